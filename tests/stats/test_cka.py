"""CKA from moments equals its definition on rows."""

from __future__ import annotations

import torch

from kvferry.stats import Moments, linear_cka


def test_it_is_the_definition_and_blind_to_rotation() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 9, generator=generator) + 3.0
    turn = torch.linalg.qr(torch.randn(5, 5, generator=generator))[0]
    y = torch.cat([2.0 * x[:, 4:] @ turn, torch.randn(400, 3, generator=generator)], dim=1)
    moments = Moments(9, 8, y_blocks=[slice(0, 5), slice(5, 8)]).update(x, y)
    sources = [slice(0, 4), slice(4, 9)]
    found = linear_cka(moments, sources)
    centred = (x - x.mean(0)).double(), (y - y.mean(0)).double()
    for row, block in enumerate(moments.y_blocks):
        for column, source in enumerate(sources):
            a, b = centred[0][:, source], centred[1][:, block]
            wanted = (a.T @ b).norm() ** 2 / ((a.T @ a).norm() * (b.T @ b).norm())
            assert torch.allclose(found[row, column], wanted, rtol=1e-4)
    assert float(found[0, 1]) > 0.999, "the same features, turned and scaled"
    assert float(found[1].max()) < 0.1, "control: independent ones"


def test_features_that_never_vary_score_nan() -> None:
    y = torch.randn(50, 2, generator=torch.Generator().manual_seed(1))
    moments = Moments(4, 2).update(torch.cat([y, torch.ones(50, 2)], dim=1), y)
    found = linear_cka(moments, [slice(0, 2), slice(2, 4)])
    assert float(found[0, 0]) > 0.999 and bool(found[0, 1].isnan())
