"""Bounded construction of head-local maps beside the naive path: time, memory, distance from GEMM.

    python benchmarks/construction.py [--tokens 4096 16384] [--source-layers 12] [--device cuda]

Protocol: see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

import torch
from construction_data import TEXT_TOKENS, Shape, reads_of, statistics_of, texts
from construction_traffic import Traffic, fused_traffic, panel_traffic
from rich.console import Console
from rich.table import Table

from kvferry.mappers.head_sums import HeadSums
from kvferry.stats.head_ridge import HeadMoments
from kvferry.stats.kernels import require_fused

ALPHA = 0.5
PATHS = {
    "cpu": {"float64": "naive, float64", "float32": "naive, float32", "bounded": "bounded"},
    "cuda": {
        "float64": "naive, float64",
        "float32": "naive, float32",
        "bounded": "bounded",
        "fused": "bounded, fused",
    },
}


@dataclass(frozen=True)
class Measured:
    """What one path found for the last target layer, and its seconds and useful operations."""

    found: HeadMoments
    seconds: float
    work: float


def now(device: str) -> float:
    """CPU seconds of this process, or wall seconds once a GPU has done all it was given."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def bounded(shape: Shape, count: int, *, fused: bool) -> Measured:
    """The package's path: text by text, plain and weighted sums, mixed at the end."""
    statistics = statistics_of(shape)
    seconds, started = 0.0, now(shape.device)
    sums = HeadSums(statistics, "values", reads_of(shape, statistics), fused=fused)
    seconds += now(shape.device) - started
    for text in texts(shape, count):
        started = now(shape.device)
        sums.add(text.seen, text.relevance)
        seconds += now(shape.device) - started
    started = now(shape.device)
    sums.finish()
    alpha = torch.full((shape.target_heads,), ALPHA, dtype=torch.float64, device=shape.device)
    for layer in sums.layers:
        mixed = sums.plain(layer).mixed(sums.weighted(layer), alpha)
        found = HeadMoments(mixed.c_xx, mixed.c_xy)
    seconds += now(shape.device) - started
    n, p = float(sums.rows), shape.inputs + 1
    square = n * p * (p + 1)
    pairs = shape.target_layers * shape.target_heads
    work = shape.source_heads * square + pairs * (square + 4 * n * p * shape.dim)
    return Measured(found, seconds, work)


def naive(shape: Shape, count: int, dtype: torch.dtype) -> Measured:
    """Keep all caches; for each layer and head gather its rows, centre, weigh and multiply."""
    tokens, here = count * TEXT_TOKENS, torch.device(shape.device)
    source = torch.empty(shape.source_layers, shape.source_heads, tokens, shape.dim, device=here)
    target = torch.empty(shape.target_layers, shape.target_heads, tokens, shape.dim, device=here)
    relevance = torch.empty(shape.target_layers, shape.target_heads, tokens, device=here)
    counted = torch.empty(tokens, dtype=torch.bool, device=here)
    for place, text in enumerate(texts(shape, count)):
        part = slice(place * TEXT_TOKENS, (place + 1) * TEXT_TOKENS)
        for layer, x in text.seen.inputs.source.values.items():
            source[layer, :, part] = x[0]
        for layer, x in text.seen.target.values.items():
            target[layer, :, part] = x[0]
            relevance[layer, :, part] = text.relevance[layer]
        counted[part] = text.seen.counted
    read = counted.nonzero().squeeze(1)  # aligned one to one
    n = len(read)
    started = now(shape.device)
    for layer in range(shape.target_layers):
        grams, crosses = [], []
        for head, source_head in enumerate(shape.sources):
            layers = [cache[source_head].index_select(0, read) for cache in source]
            x = torch.cat(layers, dim=1).to(dtype)
            y = target[layer, head].index_select(0, read).to(dtype)
            r = relevance[layer, head, read].to(dtype)
            w = 1 + ALPHA * (r / r.mean() - 1)
            centred = x - (w @ x) / n
            weighted = centred * w[:, None]
            grams.append(weighted.T @ centred / n)
            crosses.append(weighted.T @ (y - (w @ y) / n) / n)
        found = HeadMoments(torch.stack(grams), torch.stack(crosses))
    seconds = now(shape.device) - started
    pairs = shape.target_layers * shape.target_heads
    work = pairs * 2.0 * n * shape.inputs * (shape.inputs + shape.dim)
    return Measured(found, seconds, work)


def run_path(path: str, shape: Shape, count: int) -> Measured:
    """Take one of ``PATHS`` over ``count`` texts."""
    if path in ("bounded", "fused"):
        return bounded(shape, count, fused=path == "fused")
    return naive(shape, count, getattr(torch, path))


def traffic_of(path: str, shape: Shape, tokens: int) -> Traffic | None:
    """Operations and bytes of the sums, of the bounded paths."""
    match path:
        case "bounded":
            return panel_traffic(shape, tokens)
        case "fused":
            kernel = require_fused(torch.device(shape.device))
            return fused_traffic(shape, tokens, kernel._TILE)
        case _:
            return None


def product_rate(device: str) -> float:
    """Operations a second of one large fp32 product in this process."""
    size = 2048 if device == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    return 2.0 * size**3 / shortest(lambda: a @ b, device)


def copy_rate(device: str) -> float:
    """Bytes a second, read and written, of one large copy in this process."""
    a = torch.zeros(2**25 if device == "cpu" else 2**28, device=device)
    b = torch.empty_like(a)
    return 8.0 * a.numel() / shortest(lambda: b.copy_(a), device)


