"""Settings left to the fit: chosen where a map extrapolates, on text of another domain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.base import MapperMethod, Statistics
from kvferry.mappers.behaviour import read_mapped
from kvferry.mappers.judging import attention_cosine
from kvferry.mappers.observation import Observation

PASSAGES = 6
QUERIES = 64
"""Of each passage, drawn at random; the same ones judge every candidate."""
RIDGES: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1)
COUNTS: tuple[int, ...] = (4, 8)
START: dict[str, Any] = {"source_layers": "all", "ridge": 1e-3}
"""Settings that may be "auto", in the order they are chosen; the later ones wait here."""


def undecided(method: MapperMethod) -> tuple[str, ...]:
    """The settings of ``method`` that its fit must choose."""
    return tuple(name for name in START if getattr(method, name, None) == "auto")


def fit_chosen(
    method: MapperMethod, statistics: Statistics, passages: int = PASSAGES
) -> AffineMapper:
    """Fit with each setting that is "auto" at its best value, one setting after the other.

    A map that is too free looks best on the text it was fitted on and fails off it; so the
    attention-output cosine on unseen text decides, of another domain where there is such text,
    else of the same. Every score and the choice are in the mapper's report.

    Cost: one fit for each value tried, three for the layers and four for the ridge; the models
    read ``passages`` texts once, and their content is held meanwhile.

    Raises:
        ConfigurationError: there is no text to choose on.
    """
    names = undecided(method)
    split = statistics.held_out("other_domain", "selection")
    texts = list(statistics.observe(passages, split))
    chosen = _with(method, {name: START[name] for name in names})
    best: AffineMapper | None = None
    score, tried, report = float("-inf"), set[MapperMethod](), dict[str, float]()
    for name in names:
        around = chosen
        for value in _grid(name, len(statistics.source.layers)):
            candidate = _with(around, {name: value})
            if candidate in tried:
                continue
            tried.add(candidate)
            mapper = candidate.fit(statistics).affine
            cosine = report[f"cosine_{name}_{value}"] = mean_cosine(mapper, texts)
            if cosine > score:
                best, score, chosen = mapper, cosine, candidate
    assert best is not None, "called with nothing to choose, or every score is NaN"
    for name in names:
        report[f"chosen_{name}"] = _number(getattr(chosen, name), statistics)
    report["choosing_attention_cosine"] = score
    report["choosing_passages"] = len(texts)
    report["choosing_other_domain"] = float(split == "other_domain")
    return replace(best, report={**best.report, **report})


def mean_cosine(mapper: AffineMapper, texts: Sequence[Observation]) -> float:
    """Attention-output cosine over all layers that are mapped."""
    scores = []
    for text in read_mapped(mapper, texts, QUERIES, seed=0):
        cosines = attention_cosine(text.content, text.seen, text.rows)
        scores.append(float(cosines[mapper.native_layers :].mean()))
    return sum(scores) / len(scores)


def _grid(name: str, depth: int) -> Sequence[Any]:
    if name == "ridge":
        return RIDGES
    return [*(count for count in COUNTS if count < depth), "all"]


def _with(method: MapperMethod, values: dict[str, Any]) -> MapperMethod:
    return cast(MapperMethod, replace(cast(Any, method), **values))


def _number(value: float | str, statistics: Statistics) -> float:
    return float(len(statistics.source.layers)) if value == "all" else float(value)
