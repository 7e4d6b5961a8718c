"""Learn a mapper by what the target itself answers, with the text before it and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kvferry.lm.cache import copy_cache
from kvferry.lm.model import LanguageModel
from kvferry.mappers.learning import Answering
from kvferry.training.carrying import context_inputs, mapped_context, native_context
from kvferry.training.losses import pointwise_error, text_nll
from kvferry.training.module import Losses
from kvferry.training.texts import Draw
from kvferry.training.through_target import ThroughTarget


class AnsweringModule(ThroughTarget[Answering]):
    """Cross-entropy of the target's own answers on top of the mapped cache.

    Aware: the target reads the text once more before it answers. Unaware: it sees the cue alone.
    """

    def losses(self, draw: Draw) -> Losses:
        """See :class:`RefinerModule`."""
        aim, answer, target = self.aim, draw.answer, self._target[0]
        assert answer is not None, "texts of this aim are drawn with the target's answers"
        inputs, native = context_inputs(draw.trace, answer.context)
        content = mapped_context(self.mapper, inputs, self.prefix)
        cache = target.cache_from(content)
        read_again = answer.pair.target_ids[self.prefix.tokens : answer.context]
        parts: Losses = {
            "unaware_nll": self._nll(cache, content.mask, answer.cue, answer.tokens),
            "aware_nll": self._nll(cache, content.mask, [*read_again, *answer.cue], answer.tokens),
            "pointwise": pointwise_error(
                content, native_context(self.mapper, native), self.variance
            ),
        }
        total = (
            aim.unaware * parts["unaware_nll"]
            + aim.aware * parts["aware_nll"]
            + aim.pointwise * parts["pointwise"]
        )
        return {"loss": total, **parts}

    def _nll(
        self,
        cache: Any,
        mask: Bool[Tensor, "1 context"],
        prompt: Sequence[int],
        answer: Sequence[int],
    ) -> Float[Tensor, ""]:
        arguments = self._target[0], cache, mask, prompt, answer
        if not self.gradient_checkpointing:
            return answer_nll(*arguments).mean()
        nll: Tensor = checkpoint(answer_nll, *arguments, use_reentrant=False)
        return nll.mean()


def answer_nll(
    target: LanguageModel,
    cache: Any,
    mask: Bool[Tensor, "1 context"],
    prompt: Sequence[int],
    answer: Sequence[int],
) -> Float[Tensor, " answer"]:
    """Nats of each token of ``answer`` after ``prompt``, on top of a ``cache`` that stays."""
    ids = torch.tensor([[*prompt, *answer[:-1]]], device=mask.device)
    logits = target.differentiable_extend(copy_cache(cache), ids, mask, keep_logits=len(answer))
    return text_nll(logits[0], torch.tensor(list(answer), device=mask.device))
