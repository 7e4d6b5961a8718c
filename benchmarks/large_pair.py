"""A hand-off beside native prefill for a large pair on one device: random weights, real shapes.

    python benchmarks/large_pair.py [--tokens 2048 8192 32768] [--json FILE]
    python benchmarks/large_pair.py --tiny

Protocol: see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from large_pair_shapes import DTYPE, MODELS, build_model, mapper_shapes
from rich.console import Console
from rich.table import Table

from kvferry.align.tokens import TokenAlignment
from kvferry.calibration.reader import PairReader, TokenPair
from kvferry.handoff.handoff import Handoff
from kvferry.handoff.mapped import MappedCache
from kvferry.lm.device import synchronize
from kvferry.lm.model import LanguageModel, Prefill
from kvferry.mappers import inputs

Result = TypeVar("Result")
Steps = dict[str, list[float]]


@dataclass(frozen=True)
class Sample:
    """One mapper at one context length; times are medians in milliseconds.

    Args:
        panel: tokens in one panel of features.
        strip_ms, product_ms, build_ms: the steps of ``map_ms``; products include the gathering.
        gflop: of the map's matrix products.
        of_peak: their operations a second over ``map_ms``, against one large product.
        map_peak_bytes, native_peak_bytes: allocated beyond what was held before; 0 on a CPU.
        finite: whether native prefill, and decoding from the mapped cache, gave finite logits.
        repeats: every timed round.
    """

    mapper: str
    panel: int
    tokens: int
    source_ms: float
    native_ms: float
    map_ms: float
    strip_ms: float
    product_ms: float
    build_ms: float
    gflop: float
    of_peak: float
    mapper_bytes: int
    map_peak_bytes: int
    native_peak_bytes: int
    finite: bool
    repeats: Steps


def random_context(source: LanguageModel, target: LanguageModel, tokens: int) -> TokenPair:
    """Random tokens behind the sink of each model, aligned one to one."""

    def ids(model: LanguageModel) -> list[int]:
        body = torch.randint(model.geometry.vocab_size, (tokens - len(model.sink_ids),))
        return [*model.sink_ids, *body.tolist()]

    alignment = TokenAlignment(
        indices=torch.arange(tokens)[:, None],
        weights=torch.ones(tokens, 1),
        exact=torch.ones(tokens, dtype=torch.bool),
    )
    return TokenPair(ids(source), ids(target), alignment, text="")


def timed(device: torch.device, call: Callable[[], Result]) -> tuple[float, Result]:
    """Milliseconds until the device has finished a call, and what it returned."""
    synchronize(device)
    started = time.perf_counter()
    result = call()
    synchronize(device)
    return 1e3 * (time.perf_counter() - started), result


@contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int]]:
    """One number once the block is left: bytes allocated in it beyond those held before."""
    found: list[int] = []
    if device.type != "cuda":
        yield found
        found.append(0)
        return
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield found
    found.append(torch.cuda.max_memory_allocated(device) - before)


def hand_over(
    handoff: Handoff, prefill: Prefill, tokens: TokenPair
) -> tuple[dict[str, float], MappedCache]:
    """The steps of :meth:`Handoff.transfer` behind token alignment, each timed to its end."""
    device = handoff.reader.target.device
    strip, content = timed(device, lambda: handoff.source_content(prefill))
    product, mapped = timed(device, lambda: handoff.map_content(content, tokens))
    build, cache = timed(device, lambda: handoff.finish([mapped], [tokens]))
    return {"strip": strip, "product": product, "build": build}, cache


def native_prefill(target: LanguageModel, ids: torch.Tensor) -> Prefill:
    """What the hand-off replaces: logits of the last token only."""
    return target.prefill(ids, full_length=False)


def finite_logits(handoff: Handoff, mapped: MappedCache) -> bool:
    """Whether one token decodes from the mapped cache to finite logits."""
    target = handoff.reader.target
    last = torch.tensor([target.sink_ids], device=target.device)
    logits = target.extend(mapped.cache, last, mapped.mask, keep_logits=1)
    return bool(logits.isfinite().all())


@dataclass
class Bench:
    """Native prefill and every mapper over the same tokens.

    Args:
        handoffs: by the name of the mapper.
        panels: tokens in one panel of features, each measured.
        peak: operations a second of one large product.
        warmup, repeats: untimed and timed rounds.
    """

    handoffs: dict[str, Handoff]
    panels: Sequence[int]
    peak: float
    warmup: int
    repeats: int

    @torch.inference_mode()
    def measure(self, tokens: int) -> list[Sample]:
        """Alternate native prefill and the mappers, so that drift of the machine hits all alike."""
        reader = next(iter(self.handoffs.values())).reader
        source, target, device = reader.source, reader.target, reader.target.device
        pair = random_context(source, target, tokens)
        source_ids, target_ids = (
            torch.tensor([ids], device=device) for ids in (pair.source_ids, pair.target_ids)
        )
        cases = [(name, panel) for name in self.handoffs for panel in self.panels]
        steps: dict[tuple[str, int], Steps] = {case: {} for case in cases}
        finite: dict[tuple[str, int], bool] = {}
        mapped_peaks: dict[tuple[str, int], int] = {}
        with peak_memory(device) as native_peak:
            logits = native_prefill(target, target_ids).logits
            synchronize(device)
        native_finite = bool(logits.isfinite().all())
        source_ms, prefill = self._source(source, source_ids)
        native_ms: list[float] = []
        for number in range(self.warmup + self.repeats):
            native_ms.append(timed(device, lambda: native_prefill(target, target_ids))[0])
            for case in cases:
                inputs.PANEL_TOKENS = case[1]
                with peak_memory(device) as peak:
                    taken, mapped = hand_over(self.handoffs[case[0]], prefill, pair)
                mapped_peaks[case] = peak[0]
                if number == 0:
                    finite[case] = native_finite and finite_logits(self.handoffs[case[0]], mapped)
                del mapped
                for step, value in taken.items():
                    steps[case].setdefault(step, []).append(value)
        return [
            self._sample(
                case,
                tokens,
                {"source": source_ms, "native": native_ms, **steps[case]},
                (mapped_peaks[case], native_peak[0]),
                finite[case],
            )
            for case in cases
        ]

    def _source(self, source: LanguageModel, ids: torch.Tensor) -> tuple[list[float], Prefill]:
        """The source's own reading; it has happened anyway and belongs to neither side."""
        times: list[float] = []
        for _ in range(self.warmup + self.repeats):
            prefill: Prefill | None = None  # before the next one takes its place
            taken, prefill = timed(source.device, lambda: source.prefill(ids))
            times.append(taken)
        assert prefill is not None
        return times, prefill

    def _sample(
        self,
        case: tuple[str, int],
        tokens: int,
        rounds: Steps,
        peaks: tuple[int, int],
        finite: bool,
    ) -> Sample:
        kept = {step: times[self.warmup :] for step, times in rounds.items()}
        kept["map"] = [
            sum(x)
            for x in zip(*(kept[step] for step in ("strip", "product", "build")), strict=True)
        ]
        middle = {f"{step}_ms": statistics.median(times) for step, times in kept.items()}
        mapper = self.handoffs[case[0]].mapper
        work = sum(2.0 * tokens * group.weight.numel() for group in mapper.groups)
        return Sample(
            mapper=case[0],
            panel=case[1],
            tokens=tokens,
            **middle,
            gflop=work / 1e9,
            of_peak=work / (middle["map_ms"] / 1e3) / self.peak,
            mapper_bytes=mapper.storage_bytes,
            map_peak_bytes=peaks[0],
            native_peak_bytes=peaks[1],
            finite=finite,
            repeats=kept,
        )


