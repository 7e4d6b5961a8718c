"""Calibrated pairs of miniatures, made once a session."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from kvferry.calibration.corpus import load_miniature
from kvferry.calibration.reader import PairReader, PairTrace
from kvferry.calibration.replay import TextReplay
from kvferry.calibration.statistics import (
    CalibrationPlan,
    MomentsModule,
    empty_moments,
    mostly_shared,
    source_code,
)
from kvferry.calibration.trace_store import TraceStore
from kvferry.lm.pico import pico_language_model
from kvferry.mappers.base import Statistics
from kvferry.mappers.layout import COMPONENTS
from kvferry.training.learn import TraceLearner, TrainerOptions
from kvferry.training.material import Material

TOKENS = 160


@cache
def reader_of(source: str, target: str) -> PairReader:
    """Two miniatures; one model on both sides where the names are equal."""
    torch.set_num_threads(1)
    first = pico_language_model(source, 0)
    return PairReader(first, first if source == target else pico_language_model(target, 0))


@cache
def traces_of(source: str, target: str, count: int, seed: int = 0) -> tuple[PairTrace, ...]:
    """Miniature passages, read by both."""
    reader = reader_of(source, target)
    texts = [p.text for p in load_miniature(count, sentences=16, seed=seed)]
    return tuple(reader.read([reader.tokenize(text, TOKENS)])[0] for text in texts)


@cache
def statistics_of(source: str, target: str, passages: int = 12) -> Statistics:
    """Moments of some miniature passages, without a trainer."""
    reader = reader_of(source, target)
    plan = CalibrationPlan(passage_tokens=TOKENS, code_width=16)
    layouts = plan.layouts(reader)
    traces = traces_of(source, target, passages)
    code = source_code(reader, [trace.tokens for trace in traces], plan)
    moments = {c: empty_moments(reader, layouts[c]) for c in COMPONENTS}
    shared = mostly_shared([trace.tokens for trace in traces])
    module = MomentsModule(reader, layouts, code, moments, shared)
    with torch.no_grad():
        for trace in traces:
            module.add(trace)
    geometries = reader.source.geometry, reader.target.geometry
    texts = [trace.tokens.text for trace in traces]
    unseen = [p.text for p in load_miniature(3, sentences=16, seed=11)]
    replay = TextReplay(
        reader, {"calibration": texts, "training": texts, "selection": unseen}, TOKENS, code
    )
    return Statistics(*geometries, layouts, moments, code, replay)


def learnable(source: str, target: str, folder: Path, traces: Path | None = None) -> Statistics:
    """Statistics with a trainer.

    Args:
        folder: of its checkpoints.
        traces: of what both models have read; within ``folder`` by default.
    """
    reader, statistics = reader_of(source, target), statistics_of(source, target)
    layers = range(len(reader.target.geometry.layers))
    texts = statistics.replay.texts  # type: ignore[union-attr]
    material = Material(
        reader=reader,
        texts=texts,
        passage_tokens=TOKENS,
        store=TraceStore(traces or folder / "traces", reader),
        variance={c: {i: statistics.head_variance(c, i) for i in layers} for c in COMPONENTS},
    )
    options = TrainerOptions(folder / "checkpoints", {"accelerator": "cpu"})
    return replace(statistics, learn=TraceLearner(material, options))
