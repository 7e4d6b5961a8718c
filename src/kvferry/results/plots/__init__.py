"""Figures from result rows: each a matplotlib `Figure`, or None where its rows are absent."""

from kvferry.results.plots.latency import latency_figure
from kvferry.results.plots.layers import layer_figure
from kvferry.results.plots.retention import retention_figure
from kvferry.results.plots.sample_efficiency import sample_efficiency_figure
from kvferry.results.plots.tradeoff import tradeoff_figure

__all__ = [
    "latency_figure",
    "layer_figure",
    "retention_figure",
    "sample_efficiency_figure",
    "tradeoff_figure",
]