def peak_flops(device: torch.device) -> float:
    """Operations a second of one large product in the maps' number format."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=DTYPE) for _ in range(2))
    times = [timed(device, lambda: [a @ b for _ in range(5)])[0] for _ in range(6)]
    return 5 * 2.0 * size**3 / (min(times) / 1e3)


def table_of(samples: Sequence[Sample]) -> Table:
    """One line a mapper and length."""
    table = Table(
        "mapper", "panel", "tokens", "source ms", "native ms", "map ms", "strip", "products",
        "build", "ratio", "GFLOP", "of peak", "mapper GB", "map peak GB", "native peak GB",
    )  # fmt: skip
    for s in samples:
        times = (s.source_ms, s.native_ms, s.map_ms, s.strip_ms, s.product_ms, s.build_ms)
        table.add_row(
            s.mapper if s.finite else f"{s.mapper} (not finite)",
            f"{s.panel:,}",
            f"{s.tokens:,}",
            *(f"{value:,.{1 if value < 100 else 0}f}" for value in times),
            f"{s.native_ms / s.map_ms:.1f}x",
            f"{s.gflop:,.0f}",
            f"{s.of_peak:.0%}",
            *(
                f"{count / 1e9:,.2f}"
                for count in (s.mapper_bytes, s.map_peak_bytes, s.native_peak_bytes)
            ),
        )
    return table


def write_json(file: Path, header: dict[str, Any], samples: Sequence[Sample]) -> None:
    """All samples so far, with what they were measured on."""
    rows = [asdict(sample) for sample in samples]
    file.write_text(json.dumps({**header, "samples": rows}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", choices=MODELS, default="llama3_1_8b")
    parser.add_argument("--target", choices=MODELS, default="ministral3_14b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--panel", type=int, nargs="+", default=[inputs.PANEL_TOKENS])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="miniatures, to try the script itself")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure every mapper at each length; a length that does not fit is named and left out."""
    options, console = arguments(), Console()
    device = torch.device(options.device)
    torch.manual_seed(0)
    peak = peak_flops(device)
    source, target = (
        build_model(name, device, options.tiny) for name in (options.source, options.target)
    )
    with torch.device(device):
        mappers = mapper_shapes(source.geometry, target.geometry)
    reader = PairReader(source, target)
    handoffs = {name: Handoff(reader, mapper) for name, mapper in mappers.items()}
    header = {
        "source": options.source,
        "target": options.target,
        "tiny": options.tiny,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peak_flops": peak,
        "warmup": options.warmup,
    }
    for name, value in header.items():
        console.print(
            f"{name}: {value / 1e12:,.1f}e12" if name == "peak_flops" else f"{name}: {value}"
        )
    bench = Bench(handoffs, options.panel, peak, options.warmup, options.repeats)
    samples: list[Sample] = []
    for tokens in options.tokens:
        try:
            found = bench.measure(tokens)
            console.print(table_of(found))
            samples += found
        except torch.OutOfMemoryError as error:
            console.print(f"{tokens:,} tokens do not fit: {str(error).splitlines()[0]}")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if options.json:
            write_json(options.json, header, samples)


if __name__ == "__main__":
    main()
