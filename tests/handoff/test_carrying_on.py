"""A cache at full length decodes like any other, and is carried on without a loss."""

from __future__ import annotations

import pytest
import torch

from kvferry.errors import ArtefactError
from kvferry.handoff.handoff import Handoff
from kvferry.lm.cache import read_cache, require_full_length
from kvferry.mappers.controls import Identity
from tests.matrix import METHODS, PAIRS
from tests.pairs import reader_of, statistics_of, traces_of

NEW = torch.tensor([[8, 9, 10, 11]])


def handoff_of(source: str, target: str, method: str) -> Handoff:
    return Handoff(reader_of(source, target), METHODS[method].fit(statistics_of(source, target)))


@pytest.mark.parametrize("method", ["anchored_sinks", "anchored_native", "cachebridge"])
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: name)
def test_full_length_decodes_as_the_windows_do(source: str, target: str, method: str) -> None:
    handoff = handoff_of(source, target, method)
    rows = [trace.tokens.source_ids for trace in traces_of(source, target, 2)]
    rows[1] = rows[1][: len(rows[1]) // 2]
    prefill = handoff.reader.source.prefill(*handoff.reader.source.batch(rows))
    new = NEW.expand(2, -1)
    for tail in (0, 5):
        windows = handoff.transfer(prefill, native_tail=tail)
        whole = handoff.transfer(prefill, native_tail=tail, full_length=True)
        assert whole.ids.equal(windows.ids) and whole.mask.equal(windows.mask)
        expected = handoff.reader.target.extend(windows.cache, new, windows.mask)
        held, got = handoff.read_on(whole, new)
        assert float((got - expected).abs().max()) <= 1e-3
        require_full_length(held.cache)
        assert held.ids.equal(torch.cat((whole.ids, new), dim=1))


def test_what_was_mapped_lies_beneath_planted_sinks_and_comes_back() -> None:
    handoff = handoff_of("llama", "gemma3", "anchored_sinks")
    target = handoff.reader.target
    tokens = traces_of("llama", "gemma3", 1)[0].tokens
    prefill = handoff.reader.source.prefill(*handoff.reader.source.batch([tokens.source_ids]))
    row = handoff.source_content(prefill)
    mapped = handoff.map_content(row, tokens, full_length=True)
    carried = handoff.transfer(prefill, full_length=True)
    decoding = target.content(handoff_prefill(carried))
    held = target.content(handoff.read_on(carried, NEW)[0])
    planted = 0
    for layer, keys in mapped.keys.items():
        assert float((held.keys[layer][:, :, : mapped.tokens] - keys).abs().max()) <= 1e-4
        values = held.values[layer][:, :, : mapped.tokens]
        assert float((values - mapped.values[layer]).abs().max()) <= 1e-4
        places = (decoding.keys[layer] - keys).abs().amax(dim=(0, 1, 3)) > 1e-3
        planted += int(places.sum())
    assert planted == 3 * sum(
        shape.window is not None for shape in target.geometry.layers[handoff.mapper.native_layers :]
    ), "control: the sinks stand in the cache that decodes"


def handoff_prefill(carried):  # type: ignore[no-untyped-def]
    from kvferry.lm.model import Prefill

    return Prefill(carried.cache, carried.ids, carried.mask, torch.empty(1, 0))


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "ministral3", "mistral"])
def test_back_and_forth_by_identity_is_native_reading(architecture: str) -> None:
    """Two hand-offs and two stretches read in between leave the cache of one native prefill."""
    reader = reader_of(architecture, architecture)
    handoff = Handoff(reader, Identity().fit(statistics_of(architecture, architecture)))
    model = reader.source
    text = traces_of(architecture, architecture, 1)[0].tokens.text
    cuts = [text.index(" ", place) for place in (len(text) // 2, 3 * len(text) // 4)]
    first = [*model.sink_ids, *model.encode(text[: cuts[0]])]
    held = model.prefill(*model.batch([first]))
    for hand_offs, piece in enumerate((text[cuts[0] : cuts[1]], text[cuts[1] :]), start=1):
        carried = handoff.transfer(held, piece, full_length=True)
        assert carried.provenance[0].hand_offs == hand_offs
        held, logits = handoff.read_on(carried, torch.tensor(carried.suffix_ids))
    whole = [*model.sink_ids, *model.encode(text)]
    assert held.ids.tolist() == [whole]
    native = model.prefill(*model.batch([whole]))
    assert float((logits[:, -1] - native.logits).abs().max()) <= 1e-3
    for (keys, values), (own_keys, own_values) in zip(
        read_cache(held.cache), read_cache(native.cache), strict=True
    ):
        assert float((keys - own_keys).abs().max()) <= 1e-3
        assert float((values - own_values).abs().max()) <= 1e-3


def test_a_cache_of_windows_is_not_carried_on() -> None:
    handoff = handoff_of("llama", "gemma3", "anchored")
    tokens = traces_of("llama", "gemma3", 1)[0].tokens
    prefill = handoff.reader.source.prefill(*handoff.reader.source.batch([tokens.source_ids]))
    with pytest.raises(ArtefactError, match="full_length=True"):
        handoff.read_on(handoff.transfer(prefill), NEW)
