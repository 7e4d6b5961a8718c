"""Closed-form estimation: streamed moments, ridge, recolouring."""

from kvferry.stats.cka import linear_cka
from kvferry.stats.errors import NumericalError
from kvferry.stats.moments import Moments
from kvferry.stats.recolour import recolour
from kvferry.stats.ridge import (
    RidgeFactor,
    bias,
    held_out_r2,
    ridge,
    single_source_r2,
)

__all__ = [
    "Moments",
    "NumericalError",
    "RidgeFactor",
    "bias",
    "held_out_r2",
    "linear_cka",
    "recolour",
    "ridge",
    "single_source_r2",
]