def shortest(do: Any, device: str) -> float:
    """Seconds of the best of four."""
    times = []
    for _ in range(4):
        started = now(device)
        do()
        times.append(now(device) - started)
    return min(times)


def peak_bytes(device: str) -> int:
    """Largest memory of this process so far: resident, or allocated on its GPU."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_allocated()


def child(path: str, shape: Shape, tokens: int) -> None:
    """Measure one path in a process of its own, whose peak memory is then its own too."""
    torch.set_float32_matmul_precision("highest")
    rate, copied = product_rate(shape.device), copy_rate(shape.device)
    if shape.device == "cpu":
        # Nothing to compile; and what was freed above must not hide what comes.
        before = resident_bytes()
    else:
        run_path(path, shape, 1)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    ran = run_path(path, shape, tokens // TEXT_TOKENS)
    traffic = traffic_of(path, shape, tokens)
    entries = [
        part.flatten()[:: max(101, part.numel() // 100_000)].double().cpu()
        for part in (ran.found.xx, ran.found.xy)
    ]
    sample = {
        "rate": rate,
        "copied": copied,
        "seconds": ran.seconds,
        "work": ran.work,
        "bytes": peak_bytes(shape.device) - before,
        "traffic": None if traffic is None else vars(traffic),
        "entries": torch.cat(entries).tolist(),
    }
    print(json.dumps(sample))


def resident_bytes() -> int:
    """Memory of this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def measure(path: str, shape: Shape, tokens: int) -> dict[str, Any] | None:
    """Run one path in a child process; None, and why, where it fails."""
    command = [sys.executable, __file__, "--child", path, "--tokens", str(tokens)]
    for name, value in vars(shape).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        reason = ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"]
        print(f"{PATHS[shape.device][path]} at {tokens:,} tokens failed: {reason[-1]}")
        return None
    sample: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return sample


def measure_all(shape: Shape, tokens: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Every path ``repeats`` times, in turn (fp64, for its result, once): medians."""
    found: dict[str, list[dict[str, Any]]] = {}
    for turn in range(repeats):
        for path in PATHS[shape.device]:
            if path == "float64" and turn:
                continue
            if (sample := measure(path, shape, tokens)) is not None:
                found.setdefault(path, []).append(sample)
    middle = ("seconds", "rate", "copied")
    return {
        path: samples[0] | {name: median(sample[name] for sample in samples) for name in middle}
        for path, samples in found.items()
    }


def row(path: str, samples: dict[str, dict[str, Any]], device: str) -> list[str]:
    """Cells of one path beside the others."""
    sample, ratio, error = samples[path], "-", "-"
    if "float32" in samples:
        ratio = f"{samples['float32']['seconds'] / sample['seconds']:.1f}x"
    if "float64" in samples:
        found, exact = (
            torch.tensor(s["entries"], dtype=torch.float64) for s in (sample, samples["float64"])
        )
        error = f"{(found - exact).abs().max() / exact.abs().max():.0e}"
    return [
        PATHS[device][path],
        f"{sample['seconds']:.{2 if device == 'cpu' else 4}f}",
        ratio,
        f"{sample['bytes'] / 1e6:,.0f}",
        f"{sample['work'] / 1e9:,.0f}",
        f"{sample['work'] / sample['seconds'] / sample['rate']:.0%}",
        error,
    ]


def roofline(name: str, sample: dict[str, Any]) -> str:
    """A path's operations and bytes, and the seconds that they would take alone."""
    rate, copied, traffic = sample["rate"], sample["copied"], sample["traffic"]
    return (
        f"{name}: {sample['seconds']:.4f} s. {traffic['flops'] / 1e9:,.0f} GFLOP in whole blocks, "
        f"{traffic['flops'] / rate:.4f} s at the {rate / 1e9:,.0f} GFLOP/s of one product; "
        f"{traffic['moved'] / 1e9:,.2f} GB moved, {traffic['moved'] / copied:.4f} s, or "
        f"{traffic['least'] / 1e9:,.2f} GB at least, {traffic['least'] / copied:.4f} s, "
        f"at the {copied / 1e9:,.0f} GB/s of one copy."
    )


def main() -> None:
    """Every path at each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--repeats", type=int, default=3)
    for part in fields(Shape):
        if part.name != "device":
            parser.add_argument(f"--{part.name.replace('_', '-')}", type=int, default=part.default)
    parser.add_argument("--device", choices=PATHS, default="cpu")
    parser.add_argument("--child", choices=PATHS["cuda"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = Shape(**{part.name: getattr(options, part.name) for part in fields(Shape)})
    if options.child:
        child(options.child, shape, options.tokens[0])
        return
    clock = "CPU s" if shape.device == "cpu" else "wall s"
    table = Table("tokens", "path", clock, "ratio", "peak MB", "GFLOP", "of peak", "error")
    notes = []
    for tokens in options.tokens:
        samples = measure_all(shape, tokens, options.repeats)
        for path, sample in samples.items():
            table.add_row(f"{tokens:,}", *row(path, samples, shape.device))
            if sample["traffic"] is not None:
                name = f"{tokens:,} tokens, {PATHS[shape.device][path]}"
                notes.append(roofline(name, sample))
    console = Console()
    console.print(table)
    for note in notes:
        console.print(note)


if __name__ == "__main__":
    main()
