"""The error of an ill-posed estimation."""

from __future__ import annotations

from kvferry.errors import KVFerryError


class NumericalError(KVFerryError):
    """Statistics or a system of equations that floating point cannot carry."""
