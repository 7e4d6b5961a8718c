"""Map time beside native prefill, and its distance from the machine's limit.

    python benchmarks/map_time.py outputs/RUN [--tokens 512 2048 8192]

Protocol: see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from kvferry.app.corpora import load_corpora
from kvferry.app.folder import load_config
from kvferry.app.models import load_handoff, load_reader
from kvferry.evals.latency import LatencyBench
from kvferry.lm.store import cache_root
from kvferry.mappers.affine import AffineMapper


def products(mapper: AffineMapper, tokens: int) -> float:
    """Floating-point operations of the matrix products for a context of so many tokens."""
    total = 0.0
    for group in mapper.groups:
        window = mapper.target.layers[group.target_layers[0]].window
        rows = tokens if window is None else min(tokens, window - 1)
        total += 2.0 * rows * group.weight.numel()
    code = mapper.code.projection.values() if mapper.code is not None else ()
    return total + sum(2.0 * tokens * projection.numel() for projection in code)


def peak_flops(dtype: torch.dtype) -> float:
    """What one large square product reaches here, in operations a second."""
    a, b = (torch.randn(4096, 4096).to(dtype) for _ in range(2))
    times = []
    for _ in range(5):
        started = time.perf_counter()
        _ = a @ b
        times.append(time.perf_counter() - started)
    return 2.0 * 4096**3 / min(times)


def main() -> None:
    """Measure the mapper of a run folder in fp32 and bf16 products."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--products", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    cfg = load_config(options.run)
    reader = load_reader(cfg)
    text = "\n\n".join(load_corpora(cfg, cache_root(cfg.cache)).long_text)
    table = Table("products", "tokens", "native ms", "map ms", "ratio", "GFLOP", "of peak")
    for dtype in (getattr(torch, name) for name in options.products):
        handoff, _ = load_handoff(cfg, options.run, reader, dtype)
        bench, peak = LatencyBench(handoff, text), peak_flops(dtype)
        for tokens in options.tokens:
            sample = bench.measure(tokens, options.repeats, 2)
            native = statistics.median(sample.milliseconds["prefill"])
            mapped = statistics.median(sample.milliseconds["map"])
            work = products(handoff.mapper, tokens)
            table.add_row(
                str(dtype).removeprefix("torch."),
                f"{tokens:,}",
                f"{native:,.0f}",
                f"{mapped:,.0f}",
                f"{native / mapped:.1f}x",
                f"{work / 1e9:,.0f}",
                f"{work / (mapped / 1e3) / peak:.0%}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
