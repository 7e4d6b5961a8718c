"""Operations and bytes of the sums behind head-local maps, counted rather than measured."""

from __future__ import annotations

from dataclasses import dataclass

from construction_data import Shape

from kvferry.stats.head_products import PANEL_ROWS, strips


@dataclass(frozen=True)
class Traffic:
    """What some sums cost beside the clock.

    Args:
        flops: operations, whole blocks or tiles counted.
        moved: bytes that are loaded and stored, much of it from the cache.
        least: bytes with every row and every sum of a head touched once.
    """

    flops: float = 0.0
    moved: float = 0.0
    least: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.flops + other.flops, self.moved + other.moved, self.least + other.least)

    def times(self, count: float) -> Traffic:
        """So many of them."""
        return Traffic(self.flops * count, self.moved * count, self.least * count)


def panel_traffic(shape: Shape, tokens: int) -> Traffic:
    """The torch path: copies of weighted rows, products strip by strip, sums in fp64."""
    n, p, q = float(tokens), shape.inputs + 1, shape.dim
    width, panels = shape.target_layers * q, tokens / PANEL_ROWS
    # A row of the panel is read from a cache and written; y likewise.
    gathered = shape.source_heads * p + shape.target_heads * width
    gather = Traffic(moved=8 * n * gathered, least=4 * n * gathered)
    gram = _products(n, p, p, panels, symmetric=True)
    cross = _products(n, p, width, panels, symmetric=False)
    copied = Traffic(moved=8 * n * (p + q))
    weighted = copied + gram + _products(n, p, q, panels, symmetric=False)
    return (
        gather
        + gram.times(shape.source_heads)
        + cross.times(shape.target_heads)
        + weighted.times(shape.target_layers * shape.target_heads)
    )


def _products(n: float, p: int, q: int, panels: float, *, symmetric: bool) -> Traffic:
    """One head: each strip of columns of x against the rest of x, or against y."""
    flops = moved = 0.0
    for first, last in strips(p):
        rows = last - first
        columns = p - first if symmetric else q
        flops += 2 * n * rows * columns
        # Both operands; the product out and in again; its sum in fp64.
        moved += 4 * n * (rows + columns) + panels * (8 + 16) * rows * columns
    sums = p * (p + 1) / 2 if symmetric else p * q
    return Traffic(flops, moved, 4 * n * (p if symmetric else p + q) + 16 * sums)


def fused_traffic(shape: Shape, tokens: int, tile: int) -> Traffic:
    """The Triton kernel: rows loaded by each tile, sums in fp64 once a panel."""
    p, pairs = shape.inputs + 1, shape.target_layers * shape.target_heads
    width, panels = shape.target_layers * shape.dim, tokens / PANEL_ROWS
    return (
        _tiles(tokens, panels, p, None, False, tile).times(shape.source_heads)
        + _tiles(tokens, panels, p, width, False, tile).times(shape.target_heads)
        + _tiles(tokens, panels, p, None, True, tile).times(pairs)
        + _tiles(tokens, panels, p, shape.dim, True, tile).times(pairs)
    )


def _tiles(n: int, panels: float, p: int, q: int | None, weighted: bool, tile: int) -> Traffic:
    """One head; without ``q`` upper triangles."""
    high = -(-p // tile)
    if q is None:
        tiles, sums = high * (high + 1) // 2, p * (p + 1) // 2
        loads, features = (high + 1) * p, p
    else:
        wide = -(-q // tile)
        tiles, sums = high * wide, p * q
        loads, features = wide * p + high * q, p + q
    return Traffic(
        tiles * 2.0 * n * tile**2,
        4.0 * n * (loads + weighted * tiles) + panels * 16.0 * sums,
        4.0 * n * (features + weighted) + panels * 16.0 * sums,
    )
