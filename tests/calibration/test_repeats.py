"""What a text repeats is found where it stood, and chance repeats of a few tokens are not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.calibration.repeats import recalled_tokens

ids = st.lists(st.integers(0, 3), max_size=60)


def test_a_repeated_stretch_is_recalled_from_where_it_stood() -> None:
    early, between = [5, 6, 7, 8, 9, 10], [1, 2, 3]
    found = recalled_tokens([*early, *between, *early, 4], least=4).tolist()
    # The query at the fourth repeated token looks for the fifth, and so on; what follows is new.
    assert found == [-1] * 12 + [4, 5, -1, -1]
    assert recalled_tokens([*early[:4], *between, *early[:4]], least=4).max() == -1, "too short"


def test_of_several_places_the_last_one_counts() -> None:
    assert recalled_tokens([1, 2, 3] * 3, least=2).tolist() == [-1, -1, -1, -1, 2, 3, 4, 5, -1]


@given(ids, st.integers(1, 5))
def test_it_followed_the_same_tokens_and_follows_them_now(tokens: list[int], least: int) -> None:
    for at, place in enumerate(recalled_tokens(tokens, least).tolist()):
        stretch = tokens[at + 1 - least : at + 2]
        starts = range(1, at + 2 - least)
        before = [s for s in starts if tokens[s - 1 : s + least] == stretch]
        if place < 0:
            known = [s for s in range(at + 1 - least) if tokens[s : s + least + 1] == stretch]
            assert at + 1 < least or at + 1 == len(tokens) or not known
        else:
            assert tokens[place - least : place + 1] == stretch and place <= at
            assert place == before[-1] - 1 + least
