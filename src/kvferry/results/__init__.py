"""Typed result rows and their statistics; `tables`, `plots` and `report` are views of them.

The views are imported by module, so that code which only measures does not load matplotlib.
"""

from kvferry.results.catalogue import CONDITIONS, METRICS, Metric
from kvferry.results.rows import (
    ResultRow,
    RowsError,
    RowStamp,
    append_rows,
    merge_rows,
    read_rows,
    write_rows,
)
from kvferry.results.statistics import (
    Interval,
    Percentiles,
    StatisticsError,
    floor_normalised,
    kl_retention,
    mean_interval,
    median_interval,
    paired_difference,
    percentile_summary,
    ratio_interval,
    speedup_interval,
)

__all__ = [
    "CONDITIONS",
    "METRICS",
    "Interval",
    "Metric",
    "Percentiles",
    "ResultRow",
    "RowStamp",
    "RowsError",
    "StatisticsError",
    "append_rows",
    "floor_normalised",
    "kl_retention",
    "mean_interval",
    "median_interval",
    "merge_rows",
    "paired_difference",
    "percentile_summary",
    "ratio_interval",
    "read_rows",
    "speedup_interval",
    "write_rows",
]
