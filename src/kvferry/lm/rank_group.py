"""Ranks of one machine that run the forward passes of sharded models together."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_MEET = timedelta(minutes=10)
"""For all ranks to join."""
_PASS = timedelta(minutes=60)
"""For the slowest of them to load a model, or to run its part of a forward pass."""
_IDLE = timedelta(days=7)
"""The first rank may fit for long between two forward passes."""
_CPU = torch.device("cpu")


class RankGroup:
    """This process among the ranks.

    The first rank runs the program. The others wait for forward passes that it sends, run their
    part and send back what comes out, so that nothing else of the program knows of ranks: all run
    the same number of passes, however the program goes.

    Args:
        index: from 0; the first one leads.
        count: of all ranks.
        device: where this rank's part of the weights lies.
    """

    def __init__(self, index: int, count: int, device: torch.device) -> None:
        self.index, self.count, self.device = index, count, device
        self.members: list[Any] = []
        self._words = dist.new_group(backend="gloo", timeout=_IDLE)

    def send(self, value: Any, to: int) -> None:
        """Send a value; its tensors go from device to device."""
        buffer = BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(value)
        shapes = [(tuple(x.shape), x.dtype) for x in pickler.tensors]
        dist.send_object_list([buffer.getvalue(), shapes], to, group=self._words, device=_CPU)
        for tensor in pickler.tensors:
            if tensor.numel():
                dist.send(tensor.to(self.device).contiguous(), to)

    def receive(self, source: int = 0) -> Any:
        """The next value that another rank sends here, its tensors on this rank's device."""
        told: list[Any] = [None, None]
        dist.recv_object_list(told, source, group=self._words, device=_CPU)
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in told[1]]
        for tensor in tensors:
            if tensor.numel():
                dist.recv(tensor, source)
        return _Unpickler(BytesIO(told[0]), tensors).load()

    def whole_heads(self, part: Tensor, head_dim: int = 1) -> Tensor:
        """The heads of all ranks side by side, on every rank; a collective."""
        parts = [torch.empty_like(part).contiguous() for _ in range(self.count)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=head_dim)

    def follow(self) -> None:
        """Run what the first rank sends until it needs no more."""
        while (work := self.receive()) is not None:
            answer = self.members[work.member].run(work)
            if work.answered:
                self.send(answer, to=0)

    def dismiss(self) -> None:
        """Tell the other ranks that no more work comes."""
        for other in range(1, self.count):
            self.send(None, to=other)


@contextmanager
def joined(index: int, count: int, port: int, device: torch.device) -> Iterator[RankGroup]:
    """Be one of the ranks for the block's length; at its end the first one dismisses the others.

    Args:
        index, count: which rank, of how many.
        port: of this machine, where the first rank waits for the others.
        device: of this rank.
    """
    # Where DeepSpeed and transformers look up which device is theirs.
    names = {
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": device.type,
    }
    before = {name: os.environ.get(name) for name in names}
    os.environ |= names
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
        backend = "nccl" if device.type == "cuda" else "gloo"
        meeting = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, count, is_master=index == 0, timeout=_MEET
        )
        dist.init_process_group(backend, store=meeting, rank=index, world_size=count, timeout=_PASS)
        group = RankGroup(index, count, device)
        yield group
        if index == 0:
            group.dismiss()
    finally:
        _leave()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _leave() -> None:
    """Leave the process group, and let DeepSpeed forget it where it knew of it."""
    deepspeed = sys.modules.get("deepspeed.comm")
    if deepspeed is None or not deepspeed.is_initialized():
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    deepspeed.destroy_process_group()
    # It numbers modules and weights from the start of a process, and ranks compare their numbers:
    # this process may meet new ones next.
    slicing = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    hooks = importlib.import_module("deepspeed.runtime.zero.parameter_offload")
    slicing.Init.param_id = 0
    (numbers,) = hooks.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    numbers[0] = 0


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and keeps them."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Puts tensors back in."""

    def __init__(self, file: BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self.tensors[pid]
