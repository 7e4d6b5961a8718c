"""One rank of test_sharded, a process: INDEX COUNT PORT FOLDER SHARDING."""

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

SOURCE, TARGET = "llama3", "mistral"


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


def main(index: int, count: int, port: int, folder: Path, sharding: Any) -> None:
    """The first rank observes both models, sharded; and alone, for comparison."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    told: dict[str, Any] = {}
    for round_number in range(2):  # a run takes its models up again in its next stage
        with joined(index, count, port + round_number, device) as group:
            models = [
                load_language_model(
                    ModelSpec("x", pico_architecture=name, size="pico"),
                    sharding=sharding,
                    group=group,
                )
                for name in (SOURCE, TARGET)
            ]
            if index:
                group.follow()
            for model in models if index == 0 else ():
                alone = load_language_model(
                    ModelSpec("x", pico_architecture=model.name.removeprefix("pico-"), size="pico")
                )
                assert model.revision == alone.revision and model.geometry == alone.geometry
                got, wanted = observed(model), observed(alone)
                assert got.keys() == wanted.keys()
                told[f"{model.name} {round_number}"] = {
                    name: float((got[name].double() - wanted[name].double()).abs().max())
                    for name in wanted
                }
            told["held"] = [held(model.model) for model in models]
    (folder / f"{index}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:4]), Path(sys.argv[4]), sys.argv[5])
