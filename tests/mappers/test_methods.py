"""What every mapper method must do, over the one matrix: gates 3, 7, 13."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from kvferry.calibration.reader import PairTrace
from kvferry.errors import ConfigurationError
from kvferry.lm.content import ContentKV
from kvferry.mappers import inputs
from kvferry.mappers.anchored import Anchored
from kvferry.mappers.base import MapperMethod
from kvferry.mappers.controls import Identity, Random, random_content, shuffled_content
from kvferry.mappers.full_head_ridge import FullHeadRidge
from kvferry.mappers.heterofold import HeteroFold
from kvferry.mappers.layout import COMPONENTS
from kvferry.mappers.mapper import Mapper
from tests.matrix import METHODS, PAIRS, fitted
from tests.pairs import reader_of, statistics_of, traces_of

method_of = pytest.mark.parametrize("method", METHODS)
pair_of = pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: name)


def rows_of(content: ContentKV, component: str, layer: int) -> torch.Tensor:
    return getattr(content, component)[layer][0].transpose(0, 1).flatten(1)


def mapped(mapper: Mapper, trace: PairTrace) -> ContentKV:
    return mapper.map(trace.inputs(None), [0] * len(mapper.target.layers))


def explained(mapper: Mapper, traces: Sequence[PairTrace], component: str) -> float:
    """R² over all layers that are mapped, about the mean of each feature."""
    error = total = 0.0
    layers = range(mapper.native_layers, len(mapper.target.layers))
    outputs = [mapped(mapper, trace) for trace in traces]
    for layer in layers:
        got = torch.cat([rows_of(o, component, layer)[2:] for o in outputs])
        true = torch.cat([rows_of(t.target, component, layer)[2:] for t in traces])
        error += float((got - true).square().sum())
        total += float((true - true.mean(0)).square().sum())
    return 1 - error / total


@method_of
@pair_of
def test_output_has_the_shape_of_the_target(method: str, source: str, target: str) -> None:
    mapper = fitted(method, source, target)
    trace = traces_of(source, target, 2)[0]
    out = mapped(mapper, trace)
    for layer, shape in enumerate(mapper.target.layers):
        wanted = (1, shape.kv_heads, trace.target.tokens, shape.head_dim)
        assert out.keys[layer].shape == wanted and out.values[layer].shape == wanted
        assert bool(out.keys[layer].isfinite().all() and out.values[layer].isfinite().all())


@pair_of
def test_a_fit_explains_and_a_random_map_does_not(source: str, target: str) -> None:
    """Miniatures have random weights, so little is linear: the fit must still beat the mean."""
    statistics, traces = statistics_of(source, target), traces_of(source, target, 4)
    fitted = Anchored(recolour_keys=0.0).fit(statistics)
    for component in COMPONENTS:
        assert explained(fitted, traces, component) > 0.3
        assert explained(Random().fit(statistics), traces, component) < 0


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "ministral3"])
def test_on_one_model_ridge_finds_the_identity(architecture: str) -> None:
    """Gate 3: with source = target every layer is its own best predictor."""
    statistics = statistics_of(architecture, architecture)
    traces = traces_of(architecture, architecture, 3, seed=7)
    ridge = FullHeadRidge(ridge=1e-6).fit(statistics)
    for component in COMPONENTS:
        assert explained(ridge, traces, component) > 0.999
        assert explained(Identity().fit(statistics), traces, component) == 1.0


@pair_of
def test_full_recolouring_gives_the_target_its_covariance_back(source: str, target: str) -> None:
    """Gate 7: M' C_xx M = C_yy on the calibration moments, for both metrics; ridge falls short."""
    statistics = statistics_of(source, target)
    for component in COMPONENTS:
        moments, layout = statistics.moments[component], statistics.layouts[component]
        for metric in ("raw", "whitened"):
            method = HeteroFold(
                window="all",
                ridge=1e-4,
                recolour_metric=metric,
                behavioural_keys=False,
                behavioural_values=False,
            )
            mapper = method.fit(statistics)
            shrunk = FullHeadRidge(ridge=1e-4).fit(statistics)
            for layer, wanted in enumerate(moments.c_yy):
                got = _output_covariance(mapper, moments.c_xx, layout, component, layer)
                less = _output_covariance(shrunk, moments.c_xx, layout, component, layer)
                scale = wanted.diagonal().mean()
                assert float((got - wanted).abs().max() / scale) < 2e-2
                assert float(less.diagonal().sum()) < float(wanted.diagonal().sum())


def _output_covariance(mapper, c_xx, layout, component, layer):  # type: ignore[no-untyped-def]
    (group,) = (g for g in mapper.groups if g.component == component and layer in g.target_layers)
    columns = layout.columns(group.blocks)
    width = mapper.target.layers[layer].width
    start = group.target_layers.index(layer) * width
    weight = group.weight[:, start : start + width].double()
    return weight.T @ c_xx[columns][:, columns] @ weight


@pair_of
def test_anchors_are_a_function_of_the_token_ids(source: str, target: str) -> None:
    """Gate 13: free anchors of predecessors equal a construction token by token, and the first
    layer comes out exact; without anchors it does not."""
    reader, trace = reader_of(source, target), traces_of(source, target, 2)[1]
    ids = trace.tokens.target_ids
    inputs = trace.inputs(None)
    layout = statistics_of(source, target).layouts["keys"]
    blocks = [b for b in layout.of_kind("anchor") if b.index == 2]
    rows = inputs.rows(blocks, 0, len(ids))
    for place in (0, 1, 2, 5, len(ids) - 1):
        token = torch.tensor([[ids[max(place - 2, 0)]]])
        alone = reader.target.content(reader.target.prefill(token))
        brute = torch.cat([rows_of(alone, c, 0)[0] for c in COMPONENTS])
        assert torch.allclose(rows[place], brute, atol=1e-4)
    anchored = mapped(Anchored().fit(statistics_of(source, target)), trace)
    assert torch.equal(anchored.keys[0], trace.target.keys[0])
    assert torch.equal(anchored.values[0], trace.target.values[0])
    plain = mapped(FullHeadRidge().fit(statistics_of(source, target)), trace)
    assert not torch.allclose(plain.keys[0], trace.target.keys[0], atol=1e-3)


