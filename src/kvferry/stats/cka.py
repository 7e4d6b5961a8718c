"""How alike two sets of features are up to rotation and scale, from moments alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.stats.moments import Moments


def linear_cka(
    moments: Moments, source_blocks: Sequence[slice]
) -> Float[Tensor, "targets sources"]:
    """Linear centred kernel alignment of each block of y with each block of x.

    ``|C_xy|² / (|C_xx| |C_yy|)`` in Frobenius norms: 1 where one block is the other, rotated and
    scaled, and near 0 where they are independent. Needs no solve, so it costs one pass over the
    cross-covariance. A block without variance scores NaN.
    """
    cross = moments.scatter_xy
    own = torch.stack([torch.linalg.matrix_norm(c) for c in moments.c_yy])
    columns = []
    for source in source_blocks:
        shared = torch.stack([cross[source, y].square().sum() for y in moments.y_blocks])
        spread = torch.linalg.matrix_norm(moments.scatter_xx[source, source])
        columns.append(shared / moments.weight / (spread * own))
    return torch.stack(columns, dim=1)
