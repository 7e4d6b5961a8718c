"""Recolouring: give predictions back the covariance that least squares takes from them."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.errors import InputError
from kvferry.stats.errors import NumericalError

Metric = Literal["raw", "whitened"]


def recolour(
    c_hh: Float[Tensor, "d d"],
    c_hy: Float[Tensor, "d q"],
    c_yy: Float[Tensor, "q q"],
    *,
    metric: Metric = "raw",
    strength: float = 1.0,
) -> Float[Tensor, "d q"]:
    """R such that the predictions h R have the covariance of y.

    A ridge map predicts E[y | x], which varies less than y. With h = x W the recoloured map is
    `M = W R`, its constant `mean_y - mean_x M`:

        A = C_hh^{-1/2} C_hy C_yy^{s/2} = U S V',     R = C_hh^{-1/2} U V' C_yy^{1/2}

    so that R' C_hh R = C_yy. "raw" (s = 1) is, among all maps with that property, the one with the
    least E|y - h R|²; "whitened" (s = -1) the one with the least error in units of the covariance
    of y. Directions in which h or y do not vary are left out; where h varies in fewer directions
    than y, the covariance is met in as many as it has.

    Args:
        c_hh: covariance of the predictions, W' C_xx W.
        c_hy: their cross-covariance with y, W' C_xy.
        c_yy: covariance of y.
        metric: what the rotation is chosen for.
        strength: 1 is R, 0 changes nothing; between them, `(1 - strength) I + strength R`.

    Returns:
        The post-multiplier R, in fp64.

    Raises:
        InputError: unknown metric, strength outside [0, 1], or a mixture of unequal widths.
        NumericalError: the covariances are not finite.
    """
    if metric not in ("raw", "whitened"):
        raise InputError(
            f"There is no recolouring metric {metric!r}.",
            expected="raw or whitened",
            fix="Choose one of these.",
        )
    if not 0 <= strength <= 1 or (strength < 1 and len(c_hh) != len(c_yy)):
        raise InputError(
            "The strength of recolouring must lie between 0 and 1.",
            found=f"{strength} at widths {len(c_hh)} and {len(c_yy)}",
            fix="Set strength=0.5, or 1 where predictions are not as wide as y.",
        )
    h_values, h_vectors = _spectrum(c_hh)
    y_values, y_vectors = _spectrum(c_yy)
    unwhiten = h_vectors * h_values.rsqrt()
    exponent = 0.5 if metric == "raw" else -0.5
    cross = unwhiten.T @ c_hy.double() @ (y_vectors * y_values**exponent)
    u, _, v = torch.linalg.svd(cross, full_matrices=False)
    full: Tensor = unwhiten @ (u @ v) @ (y_vectors * y_values.sqrt()).T
    if strength == 1:
        return full
    identity = torch.eye(len(full), dtype=full.dtype, device=full.device)
    return torch.lerp(identity, full, strength)


def _spectrum(
    covariance: Float[Tensor, "d d"],
) -> tuple[Float[Tensor, " r"], Float[Tensor, "d r"]]:
    """Eigenvalues above rounding, and their eigenvectors."""
    wide = covariance.double()
    if not bool(wide.isfinite().all()):
        raise NumericalError(
            "A covariance to recolour with is not finite.",
            fix="Check the calibration rows for NaN and infinity, and fit again.",
        )
    values, vectors = torch.linalg.eigh((wide + wide.T) / 2)
    # Products in fp32 stand behind the moments, so smaller eigenvalues are noise.
    kept = values > max(float(values[-1]), 0.0) * torch.finfo(torch.float32).eps
    return values[kept], vectors[:, kept]
