"""Spans from ids: equal to the fast tokenizer's own offsets, and right for ids it never emits."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from kvferry.align.spans import TokenText
from kvferry.align.vocabulary import Spelling, UnsupportedTokenizerError
from kvferry.errors import InputError

CORPUS = [
    "The quick brown fox jumps over the lazy dog, twice.",
    "naïve café Zürich ångström, cafe\u0301",
    "漢字かな交じり文 Привет мир مرحبا नमस्ते",
    "ok 😀 👩‍👩‍👧 🏳️‍🌈 fin",
    "def f(x):\n    return  x[1]\t# done",
]
STRINGS = {
    "empty": "",
    "space": " ",
    "leading": "  two leading",
    "trailing": "trailing  ",
    "combining": "cafe\u0301 n\u0303",
    "unseen cjk": "龍龘の舞",
    "emoji": "👩‍👩‍👧🏳️‍🌈x",
    "lines": "a\n\n\tb\r\nc",
    "zero width": "a\u200bb\u00a0c",
    "end of planes": "\U0010ffff\x00\x7f\u07ff\u0800\uffff",
}


def wrap(tokenizer: Tokenizer) -> SimpleNamespace:
    """The one attribute of a transformers fast tokenizer that TokenText reads."""
    return SimpleNamespace(backend_tokenizer=tokenizer)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=alphabet, special_tokens=["<end>"]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def with_byte_fallback(corpus: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        limit_alphabet=60,
        special_tokens=["<unk>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256))],
    )
    tokenizer.train_from_iterator([line.replace(" ", "▁") for line in corpus], trainer)
    # Training makes the byte pieces special; in a real vocabulary they are ordinary pieces.
    return rebuilt_without_special_bytes(tokenizer)


def rebuilt_without_special_bytes(trained: Tokenizer) -> Tokenizer:
    state = json.loads(trained.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(state))


def sentencepiece() -> Tokenizer:
    tokenizer = with_byte_fallback(CORPUS)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def sentencepiece_prepended() -> Tokenizer:
    tokenizer = with_byte_fallback(CORPUS)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=["<unk>"])
    tokenizer.train_from_iterator([*CORPUS, *STRINGS.values()], trainer)
    return tokenizer


TOKENIZERS = {
    make.__name__: make()
    for make in (byte_level, sentencepiece, sentencepiece_prepended, metaspace)
}
KINDS = pytest.mark.parametrize("kind", TOKENIZERS)


def assert_canonical(tokenizer: Tokenizer, string: str) -> None:
    encoding = tokenizer.encode(string, add_special_tokens=False)
    text, spans = TokenText.from_tokenizer(wrap(tokenizer)).character_spans(encoding.ids)
    assert text == string
    assert spans.shape == (len(encoding.ids), 2)
    assert [tuple(span) for span in spans.tolist()] == encoding.offsets


@pytest.mark.parametrize("name", STRINGS)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_canonical_spans_are_the_tokenizers_own(kind: str, name: str) -> None:
    assert_canonical(TOKENIZERS[kind], STRINGS[name])


@pytest.mark.parametrize("string", ["The quick fox", "café 漢字 dog", "a", "x  y"])
@KINDS
def test_a_prepended_space_is_not_text(kind: str, string: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(string, add_special_tokens=False).ids
    text, spans = TokenText.from_tokenizer(wrap(tokenizer)).character_spans(ids)
    assert text == string == tokenizer.decode(ids)
    covered = [at for start, end in spans.tolist() for at in range(start, end)]
    assert sorted(set(covered)) == list(range(len(text)))


@settings(max_examples=60, deadline=None)
@given(
    string=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40)
)
def test_any_text_has_the_tokenizers_own_spans(string: str) -> None:
    for kind in ("byte_level", "sentencepiece"):
        assert_canonical(TOKENIZERS[kind], string)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_ids_that_no_tokenizer_emits(data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[data.draw(st.sampled_from(sorted(TOKENIZERS)))]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=30))
    text, spans = TokenText.from_tokenizer(wrap(tokenizer)).character_spans(ids)
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    if "\ufffd" not in decoded:
        assert text == decoded
    starts, ends = spans.unbind(1)
    assert bool((starts <= ends).all()) and bool((ends.diff() >= 0).all())
    with_text = spans[ends > starts]
    assert bool((with_text[:, 0].diff() >= 0).all())
    covered = {at for start, end in spans.tolist() for at in range(start, end)}
    assert covered == set(range(len(text)))


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=24), data=st.data())
def test_invalid_bytes_keep_text_and_spans_together(raw: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    edges = [0, *cuts, len(raw)]
    pieces = tuple(raw[a:b] for a, b in pairwise(edges))
    text, spans = TokenText(Spelling(pieces, 0, False)).character_spans(range(len(pieces)))
    assert text == raw.decode(errors="replace")
    for piece, (start, end) in zip(pieces, spans.tolist(), strict=True):
        if piece.isascii():
            assert text[start:end] == piece.decode()
    single = TokenText(Spelling(tuple(bytes([b]) for b in raw), 0, False))
    _, each = single.character_spans(range(len(raw)))
    assert sorted({start for start, _ in each.tolist()}) == list(range(len(text)))


def test_pieces_of_one_character_share_its_span() -> None:
    pieces = TokenText(Spelling((b"a\xe6", b"\xbc", b"\xa2b", b""), 0, False))
    text, spans = pieces.character_spans([0, 1, 3, 2, 3])
    assert text == "a漢b"
    assert spans.tolist() == [[0, 2], [1, 2], [2, 2], [1, 3], [3, 3]]


def test_special_tokens_carry_no_text_and_added_ones_their_own() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    end, tool = tokenizer.token_to_id("<end>"), tokenizer.token_to_id("<tool>")
    fox = tokenizer.encode("fox").ids
    text, spans = TokenText.from_tokenizer(wrap(tokenizer)).character_spans(
        [end, *fox, end, tool, end, 10**6]
    )
    assert text == "fox<tool>"
    assert spans[0].tolist() == [0, 0]
    assert spans[-4:].tolist() == [[3, 3], [3, 9], [9, 9], [9, 9]]


def test_added_tokens_of_a_byte_level_vocabulary_are_verbatim() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("é", special=False, normalized=False)])
    ids = tokenizer.encode("aéb").ids
    assert TokenText.from_tokenizer(wrap(tokenizer)).text(ids) == "aéb"
    assert tokenizer.decode(ids) != "aéb"  # the library takes é for the byte E9


def test_a_hundred_thousand_ids_are_spelled_at_once() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    reader = TokenText.from_tokenizer(wrap(tokenizer))
    ids = torch.randint(0, tokenizer.get_vocab_size(), (100_000,))
    text, spans = reader.character_spans(ids)
    assert spans.shape == (100_000, 2) and int(spans[-1, 1]) == len(text)
    assert bool((spans[1:, 1] >= spans[:-1, 1]).all())


def test_what_cannot_be_spelled_is_refused() -> None:
    wordpiece = Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    wordpiece.decoder = decoders.WordPiece()
    bare = Tokenizer(models.BPE())
    for tokenizer in (wrap(wordpiece), wrap(bare), SimpleNamespace()):
        with pytest.raises(UnsupportedTokenizerError):
            TokenText.from_tokenizer(tokenizer)
    reader = TokenText.from_tokenizer(wrap(TOKENIZERS["byte_level"]))
    for ids in ([3, -100], torch.zeros(2, 2)):
        with pytest.raises(InputError):
            reader.character_spans(ids)
