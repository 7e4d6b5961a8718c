"""The three stages of a run: fit a mapper, evaluate it, write the report."""

from __future__ import annotations

import json
import logging
import platform
import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytorch_lightning
import torch
import transformers
from omegaconf import OmegaConf
from rich.console import Console

import kvferry
from kvferry.app.corpora import load_corpora
from kvferry.app.folder import CONFIG, MAPPER, REPORT, ROWS
from kvferry.app.loggers import RunLogger
from kvferry.app.mapper import build_mapper
from kvferry.app.progress import Step, progress
from kvferry.app.ranks import companions
from kvferry.app.schema import RunConfig, to_plain
from kvferry.calibration.ranks import Rank
from kvferry.calibration.reader import PairReader
from kvferry.calibration.replay import TextReplay
from kvferry.calibration.statistics import CalibrationPlan, collect_statistics, is_collected
from kvferry.calibration.trace_store import TraceStore
from kvferry.evals.contexts import ContextShape, EvalContext, read_context
from kvferry.evals.ladder import ContextResult, Ladder
from kvferry.evals.latency import LatencyBench, affordable_lengths
from kvferry.evals.rows import ladder_rows, latency_rows, size_rows
from kvferry.evals.samples import continue_text
from kvferry.handoff.handoff import Handoff
from kvferry.lm.cache_limit import beyond, cache_limit_bytes, evict
from kvferry.lm.loading import load_language_model
from kvferry.lm.model import LanguageModel
from kvferry.lm.sources import ModelSpec
from kvferry.lm.store import cache_root
from kvferry.mappers.artefact import (
    WEIGHTS,
    Manifest,
    ModelIdentity,
    load_mapper,
    read_manifest,
    save_mapper,
)
from kvferry.mappers.base import MapperMethod, Statistics
from kvferry.mappers.card import write_card
from kvferry.results.report import ContinuationSample, write_report
from kvferry.results.rows import ResultRow, RowStamp, read_rows, write_atomically, write_rows
from kvferry.results.tables import markdown_table, print_tables

SAMPLES = "samples.json"
ON_CARD = ("kl", "nll_retention", "recall_kept", "top1_agreement")
CARD_LEGEND = """Beside the carried cache (*mapped*) stand what the target decodes from otherwise.
KL: nats a token from native, lower is better. NLL retention and recall kept: 1 is native, 0 is no
context. In brackets 95 % bootstrap intervals over n contexts."""


def fit(cfg: RunConfig, folder: Path, log: RunLogger) -> None:
    """Read the calibration text with both models, fit, write the artefact."""
    method: MapperMethod = build_mapper(cfg.mapper)
    reader = load_reader(cfg)
    corpora = load_corpora(cfg, cache_root(_cache(cfg)))
    texts = corpora.calibration
    started = time.perf_counter()
    statistics = _statistics(cfg, folder, reader, method, texts)
    _bound_cache(cfg, folder)
    replay = TextReplay(
        reader, corpora.replayed(cfg.eval), cfg.data.passage_tokens, statistics.code, progress
    )
    statistics = replace(statistics, replay=replay, watch=progress)
    collected = time.perf_counter()
    mapper = method.fit(statistics)
    fitted = time.perf_counter()
    rows = statistics.moments["keys"].rows if statistics.moments else 0
    manifest = save_mapper(
        folder / MAPPER,
        mapper,
        Manifest(
            pair=cfg.pair.name,
            method=method.pretty_name,
            reference_url=method.reference_url,
            fields=dict(vars(method)),
            source=_identity(cfg, reader.source, cfg.source),
            target=_identity(cfg, reader.target, cfg.target),
            calibration={
                "corpus": corpora.fingerprint(texts),
                "passages": len(texts),
                "rows": rows,
                "domain": corpora.domain,
                "mixed_domain": cfg.data.mixed_domain,
            },
            git_commit=_git_commit(),
        ),
        _portable_settings(cfg),
    )
    log.log_metrics(
        {
            "fit/rows": rows,
            "fit/parameters": mapper.parameters,
            "fit/storage_bytes": mapper.storage_bytes,
            "fit/calibration_s": collected - started,
            "fit/solve_s": fitted - collected,
            **{f"fit/{name}": value for name, value in mapper.report.items()},
        }
    )
    print(
        f"{method.pretty_name}: {mapper.parameters / 1e6:.1f} M parameters from {rows:,} tokens "
        f"({collected - started:.0f} s reading, {fitted - collected:.0f} s solving), "
        f"hash {manifest.short_hash}"
    )
    for name, value in mapper.report.items():
        print(f"  {name.replace('_', ' ')}: {value:.4g}")


