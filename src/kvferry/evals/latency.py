"""How long a hand-off takes beside the prefill that it replaces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil  # type: ignore[import-untyped]
import torch

from kvferry.handoff.handoff import Handoff
from kvferry.lm.device import synchronize
from kvferry.lm.model import LanguageModel, Prefill

SAMPLE_SECONDS = 0.005
SOURCE_REPEATS = 3
"""The source's own reading is context for the table, not part of what is compared."""


@dataclass
class LatencySample:
    """Timings of one context length, one number a repeat, in milliseconds.

    Args:
        context_tokens: source tokens of the context, prefix included.
        milliseconds: by step: source_prefill, align, map (strip, map, rotate and build), tail,
            prefill (the target's own), ttft_handoff, ttft_native.
        peak_bytes: by condition, memory on top of what was held before.
    """

    context_tokens: int
    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, step: str, value: float) -> None:
        """One more repeat of a step."""
        self.milliseconds.setdefault(step, []).append(value)


class LatencyBench:
    """Times both ways to the first token over the same text.

    The source's own prefill is timed but belongs to neither: it has happened anyway.

    Args:
        handoff: the hand-off under test, with the native tail it would use.
        text: long enough for the longest context.
    """

    def __init__(self, handoff: Handoff, text: str) -> None:
        self.handoff = handoff
        self.ids = handoff.reader.source.encode(text)

    def measure(
        self,
        tokens: int,
        repeats: int,
        warmup: int,
        each: Callable[[], None] = lambda: None,
    ) -> LatencySample:
        """Alternate hand-off and native prefill, so that drift of the machine hits both alike.

        Args:
            tokens: length of the context in source tokens.
            repeats, warmup: timed and untimed rounds.
            each: called after every round, for a progress bar.
        """
        source, target = self.handoff.reader.source, self.handoff.reader.target
        source_ids = [*source.sink_ids, *self.ids[: tokens - len(source.sink_ids)]]
        batch, mask = source.batch([source_ids])
        pair = self.handoff.reader.pair_from_source(source_ids)
        target_ids, target_mask = target.batch([pair.target_ids])
        sample = LatencySample(context_tokens=tokens)
        prefill = source.prefill(batch, mask)
        for _ in range(min(repeats, SOURCE_REPEATS)):
            started = _now(source)
            prefill = source.prefill(batch, mask)
            sample.add("source_prefill", _now(source) - started)
        for round_number in range(warmup + repeats):
            with _peak(target, sample, "mapped", watch=round_number == 0):
                steps = self._handoff_steps(prefill)
            with _peak(target, sample, "native", watch=round_number == 0):
                native = self._native_ms(target, target_ids, target_mask)
            if round_number >= warmup:
                for step, value in (steps | {"prefill": native, "ttft_native": native}).items():
                    sample.add(step, value)
            each()
        return sample

    def _handoff_steps(self, prefill: Prefill) -> dict[str, float]:
        target = self.handoff.reader.target
        started = _now(target)
        mapped = self.handoff.transfer(prefill, native_tail=0)
        carried = _now(target) - started
        # The first token needs one token run on top, as native prefill's last token gives it.
        last = torch.tensor([[target.sink_ids[-1]]], device=target.device)
        started = _now(target)
        target.extend(mapped.cache, last, mapped.mask, keep_logits=1)
        first = _now(target) - started
        clock = mapped.milliseconds
        return {
            "align": clock["align_ms"],
            "map": clock["strip_ms"] + clock["map_ms"] + clock["build_ms"],
            "ttft_handoff": carried + first,
        }

    @staticmethod
    def _native_ms(target: LanguageModel, ids: torch.Tensor, mask: torch.Tensor) -> float:
        started = _now(target)
        target.prefill(ids, mask, full_length=False)
        return _now(target) - started


def affordable_lengths(handoff: Handoff, wanted: Sequence[int], available: int) -> list[int]:
    """The lengths that text and both models' contexts allow."""
    source, target = handoff.reader.source.geometry, handoff.reader.target.geometry
    # A target with a coarser or finer tokenizer sees another number of tokens: leave room.
    limit = min(source.max_positions, int(target.max_positions / 1.25), available)
    return [length for length in wanted if length <= limit]


def _now(model: LanguageModel) -> float:
    synchronize(model.device)
    return 1e3 * time.perf_counter()


@contextmanager
def _peak(
    model: LanguageModel, sample: LatencySample, condition: str, watch: bool
) -> Iterator[None]:
    """Largest memory inside the block, over what was held at its start."""
    if not watch:
        yield
        return
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_allocated(model.device)
        yield
        sample.peak_bytes[condition] = torch.cuda.max_memory_allocated(model.device) - before
        return
    process, done, peak = psutil.Process(), threading.Event(), [0]
    before = process.memory_info().rss

    def sampler() -> None:
        while not done.wait(SAMPLE_SECONDS):
            peak[0] = max(peak[0], process.memory_info().rss)

    thread = threading.Thread(target=sampler, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    sample.peak_bytes[condition] = max(0, max(peak[0], process.memory_info().rss) - before)
