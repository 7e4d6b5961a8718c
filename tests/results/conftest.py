"""Realistic result rows, made up: the shape of a full run without running one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvferry.results.rows import ResultRow, RowStamp
from kvferry.results.statistics import Interval

#                      kl     nll_ret  top1  recall  cosine
QUALITY = {
    "native": (0.0, 1.0, 1.0, 1.0, 1.0),
    "mapped": (0.124, 0.893, 0.829, 0.612, 0.741),
    "mapped_tail": (0.0437, 0.987, 0.894, 0.608, 0.741),
    "zero": (0.630, 0.0, 0.655, 0.0, None),
    "mean": (0.825, -0.231, 0.600, -0.42, 0.499),
    "wrong_passage": (0.977, -0.513, 0.588, -0.77, 0.535),
    "shuffled": (5.989, -8.268, 0.100, -3.9, 0.166),
    "random": (6.41, -9.12, 0.081, -4.4, 0.08),
    "source": (None, 0.41, 0.62, 0.93, None),
}
METRIC_ORDER = ("kl", "nll_retention", "top1_agreement", "recall_kept", "attention_cosine")
PAIRS = {
    "smollm2_gemma3": ("SmolLM2-135M-Instruct", "Gemma-3-270M", 18),
    "gemma3_smollm2": ("Gemma-3-270M", "SmolLM2-135M-Instruct", 30),
}
LATENCIES = {  # context: source prefill, align, map, native prefill, native ttft
    128: (61.0, 0.4, 21.0, 80.0, 99.0),
    512: (310.0, 1.3, 88.0, 371.0, 392.0),
    2048: (1810.0, 5.1, 301.0, 3390.0, 3420.0),
    8192: (14100.0, 21.0, 1240.0, 41300.0, 41350.0),
}


def make_rows(
    pair: str = "smollm2_gemma3",
    mapper: str = "anchored",
    *,
    splits: dict[str, int] | None = None,
    factor: float = 1.0,
    latency: bool = True,
    layers: bool = True,
    seed: int = 0,
    mapper_hash: str = "a1b2c3d4e5f6",
    conditions: tuple[str, ...] = tuple(QUALITY),
) -> list[ResultRow]:
    """Rows of one run; `factor` scales how far a mapper is from native."""
    source, target, depth = PAIRS[pair]
    stamp = RowStamp(
        pair, source, target, mapper, mapper_hash, seed, "cpu", "float32", "c0ffee12", "deadbee"
    )
    generator = np.random.default_rng(7)
    rows: list[ResultRow] = []
    for split, n in (splits or {"wiki": 48, "factbook": 8, "novel": 8}).items():
        harder = {"wiki": 1.0, "factbook": 1.08, "novel": 1.4}.get(split, 1.0)
        for condition in conditions:
            for metric, value in zip(METRIC_ORDER, QUALITY[condition], strict=True):
                if value is None:
                    continue
                if condition.startswith("mapped"):
                    far = 0.0 if metric == "kl" else 1.0
                    value = far + (value - far) * factor * harder
                half = 0.0 if condition == "native" else (0.02 + 0.08 * abs(value)) / n**0.5 * 3
                task = "recall" if metric == "recall_kept" else "ladder"
                rows.append(
                    stamp.row(
                        task=task,
                        split=split,
                        condition=condition,
                        metric=metric,
                        value=Interval(value, value - half, value + half, n),
                        context_tokens=768,
                    )
                )
        if layers:
            for metric, level in (
                ("r2_keys", 0.78),
                ("r2_values", 0.68),
                ("attention_cosine", 0.85),
            ):
                for layer in range(depth):
                    value = 1.0 if layer == 0 else level - 0.25 * layer / depth * factor * harder
                    rows.append(
                        stamp.row(
                            task="ladder",
                            split=split,
                            condition="mapped",
                            metric=metric,
                            layer=layer,
                            value=value + (layer > 0) * generator.normal() * 0.05,
                            n=n,
                            context_tokens=768,
                        )
                    )
    if latency:
        for context, (read, align, mapping, prefill, first) in LATENCIES.items():
            for condition, metric, value in (
                ("source", "prefill_ms", read),
                ("mapped", "align_ms", align),
                ("mapped", "map_ms", mapping * factor),
                ("native", "prefill_ms", prefill),
                ("native", "ttft_ms", first),
                ("mapped", "ttft_ms", align + mapping * factor + 22),
                ("mapped_tail", "ttft_ms", align + mapping * factor + 105),
                ("mapped", "speedup", prefill / mapping / factor),
                ("mapped", "peak_bytes", 1.1e9 + context * 3e4),
            ):
                rows.append(
                    stamp.row(
                        task="latency",
                        split="p50",
                        condition=condition,
                        metric=metric,
                        value=Interval(value, value * 0.96, value * 1.05, 10),
                        context_tokens=context,
                    )
                )
                if metric.endswith("_ms"):
                    rows.append(
                        stamp.row(
                            task="latency",
                            split="p95",
                            condition=condition,
                            metric=metric,
                            value=value * 1.13,
                            n=10,
                            context_tokens=context,
                        )
                    )
    return rows


SAMPLES = {  # calibration tokens: KL retention, NLL retention, recall kept
    "full_head_ridge": {
        2_000: (-3.1, -2.4, -0.9),
        8_000: (0.21, 0.14, 0.01),
        25_000: (0.58, 0.61, 0.09),
        50_000: (0.69, 0.72, 0.13),
        100_000: (0.74, 0.78, 0.15),
        200_000: (0.76, 0.81, 0.16),
    },
    "cachebridge": {
        2_000: (0.35, 0.31, 0.02),
        8_000: (0.55, 0.52, 0.06),
        25_000: (0.62, 0.64, 0.09),
        50_000: (0.64, 0.67, 0.10),
        100_000: (0.65, 0.68, 0.10),
        200_000: (0.65, 0.69, 0.10),
    },
}


def make_sample_rows(splits: tuple[str, ...] = ("wiki", "novel"), seed: int = 0) -> list[ResultRow]:
    """Two mappers, each fitted on six lengths of text."""
    source, target, _ = PAIRS["smollm2_gemma3"]
    rows: list[ResultRow] = []
    for mapper, by_tokens in SAMPLES.items():
        for tokens, values in by_tokens.items():
            stamp = RowStamp(
                "smollm2_gemma3", source, target, mapper, f"{mapper[:4]}{tokens}", seed, "cpu",
                "float32", "c0ffee12", "deadbee",
            )  # fmt: skip
            rows.append(
                stamp.row(
                    task="size",
                    split="mapper",
                    condition="mapped",
                    metric="calibration_tokens",
                    value=float(tokens),
                    n=1,
                    context_tokens=0,
                )
            )
            for split in splits:
                for metric, value in zip(
                    ("kl_retention", "nll_retention", "recall_kept"), values, strict=True
                ):
                    shown = value * (0.8 if split == "novel" else 1.0) + 0.01 * seed
                    rows += [
                        stamp.row(
                            task="ladder",
                            split=split,
                            condition=condition,
                            metric=metric,
                            value=Interval(level, level - 0.06, level + 0.05, 24),
                            context_tokens=768,
                        )
                        for condition, level in (("mapped", shown), ("zero", 0.0))
                    ]
    return rows


@pytest.fixture
def samples() -> list[ResultRow]:
    """Retention against calibration tokens."""
    return make_sample_rows()


@pytest.fixture
def rows_of() -> Callable[..., list[ResultRow]]:
    """The row maker, for tests that need variants."""
    return make_rows


@pytest.fixture
def rows() -> list[ResultRow]:
    """One complete run of one mapper on one pair."""
    return make_rows()


@pytest.fixture
def grid() -> list[ResultRow]:
    """Two pairs times three mappers."""
    return [
        row
        for pair in PAIRS
        for mapper, factor in (("anchored", 1.0), ("heterofold", 1.3), ("full_head_ridge", 1.45))
        for row in make_rows(pair, mapper, factor=factor, mapper_hash=f"{mapper[:4]}0123")
    ]
