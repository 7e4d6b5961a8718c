"""The quality ladder: R² and attention-output cosine by layer, KL, NLL and long-range recall."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvferry.evals import scoring
from kvferry.evals.contexts import ContextShape, EvalContext
from kvferry.evals.scoring import NativeReference, Scores
from kvferry.handoff.handoff import Handoff
from kvferry.handoff.mapped import MappedCache
from kvferry.lm.attention import AttentionCall
from kvferry.lm.cache import copy_cache, read_cache
from kvferry.lm.content import ContentKV
from kvferry.mappers.controls import identity_content, random_content, shuffled_content

Build = Callable[[], MappedCache]
PER_LAYER = ("r2_keys", "r2_values", "attention_cosine")


@dataclass
class ContextResult:
    """Scores of every condition on one context.

    Args:
        scores: by condition.
        layers: by condition and metric, one number a target layer (nan where not mapped).
        source_nll: nats a target token of the continuation under the source model itself.
    """

    scores: dict[str, Scores] = field(default_factory=dict)
    layers: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    source_nll: float | None = None


class Ladder:
    """Scores contexts under several caches.

    Args:
        handoff: the source, the target and the mapper under test.
        shape: lengths of what is asked.
        native_tail: tokens that the target runs itself under ``mapped_tail``.
        conditions: what the target decodes from; native and zero are always measured.
        seed: of the random controls.
    """

    def __init__(
        self,
        handoff: Handoff,
        shape: ContextShape,
        *,
        native_tail: int,
        conditions: Sequence[str],
        seed: int,
    ) -> None:
        self.handoff = handoff
        self.shape = shape
        self.native_tail = native_tail
        self.conditions = tuple(dict.fromkeys(("native", "zero", *conditions)))
        self.seed = seed
        self._last: tuple[EvalContext, ContentKV] | None = None

    @torch.inference_mode()
    def score(self, context: EvalContext, wrong: ContentKV) -> ContextResult:
        """All conditions on ``context``; ``wrong`` is the mapped content of another text."""
        result = ContextResult()
        builds = self.builds(context, wrong)
        native_cache = builds["native"]()
        with self.handoff.reader.target.recording() as recorded:
            answers = self._ask(native_cache, context)
            calls = list(recorded)
        native = NativeReference.of(answers[0])
        for condition in self.conditions:
            if condition == "source":
                result.source_nll = self.source_nll(context)
            elif condition == "native":
                result.scores[condition] = self._scores(context, native, answers)
            elif condition in builds:
                mapped = builds[condition]()
                result.scores[condition] = self._scores(context, native, self._ask(mapped, context))
                if condition == "mapped":
                    content = self.mapped_content(context)
                    result.layers[condition] = self._layers(context, content, mapped, calls)
        return result

    def mapped_content(self, context: EvalContext) -> ContentKV:
        """What the hand-off makes of a context; kept until another context is asked for."""
        if self._last is None or self._last[0] is not context:
            content = self.handoff.map_content(context.trace.source, context.trace.tokens)
            self._last = (context, content)
        return self._last[1]

    def builds(self, context: EvalContext, wrong: ContentKV) -> Mapping[str, Build]:
        """How to make the cache of each condition; nothing is computed before it is asked for."""
        handoff, tokens = self.handoff, context.trace.tokens
        windows = handoff.mapper.first_tokens(context.trace.target.tokens)

        def finish(content: ContentKV) -> MappedCache:
            return handoff.finish([content], [tokens])

        def control(change: Callable[[ContentKV], ContentKV]) -> MappedCache:
            return finish(handoff.keep_prefix(change(self.mapped_content(context))))

        def tail() -> MappedCache:
            return finish(handoff.map_content(context.trace.source, tokens, self.native_tail))

        builds: dict[str, Build] = {
            "native": lambda: finish(identity_content(context.trace.target, windows)),
            "zero": lambda: finish_prefix(handoff),
            "mapped": lambda: finish(self.mapped_content(context)),
            "mapped_tail": tail,
            "mean": lambda: control(handoff.mapper.mean_content),
            "random": lambda: control(lambda content: random_content(content, self.seed)),
            "shuffled": lambda: control(lambda content: shuffled_content(content, self.seed)),
            "wrong_passage": lambda: finish(wrong),
        }
        source, own = handoff.reader.source, handoff.reader.target
        if source.geometry == own.geometry and source.tokenizer_hash == own.tokenizer_hash:
            builds["identity"] = lambda: finish(identity_content(context.trace.source, windows))
        return builds

    def source_nll(self, context: EvalContext) -> float:
        """NLL of the continuation's text under the source, in nats a *target* token.

        Source tokens of the same characters are summed; characters at the edges that belong to
        no whole source token are accounted for in proportion.
        """
        source = self.handoff.reader.source
        if context.source_characters == 0 or len(context.source_continuation) < 2:
            return float("nan")
        ids = torch.tensor([context.source_continuation], device=source.device)
        read = context.trace.source.to(source.device)
        logits = source.extend(source.cache_from(read), ids, read.mask)[0]
        kept = ids.shape[1]
        wanted = torch.tensor(context.source_continuation, device=source.device)
        total = scoring.token_nll(logits, wanted, 1) * (kept - 1)
        per_character = total / context.source_characters
        scored = len(context.continuation) - 1
        return per_character * context.continuation_characters / scored

    def _ask(self, mapped: MappedCache, context: EvalContext) -> tuple[Tensor, Tensor]:
        """Logits ``[tokens, vocab]`` of continuation and recall span, in one forward pass.

        The shorter one is filled up behind its end, where nothing is read.
        """
        target = self.handoff.reader.target
        asked = (context.continuation, context.recall)
        length = max(len(ids) for ids in asked)
        rows = [[*ids, *ids[-1:] * (length - len(ids))] for ids in asked]
        batch = torch.tensor(rows, device=target.device)
        mask = mapped.mask.expand(len(rows), -1)
        logits = target.extend(copy_cache(mapped.cache, len(rows)), batch, mask)
        return logits[0, : len(asked[0])], logits[1, : len(asked[1])]

    def _scores(
        self, context: EvalContext, native: NativeReference, answers: tuple[Tensor, Tensor]
    ) -> Scores:
        continuation, recall = answers
        ids = torch.tensor(context.continuation, device=continuation.device)
        span = torch.tensor(context.recall, device=recall.device)
        return scoring.scores_of(
            native, (continuation, ids), (recall, span), self.shape.recall_prompt_tokens
        )

    def _layers(
        self,
        context: EvalContext,
        content: ContentKV,
        mapped: MappedCache,
        calls: Sequence[AttentionCall],
    ) -> dict[str, list[float]]:
        prefix = self.handoff.prefix.tokens
        out: dict[str, list[float]] = {name: [] for name in PER_LAYER}
        rotated: list[Any] = read_cache(mapped.cache)
        for call in calls:
            layer = call.layer
            output = call.with_context(*rotated[layer])
            out["attention_cosine"].append(scoring.mean_cosine(output, call.output))
            for component in ("keys", "values"):
                made: Tensor = getattr(content, component)[layer]
                start = max(prefix, context.trace.target.tokens - made.shape[2])
                length = context.trace.target.tokens - start
                true: Tensor = getattr(context.trace.target, component)[layer]
                places = self.handoff.mapper.planted_places(layer, context.trace.target.tokens)
                mapped_rows = torch.ones(made.shape[2], dtype=torch.bool, device=made.device)
                mapped_rows[places] = False
                mapped_rows = mapped_rows[-length:]
                predicted, wanted = _rows(made, length), _rows(true, length)
                out[f"r2_{component}"].append(
                    scoring.r2_about_mean(predicted[mapped_rows], wanted[mapped_rows])
                )
        return out


def finish_prefix(handoff: Handoff) -> MappedCache:
    """A cache that holds nothing but the target's own prefix."""
    prefix = handoff.prefix
    target = handoff.reader.target
    return MappedCache(
        cache=target.cache_from(prefix),
        ids=torch.tensor([target.sink_ids], device=target.device),
        mask=prefix.mask,
        suffix_ids=[[]],
        provenance=[],
    )


def _rows(x: Tensor, last: int) -> Tensor:
    return x[0, :, -last:].transpose(0, 1).flatten(1)
