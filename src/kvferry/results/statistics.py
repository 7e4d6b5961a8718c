"""Bootstrap intervals, paired by passage.

Every function takes one number a passage (or a timing) and returns an `Interval`. Passages are
resampled with replacement, the same passages for every argument, and the statistic is one of the
*means*: a ratio of means stays finite where a mean of ratios does not.

Plain percentile intervals are too narrow for a handful of passages, so the percentiles are widened
to the ones at which the interval of a mean is as wide as Student's t would make it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from kvferry.errors import KVFerryError

DRAWS = 10_000
LEVEL = 0.95
CHUNK_ELEMENTS = 4_000_000

Values = Sequence[float] | NDArray[Any] | Any
Array = NDArray[np.float64]


class StatisticsError(KVFerryError):
    """The numbers handed to a statistic cannot be summarised."""


@dataclass(frozen=True)
class Interval:
    """A number with its interval; `low` and `high` are nan where none can be given."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Percentiles:
    """Median and 95th percentile of `n` timings, in the unit they came in."""

    p50: float
    p95: float
    n: int


def _column(values: Values, name: str) -> Float[np.ndarray, " n"]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise StatisticsError(
            f"The {name} are not a list of at least one number.",
            found=f"shape {array.shape}",
            expected="one number a passage",
            fix="Pass one-dimensional values; evaluate at least one passage.",
        )
    if not np.isfinite(array).all():
        raise StatisticsError(
            f"The {name} hold numbers that are not finite.",
            found=f"{int((~np.isfinite(array)).sum())} of {array.size}",
            fix="Look at the passages at these indices: "
            f"{np.flatnonzero(~np.isfinite(array))[:8].tolist()}.",
        )
    return array


