"""Where the weights of a frozen model go: one device, all devices of a host, or several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kvferry.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from kvferry.lm.geometry import KVGeometry
    from kvferry.lm.model import LanguageModel
    from kvferry.lm.rank_group import RankGroup

Sharding = Literal["none", "zero3", "tensor_parallel", "device_map"]
OVER_RANKS: tuple[Sharding, ...] = ("zero3", "tensor_parallel")
PACKAGES: dict[Sharding, str] = {
    "zero3": "deepspeed",
    "tensor_parallel": "accelerate",
    "device_map": "accelerate",
}
"""What each way needs beyond PyTorch and transformers."""

Build = Callable[..., Any]
"""`from_pretrained` with everything but the placement bound to it: gives (model, what it found)."""


class Placement(Protocol):
    """One way to hold a model."""

    @property
    def device(self) -> torch.device:
        """Where tokens go and caches come from."""

    def check(self, name: str, geometry: KVGeometry) -> None:
        """Refuse a model that cannot be held like this, told by its configuration.

        Raises:
            ConfigurationError: says why.
        """

    def build(self, build: Build, dtype: str) -> Any:
        """Load the weights to where they belong."""

    def wrap(self, model: Any, tokenizer: Any, name: str, revision: str) -> LanguageModel:
        """The language model around them."""


@dataclass(frozen=True)
class OneDevice:
    """All weights on one device."""

    device: torch.device

    def check(self, name: str, geometry: KVGeometry) -> None:
        """Any model."""

    def build(self, build: Build, dtype: str) -> Any:
        """Load, then move."""
        model, found = build()
        return model.to(self.device), found

    def wrap(self, model: Any, tokenizer: Any, name: str, revision: str) -> LanguageModel:
        """See :class:`Placement`."""
        from kvferry.lm.model import LanguageModel

        return LanguageModel(model, tokenizer, name, revision)


@dataclass(frozen=True)
class DeviceMap:
    """Layers spread over the GPUs of this machine, and over its memory where those are full.

    Args:
        device: of tokens, and of caches once they are read.
        limits: bytes that each device may take, as accelerate's `max_memory`; null asks it.
        offload: folder for what fits nowhere; null refuses.
    """

    device: torch.device
    limits: dict[int | str, int] | None = None
    offload: str | None = None

    def check(self, name: str, geometry: KVGeometry) -> None:
        """Any model."""

    def build(self, build: Build, dtype: str) -> Any:
        """Let accelerate choose a device for each layer."""
        return build(device_map="auto", max_memory=self.limits, offload_folder=self.offload)

    def wrap(self, model: Any, tokenizer: Any, name: str, revision: str) -> LanguageModel:
        """A language model that puts each layer's cache beside its weights."""
        from kvferry.lm.model import LanguageModel

        return LanguageModel(model, tokenizer, name, revision, device=self.device)


@dataclass(frozen=True)
class TensorParallel:
    """Some heads of each layer on every rank, by the model's own plan in transformers."""

    group: RankGroup

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return self.group.device

    def check(self, name: str, geometry: KVGeometry) -> None:
        """Every rank needs the same number of KV heads."""
        heads = {layer.kv_heads for layer in geometry.layers}
        if problem := indivisible(name, min(heads), self.group.count):
            raise ConfigurationError(
                "The model cannot be divided by heads.", found=problem, fix=DIVISIBLE
            )

    def build(self, build: Build, dtype: str) -> Any:
        """Load this rank's part."""
        from transformers.distributed.configuration_utils import DistributedConfig

        return build(distributed_config=DistributedConfig(tp_plan="auto", tp_size=self.group.count))

    def wrap(self, model: Any, tokenizer: Any, name: str, revision: str) -> LanguageModel:
        """See :class:`Placement`."""
        from kvferry.lm.sharded import HeadShards, ShardedLanguageModel

        shards = HeadShards(self.group)
        return ShardedLanguageModel(model, tokenizer, name, revision, self.group, shards)


DIVISIBLE = "take a number of devices that divides them, trainer.sharding=zero3, or device_map"


def indivisible(name: str, kv_heads: int, ranks: int) -> str | None:
    """What is wrong with dividing a model's KV heads among ranks, or None."""
    if kv_heads % ranks == 0:
        return None
    return f"{name} has {kv_heads} KV heads, which {ranks} ranks cannot share equally"


def placement(
    sharding: Sharding, device: torch.device, group: RankGroup | None, *, slice_all: bool = False
) -> Placement:
    """How a model is held under a setting.

    Args:
        device: of this process.
        group: the ranks, where there are several.
        slice_all: ZeRO-3 slices small weights too: a miniature has no others.

    Raises:
        ConfigurationError: sharding over ranks, and there is only one.
    """
    if sharding == "none":
        return OneDevice(device)
    if sharding == "device_map":
        return DeviceMap(device)
    if group is None or group.count < 2:
        raise ConfigurationError(
            f"sharding={sharding} divides a model among ranks.",
            found="one rank",
            fix="set trainer.devices to the number of devices, or trainer.sharding=device_map",
        )
    if sharding == "tensor_parallel":
        return TensorParallel(group)
    from kvferry.lm.zero3 import ZeRO3

    return ZeRO3(group, whole_below=0) if slice_all else ZeRO3(group)