def evaluate(cfg: RunConfig, folder: Path, log: RunLogger) -> None:
    """Measure quality against every control, then latency; write `rows.parquet`."""
    reader = load_reader(cfg)
    handoff, stamp = load_handoff(cfg, folder, reader)
    corpora = load_corpora(cfg, cache_root(_cache(cfg)))
    rows: list[ResultRow] = size_rows(
        stamp, handoff.mapper.parameters, (folder / MAPPER / WEIGHTS).stat().st_size
    )
    samples: list[ContinuationSample] = []
    for split, texts in corpora.evaluation(
        cfg.eval.contexts, cfg.eval.out_of_domain_contexts
    ).items():
        results, contexts = _score(cfg, handoff, split, texts)
        if not samples:
            samples = [_sample(cfg, handoff, c) for c in contexts[: cfg.eval.samples]]
        rows += ladder_rows(
            stamp,
            results,
            split=split,
            context_tokens=cfg.eval.context_tokens,
            draws=cfg.eval.bootstrap_resamples,
        )
        write_rows(folder / ROWS, rows)
    _bound_cache(cfg, folder)
    text = "\n\n".join(corpora.long_text)
    bench = LatencyBench(handoff, text)
    lengths = affordable_lengths(handoff, cfg.eval.latency_tokens, len(bench.ids))
    rounds = cfg.eval.latency_warmup + cfg.eval.latency_repeats
    timings = []
    for length in lengths:
        with progress(f"time {length:,} tokens", rounds) as step:
            timings.append(
                bench.measure(length, cfg.eval.latency_repeats, cfg.eval.latency_warmup, step)
            )
    rows += latency_rows(stamp, timings, cfg.eval.bootstrap_resamples)
    write_rows(folder / ROWS, rows)
    _show_on_card(folder / MAPPER, handoff.mapper.parameters, rows)
    write_atomically(folder / SAMPLES, json.dumps([asdict(sample) for sample in samples]).encode())


def _show_on_card(mapper: Path, parameters: int, rows: Sequence[ResultRow]) -> None:
    shown = [row for row in rows if row.metric in ON_CARD and row.layer is None]
    text = f"{CARD_LEGEND}\n\n{markdown_table(shown)}"
    size = (mapper / WEIGHTS).stat().st_size
    write_card(mapper, read_manifest(mapper), parameters, size, text)


def report(cfg: RunConfig, folder: Path, log: RunLogger) -> None:
    """Write `report.html` and its figures from the rows, and show the tables."""
    rows = read_rows(folder / ROWS)
    print_tables(rows, Console())
    samples = [ContinuationSample(**s) for s in json.loads((folder / SAMPLES).read_text())]
    write_report(
        folder / REPORT,
        rows,
        config_yaml=(folder / CONFIG).read_text(),
        versions=_versions(),
        samples=samples,
        title=f"{cfg.source.name} to {cfg.target.name}, {cfg.mapper.name}",
    )


def load_reader(cfg: RunConfig, rank: int = 0) -> PairReader:
    """Both models of a run, ready to read; each rank has a device of its own."""
    if cfg.trainer.threads is not None:
        torch.set_num_threads(cfg.trainer.threads)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = f"cuda:{rank}" if rank and _device(cfg) == "cuda" else _device(cfg)

    def load(spec: Any) -> Any:
        return load_language_model(
            spec,
            cache_dir=_cache(cfg),
            dtype=cfg.trainer.model_dtype,
            device=device,
            seed=cfg.seed,
        )

    source = load(cfg.source)
    same = cfg.source == cfg.target
    return PairReader(source, source if same else load(cfg.target))


