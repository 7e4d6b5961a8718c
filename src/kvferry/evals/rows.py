"""From scores and timings to result rows with intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from kvferry.evals.ladder import PER_LAYER, ContextResult
from kvferry.evals.latency import LatencySample
from kvferry.evals.multi_turn import ConversationShape
from kvferry.evals.scoring import Scores
from kvferry.results.catalogue import CALIBRATION_TOKENS, LATENCY_TASK, MULTI_TURN_TASK
from kvferry.results.rows import ResultRow, RowStamp
from kvferry.results.statistics import (
    Interval,
    floor_normalised,
    kl_retention,
    mean_interval,
    median_interval,
    paired_difference,
    percentile_summary,
)

LADDER_TASK = "ladder"


def ladder_rows(
    stamp: RowStamp,
    results: Sequence[ContextResult],
    *,
    split: str,
    context_tokens: int,
    draws: int,
) -> list[ResultRow]:
    """Rows of every condition on one split, intervals paired by context."""
    measured = partial(stamp.row, task=LADDER_TASK, split=split, context_tokens=context_tokens)
    scores = [result.scores for result in results]
    rows = [
        measured(condition=condition, metric=metric, value=value)
        for condition, metric, value in _intervals(scores, draws, stamp.seed)
    ]

    def add(condition: str, metric: str, value: Interval, layer: int | None = None) -> None:
        rows.append(measured(condition=condition, metric=metric, value=value, layer=layer))

    seed = stamp.seed
    source = [r.source_nll for r in results if r.source_nll is not None]
    source = [nll for nll in source if math.isfinite(nll)]
    if source:
        interval = mean_interval(source, draws=draws, seed=seed)
        add("source", "nll", interval)
        add("source", "perplexity", _exponential(interval))
    for condition, metric, layer, numbers in _by_layer(results):
        add(condition, metric, mean_interval(numbers, draws=draws, seed=seed), layer)
    for condition, metric, numbers in _over_layers(results):
        add(condition, metric, mean_interval(numbers, draws=draws, seed=seed))
    return rows


def multi_turn_rows(
    stamp: RowStamp,
    conversations: Sequence[Sequence[Mapping[str, Scores]]],
    shape: ConversationShape,
    *,
    split: str,
    draws: int,
) -> list[ResultRow]:
    """Rows of every turn and condition, intervals paired by conversation.

    Args:
        stamp: of the first hand-off; at every second turn source and target change places.
        conversations: by conversation and turn, the scores of each condition.
    """
    rows: list[ResultRow] = []
    swapped = replace(stamp, source=stamp.target, target=stamp.source)
    for turn, scores in enumerate(zip(*conversations, strict=True), start=1):
        measured = partial(
            (stamp if turn % 2 else swapped).row,
            task=MULTI_TURN_TASK,
            split=split,
            turn=turn,
            context_tokens=shape.context_tokens(turn),
        )
        for condition, metric, value in _intervals(scores, draws, stamp.seed):
            rows.append(measured(condition=condition, metric=metric, value=value))
        drift = paired_difference(
            [s["mapped"].kl for s in scores],
            [s["fresh"].kl for s in scores],
            draws=draws,
            seed=stamp.seed,
        )
        rows.append(measured(condition="mapped", metric="kl_drift", value=drift))
    return rows


def _intervals(
    scores: Sequence[Mapping[str, Scores]], draws: int, seed: int
) -> Iterator[tuple[str, str, Interval]]:
    """(condition, metric, interval) of all that follows from the scores of some contexts."""

    def values(condition: str, name: str) -> list[float]:
        return [float(getattr(by_condition[condition], name)) for by_condition in scores]

    for condition in scores[0]:
        nll, kl = values(condition, "nll"), values(condition, "kl")
        for metric in ("nll", "kl", "top1_agreement", "recall_nll"):
            interval = mean_interval(values(condition, metric), draws=draws, seed=seed)
            yield condition, metric, interval
        perplexity = _exponential(mean_interval(nll, draws=draws, seed=seed))
        yield condition, "perplexity", perplexity
        zero, native = values("zero", "nll"), values("native", "nll")
        recall = [values(c, "recall_nll") for c in (condition, "zero", "native")]
        kept = floor_normalised(nll, zero, native, draws=draws, seed=seed)
        yield condition, "nll_retention", kept
        yield condition, "recall_kept", floor_normalised(*recall, draws=draws, seed=seed)
        retained = kl_retention(kl, values("zero", "kl"), draws=draws, seed=seed)
        yield condition, "kl_retention", retained


def _exponential(interval: Interval) -> Interval:
    return Interval(
        math.exp(interval.value), math.exp(interval.low), math.exp(interval.high), interval.n
    )


def _by_layer(
    results: Sequence[ContextResult],
) -> Iterator[tuple[str, str, int, list[float]]]:
    for condition, metrics in results[0].layers.items():
        for metric in PER_LAYER:
            for layer in range(len(metrics[metric])):
                yield (
                    condition,
                    metric,
                    layer,
                    [r.layers[condition][metric][layer] for r in results],
                )


def _over_layers(results: Sequence[ContextResult]) -> Iterator[tuple[str, str, list[float]]]:
    for condition, metrics in results[0].layers.items():
        for metric in PER_LAYER:
            depth = len(metrics[metric])
            yield condition, metric, [sum(r.layers[condition][metric]) / depth for r in results]


def latency_rows(stamp: RowStamp, samples: Sequence[LatencySample], draws: int) -> list[ResultRow]:
    """p50 (with interval) and p95 of every step, speed-ups, and peak memory."""
    rows: list[ResultRow] = []
    names = {
        "source_prefill": ("source", "prefill_ms"),
        "align": ("mapped", "align_ms"),
        "map": ("mapped", "map_ms"),
        "prefill": ("native", "prefill_ms"),
        "ttft_handoff": ("mapped", "ttft_ms"),
        "ttft_native": ("native", "ttft_ms"),
    }
    for sample in samples:
        for step, (condition, metric) in names.items():
            times = sample.milliseconds[step]
            timed = partial(
                stamp.row,
                task=LATENCY_TASK,
                condition=condition,
                metric=metric,
                context_tokens=sample.context_tokens,
            )
            summary = percentile_summary(times)
            p50 = median_interval(times, draws=draws, seed=stamp.seed)
            rows.append(timed(split="p50", value=p50))
            rows.append(timed(split="p95", value=summary.p95, n=summary.n))
        pairs = zip(sample.milliseconds["prefill"], sample.milliseconds["map"], strict=True)
        rows.append(
            stamp.row(
                task=LATENCY_TASK,
                split="p50",
                condition="mapped",
                metric="speedup",
                value=median_interval([a / b for a, b in pairs], draws=draws, seed=stamp.seed),
                context_tokens=sample.context_tokens,
            )
        )
        for condition, peak in sample.peak_bytes.items():
            rows.append(
                stamp.row(
                    task=LATENCY_TASK,
                    split="p50",
                    condition=condition,
                    metric="peak_bytes",
                    value=float(peak),
                    n=1,
                    context_tokens=sample.context_tokens,
                )
            )
    return rows


def size_rows(
    stamp: RowStamp, parameters: int, storage_bytes: int, calibration_tokens: int
) -> list[ResultRow]:
    """Parameters of the mapper, what they take on disk, and how much text they were fitted on."""
    sizes = {
        "parameters": parameters,
        "storage_bytes": storage_bytes,
        CALIBRATION_TOKENS: calibration_tokens,
    }
    return [
        stamp.row(
            task="size",
            split="mapper",
            condition="mapped",
            metric=metric,
            value=float(value),
            n=1,
            context_tokens=0,
        )
        for metric, value in sizes.items()
    ]
