"""Placements of one process: one device, and accelerate's device map."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvferry.errors import ConfigurationError
from kvferry.lm.loading import load_folder, load_language_model
from kvferry.lm.model import LanguageModel
from kvferry.lm.sharding import DeviceMap, TensorParallel, indivisible, placement
from kvferry.lm.sources import ModelSpec
from tests.lm.one_shard_rank import observed

CPU = torch.device("cpu")
Pico = Callable[..., LanguageModel]


@pytest.mark.parametrize(("heads", "ranks", "fits"), [(8, 4, True), (3, 2, False), (1, 2, False)])
def test_heads_are_shared_equally_or_not_at_all(
    pico: Pico, heads: int, ranks: int, fits: bool
) -> None:
    assert (indivisible("m", heads, ranks) is None) == fits


def test_a_group_refuses_what_it_cannot_divide(pico: Pico) -> None:
    class Three:
        count, device = 3, CPU

    shared = TensorParallel(Three())  # type: ignore[arg-type]
    shared.check("llama", pico("llama").geometry)
    with pytest.raises(ConfigurationError, match="divided by heads"):
        shared.check("qwen3", pico("qwen3").geometry)


@pytest.mark.parametrize("sharding", ["zero3", "tensor_parallel"])
def test_one_rank_divides_nothing(sharding: str) -> None:
    with pytest.raises(ConfigurationError, match="among ranks"):
        placement(sharding, CPU, None)  # type: ignore[arg-type]


@pytest.fixture
def folder(pico: Pico, tmp_path: Path) -> Path:
    """A miniature with windows, as files."""
    model = pico("mistral")
    save_file(model.model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    model.model.config.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
def test_a_model_half_on_disk_does_all_that_one_in_memory_does(pico: Pico, folder: Path) -> None:
    whole = pico("mistral")
    size = sum(x.nbytes for x in whole.model.parameters())
    place = DeviceMap(CPU, limits={"cpu": int(0.7 * size)}, offload=str(folder / "disk"))
    spread = load_folder(folder, ModelSpec("m"), dtype="float32", place=place)
    chosen = spread.model.hf_device_map
    assert set(chosen.values()) == {"cpu", "disk"}, "control: it is spread"
    assert any(x.is_meta for x in spread.model.parameters())
    got, wanted = observed(spread), observed(whole)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name


def test_a_miniature_under_a_device_map_is_the_same_miniature(pico: Pico) -> None:
    pytest.importorskip("accelerate")
    spec = ModelSpec("x", pico_architecture="qwen2", size="pico")  # tied embeddings
    spread, whole = load_language_model(spec, sharding="device_map"), pico("qwen2")
    ids, mask = whole.batch([whole.encode("The ferry carries letters.")])
    assert torch.equal(spread.prefill(ids, mask).logits, whole.prefill(ids, mask).logits)
    assert (spread.revision, spread.name) == (whole.revision, whole.name)


def test_each_layer_keeps_its_cache_where_it_runs(pico: Pico) -> None:
    model = LanguageModel(pico("mistral").model, None, "m", "r", device=CPU)
    try:
        model.model.hf_device_map = {
            "model.embed_tokens": 0,
            "model.layers.0": 1,
            "model.layers.1": "disk",
            "model": 2,
        }
        names = [str(place) for place in model.layer_devices]
    finally:
        del model.model.hf_device_map
    assert names == ["cuda:1", "cpu", "cuda:2"]
