"""A low-rank code of the source cache, from a sample of its tokens."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.mappers.inputs import SourceCode
from kvferry.mappers.layout import COMPONENTS, Component


def fit_source_code(
    samples: dict[Component, list[Float[Tensor, "layers tokens features"]]], width: int, seed: int
) -> SourceCode:
    """Leading principal directions of all source layers, each layer scaled to unit power.

    Args:
        samples: by component, position-free content of some passages.
        width: features of the code; no more than the samples can tell apart are used.
        seed: of the randomised decomposition (Halko et al.).
    """
    projection: dict[Component, Tensor] = {}
    for component in COMPONENTS:
        rows = torch.cat(samples[component], dim=1).float()
        rows = rows - rows.mean(dim=1, keepdim=True)
        scale = rows.square().mean(dim=(1, 2)).clamp(min=1e-12).rsqrt()
        flat = (rows * scale[:, None, None]).transpose(0, 1).flatten(1)
        rank = min(width, *flat.shape)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            _, _, directions = torch.svd_lowrank(flat, q=rank, niter=3)
        projection[component] = directions * scale.repeat_interleave(rows.shape[2])[:, None]
    return SourceCode(projection)
