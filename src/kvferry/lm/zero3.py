"""DeepSpeed ZeRO-3 for inference: a slice of each weight on every rank."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvferry.lm.geometry import KVGeometry
from kvferry.lm.model import LanguageModel
from kvferry.lm.rank_group import RankGroup
from kvferry.lm.sharded import ShardedLanguageModel, WeightShards


@dataclass(frozen=True)
class ZeRO3:
    """A slice of each weight on every rank, all of it while its layer runs (arXiv 1910.02054).

    A :class:`kvferry.lm.sharding.Placement`.

    Args:
        group: the ranks.
        whole_below: weights of fewer numbers stay whole once they were gathered: norms and biases.
    """

    group: RankGroup
    whole_below: int = 100_000

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self.group.device

    def check(self, name: str, geometry: KVGeometry) -> None:
        """Any model."""

    def build(self, build: Callable[[], Any], dtype: str) -> Any:
        """Slice each weight as it is made, so that no rank ever holds them all."""
        import deepspeed
        from transformers.integrations import deepspeed as hugging_face

        # DeepSpeed calls what PyTorch has since renamed.
        warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*")
        _leave_out_shared_memory()
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        deepspeed.init_distributed(backend, dist_init_required=False, verbose=False)
        options = self._options(dtype)
        # While this lives, transformers slices whatever is loaded.
        slicing: Any = hugging_face.HfDeepSpeedConfig(options)  # type: ignore[no-untyped-call]
        try:
            model, found = build()
        finally:
            hugging_face.unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
            del slicing
        model.eval().requires_grad_(False)
        engine, *_ = deepspeed.initialize(model=model, config=options, dist_init_required=False)
        # Its hooks gather the weights. In a tuple it is no submodule of what it wraps.
        model.kvferry_engine = (engine,)
        return model, found

    def wrap(self, model: Any, tokenizer: Any, name: str, revision: str) -> LanguageModel:
        """A language model that all ranks run."""
        shards = WeightShards(self.group)
        return ShardedLanguageModel(model, tokenizer, name, revision, self.group, shards)

    def _options(self, dtype: str) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": dtype == "bfloat16"},
            "fp16": {"enabled": dtype == "float16"},
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": False,
                "stage3_param_persistence_threshold": self.whole_below,
            },
            "steps_per_print": 10**9,
        }


def _leave_out_shared_memory() -> None:
    """The reduction kernel for CPU ranks is compiled for a minute, and never used here."""
    compatible = importlib.import_module("deepspeed.ops").__compatible_ops__
    for name in [name for name in compatible if "shm" in name]:
        compatible[name] = False
