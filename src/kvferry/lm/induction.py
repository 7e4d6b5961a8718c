"""Miniatures that can copy: trained in process, in seconds, so that recall can be tested.

A random model recalls nothing, whatever its cache holds. These find an earlier occurrence of the
last token and repeat what followed it, which is what recall from a cache amounts to.
"""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from kvferry.lm.pico import pico_language_model

if TYPE_CHECKING:
    from kvferry.lm.model import LanguageModel

SYMBOLS = string.ascii_uppercase + string.ascii_lowercase[:22]
_SHORTEST, _LONGEST, _SPAN = 8, 48, 6
_BATCH, _RATE = 32, 1e-2


def induction_language_model(
    architecture: str = "llama", seed: int = 0, steps: int = 400
) -> LanguageModel:
    """A two-layer miniature trained to copy; about ten seconds on one core.

    Args:
        architecture: one whose keys and queries can have biases: "llama" or "qwen2".
        seed: of weights and training data.
        steps: of training; 0 gives the model as it starts.
    """
    options = {"attention_bias": True} if architecture == "llama" else {}
    model = pico_language_model(
        architecture,
        seed,
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        tie_word_embeddings=True,
        # A short rotary base: neighbouring positions differ in several channels.
        rope_parameters={"rope_type": "default", "rope_theta": 50.0},
        **options,
    )
    _look_back(model)
    train_induction(model, steps=steps, seed=seed)
    return model


def train_induction(model: LanguageModel, *, steps: int, seed: int = 0) -> None:
    """Train `model` in place to repeat spans of a context of distinct symbols.

    Contexts grow from 8 to 48 tokens, slowly at first: short ones teach the mechanism, long ones
    make it independent of the distance. The revision of the model changes with its weights.
    """
    network = model.model.train().requires_grad_(True)
    optimiser = torch.optim.AdamW(
        network.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0
    )
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        longest = _SHORTEST + round((_LONGEST - _SHORTEST) * (step / steps) ** 2)
        length = int(torch.randint(_SHORTEST, longest + 1, (1,), generator=generator))
        context, spans = induction_batch(model, _BATCH, length, 4, generator)
        ids = torch.cat((context, spans), dim=1)
        # The first token of a span cannot be foreseen.
        foreseen = torch.arange(spans.shape[1]) % _SPAN > 0
        logits = network(input_ids=ids, use_cache=False).logits[:, context.shape[1] - 1 : -1]
        loss = F.cross_entropy(logits[:, foreseen].flatten(0, 1), spans[:, foreseen].flatten())
        warm_up, decay = min(1.0, (step + 1) / 30), 1 - 0.9 * step / steps
        for group in optimiser.param_groups:
            group["lr"] = _RATE * warm_up * decay
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
    network.eval().requires_grad_(False)
    if steps:
        model.revision = f"{model.revision}-induction-{steps}-{seed}"


def induction_batch(
    model: LanguageModel, rows: int, length: int, spans: int, generator: torch.Generator
) -> tuple[Int[Tensor, "rows context"], Int[Tensor, "rows repeated"]]:
    """Contexts (the sink, then `length` distinct symbols) and spans of six tokens out of them.

    Args:
        length: 6 to 48 symbols.
        spans: how many spans follow the context, each from a random place.
    """
    ids = torch.tensor(model.tokenizer.convert_tokens_to_ids(list(SYMBOLS)))
    order = torch.rand(rows, len(SYMBOLS), generator=generator).argsort(dim=1)[:, :length]
    starts = torch.randint(0, length - _SPAN + 1, (rows, spans, 1), generator=generator)
    places = (starts + torch.arange(_SPAN)).flatten(1)
    sink = torch.tensor(model.sink_ids).expand(rows, -1)
    context = ids[order]
    return torch.cat((sink, context), dim=1), context.gather(1, places)


@torch.inference_mode()
def induction_nll(model: LanguageModel, *, length: int, rows: int = 64, seed: int = 1) -> float:
    """Mean NLL in nats of a span's tokens but the first, after a context of `length` symbols.

    A model that only knows the symbols of the context scores about log(length).
    """
    generator = torch.Generator().manual_seed(1_000_003 + seed)
    context, span = induction_batch(model, rows, length, 1, generator)
    prefill = model.prefill(context)
    logits = model.extend(prefill.cache, span, prefill.mask)
    return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), span[:, 1:].flatten()))


def _look_back(model: LanguageModel) -> None:
    """Start one head of layer 0 out attending to the previous token, through its biases.

    Training finds that by itself, but takes minutes over it.
    """
    attention = model.base.layers[0].self_attn
    dim = attention.head_dim
    angle = torch.cat((model.base.rotary_emb.inv_freq,) * 2)
    query = torch.zeros(dim)
    query[: dim // 4] = 5.0
    turned = torch.cat((-query[dim // 2 :], query[: dim // 2]))
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight[:dim] *= 0.1
        attention.q_proj.bias[:dim] = query
        # One step of rotation ahead: the score peaks where the key is one position behind.
        attention.k_proj.bias[:dim] = query * angle.cos() + turned * angle.sin()
