"""The three stages of a run: fit a mapper, evaluate it, write the report."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from kvferry.app.calibrate import calibrate
from kvferry.app.corpora import load_corpora
from kvferry.app.folder import CONFIG, CURVES, MAPPER, REPORT, ROWS, SOLVE_SECONDS
from kvferry.app.identity import model_identity, portable_settings
from kvferry.app.loggers import RunLogger
from kvferry.app.mapper import build_mapper
from kvferry.app.models import cache_folder, git_commit, load_handoff, open_reader, versions
from kvferry.app.progress import progress
from kvferry.app.schema import RunConfig
from kvferry.app.training import learner
from kvferry.calibration.reader import PairReader
from kvferry.calibration.replay import TextReplay
from kvferry.calibration.trace_store import TraceStore
from kvferry.evals.contexts import ContextShape, EvalContext, read_context
from kvferry.evals.ladder import ContextResult, Ladder
from kvferry.evals.latency import LatencyBench, affordable_lengths
from kvferry.evals.measured import measured_of
from kvferry.evals.rows import ladder_rows, latency_rows, size_rows
from kvferry.evals.samples import continue_text
from kvferry.handoff.handoff import Handoff
from kvferry.lm.cache_limit import beyond, cache_limit_bytes, evict
from kvferry.lm.store import cache_root
from kvferry.mappers.artefact import (
    WEIGHTS,
    Manifest,
    read_manifest,
    save_mapper,
)
from kvferry.mappers.base import MapperMethod
from kvferry.mappers.card import write_card
from kvferry.mappers.hub import MapperArtefact
from kvferry.mappers.mapper import Mapper
from kvferry.results.report import ContinuationSample, write_report
from kvferry.results.rows import ResultRow, read_rows, write_atomically, write_rows
from kvferry.results.tables import markdown_table, print_tables
from kvferry.results.training import read_curves

SAMPLES = "samples.json"
ON_CARD = ("kl", "nll_retention", "recall_kept", "top1_agreement")
CARD_LEGEND = """Beside the carried cache (*mapped*) stand what the target decodes from otherwise.
KL: nats a token from native, lower is better. NLL retention and recall kept: 1 is native, 0 is no
context. In brackets 95 % bootstrap intervals over n contexts."""


def fit(cfg: RunConfig, folder: Path, log: RunLogger) -> None:
    """Read the calibration text with both models, fit, write the artefact."""
    method: MapperMethod = build_mapper(cfg.mapper)
    with open_reader(cfg, folder, cfg.trainer.fit_device) as reader:
        _fit(cfg, folder, log, reader, method)


def _fit(
    cfg: RunConfig, folder: Path, log: RunLogger, reader: PairReader, method: MapperMethod
) -> None:
    corpora = load_corpora(cfg, cache_root(cache_folder(cfg)))
    texts = corpora.calibration
    started = time.perf_counter()
    statistics = calibrate(cfg, folder, reader, method, texts)
    _bound_cache(cfg, folder)
    replay = TextReplay(
        reader, corpora.replayed(cfg.eval), cfg.data.passage_tokens, statistics.code, progress
    )
    learn = learner(cfg, folder, reader, corpora, statistics, log)

    def load(artefact: str) -> Mapper:
        return MapperArtefact.from_pretrained(artefact).load(reader.source, reader.target)[0]

    statistics = replace(statistics, replay=replay, watch=progress, learn=learn, load=load)
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
            source=model_identity(cfg, reader.source, cfg.source),
            target=model_identity(cfg, reader.target, cfg.target),
            calibration={
                "corpus": corpora.fingerprint(texts),
                "passages": len(texts),
                "rows": rows,
                "domain": corpora.domain,
                "mixed_domain": cfg.data.mixed_domain,
            },
            git_commit=git_commit(),
        ),
        portable_settings(cfg),
    )
    log.log_metrics(
        {
            "fit/rows": rows,
            "fit/parameters": mapper.parameters,
            "fit/storage_bytes": mapper.storage_bytes,
            "fit/calibration_s": collected - started,
            SOLVE_SECONDS: fitted - collected,
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
    with open_reader(cfg, folder) as reader:
        _evaluate(cfg, folder, reader)


def _evaluate(cfg: RunConfig, folder: Path, reader: PairReader) -> None:
    handoff, stamp = load_handoff(cfg, folder, reader)
    corpora = load_corpora(cfg, cache_root(cache_folder(cfg)))
    rows: list[ResultRow] = size_rows(
        stamp,
        handoff.mapper.parameters,
        (folder / MAPPER / WEIGHTS).stat().st_size,
        read_manifest(folder / MAPPER).calibration_tokens,
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
    manifest = read_manifest(folder / MAPPER)
    measured = measured_of(rows, manifest.weights_sha256, handoff.reader.target.device.type)
    measured.save(folder / MAPPER)
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
        versions=versions(),
        samples=samples,
        training=read_curves(folder / CURVES),
        title=f"{cfg.source.name} to {cfg.target.name}, {cfg.mapper.name}",
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
    store = TraceStore(cache_root(cache_folder(cfg)) / "traces", handoff.reader)
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


def _bound_cache(cfg: RunConfig, folder: Path) -> None:
    """Let go of what was used longest ago; its settings were written when this run began."""
    since = (folder / CONFIG).stat().st_mtime
    goners = beyond(cache_root(cache_folder(cfg)), cache_limit_bytes(cfg.cache_limit_gb), since)
    gone = evict(goners)
    if gone:
        size = sum(entry.bytes for entry in gone) / 1e9
        print(f"cache limit: {len(gone)} entries that were used longest ago went, {size:,.2f} GB")
