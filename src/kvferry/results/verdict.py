"""The numbers of a run in plain words: one summary a pair, and what it lets one conclude."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvferry.results.catalogue import condition_label
from kvferry.results.rows import ResultRow
from kvferry.results.tables import format_value
from kvferry.results.views import (
    Block,
    Cell,
    LatencyBlock,
    Line,
    latency_blocks,
    quality_blocks,
    turn_blocks,
)

Answer = Literal["yes", "no", "open"]
CONTROLS = ("mean", "wrong_passage", "shuffled", "random")


@dataclass(frozen=True)
class Verdict:
    """One question, its answer, and the numbers behind the answer."""

    answer: Answer
    text: str


def main_block(rows: Sequence[ResultRow], pair: str) -> Block | None:
    """The block of `pair` that headlines speak of: the first one measured, mapped if possible."""
    blocks = [block for block in quality_blocks(rows) if block.pair == pair and not block.task]
    mapped = [block for block in blocks if block.find("mapped") is not None]
    return next(iter([*mapped, *blocks]), None)


def headline(rows: Sequence[ResultRow], pair: str) -> str:
    """Summary of one pair in two or three sentences; empty where nothing was measured."""
    sentences = []
    block = main_block(rows, pair)
    line = _champion(block) if block else None
    if block and line:
        parts = _parts(line, full=True)
        name = f" by {line.mapper}" if line.mapper else ""
        length = f" of {block.context_tokens:,} tokens" if block.context_tokens else ""
        if parts:
            sentences.append(
                f"On {block.split} text (n = {block.n}), {block.target} goes on from a context"
                f"{length} that only {block.source} has read, through a cache mapped{name}: it "
                f"{_join(parts)}."
            )
        tail = block.find("mapped_tail", line.mapper)
        if tail and (more := _parts(tail, full=False)):
            sentences.append(f"When it runs the last tokens itself as well, it {_join(more)}.")
    timed = _latency(rows, pair, line.mapper if line else "")
    if timed and (gain := _gains(timed)):
        longest, prefill, mapping = gain[-1]
        sentences.append(
            f"Building its cache for {longest:,} tokens takes {_seconds(mapping)} instead of "
            f"{_seconds(prefill)} of native prefill ({format_value('speedup', prefill / mapping)})."
        )
    return " ".join(sentences)


def verdicts(rows: Sequence[ResultRow], pair: str) -> list[Verdict]:
    """What one may conclude for this pair; questions without data are left out."""
    found: list[Verdict] = []
    block = main_block(rows, pair)
    line = _champion(block) if block else None
    if block and line:
        for verdict in (_against_zero(block, line), _recall(line), _against_controls(block, line)):
            if verdict:
                found.append(verdict)
    identity = block.find("identity") if block else None
    if identity and "kl" in identity.cells:
        kl = identity.cells["kl"].value
        answer: Answer = "yes" if kl < 1e-3 else "no"
        found.append(Verdict(answer, f"Identity mapper equals native: KL {kl:.2g}."))
    if drift := _drift(rows, pair):
        found.append(drift)
    timed = _latency(rows, pair, line.mapper if line else "")
    if timed and (gains := _gains(timed)):
        found.append(_against_prefill(gains))
    return found


def _champion(block: Block) -> Line | None:
    lines = [line for line in block.lines if line.condition == "mapped"]
    by_kl = [line for line in lines if "kl" in line.cells and line.cells["kl"].value >= 0]
    return min(by_kl, key=lambda line: line.cells["kl"].value) if by_kl else next(iter(lines), None)


def _latency(rows: Sequence[ResultRow], pair: str, mapper: str) -> LatencyBlock | None:
    blocks = [block for block in latency_blocks(rows) if block.pair == pair]
    same = [block for block in blocks if block.mapper == mapper]
    return next(iter([*same, *blocks]), None)


def _gains(block: LatencyBlock) -> list[tuple[int, float, float]]:
    mapping = dict(block.series("map"))
    return [
        (length, prefill.p50.value, mapping[length].p50.value)
        for length, prefill in block.series("native_prefill")
        if length in mapping and mapping[length].p50.value > 0
    ]


def _percent(cell: Cell, *, interval: bool) -> str:
    text = f"{100 * cell.value:.0f}%"
    if interval and cell.has_interval:
        text += f" [{100 * cell.low:.0f}, {100 * cell.high:.0f}]"
    return text


def _parts(line: Line, *, full: bool) -> list[str]:
    wording = {
        "nll_retention": "keeps {} of what the context is worth for predicting the next words"
        if full
        else "keeps {} of that worth",
        "top1_agreement": "picks native decoding's next token {} of the time"
        if full
        else "agrees {} of the time",
        "recall_kept": "keeps {} of its long-range recall" if full else "keeps {} of recall",
    }
    return [
        words.format(_percent(line.cells[metric], interval=full))
        for metric, words in wording.items()
        if metric in line.cells and math.isfinite(line.cells[metric].value)
    ]


def _join(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _seconds(milliseconds: float) -> str:
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.1f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def _against_zero(block: Block, line: Line) -> Verdict | None:
    zero = block.find("zero")
    if zero is None or "kl" not in zero.cells or "kl" not in line.cells:
        return None
    ours, floor = line.cells["kl"], zero.cells["kl"]
    numbers = f"KL {ours.value:.3f} mapped, {floor.value:.3f} without context"
    if not (ours.has_interval and floor.has_interval):
        return Verdict("open", f"Mapped against zero context: {numbers}; no intervals to judge by.")
    if ours.high < floor.low:
        return Verdict("yes", f"Mapped is better than no context: {numbers}; intervals are apart.")
    if ours.low > floor.high:
        return Verdict("no", f"Mapped is WORSE than dropping the context: {numbers}.")
    return Verdict("open", f"Mapped cannot be told from no context: {numbers}; intervals overlap.")


def _recall(line: Line) -> Verdict | None:
    cell = line.cells.get("recall_kept")
    if cell is None or math.isnan(cell.value):
        return None
    numbers = f"{_percent(cell, interval=True)} of native recall"
    if not cell.has_interval:
        return Verdict("open", f"Long-range recall: {numbers}; no interval to judge by.")
    if cell.low > 0:
        return Verdict("yes", f"Long-range recall survives in part: {numbers}.")
    return Verdict("no", f"Long-range recall is not shown to survive: {numbers}.")


def _drift(rows: Sequence[ResultRow], pair: str) -> Verdict | None:
    """Whether errors add up from hand-off to hand-off, judged at the last of several."""
    block = next(iter(turn_blocks(rows, pair)[1:][-1:]), None)
    line = _champion(block) if block else None
    if block is None or line is None or "kl_drift" not in line.cells:
        return None
    drift, kl = line.cells["kl_drift"], line.cells["kl"].value
    numbers = f"KL {kl:.3f} after hand-off {block.turn}, {kl - drift.value:.3f} after a fresh one"
    if not drift.has_interval:
        return Verdict("open", f"Drift: {numbers}; no interval to judge by.")
    numbers += f"; drift {drift.value:.3f} [{drift.low:.3f}, {drift.high:.3f}]"
    if drift.low > 0:
        return Verdict("no", f"Errors add up over hand-offs: {numbers}.")
    return Verdict("yes", f"Errors are not shown to add up over hand-offs: {numbers}.")


def _against_controls(block: Block, line: Line) -> Verdict | None:
    ours = line.cells.get("kl")
    rivals = [
        (condition, control.cells["kl"].value)
        for condition in CONTROLS
        if (control := block.find(condition, line.mapper)) and "kl" in control.cells
    ]
    if ours is None or not rivals:
        return None
    listed = ", ".join(f"{condition_label(name)} {kl:.2f}" for name, kl in rivals)
    if all(kl > ours.value for _, kl in rivals):
        return Verdict("yes", f"Mapped beats every control: KL {ours.value:.3f} against {listed}.")
    return Verdict("no", f"A control is as good as the mapper: KL {ours.value:.3f}; {listed}.")


def _against_prefill(gains: Sequence[tuple[int, float, float]]) -> Verdict:
    ratios = [(length, prefill / mapping) for length, prefill, mapping in gains]
    listed = ", ".join(
        f"{format_value('speedup', ratio)} at {length:,}" for length, ratio in ratios
    )
    faster = [length for length, ratio in ratios if ratio > 1]
    if len(faster) == len(ratios):
        return Verdict("yes", f"The map is faster than native prefill: {listed} tokens.")
    if not faster:
        return Verdict("no", f"The map is slower than native prefill: {listed} tokens.")
    return Verdict(
        "open", f"The map is faster than native prefill at some lengths only: {listed} tokens."
    )
