"""Texts collected in panels of any size leave the same sums; the kernel is refused on a CPU."""

from __future__ import annotations

import pytest
import torch

from kvferry.errors import ConfigurationError
from kvferry.mappers.anchors import AnchorReads
from kvferry.mappers.attention_weighted import row_relevance
from kvferry.mappers.cachebridge import CacheBridge
from kvferry.mappers.head_sums import HeadSums
from kvferry.mappers.head_support import select_heads_and_layers
from tests.pairs import statistics_of


def summed(panel_rows: int, *, texts: int = 3) -> HeadSums:
    """Sums of two layers that read different source layers, over miniature texts."""
    statistics = statistics_of("qwen3", "gemma3")
    support = select_heads_and_layers(statistics, 2, "index")
    reads = support.reads(statistics, "values", AnchorReads(-1, False))
    sums = HeadSums(statistics, "values", {i: reads[i] for i in (0, 2)}, panel_rows=panel_rows)
    for seen in statistics.observe(texts):
        relevant = {i: row_relevance(seen, i, 4)["values"] for i in sums.layers}
        sums.add(seen, relevant)
    sums.finish()
    return sums


def test_panels_of_any_size_leave_the_same_sums() -> None:
    """Also where a text is cut, and where several share a panel."""
    whole, cut, fewer = summed(4096), summed(37), summed(4096, texts=2)
    assert whole.rows == cut.rows > fewer.rows
    for layer in whole.layers:
        for name in ("plain", "weighted"):
            one, other, control = (getattr(sums, name)(layer) for sums in (whole, cut, fewer))
            for part in ("xx", "xy"):
                found, wanted = getattr(other, part), getattr(one, part)
                assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5
                assert not torch.allclose(getattr(control, part), wanted, rtol=1e-2), "control"
        torch.testing.assert_close(cut.variation(layer), whole.variation(layer), rtol=1e-5, atol=0)
        assert int(whole.plain(layer).weight[0].round()) == whole.rows


def test_the_fused_kernel_is_refused_before_a_text_is_read() -> None:
    statistics = statistics_of("qwen3", "gemma3")
    with pytest.raises(ConfigurationError, match="fused"):
        CacheBridge(source_layers=2, fused=True).fit(statistics)
