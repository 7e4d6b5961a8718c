"""The run-time: a cache to decode from, for every method and architecture. Gates 2, 3, 10."""

from __future__ import annotations

import pytest
import torch

from kvferry.errors import ArtefactError, InputError
from kvferry.handoff.handoff import Handoff
from kvferry.lm.cache import cached_tokens, read_cache
from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.anchored import Anchored
from kvferry.mappers.controls import Identity
from kvferry.mappers.full_head_ridge import FullHeadRidge
from kvferry.mappers.layout import COMPONENTS
from tests.matrix import METHODS, PAIRS, fitted
from tests.pairs import reader_of, statistics_of, traces_of

SUFFIX = " The end of it was"


def handoff_of(source: str, target: str, method: str = "anchored", tail: int = 0) -> Handoff:
    return Handoff(reader_of(source, target), fitted(method, source, target), native_tail=tail)


def logits_after(handoff: Handoff, mapped, ids: list[int]) -> torch.Tensor:  # type: ignore[no-untyped-def]
    batch = torch.tensor([ids] * mapped.mask.shape[0])
    return handoff.reader.target.extend(mapped.cache, batch, mapped.mask)


@pytest.mark.parametrize(
    "architecture",
    ["llama", "llama3", "qwen2", "qwen3", "gemma2", "gemma3", "ministral3", "mistral"],
)
def test_the_identity_equals_native_prefill_logit_for_logit(architecture: str) -> None:
    reader = reader_of(architecture, architecture)
    mapper = Identity().fit(statistics_of(architecture, architecture))
    tokens = traces_of(architecture, architecture, 1)[0].tokens
    ids, mask = reader.source.batch([tokens.source_ids])
    prefill = reader.source.prefill(ids, mask)
    mapped = Handoff(reader, mapper).transfer(prefill)
    assert mapped.mask.shape[1] == len(tokens.target_ids), "the same tokens on both sides"
    suffix = [8, 9, 10]
    native = reader.target.extend(prefill.cache, torch.tensor([suffix]), mask)
    got = logits_after(Handoff(reader, mapper), mapped, suffix)
    assert float((got - native).abs().max()) <= 1e-3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: name)
def test_a_batch_equals_each_row_alone(method: str, source: str, target: str) -> None:
    handoff = handoff_of(source, target, method, tail=3)
    long, short = (trace.tokens.source_ids for trace in traces_of(source, target, 2))
    short = short[: len(short) // 3]
    ids, mask = handoff.reader.source.batch([long, short])
    together = handoff.transfer(handoff.reader.source.prefill(ids, mask))
    suffix = [8, 9]
    got = logits_after(handoff, together, suffix)
    for row, source_ids in enumerate((long, short)):
        ids, mask = handoff.reader.source.batch([source_ids])
        alone = handoff.transfer(handoff.reader.source.prefill(ids, mask))
        expected = logits_after(handoff, alone, suffix)
        assert float((got[row] - expected[0]).abs().max()) <= 2e-3


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: name)
def test_a_tail_as_long_as_the_context_is_native_prefill(source: str, target: str) -> None:
    """And less of it lies in between: the control that a tail does something."""
    handoff = handoff_of(source, target)
    tokens = traces_of(source, target, 1)[0].tokens
    ids, mask = handoff.reader.source.batch([tokens.source_ids])
    prefill = handoff.reader.source.prefill(ids, mask)
    whole, own_mask = handoff.reader.target.batch([tokens.target_ids])
    native = handoff.reader.target.prefill(whole, own_mask)
    suffix = [8, 9]
    wanted = handoff.reader.target.extend(native.cache, torch.tensor([suffix]), own_mask)
    gap = {}
    for tail in (0, 10_000):
        mapped = handoff.transfer(prefill, native_tail=tail)
        assert mapped.provenance[0].exact is False
        gap[tail] = float((logits_after(handoff, mapped, suffix) - wanted).abs().max())
    # All but the first body token is run natively on top of the native prefix.
    assert gap[10_000] < 0.5 * gap[0]


def test_the_cache_holds_what_decoding_needs_and_no_more() -> None:
    handoff = handoff_of("llama", "gemma3")
    tokens = traces_of("llama", "gemma3", 1)[0].tokens
    ids, mask = handoff.reader.source.batch([tokens.source_ids])
    mapped = handoff.transfer(handoff.reader.source.prefill(ids, mask))
    total = len(tokens.target_ids)
    assert cached_tokens(mapped.cache) == total
    for shape, (keys, _) in zip(
        handoff.reader.target.geometry.layers, read_cache(mapped.cache), strict=True
    ):
        held = total if shape.window is None else min(total, shape.window - 1)
        assert keys.shape[2] == held
    assert mapped.provenance[0].mapped_tokens == total - 1
    assert set(mapped.milliseconds) == {"align_ms", "strip_ms", "map_ms", "build_ms", "tail_ms"}


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: name)
def test_the_native_prefix_is_run_over_no_more_than_its_windows(source: str, target: str) -> None:
    """What is mapped and what is exact stay as if the target had run every token."""
    reader = reader_of(source, target)
    mapper = Anchored(native_layers=3).fit(statistics_of(source, target))
    handoff = Handoff(reader, mapper)
    tokens = traces_of(source, target, 1)[0].tokens
    count = len(tokens.target_ids)
    windows = [layer.window for layer in reader.target.geometry.layers[:3]]
    needed = mapper.native_tokens(count)
    assert (needed < count) == all(w is not None and 3 * (w - 1) < count for w in windows)
    ids, mask = reader.source.batch([tokens.source_ids])
    source_content = handoff.source_content(reader.source.prefill(ids, mask))
    got = handoff.map_content(source_content, tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AffineMapper, "native_tokens", lambda self, tokens: tokens)
        whole = handoff.map_content(source_content, tokens)
    for component in COMPONENTS:
        for layer, x in getattr(whole, component).items():
            assert float((getattr(got, component)[layer] - x).abs().max()) <= 1e-4
    if needed < count:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AffineMapper, "native_tokens", lambda self, tokens: needed - 8)
            short = handoff.map_content(source_content, tokens)
        assert float((short.keys[2] - whole.keys[2]).abs().max()) > 1e-3


