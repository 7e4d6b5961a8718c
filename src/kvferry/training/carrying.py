"""What is asked of a mapped cache while its mapper learns: go on, and repeat what was early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kvferry.calibration.reader import PairTrace
from kvferry.lm.cache import copy_cache
from kvferry.lm.content import ContentKV
from kvferry.lm.model import LanguageModel
from kvferry.mappers.controls import identity_content
from kvferry.mappers.inputs import MapperInputs
from kvferry.mappers.learning import Generation
from kvferry.mappers.mapper import Mapper
from kvferry.mappers.prefix import keep_prefix


@dataclass(frozen=True)
class Questions:
    """Rows of target tokens that are run on top of one context, all of one length.

    Args:
        context: target tokens that are carried over, prefix included.
        ids: the first row continues the text, the others repeat stretches of it.
        scored: positions whose next token is scored.
        starts: context token at which each repeated stretch stood.
    """

    context: int
    ids: Int64[Tensor, "rows tokens"]
    scored: Bool[Tensor, "rows tokens"]
    starts: tuple[int, ...]


def draw_questions(
    target_ids: Sequence[int], prefix: int, aim: Generation, generator: torch.Generator
) -> Questions:
    """Cut a text at random and ask for what follows and for what came early.

    Args:
        target_ids: the text, its prefix included.
        prefix: first tokens that carry no text.
        aim: lengths; a text that is too short for them is cut so that half of it is context.
        generator: of the cut and of the stretches.
    """
    body = len(target_ids) - prefix
    length = min(aim.continuation_tokens, body // 4)
    shortest = min(aim.shortest_context, body // 2)
    cut = _between(shortest, body - length, generator)
    rows = [list(target_ids[prefix + cut : prefix + cut + length])]
    scored = [[True] * (length - 1) + [False]]
    span = min(aim.recall_tokens, length)
    given = min(aim.recall_prompt_tokens, span // 2)
    starts = []
    for _ in range(aim.recall_spans):
        start = prefix + _between(0, max(cut - 2 * span, 0), generator)
        starts.append(start)
        row = list(target_ids[start : start + span])
        rows.append(row + row[-1:] * (length - span))
        scored.append([given - 1 <= i < span - 1 for i in range(length)])
    return Questions(prefix + cut, torch.tensor(rows), torch.tensor(scored), tuple(starts))


def _between(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, max(high, low) + 1, (), generator=generator))


def context_inputs(trace: PairTrace, context: int) -> tuple[MapperInputs, ContentKV]:
    """What a mapper may read of the first ``context`` target tokens, and their native content."""
    alignment = trace.tokens.alignment.narrow(0, context).to(trace.target.mask.device)
    read = int(alignment.indices.max()) + 1
    native = trace.target.slice_tokens(0, context)
    inputs = MapperInputs(
        source=trace.source.slice_tokens(0, read),
        alignment=alignment,
        anchors=native,
        native=native,
    )
    return inputs, native


def mapped_context(mapper: Mapper, inputs: MapperInputs, prefix: ContentKV) -> ContentKV:
    """Content as a hand-off leaves it, before rotation; gradients reach a learned mapper."""
    content = mapper.map(inputs, mapper.first_tokens(inputs.tokens))
    # Layers may be views, of the trace or of each other, which the prefix must not be written into.
    return keep_prefix(content.map_layers(torch.clone), prefix, mapper)


def native_context(mapper: Mapper, native: ContentKV) -> ContentKV:
    """The target's own content, windows cut as a hand-off does."""
    return identity_content(native, mapper.first_tokens(native.tokens))


def ask(
    target: LanguageModel, content: ContentKV, questions: Questions, *, checkpointed: bool = False
) -> Float[Tensor, "scored vocab"]:
    """Logits of every scored position on top of ``content``, rows one after the other.

    Args:
        checkpointed: keep nothing of a row's forward pass and run it again in the backward one, so
            that memory is one row's.
    """
    cache = target.cache_from(content)
    if not checkpointed:
        return _answers(target, cache, content.mask, questions.ids, questions.scored)
    rows = [
        checkpoint(
            _answers,
            target,
            cache,
            content.mask,
            questions.ids[i : i + 1],
            questions.scored[i : i + 1],
            use_reentrant=False,
        )
        for i in range(len(questions.ids))
    ]
    return torch.cat([row for row in rows if row is not None])


def _answers(
    target: LanguageModel,
    cache: Any,
    mask: Bool[Tensor, "1 context"],
    ids: Int64[Tensor, "rows tokens"],
    scored: Bool[Tensor, "rows tokens"],
) -> Float[Tensor, "scored vocab"]:
    rows = len(ids)
    logits = target.differentiable_extend(
        copy_cache(cache, rows), ids.to(mask.device), mask.expand(rows, -1)
    )
    return logits[scored.to(mask.device)]


def inference_free(content: ContentKV) -> ContentKV:
    """A copy that may meet gradients, of content that was read in inference mode."""
    copied = content.map_layers(torch.clone)
    return replace(copied, positions=content.positions.clone(), mask=content.mask.clone())
