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

import torch
from rich.console import Console
from rich.table import Table

from kvferry.stats.head_products import HeadRows, add_cross, add_gram, mirror
from kvferry.stats.head_ridge import HeadMoments

TEXT_TOKENS = 1024


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
    cross, plain_cross = zeros(*heads, p, shape.dim), zeros(*heads, p, shape.dim)
    every, own = torch.arange(p), torch.arange(shape.source_heads)
    spent = 0.0
    for x, y, relevance in texts(shape, count):
        started = time.perf_counter()
        panel = torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)
        add_gram(plain, HeadRows(panel, own, every))
        for layer in range(shape.target_layers):
            rows = HeadRows(panel, shape.sources, every)
            add_gram(gram[layer], rows, relevance[layer])
            add_cross(cross[layer], rows, y[layer], relevance[layer])
            add_cross(plain_cross[layer], rows, y[layer])
        spent += time.perf_counter() - started
    started = time.perf_counter()
    mirror(plain)
    alpha = torch.full((shape.target_heads,), 0.5, dtype=torch.float64)
    for layer in range(shape.target_layers):
        mirror(gram[layer])
        first = HeadMoments(plain[shape.sources], plain_cross[layer])
        mixed = first.mixed(HeadMoments(gram[layer], cross[layer]), alpha)
        found = HeadMoments(mixed.c_xx, mixed.c_xy)
    spent += time.perf_counter() - started
    n = float(count * TEXT_TOKENS)
    square = n * p * (p + 1)
    pairs = shape.target_layers * shape.target_heads
    work = shape.source_heads * square + pairs * (square + 4 * n * p * shape.dim)
    return found, spent, work


def naive(shape: Shape, count: int) -> tuple[HeadMoments, float, float]:
    """Keep all rows; for each layer and head copy its matrix, centre, weigh and multiply."""
    kept = list(texts(shape, count))
    started = time.perf_counter()
    x, y, relevance = (
        torch.cat([text[part] for text in kept], dim=dim) for part, dim in ((0, 1), (1, 2), (2, 2))
    )
    del kept
    n = x.shape[1]
    for layer in range(shape.target_layers):
        grams, crosses = [], []
        for head, source in enumerate(shape.sources.tolist()):
            r = relevance[layer, head]
            w = 1 + 0.5 * (r / r.mean() - 1)
            rows, wanted = x[source].clone(), y[layer, head]
            centred = rows - (w @ rows) / n
            weighted = centred * w[:, None]
            grams.append(weighted.T @ centred / n)
            crosses.append(weighted.T @ (wanted - (w @ wanted) / n) / n)
        found = HeadMoments(torch.stack(grams), torch.stack(crosses))
    spent = time.perf_counter() - started
    pairs = shape.target_layers * shape.target_heads
    work = pairs * 2.0 * n * shape.inputs * (shape.inputs + shape.dim)
    return found, spent, work


def peak_rate() -> float:
    """Operations a second of one large fp32 product in this process."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    times = []
    for _ in range(4):
        started = time.perf_counter()
        _ = a @ b
        times.append(time.perf_counter() - started)
    return 2.0 * 2048**3 / min(times)


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def child(path: str, shape: Shape, count: int) -> None:
    """Measure one path in a process of its own, whose peak memory is then its own too."""
    rate = peak_rate()
    list(texts(shape, 1))
    before = peak_bytes()
    run = bounded if path == "bounded" else naive
    found, spent, work = run(shape, count)
    sample = {"rate": rate, "seconds": spent, "work": work, "bytes": peak_bytes() - before}
    sample["xx"] = found.xx.double().square().sum().sqrt().item()
    sample["xy"] = found.xy.double().square().sum().sqrt().item()
    print(json.dumps(sample))


def measure(path: str, options: argparse.Namespace, tokens: int) -> dict[str, float]:
    """Run one path in a child process."""
    command = [sys.executable, __file__, "--child", path, "--tokens", str(tokens)]
    for name in ("source_layers", "source_heads", "target_layers", "target_heads", "dim"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    sample: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return sample


def main() -> None:
    """Both paths at each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--source-layers", type=int, default=12)
    parser.add_argument("--source-heads", type=int, default=3)
    parser.add_argument("--target-layers", type=int, default=4)
    parser.add_argument("--target-heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--child", choices=("bounded", "naive"))
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
    table = Table("tokens", "path", "seconds", "ratio", "peak MB", "GFLOP", "of peak", "norm gap")
    for tokens in options.tokens:
        samples = {path: measure(path, options, tokens) for path in ("naive", "bounded")}
        slow = samples["naive"]
        for path, sample in samples.items():
            gap = max(abs(sample[name] / slow[name] - 1) for name in ("xx", "xy"))
            table.add_row(
                f"{tokens:,}",
                path,
                f"{sample['seconds']:.2f}",
                f"{slow['seconds'] / sample['seconds']:.1f}x",
                f"{sample['bytes'] / 1e6:,.0f}",
                f"{sample['work'] / 1e9:,.0f}",
                f"{sample['work'] / sample['seconds'] / sample['rate']:.0%}",
                f"{gap:.0e}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
