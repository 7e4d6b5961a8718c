"""`kvferry clean`: say what the cache would give back, and give it back."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from kvferry.lm.cache_limit import BOUNDED, beyond, cache_limit_bytes, entries, evict
from kvferry.lm.store import cache_root


def clean(cache: Path | None, to_gb: float | None, really: bool, console: Console) -> int:
    """Shrink moments and traces to a size; models and text stay.

    Args:
        cache: the cache folder; by default the one that a run would use.
        to_gb: what may stay; by default the limit that every run keeps to.
        really: remove, rather than only say what would go.

    Returns:
        Bytes that went, or would go.
    """
    root = cache_root(cache)
    limit = cache_limit_bytes(to_gb)
    held = sum(entry.bytes for entry in entries(root))
    goners = beyond(root, limit)
    gone = evict(goners) if really else goners
    freed = sum(entry.bytes for entry in gone)
    console.print(
        f"{root}: {' and '.join(BOUNDED)} take {_size(held)}, {_size(limit)} may stay.",
        highlight=False,
        soft_wrap=True,
    )
    for name in BOUNDED:
        members = [entry for entry in gone if entry.path.is_relative_to(root / name)]
        if members:
            total = _size(sum(entry.bytes for entry in members))
            console.print(f"  {name}: {len(members)} unused longest, {total}", highlight=False)
    said = "Freed" if really else "Would free"
    console.print(f"{said} {_size(freed)}.", highlight=False)
    if goners and not really:
        console.print("Add --yes to free it. They are made again when a run needs them.")
    if really and len(gone) < len(goners):
        console.print(f"{len(goners) - len(gone)} are in use and stay.", highlight=False)
    return freed


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e7 else f"{count / 1e6:,.2f} MB"
