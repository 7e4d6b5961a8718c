"""Mergeable second moments of (x, y) rows: all that the closed-form mappers learn from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from kvferry.errors import InputError
from kvferry.stats.errors import NumericalError
from kvferry.stats.panel import Panel

Columns = slice | Sequence[int] | Tensor
_BLOCK = 1024  # columns of the Gram computed at once: scratch is _BLOCK rows of it


class Moments:
    """Centred, optionally weighted second moments of rows x [p] and y [q], streamed.

    Rows are collected in a panel of `panel` rows; a full panel is centred on its own mean,
    multiplied in fp32 and added to sums in fp64 (Chan's update), so neither a large mean nor many
    rows cost accuracy. Memory is that of the sums, one panel and `1024 (p + q)` numbers of scratch,
    however many rows there are. Of the symmetric sums only the upper triangle is computed.

    Products of y with itself are kept only inside `y_blocks` (say, one target layer each): the
    sums of p² + p q + sum of d² numbers are what a p of 10,000 leaves room for.

    Moments grow in place by `update` and `merge`; everything read from them is divided by the
    total weight, so that a ridge penalty means the same at every number of rows.
    """

    def __init__(
        self,
        x_width: int,
        y_width: int,
        *,
        y_blocks: Sequence[slice] | None = None,
        panel: int = 4096,
        device: torch.device | str = "cpu",
    ) -> None:
        """Empty moments.

        Args:
            x_width: p, columns of x.
            y_width: q, columns of y.
            y_blocks: consecutive slices that partition the columns of y; one block by default.
            panel: rows multiplied at once.
            device: where rows are multiplied and sums live.

        Raises:
            InputError: `y_blocks` is no partition or a size is not positive.
        """
        self.x_width, self.y_width = x_width, y_width
        self.y_blocks = tuple(y_blocks) if y_blocks is not None else (slice(0, y_width),)
        edges = [(block.start, block.stop) for block in self.y_blocks]
        expected = [0, *(stop for _, stop in edges)]
        if [start for start, _ in edges] != expected[:-1] or expected[-1] != y_width:
            raise InputError(
                "The blocks of y must follow each other and cover all its columns.",
                found=edges,
                expected=f"slices from 0 to {y_width}",
                fix="Pass one slice for each target layer, in order.",
            )
        if min(x_width, y_width, panel) < 1:
            raise InputError(
                "Moments need at least one column of x and of y and one row a panel.",
                found=(x_width, y_width, panel),
                fix="Pass positive sizes.",
            )
        self.panel = panel
        self.device = torch.device(device)
        self.rows = 0
        self._weight = 0.0
        self._mean = self._zeros(x_width + y_width)
        self._xx = self._zeros(x_width, x_width)
        self._xy = self._zeros(x_width, y_width)
        self._yy = [self._zeros(stop - start, stop - start) for start, stop in edges]
        self._mirrored = True
        self._panel: Panel | None = None

    @torch.no_grad()
    def update(
        self,
        x: Float[Tensor, "n p"],
        y: Float[Tensor, "n q"],
        weights: Float[Tensor, " n"] | None = None,
    ) -> Moments:
        """Add rows, each with its weight (one, unless given).

        Raises:
            InputError: widths, row counts or weights do not fit.
            NumericalError: rows that are not finite (found when their panel is full or read).
        """
        if x.shape != (len(y), self.x_width) or y.shape != (len(x), self.y_width):
            raise InputError(
                "Rows do not fit these moments.",
                found=f"x {tuple(x.shape)}, y {tuple(y.shape)}",
                expected=f"x [n, {self.x_width}], y [n, {self.y_width}]",
                fix="Pass x and y of the layers that the moments were made for.",
            )
        if weights is not None and (weights.shape != (len(x),) or bool((weights < 0).any())):
            raise InputError(
                "Weights must be one non-negative number a row.",
                found=tuple(weights.shape),
                expected=(len(x),),
                fix="Clamp the weights at zero.",
            )
        if self._panel is None:
            self._panel = Panel(self.panel, self.x_width + self.y_width, self.device)
        done = 0
        while done < len(x):
            part = slice(done, done + self._panel.space)
            self._panel.append(x[part], y[part], None if weights is None else weights[part])
            done = part.stop
            if not self._panel.space:
                self._flush()
        self.rows += len(x)
        return self

    def merge(self, other: Moments) -> Moments:
        """Add the rows that another set of moments has seen; the other one stays as it is.

        Raises:
            InputError: the other moments are of other columns.
        """
        if (self.x_width, self.y_blocks) != (other.x_width, other.y_blocks):
            raise InputError(
                "Only moments of the same columns can be merged.",
                found=(other.x_width, other.y_blocks),
                expected=(self.x_width, self.y_blocks),
                fix="Merge moments of one pair, component and support.",
            )
        self._flush()
        other._flush()
        total = self._weight + other._weight
        if total == 0:
            return self
        shift = other._mean.to(self.device) - self._mean
        scale = self._weight * other._weight / total
        x, y = shift[: self.x_width], shift[self.x_width :]
        self._xx.add_(other._xx.to(self.device)).addr_(x, x, alpha=scale)
        self._xy.add_(other._xy.to(self.device)).addr_(x, y, alpha=scale)
        for mine, theirs, block in zip(self._yy, other._yy, self.y_blocks, strict=True):
            mine.add_(theirs.to(self.device)).addr_(y[block], y[block], alpha=scale)
        self._mean.add_(shift, alpha=other._weight / total)
        self._weight = total
        self.rows += other.rows
        self._mirrored = False
        return self

    def reduce(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> Moments:
        """Take in what every other rank has seen: all ranks call it, and all end with the same.

        Sums are moved to the mean of all rows before they are added, so that, as in `merge`, a
        large mean costs no accuracy. Nothing is copied: it takes no more memory than there is.

        Args:
            sum_over_ranks: adds a tensor up over all ranks, in place or not; a collective.
        """
        self._flush()
        head = torch.tensor([self.rows, self._weight], dtype=torch.float64, device=self.device)
        rows, total = sum_over_ranks(head).tolist()
        if total == 0:
            return self
        mean = sum_over_ranks(self._mean * (self._weight / total))
        shift = self._mean - mean
        x, y = shift[: self.x_width], shift[self.x_width :]
        self._xx = sum_over_ranks(self._xx.addr_(x, x, alpha=self._weight))
        self._xy = sum_over_ranks(self._xy.addr_(x, y, alpha=self._weight))
        for index, block in enumerate(self.y_blocks):
            mine = self._yy[index].addr_(y[block], y[block], alpha=self._weight)
            self._yy[index] = sum_over_ranks(mine)
        self._mean, self._weight, self.rows = mean, total, int(rows)
        self._mirrored = False
        return self

    def clear(self) -> Moments:
        """Forget all rows; the memory stays."""
        self.rows, self._weight, self._panel, self._mirrored = 0, 0.0, None, True
        for sums in (self._mean, self._xx, self._xy, *self._yy):
            sums.zero_()
        return self

    @property
    def weight(self) -> float:
        """Total weight: the number of rows, if all weigh one."""
        self._flush()
        return self._weight

    @property
    def mean_x(self) -> Float64[Tensor, " p"]:
        """Mean of x."""
        self._finished()
        return self._mean.narrow(0, 0, self.x_width)

    @property
    def mean_y(self) -> Float64[Tensor, " q"]:
        """Mean of y."""
        self._finished()
        return self._mean.narrow(0, self.x_width, self.y_width)

    @property
    def c_xx(self) -> Float64[Tensor, "p p"]:
        """Covariance of x; a new tensor at each reading, see `scatter_xx` for p of thousands."""
        out: Tensor = self.scatter_xx / self._weight
        return out

    @property
    def c_xy(self) -> Float64[Tensor, "p q"]:
        """Cross-covariance of x and y, a new tensor like `c_xx`."""
        out: Tensor = self.scatter_xy / self._weight
        return out

    @property
    def c_yy(self) -> tuple[Float64[Tensor, "d d"], ...]:
        """Covariance of y inside each block."""
        self._finished()
        return tuple(block / self._weight for block in self._yy)

    @property
    def scatter_xx(self) -> Float64[Tensor, "p p"]:
        """Sum of centred products of x, not divided and not copied: do not write to it."""
        self._finished()
        return self._xx

    @property
    def scatter_xy(self) -> Float64[Tensor, "p q"]:
        """Sum of centred products of x and y, like `scatter_xx`."""
        self._finished()
        return self._xy

    def state_dict(self) -> dict[str, Tensor]:
        """Everything as contiguous tensors, ready for safetensors."""
        self._flush()
        self._mirror()
        state = {
            "rows": torch.tensor([self.rows]),
            "weight": torch.tensor([self._weight], dtype=torch.float64),
            "mean": self._mean,
            "xx": self._xx,
            "xy": self._xy,
            "y_blocks": torch.tensor([[b.start, b.stop] for b in self.y_blocks]),
        }
        return state | {f"yy.{index}": block for index, block in enumerate(self._yy)}

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Tensor], *, panel: int = 4096, device: torch.device | str = "cpu"
    ) -> Moments:
        """Moments from `state_dict`; they take over its tensors where the device allows.

        Raises:
            InputError: an entry is missing.
        """
        try:
            blocks = [slice(start, stop) for start, stop in state["y_blocks"].tolist()]
            x_width, y_width = state["xy"].shape
            out = cls._hollow(x_width, y_width, blocks, panel, torch.device(device))
            out.rows = int(state["rows"])
            out._weight = float(state["weight"])
            out._mean, out._xx, out._xy = (state[k].to(device) for k in ("mean", "xx", "xy"))
            out._yy = [state[f"yy.{index}"].to(device) for index in range(len(blocks))]
        except KeyError as missing:
            raise InputError(
                "The stored moments are incomplete.", found=f"no {missing}", fix="Fit again."
            ) from missing
        return out

    def select(self, columns_x: Columns, columns_y: Columns | None = None) -> Moments:
        """The moments of some columns alone, as if no others had ever been there.

        Args:
            columns_x: columns of x, in the order wanted.
            columns_y: ascending columns of y; blocks keep what is chosen of them, or go.

        Raises:
            InputError: no column is left, or columns of y are not ascending.
        """
        self._flush()
        self._mirror()
        x = _index(columns_x, self.x_width, self.device)
        y = _index(slice(None) if columns_y is None else columns_y, self.y_width, self.device)
        if not len(x) or not len(y) or bool((y.diff() <= 0).any()):
            raise InputError(
                "A selection needs columns of x, and ascending columns of y.",
                found=f"{len(x)} of x, {len(y)} of y",
                fix="Sort the columns of y and select at least one of each.",
            )
        blocks: list[slice] = []
        parts: list[Tensor] = []
        for block, sums in zip(self.y_blocks, self._yy, strict=True):
            inside = y[(y >= block.start) & (y < block.stop)] - block.start
            if len(inside):
                first = blocks[-1].stop if blocks else 0
                blocks.append(slice(first, first + len(inside)))
                parts.append(sums.index_select(0, inside).index_select(1, inside))
        out = self._hollow(len(x), len(y), blocks, self.panel, self.device)
        out.rows, out._weight, out._yy = self.rows, self._weight, parts
        out._mean = torch.cat([self._mean[: self.x_width][x], self._mean[self.x_width :][y]])
        out._xx = self._xx.index_select(0, x).index_select(1, x)
        out._xy = self._xy.index_select(0, x).index_select(1, y)
        return out

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64, device=self.device)

    @classmethod
    def _hollow(
        cls,
        x_width: int,
        y_width: int,
        blocks: Sequence[slice],
        panel: int,
        device: torch.device,
    ) -> Moments:
        # On "meta" the constructor checks everything but allocates no sums.
        out = cls(x_width, y_width, y_blocks=blocks, panel=panel, device="meta")
        out.device = device
        return out

    def _flush(self) -> None:
        """Move the rows of the panel into the sums."""
        part = self._panel.take() if self._panel else None
        if part is None:
            return
        total = self._weight + part.weight
        shift = part.mean - self._mean
        # The step between the means is one more row: every term is a sum of squares, so fp32 does.
        part.rows[-1] = shift * (self._weight * part.weight / total) ** 0.5
        self._add_products(part.rows)
        self._mean.add_(shift, alpha=part.weight / total)
        self._weight = total

    def _add_products(self, rows: Float[Tensor, "n width"]) -> None:
        p, width = self.x_width, self.x_width + self.y_width
        scratch = rows.new_empty(min(_BLOCK, p) * width)
        for first in range(0, p, _BLOCK):
            last = min(first + _BLOCK, p)
            out = scratch[: (last - first) * (width - first)].view(last - first, width - first)
            torch.mm(rows[:, first:last].T, rows[:, first:], out=out)
            self._xx[first:last, first:].add_(out[:, : p - first])
            self._xy[first:last].add_(out[:, p - first :])
        for block, sums in zip(self.y_blocks, self._yy, strict=True):
            part = rows[:, p + block.start : p + block.stop]
            for first in range(0, part.shape[1], _BLOCK):
                sums[first : first + _BLOCK].add_(part[:, first : first + _BLOCK].T @ part)
        self._mirrored = False

    def _mirror(self) -> None:
        """Copy the upper triangle, which is kept up to date, into the lower one."""
        if self._mirrored:
            return
        for first in range(0, self.x_width, _BLOCK):
            last = min(first + _BLOCK, self.x_width)
            self._xx[last:, first:last] = self._xx[first:last, last:].T
            corner = self._xx[first:last, first:last]
            corner.copy_(corner.triu() + corner.triu(1).T)
        self._mirrored = True

    def _finished(self) -> None:
        self._flush()
        self._panel = None  # hundreds of MB at full width, and reading comes last
        self._mirror()
        if self._weight == 0:
            raise NumericalError(
                "These moments have seen no rows with weight.",
                found=f"{self.rows} rows, total weight 0",
                fix="Calibrate on more text, or check the alignment's exact rows.",
            )


def _index(columns: Columns, width: int, device: torch.device) -> Int64[Tensor, " n"]:
    if isinstance(columns, slice):
        return torch.arange(width, device=device)[columns]
    return torch.as_tensor(columns, dtype=torch.int64, device=device)
