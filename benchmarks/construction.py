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
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from kvferry.stats import head_products
from kvferry.stats.head_products import HeadRows, add_products, mirror
from kvferry.stats.head_ridge import HeadMoments
from kvferry.stats.kernels import fused_products

TEXT_TOKENS = 1024
PATHS = {
    "cpu": {"float64": "naive, float64", "float32": "naive, float32", "bounded": "bounded"},
    "cuda": {
        "float64": "naive, float64",
        "float32": "naive, float32",
        "reference": "bounded, torch",
        "bounded": "bounded, fused",
    },
}


@dataclass(frozen=True)
class Shape:
    """One component of a pair: source layers read, heads of both sides, target layers, head dim."""

    source_layers: int = 12
    source_heads: int = 3
    target_layers: int = 6
    target_heads: int = 3
    dim: int = 64
    device: str = "cpu"

    @property
    def inputs(self) -> int:
        """Features of one head's map."""
        return self.source_layers * self.dim

    @property
    def sources(self) -> torch.Tensor:
        """Source head of each target head."""
        heads = torch.arange(self.target_heads, device=self.device)
        return heads * self.source_heads // self.target_heads


@dataclass(frozen=True)
class Measured:
    """What one path found, the seconds and operations it took, and the seconds of its sums."""

    found: HeadMoments
    seconds: float
    work: float
    sums: float


def now(device: str) -> float:
    """CPU seconds of this process, or wall seconds once a GPU has done all it was given."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def texts(shape: Shape, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Inputs ``[sources, tokens, features]``, outputs and relevances by layer and head."""
    here: Any = {
        "generator": torch.Generator(shape.device).manual_seed(0),
        "device": shape.device,
    }
    heads = shape.target_layers, shape.target_heads
    for _ in range(count):
        x = torch.randn(shape.source_heads, TEXT_TOKENS, shape.inputs, **here)
        y = torch.randn(*heads, TEXT_TOKENS, shape.dim, **here)
        yield x, y, torch.rand(*heads, TEXT_TOKENS, **here).square() + 0.01


def bounded(shape: Shape, count: int) -> Measured:
    """The package's path: text by text, plain and weighted sums, mixed at the end."""

    def zeros(*sizes: int) -> torch.Tensor:
        return torch.zeros(*sizes, dtype=torch.float64, device=shape.device)

    p, heads = shape.inputs + 1, (shape.target_layers, shape.target_heads)
    plain, gram = zeros(shape.source_heads, p, p), zeros(*heads, p, p)
    cross = zeros(*heads, p, shape.dim)
    plain_cross = zeros(shape.target_heads, p, shape.target_layers * shape.dim)
    every, own = (torch.arange(n, device=shape.device) for n in (p, shape.source_heads))
    sums = 0.0
    for x, y, relevance in texts(shape, count):
        started = now(shape.device)
        panel = torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)
        add_products(HeadRows(panel, own, every), gram=plain)
        side_by_side = y.permute(1, 2, 0, 3).flatten(2)
        add_products(HeadRows(panel, shape.sources, every), cross=plain_cross, y=side_by_side)
        for layer in range(shape.target_layers):
            rows = HeadRows(panel, shape.sources, every, relevance[layer])
            add_products(rows, gram=gram[layer], cross=cross[layer], y=y[layer])
        sums += now(shape.device) - started
    started = now(shape.device)
    mirror(plain)
    alpha = zeros(shape.target_heads) + 0.5
    for layer in range(shape.target_layers):
        mirror(gram[layer])
        here = slice(layer * shape.dim, (layer + 1) * shape.dim)
        first = HeadMoments(plain[shape.sources], plain_cross[:, :, here])
        mixed = first.mixed(HeadMoments(gram[layer], cross[layer]), alpha)
        found = HeadMoments(mixed.c_xx, mixed.c_xy)
    seconds = sums + now(shape.device) - started
    n = float(count * TEXT_TOKENS)
    square = n * p * (p + 1)
    pairs = shape.target_layers * shape.target_heads
    work = shape.source_heads * square + pairs * (square + 4 * n * p * shape.dim)
    return Measured(found, seconds, work, sums)