def load_handoff(
    cfg: RunConfig, folder: Path, reader: PairReader, map_dtype: torch.dtype | None = None
) -> tuple[Handoff, RowStamp]:
    """The fitted mapper of a run, ready to carry caches, and the stamp of its rows."""
    mapper, manifest = load_mapper(folder / MAPPER, reader.source, reader.target)
    dtype = product_dtype(cfg) if map_dtype is None else map_dtype
    handoff = Handoff(
        reader,
        mapper.with_precision(dtype),
        mapper_name=manifest.method,
        mapper_hash=manifest.short_hash,
    )
    stamp = RowStamp(
        pair=cfg.pair.name,
        source=cfg.source.name,
        target=cfg.target.name,
        mapper=cfg.mapper.name,
        mapper_hash=manifest.short_hash,
        seed=cfg.seed,
        device=f"{reader.target.device.type}, {torch.get_num_threads()} threads",
        dtype=f"model {cfg.trainer.model_dtype}, map {str(dtype).removeprefix('torch.')}",
        config_hash=cfg.config_hash,
        git_commit=_git_commit(),
    )
    return handoff, stamp


def product_dtype(cfg: RunConfig) -> torch.dtype:
    """Number format of the mapper's products on this machine."""
    if cfg.trainer.map_dtype != "auto":
        named: torch.dtype = getattr(torch, cfg.trainer.map_dtype)
        return named
    on_gpu = _device(cfg) == "cuda"
    fast = on_gpu or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def _statistics(
    cfg: RunConfig, folder: Path, reader: PairReader, method: MapperMethod, texts: Sequence[str]
) -> Statistics:
    plan = _plan(cfg)
    if not method.needs_moments:
        return Statistics(
            reader.source.geometry, reader.target.geometry, plan.layouts(reader), {}, None
        )
    count = 1 if is_collected(reader, texts, plan, _moments(cfg)) else _rank_count(cfg)
    with (
        companions(folder, count) as rank,
        progress("read calibration text", len(texts)) as step,
    ):
        return _collect(cfg, reader, texts, rank, step)


def collect_share(cfg: RunConfig, rank: Rank, ready: Callable[[], None]) -> None:
    """What a further rank does: read its share of the calibration text with its own models.

    Args:
        ready: called when the models are loaded and the others may start.
    """
    reader = load_reader(cfg, rank.index)
    texts = load_corpora(cfg, cache_root(_cache(cfg))).calibration
    ready()
    _collect(cfg, reader, texts, rank, lambda steps=1: None)


def _collect(
    cfg: RunConfig, reader: PairReader, texts: Sequence[str], rank: Rank | None, step: Step
) -> Statistics:
    return collect_statistics(
        reader,
        texts,
        _plan(cfg),
        _trainer(cfg, rank),
        _moments(cfg),
        batch_size=cfg.trainer.batch_size,
        each=step,
    )


def _plan(cfg: RunConfig) -> CalibrationPlan:
    return CalibrationPlan(passage_tokens=cfg.data.passage_tokens, seed=cfg.seed)


def _moments(cfg: RunConfig) -> Path:
    return cache_root(_cache(cfg)) / "moments"


def _rank_count(cfg: RunConfig) -> int:
    """Processes that calibrate together: one a device."""
    if cfg.trainer.devices != "auto":
        return cfg.trainer.devices
    return torch.cuda.device_count() if _device(cfg) == "cuda" else 1


def _trainer(cfg: RunConfig, rank: Rank | None) -> pytorch_lightning.Trainer:
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    return pytorch_lightning.Trainer(
        accelerator=cfg.trainer.accelerator,
        devices=1 if rank is None else rank.count,
        strategy="auto" if rank is None else rank.strategy(),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )


