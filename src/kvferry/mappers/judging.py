"""What a mapped cache does to the target's attention, on a text that it was not fitted on."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvferry.lm.content import ContentKV
from kvferry.mappers.observation import Observation


@torch.inference_mode()
def attention_cosine(
    content: ContentKV, seen: Observation, rows: Int64[Tensor, " rows"]
) -> Float[Tensor, " layers"]:
    """Cosine of attention output over ``content`` and native content, mean of heads and ``rows``.

    The queries are native ones, as they are when the target has just begun to go on. Of all
    quantities that cost no forward pass this one ranks mappers as retention does (arXiv
    2608.03893); R² does not.
    """
    rows = rows.to(content.mask.device)
    cosines = []
    for layer, queries in enumerate(seen.queries):
        native = queries.attend(rows, seen.target.keys[layer][0], seen.target.values[layer][0])
        mapped = queries.attend(rows, content.keys[layer][0], content.values[layer][0])
        cosines.append(torch.cosine_similarity(native, mapped, dim=-1).mean())
    return torch.stack(cosines)