def reference(shape: Shape, count: int) -> Measured:
    """The same without the fused kernel, as where Triton is not installed."""
    with mock.patch.object(head_products, "fused_products", lambda: None):
        return bounded(shape, count)


def naive(shape: Shape, count: int, dtype: torch.dtype) -> Measured:
    """Keep all rows; for each layer and head copy its matrix, centre, weigh and multiply."""
    kept = list(texts(shape, count))
    started = now(shape.device)
    x, y, relevance = (
        torch.cat([text[part] for text in kept], dim=dim) for part, dim in ((0, 1), (1, 2), (2, 2))
    )
    del kept
    n = x.shape[1]
    for layer in range(shape.target_layers):
        grams, crosses = [], []
        for head, source in enumerate(shape.sources.tolist()):
            r = relevance[layer, head].to(dtype)
            w = 1 + 0.5 * (r / r.mean() - 1)
            rows, wanted = x[source].to(dtype, copy=True), y[layer, head].to(dtype)
            centred = rows - (w @ rows) / n
            weighted = centred * w[:, None]
            grams.append(weighted.T @ centred / n)
            crosses.append(weighted.T @ (wanted - (w @ wanted) / n) / n)
        found = HeadMoments(torch.stack(grams), torch.stack(crosses))
    seconds = now(shape.device) - started
    pairs = shape.target_layers * shape.target_heads
    work = pairs * 2.0 * n * shape.inputs * (shape.inputs + shape.dim)
    return Measured(found, seconds, work, seconds)


def run_path(path: str, shape: Shape, count: int) -> Measured:
    """Take one of ``PATHS`` over ``count`` texts."""
    match path:
        case "bounded":
            return bounded(shape, count)
        case "reference":
            return reference(shape, count)
        case _:
            return naive(shape, count, getattr(torch, path))


