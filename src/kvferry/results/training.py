"""How a mapper learned: its curves from `training.jsonl`, what they say, and their figure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kvferry.results.plot_style import PALETTES, Theme, color_of, new_figure, themed
from kvferry.results.verdict import Verdict

Curve = Sequence[tuple[int, float]]
"""(step, value) by rising step."""

TRAIN, HELD_OUT, START = "train/", "held_out/", "start"
LOSS = "loss"
RATE = "learning_rate"
OPTIMISER = (RATE, "gradient_norm")
COLUMNS = 3
TITLES = {
    "loss": "Loss",
    "kl": "KL where the text goes on, nats",
    "recall_kl": "KL where early text is repeated, nats",
    "text_nll": "NLL of the text itself, nats",
    "pointwise": "Error of keys and values",
    "attention_kl": "KL of attention that copies, nats",
    "attention_error": "Error of attention outputs",
    "unaware_nll": "NLL of answers without the text, nats",
    "aware_nll": "NLL of answers, text read again, nats",
    "keys": "Error of keys",
    "values": "Error of values",
    RATE: "Learning rate",
    "gradient_norm": "Norm of the gradient, unclipped",
}


@dataclass(frozen=True)
class TrainingCurves:
    """What one phase of training logged, by the name of the value.

    Attributes:
        train: one text a step, found on the way to it.
        held_out: mean of the held-out texts after a step; ``start`` is the mapper before training.
        start: step of the phase before, 0 for the first one.
    """

    train: Mapping[str, Curve]
    held_out: Mapping[str, Curve]
    start: int = 0

    @property
    def steps(self) -> int:
        """The last step."""
        curves = (*self.train.values(), *self.held_out.values())
        return max((curve[-1][0] for curve in curves), default=self.start)

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and value of the least held-out loss after training began."""
        looks = [look for look in self.held_out.get(LOSS, ()) if look[0] > self.start]
        finite = [look for look in looks if math.isfinite(look[1])]
        return min(finite, key=lambda look: look[1], default=None)


def read_curves(path: Path) -> tuple[TrainingCurves, ...]:
    """Curves of a run by phase, whose losses do not compare; none where nothing was trained.

    Args:
        path: JSON lines with a `step`, `train/NAME` and `held_out/NAME`, and the `start` of their
            phase unless it is 0; one that is not whole ends the file.
    """
    phases: dict[int, dict[str, dict[int, float]]] = {}
    for values in _lines(path):
        curves = phases.setdefault(int(values.get(START, 0)), {})
        for name, value in values.items():
            if name.startswith((TRAIN, HELD_OUT)):
                curves.setdefault(name, {})[int(values["step"])] = value
    return tuple(
        TrainingCurves(_under(TRAIN, curves), _under(HELD_OUT, curves), start)
        for start, curves in sorted(phases.items())
        if curves
    )


def _lines(path: Path) -> Iterator[dict[str, float]]:
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def _under(prefix: str, curves: Mapping[str, Mapping[int, float]]) -> dict[str, Curve]:
    return {
        name.removeprefix(prefix): sorted(by_step.items())
        for name, by_step in curves.items()
        if name.startswith(prefix)
    }


def training_verdict(curves: TrainingCurves) -> Verdict:
    """Whether training lowered the held-out loss, in a sentence."""
    looks, best = dict(curves.held_out.get(LOSS, ())), curves.best
    if best is None:
        return Verdict("open", "Training has not been judged on held-out text.")
    step, least = best
    where = f"best at step {step:,} of {curves.steps:,}"
    if curves.start not in looks:
        return Verdict(
            "open", f"Training: held-out loss {least:.3g}, {where}; no start to compare."
        )
    start = looks[curves.start]
    if least < start:
        gain = f"held-out loss {start:.3g} -> {least:.3g} (-{1 - least / start:.0%}), {where}"
        return Verdict("yes", f"Training paid: {gain}.")
    return Verdict(
        "no", f"Training did not pay: held-out loss {start:.3g} at the start, {least:.3g} at its "
        f"best ({where}); the start is kept."
    )  # fmt: skip


def training_figure(curves: TrainingCurves, *, theme: Theme = "light") -> Figure | None:
    """A panel for each part of the loss, then learning rate and gradient norm."""
    parts = [name for name in (*curves.held_out, *curves.train) if name not in OPTIMISER]
    parts = sorted(dict.fromkeys(parts), key=lambda name: name != LOSS)
    names = [*parts, *(name for name in OPTIMISER if name in curves.train)]
    if not names:
        return None
    columns = min(COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    with themed(theme):
        figure = new_figure(4.3 * columns, 0.5 + 2.7 * rows)
        panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
        for axes, name in zip(panels, names, strict=False):
            _panel(axes, curves, name, theme)
        for axes in panels[len(names) :]:
            axes.set_visible(False)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _panel(axes: Axes, curves: TrainingCurves, name: str, theme: Theme) -> None:
    train, held_out = curves.train.get(name, ()), curves.held_out.get(name, ())
    learned, judged = color_of(0, theme), color_of(1, theme)
    if train and name == RATE:
        axes.plot(*zip(*train, strict=True), color=learned)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    elif train:
        steps, values = zip(*train, strict=True)
        axes.plot(steps, values, ".", color=learned, markersize=3, alpha=0.35, label="one text")
        axes.plot(steps, running_mean(values), color=learned, label="texts learned from, mean")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "D-", color=judged, markersize=5, label="held out")
    if curves.best is not None and held_out:
        axes.axvline(
            curves.best[0],
            color=PALETTES[theme].text,
            linewidth=1,
            linestyle=(0, (4, 3)),
            label="least held-out loss",
        )
    axes.set_title(TITLES.get(name, name.replace("_", " ")))
    span = max(curves.steps - curves.start, 1)
    axes.set_xlim(curves.start, curves.start + 1.02 * span)
    axes.set_ylim(*_limits([value for _, value in train], [value for _, value in held_out]))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel("step")
    axes.grid()


def running_mean(values: Sequence[float]) -> list[float]:
    """Mean over a tenth of the values around each one, fewer at the ends."""
    half = len(values) // 20
    return [float(np.mean(values[max(0, i - half) : i + half + 1])) for i in range(len(values))]


def _limits(train: Sequence[float], held_out: Sequence[float]) -> tuple[float, float]:
    """All held-out values are seen; a few single texts may lie above."""
    finite = [value for value in (*train, *held_out) if math.isfinite(value)]
    shown = [value for value in train if math.isfinite(value)]
    tops = [float(np.quantile(shown, 0.98))] if shown else []
    tops += [value for value in held_out if math.isfinite(value)]
    return min(0.0, min(finite, default=0.0)), 1.08 * max(tops, default=1.0) or 1.0
