"""Collect the calibration statistics of a run, alone or with further ranks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytorch_lightning

from kvferry.app.corpora import load_corpora
from kvferry.app.mapper import build_mapper
from kvferry.app.models import cache_folder, load_reader, rank_count
from kvferry.app.progress import Step, progress
from kvferry.app.ranks import companions
from kvferry.app.schema import RunConfig
from kvferry.calibration.ranks import Rank
from kvferry.calibration.reader import PairReader
from kvferry.calibration.statistics import CalibrationPlan, collect_statistics, is_collected
from kvferry.lm.store import cache_root
from kvferry.mappers.base import MapperMethod, Statistics


def calibrate(
    cfg: RunConfig, folder: Path, reader: PairReader, method: MapperMethod, texts: Sequence[str]
) -> Statistics:
    """Moments of the calibration text, read by every rank, or nothing where no method asks."""
    plan = _plan(cfg, method, reader)
    if not method.needs_moments:
        return Statistics(
            reader.source.geometry, reader.target.geometry, plan.layouts(reader), {}, None
        )
    # Ranks that hold the models together read as one, and calibrate as one.
    alone = cfg.trainer.shares_models or is_collected(reader, texts, plan, _moments(cfg))
    count = 1 if alone else rank_count(cfg)
    with (
        companions(folder, count) as rank,
        progress("read calibration text", len(texts)) as step,
    ):
        return _collect(cfg, reader, texts, plan, rank, step)


def collect_share(cfg: RunConfig, rank: Rank, ready: Callable[[], None]) -> None:
    """What a further rank does: read its share of the calibration text with its own models.

    Args:
        ready: called when the models are loaded and the others may start.
    """
    reader = load_reader(cfg, rank.index, device=cfg.trainer.fit_device)
    texts = load_corpora(cfg, cache_root(cache_folder(cfg))).calibration
    ready()
    plan = _plan(cfg, build_mapper(cfg.mapper), reader)
    _collect(cfg, reader, texts, plan, rank, lambda steps=1: None)


def _collect(
    cfg: RunConfig,
    reader: PairReader,
    texts: Sequence[str],
    plan: CalibrationPlan,
    rank: Rank | None,
    step: Step,
) -> Statistics:
    return collect_statistics(
        reader,
        texts,
        plan,
        _trainer(cfg, rank),
        _moments(cfg),
        batch_size=cfg.trainer.batch_size,
        each=step,
    )


def _plan(cfg: RunConfig, method: MapperMethod, reader: PairReader) -> CalibrationPlan:
    plan = CalibrationPlan(passage_tokens=cfg.data.passage_tokens, seed=cfg.seed)
    # Up to the usual depth all methods share one collection.
    depth = max(plan.native_layers, method.native_depth(reader.target.geometry))
    return replace(plan, native_layers=depth)


def _moments(cfg: RunConfig) -> Path:
    return cache_root(cache_folder(cfg)) / "moments"


def _trainer(cfg: RunConfig, rank: Rank | None) -> pytorch_lightning.Trainer:
    quiet_lightning()
    return pytorch_lightning.Trainer(
        accelerator=cfg.trainer.accelerator,
        devices=1 if rank is None else rank.count,
        strategy="auto" if rank is None else rank.strategy(),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )


def quiet_lightning() -> None:
    """Keep advice about loaders and loggers off the screen: it does not apply here."""
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