def test_a_target_token_that_straddles_the_boundary_belongs_to_the_suffix() -> None:
    handoff = handoff_of("llama", "gemma3")
    reader = handoff.reader
    text = traces_of("llama", "gemma3", 1)[0].tokens.text
    whole = reader.target.encode(text)
    _, spans = reader.target_text.character_spans(whole)
    place = next(i for i in range(20, len(whole)) if spans[i, 1] - spans[i, 0] >= 3)
    cut = int(spans[place, 0]) + 1
    context, suffix = text[:cut], text[cut:]
    source_ids = [*reader.source.sink_ids, *reader.source.encode(context)]
    ids, mask = reader.source.batch([source_ids])
    mapped = handoff.transfer(reader.source.prefill(ids, mask), suffix=suffix)
    assert mapped.suffix_ids[0] == whole[place:], "healed: the token is whole, and the target's"
    assert mapped.mask.shape[1] == len(reader.target.sink_ids) + place
    plain = handoff.transfer(reader.source.prefill(ids, mask))
    assert plain.suffix_ids == [[]]


def test_ids_that_the_source_tokenizer_would_not_choose_are_aligned_as_they_are() -> None:
    """Generated ids may spell a word letter by letter."""
    handoff = handoff_of("llama", "gemma3")
    reader = handoff.reader
    text = "the water of the river"
    letters = [token for letter in text for token in reader.source.encode(letter)]
    assert letters != reader.source.encode(text), "control: not the canonical ids"
    ids, mask = reader.source.batch([[*reader.source.sink_ids, *letters]])
    mapped = handoff.transfer(reader.source.prefill(ids, mask))
    assert mapped.mask.shape[1] == 1 + len(reader.target.encode(text))


def test_a_mapper_of_another_pair_is_refused() -> None:
    mapper = FullHeadRidge().fit(statistics_of("llama", "gemma3"))
    with pytest.raises(ArtefactError, match="another source"):
        Handoff(reader_of("qwen3", "gemma3"), mapper)
    with pytest.raises(ArtefactError, match="another target"):
        Handoff(reader_of("llama", "mistral"), mapper)


def test_a_context_without_text_and_a_negative_tail_are_refused() -> None:
    handoff = handoff_of("llama", "gemma3")
    source = handoff.reader.source
    ids, mask = source.batch([source.sink_ids])
    with pytest.raises(InputError, match="no text"):
        handoff.transfer(source.prefill(ids, mask))
    tokens = traces_of("llama", "gemma3", 1)[0].tokens
    ids, mask = source.batch([tokens.source_ids])
    with pytest.raises(InputError, match="negative"):
        handoff.transfer(source.prefill(ids, mask), native_tail=-1)


def test_a_one_token_document_is_carried_over() -> None:
    handoff = handoff_of("llama", "gemma3", tail=5)
    source = handoff.reader.source
    ids, mask = source.batch([[*source.sink_ids, *source.encode("a")]])
    mapped = handoff.transfer(source.prefill(ids, mask))
    assert mapped.mask.shape[1] == 2


@pytest.mark.parametrize("mode", ["owner", "causal", "overlap", "owner_previous"])
def test_every_alignment_mode_runs_end_to_end(mode: str) -> None:
    from dataclasses import replace

    from kvferry.calibration.statistics import CalibrationPlan, MomentsModule, empty_moments
    from kvferry.mappers.base import Statistics
    from kvferry.mappers.layout import COMPONENTS

    reader = replace(reader_of("llama", "gemma3"), mode=mode)
    plan = CalibrationPlan(code_width=0)
    layouts = plan.layouts(reader)
    moments = {c: empty_moments(reader, layouts[c]) for c in COMPONENTS}
    module = MomentsModule(reader, layouts, None, moments, shared_only=False)
    pairs = [reader.tokenize(t.tokens.text) for t in traces_of("llama", "gemma3", 6)]
    with torch.no_grad():
        for trace in reader.read(pairs[:1]) + reader.read(pairs[1:]):
            module.add(trace)
    statistics = Statistics(reader.source.geometry, reader.target.geometry, layouts, moments, None)
    handoff = Handoff(reader, Anchored(neighbours=False, behavioural_keys=False).fit(statistics))
    ids, mask = reader.source.batch([pairs[0].source_ids])
    mapped = handoff.transfer(reader.source.prefill(ids, mask))
    assert bool(logits_after(handoff, mapped, [8]).isfinite().all())
