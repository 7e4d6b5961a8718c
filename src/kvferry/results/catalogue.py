"""What can be measured and under which condition: names, units, direction and meaning.

Tables, figures, the glossary and the row check all read this one list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower", "neither"]
CALIBRATION_TOKENS = "calibration_tokens"


@dataclass(frozen=True)
class Metric:
    """One measurable quantity.

    Attributes:
        label: short name for table heads and axes.
        unit: what `ResultRow.unit` holds for it.
        better: which direction is good.
        meaning: one or two sentences for the glossary.
        per_layer: whether rows may carry a layer index.
    """

    label: str
    unit: str
    better: Better
    meaning: str
    per_layer: bool = False


METRICS: dict[str, Metric] = {
    "kl": Metric(
        "KL",
        "nats/token",
        "lower",
        "Kullback-Leibler divergence from the native next-token distribution to the one decoded "
        "from this cache, averaged over the continuation. Native is 0; the zero-context value "
        "is what doing nothing costs.",
    ),
    "kl_retention": Metric(
        "KL retention",
        "fraction",
        "higher",
        "1 - KL / KL of zero context. 1 = indistinguishable from native, 0 = no better than "
        "dropping the context, negative = worse than dropping it.",
    ),
    "kl_drift": Metric(
        "KL drift",
        "nats/token",
        "lower",
        "KL of this turn beyond that of one hand-off of the same conversation, read by the other "
        "model itself: what earlier hand-offs have added. The first turn is 0 by definition.",
    ),
    "nll": Metric(
        "NLL",
        "nats/token",
        "lower",
        "Negative log-likelihood of the true continuation, a token.",
    ),
    "nll_retention": Metric(
        "NLL retention",
        "fraction",
        "higher",
        "How much of the context's worth for predicting the continuation survives: "
        "(NLL zero - NLL mapped) / (NLL zero - NLL native). 1 = native, 0 = zero context.",
    ),
    "perplexity": Metric(
        "Perplexity", "ratio", "lower", "exp(NLL) of the true continuation; native is the goal."
    ),
    "top1_agreement": Metric(
        "Top-1",
        "fraction",
        "higher",
        "How often the most likely next token is the one that native decoding ranks first. "
        "Native is 1; zero context already reaches a good part of it by grammar alone.",
    ),
    "recall_nll": Metric(
        "Recall NLL",
        "nats/token",
        "lower",
        "Negative log-likelihood of an early span of the context when it is repeated after the "
        "context: easy for a cache that can still be looked up at long range, hard otherwise.",
    ),
    "recall_kept": Metric(
        "Recall kept",
        "fraction",
        "higher",
        "The long-range number: (recall NLL zero - recall NLL mapped) / (recall NLL zero - "
        "recall NLL native). 1 = native, 0 = zero context. A short native tail does not reach "
        "the span.",
    ),
    "attention_cosine": Metric(
        "Attn. cosine",
        "cosine",
        "higher",
        "Cosine between native attention output and the output over mapped keys and values, "
        "with native queries. 1 = identical direction.",
        per_layer=True,
    ),
    "r2_keys": Metric(
        "R² keys",
        "fraction",
        "higher",
        "Held-out explained variance of the position-free keys. Known not to rank mappers; "
        "shown for diagnosis.",
        per_layer=True,
    ),
    "r2_values": Metric(
        "R² values",
        "fraction",
        "higher",
        "Held-out explained variance of the values. Known not to rank mappers; shown for "
        "diagnosis.",
        per_layer=True,
    ),
    "accuracy": Metric("Accuracy", "fraction", "higher", "Share of questions answered correctly."),
    "f1": Metric("F1", "fraction", "higher", "Token overlap F1 of the answer with the reference."),
    "retention": Metric(
        "Retention", "fraction", "higher", "Task score under this condition / native task score."
    ),
    "floor_retention": Metric(
        "Floor retention",
        "fraction",
        "higher",
        "(score - zero-context score) / (native score - zero-context score): retention with "
        "what the target knows without the context taken out.",
    ),
    "prefill_ms": Metric(
        "Prefill", "ms", "lower", "Time for a model to read the whole context itself."
    ),
    "align_ms": Metric(
        "Align", "ms", "lower", "Time to match target tokens to source tokens by characters."
    ),
    "map_ms": Metric(
        "Map", "ms", "lower", "Time from the source's cache to a target cache ready to decode."
    ),
    "ttft_ms": Metric(
        "First token",
        "ms",
        "lower",
        "Time to the target's first token when the context is known: native = prefill + one "
        "step; mapped = alignment + map + one step. The source's own reading is listed apart.",
    ),
    "speedup": Metric(
        "Speed-up", "ratio", "higher", "Native target prefill time / map time, medians."
    ),
    CALIBRATION_TOKENS: Metric(
        "Calibration tokens",
        "count",
        "neither",
        "Target tokens that the map was fitted on.",
    ),
    "parameters": Metric("Parameters", "count", "lower", "Numbers stored in the mapper."),
    "storage_bytes": Metric("Storage", "bytes", "lower", "Size of the mapper on disk."),
    "peak_bytes": Metric("Peak memory", "bytes", "lower", "Highest memory in use."),
}

CONDITIONS: dict[str, tuple[str, str]] = {
    "native": ("native", "the target read the context itself: the upper anchor"),
    "mapped": ("mapped", "the target decodes from the translated cache"),
    "mapped_tail": (
        "mapped + native tail",
        "translated cache, and the target runs the last few context tokens itself",
    ),
    "fresh": (
        "fresh hand-off",
        "one hand-off of the same conversation, which the source has read itself: what is not "
        "drift",
    ),
    "zero": ("zero context", "the target sees nothing of the context: the lower anchor"),
    "identity": ("identity", "same model on both sides, nothing changed: must equal native"),
    "text": ("text", "the source hands text over instead of its cache"),
    "mean": ("mean", "control: every token gets the average key and value"),
    "wrong_passage": ("wrong passage", "control: the right mapper on another text"),
    "shuffled": ("shuffled", "control: the mapped keys and values at the wrong tokens"),
    "random": ("random", "control: noise with the mean and spread of the mapped cache"),
    "source": ("source alone", "the source model goes on by itself"),
}

MAPPED_CONDITIONS = ("mapped", "mapped_tail")
MAPPER_FREE_CONDITIONS = ("native", "zero", "text", "source")

LATENCY_TASK = "latency"
LATENCY_SPLITS = ("p50", "p95")
MULTI_TURN_TASK = "multi_turn"
TURN_METRICS = ("kl", "kl_drift", "nll_retention", "top1_agreement", "recall_kept")
LADDER_TASKS = ("ladder", "recall")
QUALITY_METRICS = (
    "kl",
    "nll",
    "nll_retention",
    "top1_agreement",
    "recall_kept",
    "attention_cosine",
)
LAYER_METRICS = tuple(name for name, metric in METRICS.items() if metric.per_layer)


def condition_label(condition: str) -> str:
    """The words for a condition in tables and figures."""
    return CONDITIONS[condition][0]
