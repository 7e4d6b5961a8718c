"""Binding: what fits is built, what does not is named, all of it at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.app.binding import Mistake, Range, bind, did_you_mean
from kvferry.app.schema import EvalConfig, to_plain
from kvferry.errors import ConfigurationError, SettingsError


@dataclass(frozen=True)
class Inner:
    depth: Annotated[int, Range(1, 9)]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    inner: Inner
    rate: float = 0.5
    mode: Literal["raw", "whitened"] = "raw"
    layers: int | Literal["all"] = "all"
    title: str | None = None
    on: bool = False


def problems(values: dict[str, object]) -> list[str]:
    mistakes: list[Mistake] = []
    bound = bind(Outer, values, mistakes)
    assert (bound is None) == bool(mistakes)
    return [str(mistake) for mistake in mistakes]


def test_what_fits_is_built() -> None:
    mistakes: list[Mistake] = []
    values = {"inner": {"depth": 2, "names": ["a"]}, "rate": 1, "layers": 4, "title": 12}
    built = bind(Outer, values, mistakes)
    assert built == Outer(Inner(2, ("a",)), rate=1.0, layers=4, title="12")
    assert not mistakes


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"inner": {"depth": 0}}, "inner.depth: must be at least 1, found 0"),
        ({"inner": {"depth": 10}}, "inner.depth: must be at most 9, found 10"),
        ({"inner": {"depth": True}}, "inner.depth: must be a whole number, found True"),
        ({"inner": {"depth": 2.0}}, "inner.depth: must be a whole number, found 2.0"),
        ({"inner": {"depth": "???"}}, "inner.depth: needs a value: inner.depth=..."),
        ({"inner": {}}, "inner.depth: is not set"),
        ({"inner": 3}, "inner: must be a group of settings, found 3"),
        ({"inner": {"depth": 1, "names": "a"}}, "inner.names: must be a list"),
        ({"inner": {"depth": 1}, "on": 1}, "on: must be true or false, found 1"),
        ({"inner": {"depth": 1}, "mode": "whitend"}, "Did you mean `whitened`?"),
        ({"inner": {"depth": 1}, "layers": "al"}, "layers: must be a whole number or all"),
        ({"inner": {"depth": 1}, "rate": None}, "rate: must be a number, found None"),
        ({"inner": {"depth": 1, "dept": 2}}, "no such setting. Did you mean `inner.depth`?"),
        ({"inner": {"depth": 1}, "names": []}, "names: no such setting. Did you mean `inner.nam"),
    ],
)
def test_each_mistake_is_named(values: dict[str, object], expected: str) -> None:
    found = problems(values)
    assert len(found) == 1
    assert expected in found[0]


def test_all_mistakes_come_together() -> None:
    found = problems({"inner": {"depth": 0, "x": 1}, "rate": "fast", "mode": 3, "typo": None})
    assert len(found) == 5


def test_an_error_of_the_class_itself_is_a_mistake() -> None:
    @dataclass(frozen=True)
    class Picky:
        x: int = 0

        def __post_init__(self) -> None:
            if self.x:
                raise ConfigurationError("x must vanish.", fix="Leave it.")

    mistakes: list[Mistake] = []
    assert bind(Picky, {"x": 1}, mistakes, where="mapper") is None
    assert mistakes == [Mistake("mapper", "x must vanish.")]


def test_rules_of_the_class_are_a_mistake_each() -> None:
    @dataclass(frozen=True)
    class Ruled:
        x: int = 0
        y: int = 0

        def __post_init__(self) -> None:
            raise SettingsError(["x must vanish", "x and y must agree"], fix="Leave them.")

    mistakes: list[Mistake] = []
    assert bind(Ruled, {"x": 1}, mistakes, where="mapper.start") is None
    assert mistakes == [
        Mistake("mapper.start.x", "must vanish"),
        Mistake("mapper.start", "x and y must agree"),
    ]


def test_did_you_mean_stays_silent_for_something_else() -> None:
    assert did_you_mean("zzz", ["heterofold", "anchored"]) == ""
    assert did_you_mean("heterofld", ["heterofold", "anchored"]) == " Did you mean `heterofold`?"


@settings(deadline=None)
@given(
    st.builds(
        EvalConfig,
        contexts=st.integers(1, 99),
        out_of_domain_contexts=st.integers(0, 99),
        context_tokens=st.integers(2, 9999),
        continuation_tokens=st.integers(1, 99),
        recall_start=st.integers(0, 99),
        recall_tokens=st.integers(1, 99),
        recall_prompt_tokens=st.integers(0, 99),
        native_tail=st.integers(0, 99),
        conditions=st.lists(st.sampled_from(["native", "zero", "mean"])).map(tuple),
        latency_tokens=st.lists(st.integers(1, 9999)).map(tuple),
        latency_repeats=st.integers(1, 99),
        latency_warmup=st.integers(0, 9),
        samples=st.integers(0, 9),
        bootstrap_resamples=st.integers(1, 9999),
    )
)
def test_plain_containers_bind_back_to_the_same_value(config: EvalConfig) -> None:
    mistakes: list[Mistake] = []
    assert bind(EvalConfig, to_plain(config), mistakes) == config
    assert not mistakes
