"""A panel of rows: what is multiplied at once while moments are streamed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from kvferry.stats.errors import NumericalError


@dataclass(frozen=True)
class CentredRows:
    """Rows minus their weighted mean, times the root of their weight.

    Attributes:
        rows: the last row is spare: it belongs to whoever adds these rows to others.
        mean: weighted mean of the rows.
        weight: total weight.
        count: rows without the spare one.
    """

    rows: Float[Tensor, "rows width"]
    mean: Float64[Tensor, " width"]
    weight: float
    count: int


class Panel:
    """A buffer of at most `capacity` weighted rows in fp32."""

    def __init__(self, capacity: int, width: int, device: torch.device) -> None:
        self.capacity = capacity
        self._rows = torch.empty(capacity + 1, width, device=device)
        self._weights = torch.empty(capacity, device=device)
        self._count = 0

    @property
    def space(self) -> int:
        """How many rows still fit."""
        return self.capacity - self._count

    def append(
        self, x: Float[Tensor, "n p"], y: Float[Tensor, "n q"], weights: Float[Tensor, " n"] | None
    ) -> None:
        """Copy rows in; the caller sees to it that they fit."""
        here = slice(self._count, self._count + len(x))
        self._rows[here, : x.shape[1]] = x
        self._rows[here, x.shape[1] :] = y
        self._weights[here] = 1.0 if weights is None else weights.float()
        self._count = here.stop

    def take(self) -> CentredRows | None:
        """Empty the panel; its rows stay valid until the next `append`. None without weight.

        Raises:
            NumericalError: a row is not finite.
        """
        count, self._count = self._count, 0
        weights, data = self._weights[:count], self._rows[:count]
        weight = float(weights.sum(dtype=torch.float64))
        if weight == 0:
            return None
        mean = (weights @ data).div_(weight)
        if not bool(mean.isfinite().all()):
            raise NumericalError(
                "Calibration rows are not finite.",
                found=f"{int((~mean.isfinite()).sum())} columns with NaN or infinity",
                fix="Run the models in float32 or bfloat16, and check the text of these rows.",
            )
        data.sub_(mean)
        rest = (weights @ data).div_(weight)  # what rounding of a large mean left behind
        data.sub_(rest).mul_(weights.sqrt()[:, None])
        return CentredRows(self._rows[: count + 1], mean.double() + rest.double(), weight, count)
