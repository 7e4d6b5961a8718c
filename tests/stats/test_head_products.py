"""Gate 5: bounded products equal those of whole matrices at any panel, and so does Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from kvferry.stats.head_products import HeadRows, add_products, mirror, strips

SOURCES, ROWS, FEATURES, OUTPUTS = 3, 150, 250, 20


def planted(device: str = "cpu") -> tuple[HeadRows, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SOURCES, ROWS, FEATURES, generator=generator)
    y = torch.randn(4, ROWS, OUTPUTS, generator=generator)
    weights = torch.rand(4, ROWS, generator=generator)
    columns = torch.cat([torch.arange(30, 160), torch.arange(5, 15), torch.arange(230, 250)])
    rows = HeadRows(x.to(device), torch.tensor([2, 0, 0, 1]).to(device), columns.to(device))
    return rows, y.to(device), weights.to(device)


def by_matrices(
    rows: HeadRows, y: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The naive path: every head's rows as a matrix of its own, in fp64."""
    x = rows.x[rows.sources][:, :, rows.columns].double()
    weighted = x * weights[:, :, None]
    return weighted.transpose(1, 2) @ x, weighted.transpose(1, 2) @ y.double()


def by_panels(
    rows: HeadRows, y: torch.Tensor, weights: torch.Tensor, panel: int
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, p = len(rows.sources), len(rows.columns)
    gram = torch.zeros(heads, p, p, dtype=torch.float64, device=y.device)
    cross = torch.zeros(heads, p, y.shape[2], dtype=torch.float64, device=y.device)
    rows = replace(rows, weights=weights)
    add_products(rows, gram=gram, cross=cross, y=y, panel=panel)
    mirror(gram)
    return gram, cross


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5


@pytest.mark.parametrize("panel", [1, 7, 64, 1000])
def test_panels_of_any_size_give_the_products_of_whole_matrices(panel: int) -> None:
    rows, y, weights = planted()
    for found, wanted in zip(
        by_panels(rows, y, weights, panel), by_matrices(rows, y, weights), strict=True
    ):
        assert_close(found, wanted)
    other = by_matrices(rows, y, weights.flip(1))[0]
    with pytest.raises(AssertionError):
        assert_close(by_panels(rows, y, weights, panel)[0], other)


def test_weights_of_one_are_no_weights() -> None:
    rows, y, weights = planted()
    gram, cross = by_panels(rows, y, torch.ones_like(weights), 64)
    plain = torch.zeros_like(gram)
    add_products(rows, gram=plain)
    mirror(plain)
    assert_close(plain, gram)
    alone = torch.zeros_like(cross)
    add_products(rows, cross=alone, y=y)
    assert_close(alone, cross)


def test_strips_follow_each_other_and_none_is_short() -> None:
    for p in (1, 64, 128, 129, 191, 192, 769, 2561):
        found = strips(p)
        assert [first for first, _ in found] == [0, *(last for _, last in found[:-1])]
        assert found[-1][1] == p
        assert p < 64 or all(64 <= last - first < 192 for first, last in found)


class Largest(torch.overrides.TorchFunctionMode):
    """Bytes of the largest tensor that is made inside the block, views of ``given`` apart."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.given, self.bytes = given.untyped_storage().data_ptr(), 0

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != self.given:
            self.bytes = max(self.bytes, out.untyped_storage().nbytes())
        return out


def test_scratch_does_not_grow_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor made while rows are added is a panel or a product."""
    sizes = []
    for count in (500, 2000):
        x = torch.randn(1, count, 40)
        rows = HeadRows(x, torch.tensor([0, 0]), torch.arange(40))
        with Largest(x) as watch:
            add_products(rows, gram=torch.zeros(2, 40, 40, dtype=torch.float64), panel=64)
        sizes.append(watch.bytes)
    assert sizes[0] == sizes[1] > 0


INTERPRETED = """
import torch
from kvferry.stats import head_products
from kvferry.stats.kernels.weighted_products import add_products
from tests.stats.test_head_products import assert_close, by_panels, planted
rows, y, weights = planted()
for w in (weights, None):
    for panel in (40, 1000):
        gram, cross = (torch.zeros(4, 160, q, dtype=torch.float64) for q in (160, 20))
        add_products(gram, rows.x, rows.sources, rows.columns, w, panel=panel)
        add_products(cross, rows.x, rows.sources, rows.columns, w, y, panel=panel)
        head_products.mirror(gram)
        one = torch.ones_like(weights) if w is None else w
        for found, wanted in zip((gram, cross), by_panels(rows, y, one, 64), strict=True):
            assert_close(found, wanted)
print("equal")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_fused_kernel_equals_the_reference_in_the_interpreter() -> None:
    # In a process of its own: the interpreter is chosen when the kernel is first imported.
    ran = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.strip() == "equal", ran.stderr


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("panel", [40, 1000])
def test_the_fused_kernel_equals_the_reference_on_the_device(panel: int) -> None:
    rows, y, weights = planted()
    on_device = planted("cuda")
    for found, wanted in zip(
        by_panels(*on_device, panel), by_matrices(rows, y, weights), strict=True
    ):
        assert_close(found.cpu(), wanted)
