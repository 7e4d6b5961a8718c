"""Kernels beside the torch reference."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from kvferry.errors import ConfigurationError


@cache
def fused_products() -> ModuleType | None:
    """The Triton kernel for weighted products, or None where Triton is not installed."""
    if find_spec("triton") is None:
        return None
    return import_module("kvferry.stats.kernels.weighted_products")


def require_fused(device: torch.device) -> ModuleType:
    """The Triton kernel, for sums on ``device``.

    Raises:
        ConfigurationError: it cannot run there.
    """
    kernel = fused_products()
    if kernel is None or device.type != "cuda":
        raise ConfigurationError(
            "The fused kernel cannot run here.",
            found="no Triton" if kernel is None else f"sums on {device}",
            fix="set mapper.fused=false, or fit on a CUDA device with Triton installed",
        )
    return kernel
