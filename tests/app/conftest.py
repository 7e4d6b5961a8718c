"""Fixtures for the application: a small configuration, fake stages, loggers that remember."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.app.compose import compose
from kvferry.app.schema import RunConfig


class Memory:
    """A `RunLogger` that keeps what it is told."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.metrics: list[dict[str, float]] = []
        self.rows: list[dict[str, Any]] = []
        self.figures: list[str] = []
        self.closed: list[bool] = []

    def log_config(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.metrics.append(dict(metrics))

    def log_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows += [dict(row) for row in rows]

    def log_figure(self, name: str, path: Path) -> None:
        self.figures.append(name)

    def close(self, failed: bool = False) -> None:
        self.closed.append(failed)


@pytest.fixture
def memory() -> Memory:
    """A logger to look into afterwards."""
    return Memory()


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    """The smallest run, with its outputs in the test's folder."""
    return compose(["experiment=smoke", f"outputs={tmp_path / 'out'}"])