def test_windowed_layers_are_mapped_only_where_they_are_read() -> None:
    mapper = METHODS["heterofold_all"].fit(statistics_of("llama", "gemma3"))
    trace = traces_of("llama", "gemma3", 1)[0]
    first = [
        0 if layer.window is None else trace.target.tokens - (layer.window - 1)
        for layer in mapper.target.layers
    ]
    cut, whole = mapper.map(trace.inputs(None), first), mapped(mapper, trace)
    assert any(start > 0 for start in first), "control: the miniature has windows"
    for layer, start in enumerate(first):
        assert torch.allclose(cut.keys[layer], whole.keys[layer][:, :, start:], atol=1e-4)


def test_only_layers_that_are_read_are_named() -> None:
    statistics = statistics_of("llama", "gemma3")
    one = FullHeadRidge(source_layers=1).fit(statistics)
    reads = one.source_layers["keys"]
    assert set(reads) < set(range(len(statistics.source.layers)))
    trace = traces_of("llama", "gemma3", 1)[0]
    poisoned = {
        layer: x if layer in reads else torch.full_like(x, float("nan"))
        for layer, x in trace.source.keys.items()
    }
    source = ContentKV(poisoned, trace.source.values, trace.source.positions, trace.source.mask)
    out = mapped(one, PairTrace(trace.tokens, source, trace.target))
    assert all(bool(x.isfinite().all()) for x in out.keys.values())


def test_the_planted_layer_is_selected() -> None:
    """On one model, layer l of the target is layer l of the source: top-1 must find it."""
    statistics = statistics_of("qwen3", "qwen3")
    mapper = FullHeadRidge(source_layers=1).fit(statistics)
    for group in mapper.groups:
        assert [block.index for block in group.blocks] == list(group.target_layers)


def test_low_precision_products_stay_close() -> None:
    statistics, trace = statistics_of("llama", "gemma3"), traces_of("llama", "gemma3", 1)[0]
    mapper = Anchored().fit(statistics)
    low = mapped(mapper.with_precision(torch.bfloat16), trace)
    high = mapped(mapper, trace)
    for layer in range(1, len(mapper.target.layers)):
        error = (low.keys[layer] - high.keys[layer]).square().mean().sqrt()
        assert float(error / high.keys[layer].std()) < 0.02


def test_a_network_sees_the_same_panel_by_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    mapper, (trace, *_) = fitted("mobility", "llama", "gemma3"), traces_of("llama", "gemma3", 2)
    whole = mapper.map(trace.inputs(None), mapper.first_tokens(trace.target.tokens))
    monkeypatch.setattr(inputs, "PANEL_TOKENS", 16)
    parts = mapper.map(trace.inputs(None), mapper.first_tokens(trace.target.tokens))
    for component in COMPONENTS:
        for layer, x in getattr(whole, component).items():
            assert torch.allclose(x, getattr(parts, component)[layer], atol=1e-5)


def test_a_network_uses_the_source_code_of_its_affine_map(monkeypatch: pytest.MonkeyPatch) -> None:
    mapper, (trace, *_) = fitted("mobility", "llama", "gemma3"), traces_of("llama", "gemma3", 2)
    project, coded = inputs._project, []

    def counted(layers: Sequence[torch.Tensor], projection: torch.Tensor) -> torch.Tensor:
        coded.append(projection)
        return project(layers, projection)

    monkeypatch.setattr(inputs, "_project", counted)
    mapper.map(trace.inputs(None), mapper.first_tokens(trace.target.tokens))
    assert mapper.affine.code is not None
    assert len(coded) == len(COMPONENTS), "keys once, values once"


def test_controls_change_what_they_say_and_nothing_else() -> None:
    trace = traces_of("llama", "gemma3", 1)[0]
    shuffled = shuffled_content(trace.target, seed=1)
    for layer, x in trace.target.keys.items():
        assert not torch.equal(shuffled.keys[layer], x)
        assert torch.allclose(shuffled.keys[layer].sort(dim=2)[0], x.sort(dim=2)[0])
    noise = random_content(trace.target, seed=1)
    again = random_content(trace.target, seed=1)
    for layer, x in trace.target.values.items():
        assert torch.equal(noise.values[layer], again.values[layer])
        assert torch.allclose(noise.values[layer].std(dim=2), x.std(dim=2), rtol=0.5, atol=1e-3)
    mapper = FullHeadRidge().fit(statistics_of("llama", "gemma3"))
    mean = mapper.mean_content(mapped(mapper, trace))
    mean.keys[2][:, :, :1] = 0.0
    assert float(mean.keys[2][:, :, 1:].std(dim=2).max()) < 1e-4, "rows do not share memory"
    assert float(mean.keys[2][:, :, 1].abs().max()) > 0


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (lambda: FullHeadRidge(source_layers=0, ridge=-1.0), "source_layers.*ridge"),
        (lambda: HeteroFold(window=0), "window"),
        (lambda: Anchored(recolour_keys=1.5, anchor_context=-2), "anchor_context.*recolour_keys"),
    ],
)
def test_settings_out_of_range_are_all_named(
    method: Callable[[], MapperMethod], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        method()
