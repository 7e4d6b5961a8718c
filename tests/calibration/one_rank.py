"""One rank of test_ranks, a process: INDEX COUNT PORT FOLDER."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import pytorch_lightning
import torch
from safetensors.torch import save_file

from kvferry.calibration.ranks import Rank
from kvferry.calibration.statistics import collect_statistics
from tests.calibration.test_statistics import PLAN, TEXTS
from tests.pairs import reader_of


def main(index: int, count: int, port: int, folder: Path) -> None:
    """Three passages, then two more on top of them, in rounds of two."""
    rank = Rank(index, count, port)
    reader = reader_of("llama", "gemma3")
    told: list[list[int]] = []
    for texts in (TEXTS[:3], TEXTS):
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu",
            devices=count,
            strategy=rank.strategy(timedelta(seconds=120)),
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        told.append([])
        statistics = collect_statistics(
            reader, texts, PLAN, trainer, folder / "moments", save_every=2, each=told[-1].append
        )
    tensors = {
        f"{component}.{name}": tensor.clone()
        for component, moments in statistics.moments.items()
        for name, tensor in moments.state_dict().items()
    }
    assert statistics.code is not None
    tensors |= {f"code.{c}": p.contiguous() for c, p in statistics.code.projection.items()}
    save_file(tensors, folder / f"{index}.safetensors")
    (folder / f"{index}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:4]), Path(sys.argv[4]))