def _paired(**columns: Values) -> Float[np.ndarray, "n k"]:
    arrays = {name: _column(values, name) for name, values in columns.items()}
    sizes = {name: array.size for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        raise StatisticsError(
            "A paired statistic needs the same passages on every side.",
            found=sizes,
            expected="equal lengths",
            fix="Evaluate every condition on the same passages, in the same order.",
        )
    return np.stack(list(arrays.values()), axis=1)


def _student_quantile(probability: float, freedom: int) -> float:
    # Cornish-Fisher expansion: within 1 % from 3 degrees of freedom on, which spares a dependency.
    z = NormalDist().inv_cdf(probability)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def _limits(statistics: Float[np.ndarray, " draws"], n: int, level: float) -> tuple[float, float]:
    upper = (1 + level) / 2
    widened = math.sqrt(n / (n - 1)) * _student_quantile(upper, n - 1)
    tail = NormalDist().cdf(-widened)
    low, high = np.quantile(statistics, [tail, 1 - tail])
    return float(low), float(high)


def _resample(
    columns: Float[np.ndarray, "n k"],
    reduce: Callable[[Float[np.ndarray, "draws n k"]], Float[np.ndarray, "draws k"]],
    draws: int,
    seed: int,
) -> Float[np.ndarray, "draws k"]:
    generator = np.random.default_rng(seed)
    n = columns.shape[0]
    chunk = max(1, CHUNK_ELEMENTS // (n * columns.shape[1]))
    parts = [
        reduce(columns[generator.integers(0, n, size=(min(chunk, draws - start), n))])
        for start in range(0, draws, chunk)
    ]
    return np.concatenate(parts)


def _bootstrap(
    columns: Float[np.ndarray, "n k"],
    statistic: Callable[[Float[np.ndarray, "draws k"]], Float[np.ndarray, " draws"]],
    denominator: Callable[[Float[np.ndarray, "draws k"]], Float[np.ndarray, " draws"]] | None,
    draws: int,
    seed: int,
    level: float,
) -> Interval:
    n = columns.shape[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(columns.mean(axis=0, keepdims=True))[0])
        if n < 2:
            return Interval(value, math.nan, math.nan, n)
        means = _resample(columns, lambda drawn: drawn.mean(axis=1), draws, seed)
        if denominator is not None:
            low, high = _limits(denominator(means), n, level)
            if low <= 0 <= high:  # the ratio is unbounded there: two quantiles would be a lie
                return Interval(value, math.nan, math.nan, n)
        low, high = _limits(statistic(means), n, level)
    return Interval(value, low, high, n)


def mean_interval(
    values: Values, *, draws: int = DRAWS, seed: int = 0, level: float = LEVEL
) -> Interval:
    """Mean of one number a passage, `values` [n]."""
    return _bootstrap(_paired(values=values), lambda m: m[:, 0], None, draws, seed, level)


def paired_difference(
    a: Values, b: Values, *, draws: int = DRAWS, seed: int = 0, level: float = LEVEL
) -> Interval:
    """mean(a) - mean(b) with passages kept in pairs; `a`, `b` [n]."""
    return _bootstrap(_paired(a=a, b=b), lambda m: m[:, 0] - m[:, 1], None, draws, seed, level)


def ratio_interval(
    numerator: Values,
    denominator: Values,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> Interval:
    """mean(numerator) / mean(denominator), pairs kept; retention = mapped / native.

    The interval is nan where the denominator cannot be told from zero.
    """
    columns = _paired(numerator=numerator, denominator=denominator)
    return _bootstrap(columns, lambda m: m[:, 0] / m[:, 1], lambda m: m[:, 1], draws, seed, level)


def floor_normalised(
    mapped: Values,
    zero: Values,
    native: Values,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> Interval:
    """(mean mapped - mean zero) / (mean native - mean zero), pairs kept.

    On NLL this is `nll_retention`, on the NLL of a repeated early span `recall_kept`, on a task
    score `floor_retention`. The interval is nan where native and zero cannot be told apart.
    """
    columns = _paired(mapped=mapped, zero=zero, native=native)
    return _bootstrap(
        columns,
        lambda m: (m[:, 0] - m[:, 1]) / (m[:, 2] - m[:, 1]),
        lambda m: m[:, 2] - m[:, 1],
        draws,
        seed,
        level,
    )


def kl_retention(
    kl: Values, kl_zero: Values, *, draws: int = DRAWS, seed: int = 0, level: float = LEVEL
) -> Interval:
    """1 - mean(kl) / mean(kl_zero), pairs kept."""
    columns = _paired(kl=kl, kl_zero=kl_zero)
    return _bootstrap(
        columns, lambda m: 1 - m[:, 0] / m[:, 1], lambda m: m[:, 1], draws, seed, level
    )


def median_interval(
    times: Values, *, draws: int = DRAWS, seed: int = 0, level: float = LEVEL
) -> Interval:
    """Median of repeated timings [n]."""
    column = _column(times, "times")[:, None]
    value, n = float(np.median(column)), column.shape[0]
    if n < 2:
        return Interval(value, math.nan, math.nan, n)
    medians = _resample(column, lambda drawn: np.median(drawn, axis=1), draws, seed)
    return Interval(value, *_limits(medians[:, 0], n, level), n)


def speedup_interval(
    slow: Values, fast: Values, *, draws: int = DRAWS, seed: int = 0, level: float = LEVEL
) -> Interval:
    """median(slow) / median(fast) of two independent lists of timings, of any lengths.

    `n` is the shorter list's.
    """
    slow_column, fast_column = _column(slow, "slow times"), _column(fast, "fast times")
    n = min(slow_column.size, fast_column.size)
    value = float(np.median(slow_column) / np.median(fast_column))
    if n < 2:
        return Interval(value, math.nan, math.nan, n)

    def medians(column: Array, seed: int) -> Array:
        drawn = _resample(column[:, None], lambda d: np.median(d, axis=1), draws, seed)
        return np.asarray(drawn[:, 0])

    ratios = medians(slow_column, seed) / medians(fast_column, seed + 1)
    return Interval(value, *_limits(ratios, n, level), n)


def percentile_summary(times: Values) -> Percentiles:
    """Median and 95th percentile of timings [n]."""
    column = _column(times, "times")
    p50, p95 = np.quantile(column, [0.5, 0.95])
    return Percentiles(float(p50), float(p95), column.size)
