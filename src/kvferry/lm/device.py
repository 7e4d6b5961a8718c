"""Waiting for a device, so that clocks see its work."""

from __future__ import annotations

import torch


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all that it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