@dataclass(frozen=True)
class Traffic:
    """What the fused kernel does for some sums.

    Args:
        flops: operations, whole tiles counted.
        tiled: bytes that its tiles load and store: x once for each column of tiles, y once for each
            row, sums in fp64 read and written. Most of it can come from the cache.
        least: bytes with every row and every sum of a head touched once.
    """

    flops: float = 0.0
    tiled: float = 0.0
    least: float = 0.0

    def plus(self, times: float, p: int, q: int | None, weighted: bool, tile: int) -> Traffic:
        """These and ``times`` heads' sums over one text; without ``q`` upper triangles."""
        n, rows_of_tiles = TEXT_TOKENS, -(-p // tile)
        if q is None:
            tiles, sums = rows_of_tiles * (rows_of_tiles + 1) // 2, p * (p + 1) // 2
            loads, features = (rows_of_tiles + 1) * p, p
        else:
            columns_of_tiles = -(-q // tile)
            tiles, sums = rows_of_tiles * columns_of_tiles, p * q
            loads, features = columns_of_tiles * p + rows_of_tiles * q, p + q
        return Traffic(
            self.flops + times * tiles * 2.0 * n * tile**2,
            self.tiled + times * (4.0 * n * (loads + weighted * tiles) + 16.0 * sums),
            self.least + times * (4.0 * n * (features + weighted) + 16.0 * sums),
        )


def fused_traffic(shape: Shape, count: int, tile: int) -> Traffic:
    """What the fused kernel does over ``count`` texts."""
    p, pairs = shape.inputs + 1, shape.target_layers * shape.target_heads
    traffic = Traffic().plus(count * shape.source_heads, p, None, False, tile)
    width = shape.target_layers * shape.dim
    traffic = traffic.plus(count * shape.target_heads, p, width, False, tile)
    traffic = traffic.plus(count * pairs, p, None, True, tile)
    return traffic.plus(count * pairs, p, shape.dim, True, tile)


def peak_rate(device: str) -> float:
    """Operations a second of one large fp32 product in this process."""
    size = 2048 if device == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    times = []
    for _ in range(4):
        started = now(device)
        _ = a @ b
        times.append(now(device) - started)
    return 2.0 * size**3 / min(times)


def copy_rate(device: str) -> float:
    """Bytes a second, read and written, of one large copy in this process."""
    a = torch.zeros(2**28, device=device)
    b, times = torch.empty_like(a), []
    for _ in range(4):
        started = now(device)
        b.copy_(a)
        times.append(now(device) - started)
    return 8.0 * a.numel() / min(times)


def peak_bytes(device: str) -> int:
    """Largest memory of this process so far: resident, or allocated on its GPU."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_allocated()


def warm_up(path: str, shape: Shape) -> None:
    """One text: so that nothing is compiled, and no library loaded, while the clock runs."""
    if shape.device == "cpu":
        list(texts(shape, 1))
        return
    run_path(path, shape, 1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def child(path: str, shape: Shape, count: int) -> None:
    """Measure one path in a process of its own, whose peak memory is then its own too."""
    torch.set_float32_matmul_precision("highest")
    sample = {"rate": peak_rate(shape.device)}
    if path == "bounded" and shape.device == "cuda":
        kernel = fused_products()
        if kernel is None:
            raise SystemExit("Triton is not installed: there is no fused kernel to measure.")
        traffic = fused_traffic(shape, count, kernel._TILE)
        sample |= {**vars(traffic), "copy_rate": copy_rate(shape.device)}
    warm_up(path, shape)
    before = peak_bytes(shape.device)
    ran = run_path(path, shape, count)
    sample |= {"seconds": ran.seconds, "sums": ran.sums, "work": ran.work}
    sample["bytes"] = peak_bytes(shape.device) - before
    entries = [
        part.flatten()[:: max(101, part.numel() // 100_000)].double().cpu()
        for part in (ran.found.xx, ran.found.xy)
    ]
    print(json.dumps({**sample, "entries": torch.cat(entries).tolist()}))


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


def roofline(sample: dict[str, Any]) -> str:
    """The fused kernel's operations and bytes, and the seconds that they would take alone."""
    rate, copy = sample["rate"], sample["copy_rate"]
    return (
        f"fused sums: {sample['sums']:.4f} s. {sample['flops'] / 1e9:,.0f} GFLOP in whole tiles, "
        f"{sample['flops'] / rate:.4f} s at the {rate / 1e12:,.1f} TFLOP/s of one product; "
        f"{sample['tiled'] / 1e9:,.2f} GB through tiles, {sample['tiled'] / copy:.4f} s, or "
        f"{sample['least'] / 1e9:,.2f} GB at least, {sample['least'] / copy:.4f} s, "
        f"at the {copy / 1e9:,.0f} GB/s of one copy."
    )


def main() -> None:
    """Every path at each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    for part in fields(Shape):
        if part.name != "device":
            parser.add_argument(f"--{part.name.replace('_', '-')}", type=int, default=part.default)
    parser.add_argument("--device", choices=PATHS, default="cpu")
    parser.add_argument("--child", choices=PATHS["cuda"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = Shape(**{part.name: getattr(options, part.name) for part in fields(Shape)})
    if options.child:
        child(options.child, shape, options.tokens[0] // TEXT_TOKENS)
        return
    clock = "CPU s" if shape.device == "cpu" else "wall s"
    table = Table("tokens", "path", clock, "ratio", "peak MB", "GFLOP", "of peak", "error")
    notes = []
    for tokens in options.tokens:
        ran = {path: measure(path, shape, tokens) for path in PATHS[shape.device]}
        samples = {path: sample for path, sample in ran.items() if sample is not None}
        for path, sample in samples.items():
            table.add_row(f"{tokens:,}", *row(path, samples, shape.device))
            if "copy_rate" in sample:
                notes.append(f"{tokens:,} tokens, {roofline(sample)}")
    console = Console()
    console.print(table)
    for note in notes:
        console.print(note)


if __name__ == "__main__":
    main()
