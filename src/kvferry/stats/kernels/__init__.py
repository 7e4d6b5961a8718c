"""Kernels beside the torch reference."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


@cache
def fused_products() -> ModuleType | None:
    """The Triton kernel for weighted products, or None where Triton is not installed."""
    if find_spec("triton") is None:
        return None
    return import_module("kvferry.stats.kernels.weighted_products")
