"""From a `ModelSpec` to a `LanguageModel`: local folder, wheel, hub, or a random miniature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvferry.errors import ConfigurationError, ModelUnavailableError, UnsupportedModelError
from kvferry.lm.convert import converted_folder
from kvferry.lm.hub import hub_folder
from kvferry.lm.sources import ModelSpec
from kvferry.lm.weights import check_weights, content_fingerprint

if TYPE_CHECKING:
    from kvferry.lm.model import LanguageModel

DTYPES = ("float32", "bfloat16", "float16")


def load_language_model(
    spec: ModelSpec,
    *,
    cache_dir: Path | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    size: Literal["full", "pico"] | None = None,
    seed: int = 0,
) -> LanguageModel:
    """Load a frozen model with its fast tokenizer.

    Args:
        spec: names the sources; the first one that is set is used.
        cache_dir: where converted wheels lie; see `store.cache_root`.
        dtype: type of the weights in memory: float32, bfloat16 or float16.
        device: a torch device.
        size: overrides `spec.size`; "pico" builds a random miniature, with no download.
        seed: of the miniature.

    Raises:
        ModelUnavailableError: weights missing, gated, truncated, or too big for the device.
        UnsupportedModelError: no per-head key-value cache, or no fast tokenizer. Told by the
            configuration, before any weight is read.
        StorageError: the disk is full.
        ConfigurationError: an unknown dtype or a device that is not here.
    """
    import torch

    _check_placement(dtype, device)
    if (size or spec.size) == "pico":
        from kvferry.lm.pico import pico_language_model

        model = pico_language_model(spec.pico_architecture, seed)
        # Weights only: the rotary frequencies beside them must stay in float32.
        for parameter in model.model.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
        model.model.to(device)
        return model
    if spec.folder is not None:
        return load_folder(Path(spec.folder).expanduser(), spec, dtype=dtype, device=device)
    if spec.wheel is not None:
        folder = converted_folder(spec.wheel, cache_dir=cache_dir)
        revision = f"gguf-{spec.wheel.gguf_sha256}"
        return load_folder(folder, spec, dtype=dtype, device=device, revision=revision)
    if spec.hub is not None:
        folder, revision = hub_folder(spec, check=supported_config)
        return load_folder(folder, spec, dtype=dtype, device=device, revision=revision)
    raise ModelUnavailableError(
        f"The model {spec.name} names no source.",
        expected="one of folder, wheel, hub",
        fix="Set one of them in the model YAML, or use size=pico.",
    )


def load_folder(
    folder: Path, spec: ModelSpec, *, dtype: str, device: str, revision: str | None = None
) -> LanguageModel:
    """Load a transformers folder; without `revision`, one is derived from its content."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvferry.lm.attention import attention_implementation
    from kvferry.lm.model import LanguageModel

    config = supported_config(folder, spec.name)
    shards = check_weights(folder)
    tokenizer = _fast_tokenizer(folder, spec.name)
    build: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, info = build(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation=attention_implementation(config),
            local_files_only=True,
            output_loading_info=True,
        )
        model.to(device)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelUnavailableError(
            f"The model {spec.name} does not fit on {device}.",
            found=f"{sum(p.stat().st_size for p in shards) / 1e9:,.1f} GB of weights on disk",
            fix="Use dtype=bfloat16, another device, or pair=smollm2_gemma3, which runs on a CPU.",
        ) from error
    except (RuntimeError, ValueError, OSError) as error:
        raise _misfit(folder, str(error).strip().splitlines()[0]) from error
    # transformers fills a missing tensor with random numbers and only logs it.
    if info["missing_keys"]:
        raise _misfit(folder, f"missing {', '.join(sorted(info['missing_keys'])[:3])}")
    known = revision or f"content-{content_fingerprint(folder, shards)}"
    return LanguageModel(model, tokenizer, name=spec.name, revision=known)


def supported_config(folder: Path, name: str) -> Any:
    """The transformers configuration of a folder whose architecture kvferry can map.

    Raises:
        ModelUnavailableError: there is no such folder, or no readable configuration in it.
        UnsupportedModelError: the architecture has no per-head key-value cache.
    """
    from transformers import AutoConfig

    from kvferry.lm.geometry import KVGeometry

    file = folder / "config.json"
    try:
        kind = json.loads(file.read_text()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelUnavailableError(
            f"The folder of {name} holds no readable model: {folder}",
            found=f"{file.name}: {error}",
            expected="config.json, *.safetensors and tokenizer.json, as save_pretrained writes",
            fix="Correct `folder`, or unset it so that the next source is used.",
        ) from error
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise UnsupportedModelError(
            f"The architecture of {name} is not known to the installed transformers.",
            found=f"model_type {kind!r}; {str(error).splitlines()[0]}",
            fix="Use a decoder with rotary positions (llama, mistral, qwen, gemma, ministral).",
        ) from error
    KVGeometry.from_config(config)
    return config


def _fast_tokenizer(folder: Path, name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ModelUnavailableError(
            f"The tokenizer of {name} cannot be read: {folder}",
            found=str(error).splitlines()[0],
            expected="tokenizer.json and tokenizer_config.json",
            fix="Copy the tokenizer files beside the weights.",
        ) from error
    if not tokenizer.is_fast:
        raise UnsupportedModelError(
            f"The tokenizer of {name} is not a fast one, so tokens have no character spans.",
            found=type(tokenizer).__name__,
            expected="a tokenizer.json of the tokenizers library",
            fix="Convert the tokenizer, or use another model.",
        )
    return tokenizer


def _check_placement(dtype: str, device: str) -> None:
    import torch

    if dtype not in DTYPES:
        raise ConfigurationError(
            f"Unknown dtype {dtype!r}.", expected=", ".join(DTYPES), fix="Choose one of them."
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"The device {device!r} is not here.",
            found=str(error).splitlines()[0],
            fix="Use device=cpu, or install a torch build for this device.",
        ) from error


def _misfit(folder: Path, found: str) -> ModelUnavailableError:
    return ModelUnavailableError(
        f"The weights do not fit the configuration beside them: {folder}",
        found=found,
        expected="every tensor that config.json calls for",
        fix="Copy or download the folder again.",
    )