def _score(
    cfg: RunConfig, handoff: Handoff, split: str, texts: Sequence[str]
) -> tuple[list[ContextResult], list[EvalContext]]:
    """Contexts one by one; the one before lends its cache to `wrong_passage`."""
    shape = ContextShape(
        context_tokens=cfg.eval.context_tokens,
        continuation_tokens=cfg.eval.continuation_tokens,
        recall_start=cfg.eval.recall_start,
        recall_tokens=cfg.eval.recall_tokens,
        recall_prompt_tokens=cfg.eval.recall_prompt_tokens,
    )
    ladder = Ladder(
        handoff,
        shape,
        native_tail=cfg.eval.native_tail,
        conditions=cfg.eval.conditions,
        seed=cfg.seed,
    )
    results: list[ContextResult] = []
    kept: list[EvalContext] = []
    store = TraceStore(cache_root(_cache(cfg)) / "traces", handoff.reader)
    wrong = ladder.mapped_content(read_context(handoff.reader, texts[-1], shape, store))
    with progress(f"score {split}", len(texts)) as step:
        for text in texts:
            context = read_context(handoff.reader, text, shape, store)
            results.append(ladder.score(context, wrong))
            wrong = ladder.mapped_content(context)
            if len(kept) < cfg.eval.samples:
                kept.append(context)
            step()
    return results, kept


def _sample(cfg: RunConfig, handoff: Handoff, context: EvalContext) -> ContinuationSample:
    target = handoff.reader.target
    builds = Ladder(
        handoff,
        ContextShape(context_tokens=max(cfg.eval.context_tokens, 160)),
        native_tail=cfg.eval.native_tail,
        conditions=(),
        seed=cfg.seed,
    ).builds(context, context.trace.target)
    made = {
        name: continue_text(handoff, builds[name](), context, cfg.eval.continuation_tokens)
        for name in ("native", "mapped", "mapped_tail", "zero")
    }
    return ContinuationSample(
        context_tail=target.text_of(context.trace.tokens.target_ids[-64:]),
        reference=target.text_of(context.continuation),
        label=cfg.pair.name,
        **made,
    )


def _portable_settings(cfg: RunConfig) -> str:
    """The YAML of what changes results, without where things lie on this machine."""
    values = _without_folders({"name": cfg.name, **cfg.identity()})
    text: str = OmegaConf.to_yaml(OmegaConf.create(values))
    return text


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(inner) for inner in value]
    local = isinstance(value, str) and Path(value).expanduser().is_absolute()
    return Path(value).name if local else value


def _identity(cfg: RunConfig, model: LanguageModel, spec: ModelSpec) -> ModelIdentity:
    return ModelIdentity.of(model, _origin(cfg, spec, model.revision))


def _origin(cfg: RunConfig, spec: ModelSpec, revision: str) -> dict[str, Any]:
    """Where a mapper finds this model again; a folder of this machine says nothing elsewhere."""
    if spec.folder is not None and spec.size == "full":
        return {"spec": {}, "dtype": cfg.trainer.model_dtype, "licence": spec.licence}
    # The commit that was loaded, not the branch that was asked for.
    values = {**to_plain(spec), "folder": None, **({"revision": revision} if spec.hub else {})}
    return {"spec": values, "dtype": cfg.trainer.model_dtype, "seed": cfg.seed}


def _bound_cache(cfg: RunConfig, folder: Path) -> None:
    """Let go of what was used longest ago; its settings were written when this run began."""
    since = (folder / CONFIG).stat().st_mtime
    goners = beyond(cache_root(_cache(cfg)), cache_limit_bytes(cfg.cache_limit_gb), since)
    gone = evict(goners)
    if gone:
        size = sum(entry.bytes for entry in gone) / 1e9
        print(f"cache limit: {len(gone)} entries that were used longest ago went, {size:,.2f} GB")


def _cache(cfg: RunConfig) -> Path | None:
    return None if cfg.cache is None else Path(cfg.cache).expanduser()


def _device(cfg: RunConfig) -> str:
    wants_gpu = cfg.trainer.accelerator == "gpu" or (
        cfg.trainer.accelerator == "auto" and torch.cuda.is_available()
    )
    return "cuda" if wants_gpu else "cpu"


def _git_commit() -> str:
    root = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else f"v{kvferry.__version__}"


def _versions() -> dict[str, str]:
    return {
        "kvferry": kvferry.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "pytorch-lightning": version("pytorch-lightning"),
        "platform": platform.platform(),
    }
