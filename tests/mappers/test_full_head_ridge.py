"""KV Ridge as published, against a regression of each head by its definition."""

from __future__ import annotations

import pytest
import torch

from kvferry.app.compose import compose
from kvferry.app.mapper import build_mapper
from kvferry.calibration.statistics import mostly_shared
from kvferry.mappers.full_head_ridge import FullHeadRidge
from kvferry.mappers.layout import COMPONENTS
from kvferry.mappers.observation import surrogate_sinks
from tests.pairs import reader_of, statistics_of, traces_of


def rows_of(source: str, target: str, component: str):  # type: ignore[no-untyped-def]
    """Calibration rows by source layer, and by target layer and head."""
    traces = traces_of(source, target, 12)
    shared = mostly_shared([trace.tokens for trace in traces])
    first = len(reader_of(source, target).target.sink_ids) + 1
    x, y = {}, {}
    for trace in traces:
        alignment = trace.tokens.alignment
        kept = alignment.exact.clone() if shared else torch.ones_like(alignment.exact)
        kept[:first] = False
        if any(layer.window for layer in reader_of(source, target).target.geometry.layers):
            kept &= ~surrogate_sinks(trace.target)
        for layer, content in getattr(trace.source, component).items():
            heads = content[0][:, alignment.indices[:, 0]][:, kept]
            x.setdefault(layer, []).append(heads.transpose(0, 1).flatten(1).double())
        for layer, content in getattr(trace.target, component).items():
            for head in range(content.shape[1]):
                y.setdefault((layer, head), []).append(content[0, head][kept].double())
    return {k: torch.cat(v) for k, v in x.items()}, {k: torch.cat(v) for k, v in y.items()}


@pytest.mark.parametrize("layers", [2, "all"])
@pytest.mark.parametrize(
    ("source", "target"), [("llama", "gemma3"), ("qwen3", "mistral"), ("gemma3", "llama")]
)
def test_each_head_is_regressed_on_all_heads_of_its_layers(
    source: str, target: str, layers: int
) -> None:
    """Head counts (3 to 1, 2 to 2, 1 to 3) and head widths (8 and 16) need not match."""
    statistics = statistics_of(source, target)
    shapes = statistics.source.layers[0], statistics.target.layers[0]
    assert shapes[0].head_dim != shapes[1].head_dim, "control: not a matched pair"
    mapper = FullHeadRidge(source_layers=layers, absolute_ridge=0.01).fit(statistics)
    relative = FullHeadRidge(source_layers=layers, ridge=0.01).fit(statistics)
    for component in COMPONENTS:
        x_by_layer, y_by_head = rows_of(source, target, component)
        for group, other in zip(mapper.groups, relative.groups, strict=True):
            if group.component != component:
                continue
            x = torch.cat([x_by_layer[block.index] for block in group.blocks], dim=1)
            depth = len(statistics.source.layers)
            assert len(group.blocks) == (depth if layers == "all" else layers)
            centred = x - x.mean(0)
            for penalty, fitted in ((0.01, group), (0.01 * centred.square().mean(), other)):
                gram = centred.T @ centred / len(x) + penalty * torch.eye(x.shape[1]).double()
                column = 0
                for layer in group.target_layers:
                    for head in range(shapes[1].kv_heads):
                        y = y_by_head[layer, head]
                        wanted = torch.linalg.solve(gram, centred.T @ (y - y.mean(0)) / len(y))
                        width = y.shape[1]
                        got = fitted.weight[:, column : column + width].double()
                        error = (centred @ (got - wanted)).square().mean()
                        assert float(error / y.var(dim=0).mean()) < 1e-6
                        mean = fitted.output_mean[column : column + width].double()
                        assert torch.allclose(mean, y.mean(0), atol=1e-4)
                        column += width


def test_the_published_setting_is_one_command() -> None:
    method = build_mapper(compose(["experiment=kv_ridge"]).mapper)
    assert method == FullHeadRidge(source_layers=8, absolute_ridge=0.01)
    assert method.anchor_context == -1 and method.native_layers == 0 and not method.neighbours
