"""Bounded construction of head-local maps beside the naive path: time, memory, distance from GEMM.

    python benchmarks/construction.py [--tokens 4096 16384] [--source-layers 12]

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
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvferry.stats.head_products import HeadRows, add_products, mirror
from kvferry.stats.head_ridge import HeadMoments

TEXT_TOKENS = 1024
PATHS = ("float64", "float32", "bounded")


@dataclass(frozen=True)
class Shape:
    """One component of a pair: source layers read, heads of both sides, target layers, head dim."""

    source_layers: int
    source_heads: int
    target_layers: int
    target_heads: int
    dim: int

    @property
    def inputs(self) -> int:
        """Features of one head's map."""
        return self.source_layers * self.dim

    @property
    def sources(self) -> torch.Tensor:
        """Source head of each target head."""
        return torch.arange(self.target_heads) * self.source_heads // self.target_heads


def texts(shape: Shape, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Inputs ``[sources, tokens, features]``, outputs and relevances by layer and head."""
    generator = torch.Generator().manual_seed(0)
    heads = shape.target_layers, shape.target_heads
    for _ in range(count):
        x = torch.randn(shape.source_heads, TEXT_TOKENS, shape.inputs, generator=generator)
        y = torch.randn(*heads, TEXT_TOKENS, shape.dim, generator=generator)
        yield x, y, torch.rand(*heads, TEXT_TOKENS, generator=generator).square() + 0.01


def bounded(shape: Shape, count: int) -> tuple[HeadMoments, float, float]:
    """The package's path: text by text, plain and weighted sums, mixed at the end."""

    def zeros(*sizes: int) -> torch.Tensor:
        return torch.zeros(*sizes, dtype=torch.float64)

    p, heads = shape.inputs + 1, (shape.target_layers, shape.target_heads)
    plain, gram = zeros(shape.source_heads, p, p), zeros(*heads, p, p)
    cross = zeros(*heads, p, shape.dim)
    plain_cross = zeros(shape.target_heads, p, shape.target_layers * shape.dim)
    every, own = torch.arange(p), torch.arange(shape.source_heads)
    spent = 0.0
    for x, y, relevance in texts(shape, count):
        started = time.process_time()
        panel = torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)
        add_products(HeadRows(panel, own, every), gram=plain)
        side_by_side = y.permute(1, 2, 0, 3).flatten(2)
        add_products(HeadRows(panel, shape.sources, every), cross=plain_cross, y=side_by_side)
        for layer in range(shape.target_layers):
            rows = HeadRows(panel, shape.sources, every, relevance[layer])
            add_products(rows, gram=gram[layer], cross=cross[layer], y=y[layer])
        spent += time.process_time() - started
    started = time.process_time()
    mirror(plain)
    alpha = torch.full((shape.target_heads,), 0.5, dtype=torch.float64)
    for layer in range(shape.target_layers):
        mirror(gram[layer])
        here = slice(layer * shape.dim, (layer + 1) * shape.dim)
        first = HeadMoments(plain[shape.sources], plain_cross[:, :, here])
        mixed = first.mixed(HeadMoments(gram[layer], cross[layer]), alpha)
        found = HeadMoments(mixed.c_xx, mixed.c_xy)
    spent += time.process_time() - started
    n = float(count * TEXT_TOKENS)
    square = n * p * (p + 1)
    pairs = shape.target_layers * shape.target_heads
    work = shape.source_heads * square + pairs * (square + 4 * n * p * shape.dim)
    return found, spent, work


def naive(
    shape: Shape, count: int, dtype: torch.dtype = torch.float32
) -> tuple[HeadMoments, float, float]:
    """Keep all rows; for each layer and head copy its matrix, centre, weigh and multiply."""
    kept = list(texts(shape, count))
    started = time.process_time()
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
    spent = time.process_time() - started
    pairs = shape.target_layers * shape.target_heads
    work = pairs * 2.0 * n * shape.inputs * (shape.inputs + shape.dim)
    return found, spent, work


def peak_rate() -> float:
    """Operations a CPU second of one large fp32 product in this process."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    times = []
    for _ in range(4):
        started = time.process_time()
        _ = a @ b
        times.append(time.process_time() - started)
    return 2.0 * 2048**3 / min(times)


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def child(path: str, shape: Shape, count: int) -> None:
    """Measure one path in a process of its own, whose peak memory is then its own too."""
    rate = peak_rate()
    list(texts(shape, 1))
    before = peak_bytes()
    if path == "bounded":
        found, spent, work = bounded(shape, count)
    else:
        found, spent, work = naive(shape, count, getattr(torch, path))
    sample = {"rate": rate, "seconds": spent, "work": work, "bytes": peak_bytes() - before}
    entries = [part.double().flatten()[::101] for part in (found.xx, found.xy)]
    print(json.dumps({**sample, "entries": torch.cat(entries).tolist()}))


def measure(path: str, options: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Run one path in a child process."""
    command = [sys.executable, __file__, "--child", path, "--tokens", str(tokens)]
    for name in ("source_layers", "source_heads", "target_layers", "target_heads", "dim"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    sample: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return sample


def main() -> None:
    """Both paths at each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--source-layers", type=int, default=12)
    parser.add_argument("--source-heads", type=int, default=3)
    parser.add_argument("--target-layers", type=int, default=6)
    parser.add_argument("--target-heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--child", choices=PATHS)
    options = parser.parse_args()
    if options.child:
        shape = Shape(
            options.source_layers,
            options.source_heads,
            options.target_layers,
            options.target_heads,
            options.dim,
        )
        child(options.child, shape, options.tokens[0] // TEXT_TOKENS)
        return
    table = Table("tokens", "path", "CPU s", "ratio", "peak MB", "GFLOP", "of peak", "error")
    for tokens in options.tokens:
        samples = {path: measure(path, options, tokens) for path in PATHS}
        exact = torch.tensor(samples["float64"]["entries"], dtype=torch.float64)
        slow = samples["float32"]
        for path, sample in samples.items():
            error = (
                torch.tensor(sample["entries"], dtype=torch.float64) - exact
            ).abs().max() / exact.abs().max()
            table.add_row(
                f"{tokens:,}",
                path if path == "bounded" else f"naive, {path}",
                f"{sample['seconds']:.2f}",
                f"{slow['seconds'] / sample['seconds']:.1f}x",
                f"{sample['bytes'] / 1e6:,.0f}",
                f"{sample['work'] / 1e9:,.0f}",
                f"{sample['work'] / sample['seconds'] / sample['rate']:.0%}",
                f"{error:.0e}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
