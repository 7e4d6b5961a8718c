"""One rank of test_sharded, a process: INDEX COUNT PORT FOLDER SHARDING DTYPE.

An INDEX past COUNT is a rank of the second round.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvferry.calibration.corpus import load_miniature
from kvferry.lm.cache import copy_cache
from kvferry.lm.content import ContentKV
from kvferry.lm.loading import load_language_model
from kvferry.lm.model import LanguageModel
from kvferry.lm.rank_group import joined
from kvferry.lm.sources import ModelSpec

ARCHITECTURES = ("llama3", "mistral")
"""Scaled rope, and a window."""


def texts(count: int) -> list[str]:
    """Short passages of different lengths."""
    return [p.text[: 90 + 40 * i] for i, p in enumerate(load_miniature(count, sentences=4))]


def rows_of(model: LanguageModel, count: int) -> list[list[int]]:
    return [[*model.sink_ids, *model.encode(text)] for text in texts(count)]


def content_tensors(name: str, content: ContentKV) -> dict[str, Tensor]:
    return {
        f"{name} {kind} {layer}": x
        for kind in ("keys", "values")
        for layer, x in getattr(content, kind).items()
    }


@torch.inference_mode()
def observed(model: LanguageModel) -> dict[str, Tensor]:
    """Everything that a run asks of a model, the passes in an order that mixes their kinds."""
    seen: dict[str, Tensor] = {}
    for batch in (1, 2, 3):
        ids, mask = model.batch(rows_of(model, batch))
        read = model.prefill(ids, mask)
        seen[f"logits of {batch}"] = read.logits
        content = model.content(read)
        seen |= content_tensors(f"content of {batch}", content)
        keys, values = model.anchors(ids)
        seen |= {f"anchor keys of {batch}": keys, f"anchor values of {batch}": values}
        native = model.native_prefix(ids, mask, 3)
        seen |= content_tensors(f"native prefix of {batch}", native)
        cache = model.cache_from(content)
        seen[f"extended from {batch}"] = model.extend(copy_cache(cache), ids[:, :5], mask)
        with model.recording() as calls:
            model.extend(cache, ids[:, :4], mask)
        for call in calls:
            seen[f"queries {call.layer} of {batch}"] = call.queries
            seen[f"outputs {call.layer} of {batch}"] = call.output
            other = call.with_context(-call.keys[:, :, :9], call.values[:, :, :9])
            seen[f"other outputs {call.layer} of {batch}"] = other
    ids, mask = model.batch(rows_of(model, 1))
    short = model.prefill(ids, mask, full_length=False)
    made = list(model.generate(short.cache, ids[0, -3:].tolist(), mask, 6))
    seen["generated"] = torch.tensor(made)
    return seen


def held(model: Any) -> float:
    """Share of the weights that lies on this rank between two passes."""
    here = every = 0
    for weight in model.parameters():
        if hasattr(weight, "ds_tensor"):
            here += weight.ds_tensor.numel() + weight.numel()
            every += weight.ds_numel
        else:
            here += (weight.to_local() if hasattr(weight, "to_local") else weight).numel()
            every += weight.numel()
    return here / every


def main(index: int, count: int, port: int, folder: Path, sharding: Any, dtype: str) -> None:
    """The first rank observes both models, sharded; and alone, for comparison.

    It does so twice, each time with other ranks that have just been started, as a run does that
    takes its models up again in its next stage.
    """
    torch.set_num_threads(1)
    told: dict[str, Any] = {}
    for number in range(2 if index == 0 else 1):
        with joined(index % count, count, port + number, torch.device("cpu")) as group:
            place: dict[str, Any] = {"sharding": sharding, "group": group}
            models = [load(name, dtype, **place) for name in ARCHITECTURES]
            if index:
                group.follow()
            else:
                for model, name in zip(models, ARCHITECTURES, strict=True):
                    told[f"{name}, round {number}"] = differences(model, load(name, dtype))
            told["held"] = [held(model.model) for model in models]
    (folder / f"{index}.json").write_text(json.dumps(told))


def load(architecture: str, dtype: str, **place: Any) -> LanguageModel:
    spec = ModelSpec("x", pico_architecture=architecture, size="pico")
    return load_language_model(spec, dtype=dtype, **place)


def differences(model: LanguageModel, alone: LanguageModel) -> dict[str, float]:
    """Of everything that is observed, in the worst place."""
    assert (model.revision, model.name) == (alone.revision, alone.name)
    assert model.geometry == alone.geometry and model.dtype == alone.dtype
    got, wanted = observed(model), observed(alone)
    assert got.keys() == wanted.keys()
    return {
        name: float((got[name].double() - x.double()).abs().max()) for name, x in wanted.items()
    }


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:4]), Path(sys.argv[4]), *sys.argv[5:])
