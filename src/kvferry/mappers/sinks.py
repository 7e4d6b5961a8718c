"""Surrogate sinks: tokens that windowed layers lean on once BOS has left the window, kept native.

Attention needs somewhere to put mass that it has no use for. In a layer with a window that place
cannot be BOS for long; some tokens of the text (a space, a quote, a line end) stand in for it.
Their keys attract much, their values are small, and both hardly depend on the text: a map that
treats them like any other token gets them wrong where most of the attention is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvferry.errors import ConfigurationError
from kvferry.lm.content import ContentKV
from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.base import Statistics
from kvferry.mappers.constants import TokenConstants
from kvferry.mappers.judging import attention_cosine, mapped_context, query_rows
from kvferry.mappers.layout import COMPONENTS, Component
from kvferry.mappers.observation import Observation
from kvferry.stats.attracted import (
    TokenShare,
    fair_mass,
    merge_shares,
    most_attracting,
    received_mass,
    share_by_token,
)

PASSAGES = 8
LEAST_SEEN = 3
_UNATTENDED = 1e-12  # weight of an occurrence without mass, so that a mean always exists


@torch.no_grad()
def with_sinks(
    mapper: AffineMapper, statistics: Statistics, count: int, passages: int = PASSAGES
) -> AffineMapper:
    """``mapper`` with the content of up to ``count`` sink tokens stored instead of mapped.

    A stored row is the mean of a token's native content, each occurrence weighed with the
    attention it received. It is kept in those windowed layers alone where it brings attention
    output on unseen text nearer to the native one. The report says how much attention the tokens
    receive (``sink_mass``, beside the even ``sink_fair_mass``), in how many layers they are kept
    and what the cosine gains there (mean of all windowed layers), and what share of their variance
    stored rows and maps explain on unseen text.

    A target without windowed layers is left as it is.

    Raises:
        ConfigurationError: no text is longer than the window, or there is none to check on.
    """
    geometry = mapper.target.layers
    layers = [
        i for i in range(mapper.native_layers, len(geometry)) if geometry[i].window is not None
    ]
    if not layers:
        return mapper
    split = statistics.held_out("selection", "other_domain")
    texts = [
        attracted(seen, layers) for seen in statistics.observe(passages) if _reaches(seen, layers)
    ]
    if not texts:
        raise ConfigurationError(
            "Sinks show only beyond the target's window, and no calibration passage is that long.",
            expected=f"more than {max(geometry[i].window or 0 for i in layers)} target tokens",
            fix="raise data.passage_tokens, or set native_sinks=0",
        )
    shares = merge_shares(text.shares for text in texts)
    ids = most_attracting(shares, count, LEAST_SEEN * len(layers))
    seen_in = len(texts) * len(layers)
    report = {
        "sink_tokens": float(len(ids)),
        "sink_mass": sum(shares[i].received for i in ids) / seen_in,
        "sink_fair_mass": sum(shares[i].fair for i in ids) / seen_in,
    }
    constants = _constants(texts, ids, mapper, layers) if ids else None
    if constants is not None:
        checks = (s for s in statistics.observe(passages, split) if _reaches(s, layers))
        judged = [_judge(mapper, constants, seen, layers) for seen in checks]
        gains = torch.stack([gain for gain, _ in judged]).mean(dim=0)
        helped = [layer for layer, gain in zip(layers, gains.tolist(), strict=True) if gain > 0]
        constants = constants.only(helped) if helped else None
        report["sink_layers"] = float(len(helped))
        report["sink_cosine_gain"] = float(gains.clamp(min=0).mean())
        report |= _explained([errors for _, errors in judged])
    return replace(mapper, sinks=constants, report={**mapper.report, **report})


@dataclass(frozen=True)
class AttractedText:
    """What the windowed layers' attention went to in one text.

    Args:
        shares: by token id, summed over layers.
        ids: the distinct token ids of the text.
        mass: by layer, what the occurrences of each of ``ids`` received.
        content: by component and layer, the content of each of ``ids`` summed with that weight.
    """

    shares: dict[int, TokenShare]
    ids: Int64[Tensor, " ids"]
    mass: dict[int, Float[Tensor, " ids"]]
    content: dict[Component, dict[int, Float[Tensor, "ids features"]]]


def attracted(seen: Observation, layers: Sequence[int]) -> AttractedText:
    """Attention received by each token from queries for which BOS is out of the window.

    Args:
        layers: windowed target layers.
    """
    ids = _ids(seen)
    unique, place = torch.unique(ids, return_inverse=True)
    shares, mass = [], {}
    content: dict[Component, dict[int, Tensor]] = {"keys": {}, "values": {}}
    for layer in layers:
        window = seen.queries[layer].window
        assert window is not None, "a windowed layer has queries with a window"
        rows = query_rows(_first_row(seen, window), len(ids)).to(ids.device)
        behind = rows[:, None] - torch.arange(len(ids), device=ids.device)
        received = received_mass(seen.queries[layer].weights(rows, seen.target.keys[layer][0]))
        shares.append(share_by_token(ids, received, fair_mass((behind >= 0) & (behind < window))))
        weights = received + _UNATTENDED
        mass[layer] = weights.new_zeros(len(unique)).index_add_(0, place, weights)
        for component in COMPONENTS:
            flat = _rows(seen.target, component, layer) * weights[:, None]
            sums = flat.new_zeros(len(unique), flat.shape[1])
            content[component][layer] = sums.index_add_(0, place, flat)
    return AttractedText(merge_shares(shares), unique, mass, content)


def _constants(
    texts: Sequence[AttractedText], ids: tuple[int, ...], mapper: AffineMapper, layers: list[int]
) -> TokenConstants:
    chosen = torch.tensor(ids, device=texts[0].ids.device)
    picks = [(chosen[:, None] == text.ids).float() for text in texts]
    out: dict[Component, dict[int, Tensor]] = {"keys": {}, "values": {}}
    for layer in layers:
        shape = mapper.target.layers[layer]
        pairs = list(zip(picks, texts, strict=True))
        mass = torch.stack([pick @ text.mass[layer] for pick, text in pairs]).sum(dim=0)
        for component in COMPONENTS:
            sums = torch.stack([pick @ text.content[component][layer] for pick, text in pairs])
            mean = sums.sum(dim=0) / mass[:, None]
            out[component][layer] = mean.view(len(ids), shape.kv_heads, -1).contiguous()
    return TokenConstants(ids, out["keys"], out["values"])


def _judge(
    mapper: AffineMapper, constants: TokenConstants, seen: Observation, layers: Sequence[int]
) -> tuple[Float[Tensor, " layers"], dict[Component, Float[Tensor, " three"]]]:
    """Gain in attention-output cosine by layer; and, at the tokens themselves, by component the
    squared error of the stored rows, that of the maps, and the squares about the text's mean."""
    mapped = mapped_context(mapper, seen)
    stored = mapped.map_layers(torch.clone)
    whole = [0] * len(mapper.target.layers)
    constants.put({"keys": stored.keys, "values": stored.values}, _ids(seen), whole)
    first = max(_first_row(seen, mapper.target.layers[i].window or 0) for i in layers)
    rows = query_rows(first, seen.target.tokens)
    gain = attention_cosine(stored, seen, rows) - attention_cosine(mapped, seen, rows)
    at = torch.isin(_ids(seen), torch.tensor(constants.token_ids, device=gain.device))
    at[: seen.prefix] = False
    errors: dict[Component, Tensor] = {}
    for component in COMPONENTS:
        errors[component] = gain.new_zeros(3)
        for layer in layers:
            true = _rows(seen.target, component, layer)
            guesses = _rows(stored, component, layer), _rows(mapped, component, layer)
            squares = [(guess[at] - true[at]).square().sum() for guess in guesses]
            spread = (true[at] - true[seen.prefix :].mean(dim=0)).square().sum()
            errors[component] += torch.stack([*squares, spread])
    return gain[torch.tensor(layers, device=gain.device)], errors


def _explained(errors: Sequence[dict[Component, Float[Tensor, " three"]]]) -> dict[str, float]:
    out = {}
    for component in COMPONENTS:
        stored, mapped, spread = torch.stack([e[component] for e in errors]).sum(dim=0).tolist()
        if spread > 0:
            out[f"sink_r2_{component}"] = 1 - stored / spread
            out[f"sink_mapped_r2_{component}"] = 1 - mapped / spread
    return out


def _reaches(seen: Observation, layers: Sequence[int]) -> bool:
    return all(_first_row(seen, seen.queries[i].window or 0) < seen.target.tokens for i in layers)


def _first_row(seen: Observation, window: int) -> int:
    """First query that sees nothing of the native prefix."""
    return window + seen.prefix - 1


def _ids(seen: Observation) -> Int64[Tensor, " tokens"]:
    assert seen.inputs.token_ids is not None, "observations carry their token ids"
    return seen.inputs.token_ids


def _rows(content: ContentKV, component: Component, layer: int) -> Float[Tensor, "tokens features"]:
    by_layer: dict[int, Tensor] = getattr(content, component)
    return by_layer[layer][0].transpose(0, 1).flatten(1).float()
