"""Learn a mapper by what the frozen target says on top of the mapped cache."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from kvferry.lm.content import ContentKV
from kvferry.mappers.learning import Generation
from kvferry.training.attention import copying_attention_kl
from kvferry.training.carrying import (
    ask,
    context_inputs,
    draw_questions,
    mapped_context,
    native_context,
)
from kvferry.training.losses import kl_from_native, pointwise_error, text_nll
from kvferry.training.module import Losses
from kvferry.training.texts import Draw
from kvferry.training.through_target import ThroughTarget


class GenerationModule(ThroughTarget[Generation]):
    """Continuation and recall against the native cache's; gradients pass through the target."""

    def losses(self, draw: Draw) -> Losses:
        """See :class:`RefinerModule`."""
        aim, target = self.aim, self._target[0]
        generator = torch.Generator().manual_seed(draw.seed)
        tokens = draw.trace.tokens.target_ids
        questions = draw_questions(tokens, self.prefix.tokens, aim, generator)
        inputs, native = context_inputs(draw.trace, questions.context)
        own = native_context(self.mapper, native)
        with torch.no_grad(), target.recording() if aim.attention else nullcontext([]) as calls:
            wanted = ask(target, own, questions)
        content = mapped_context(self.mapper, inputs, self.prefix)
        got = ask(target, content, questions, checkpointed=self.gradient_checkpointing)
        kl = kl_from_native(wanted, got)
        scored = questions.scored.to(kl.device)
        row = torch.arange(len(scored), device=kl.device)[:, None].expand_as(scored)[scored]
        goes_on, repeats = row == 0, row > 0
        parts: dict[str, Tensor] = {"kl": kl[goes_on].mean()}
        total = aim.continuation * parts["kl"]
        if bool(repeats.any()):
            parts["recall_kl"] = kl[repeats].mean()
            total = total + aim.recall * parts["recall_kl"]
            if aim.attention:
                # Scores reach far beyond what bf16 tells apart.
                with torch.autocast(kl.device.type, enabled=False):
                    parts["attention_kl"] = copying_attention_kl(
                        calls, self._unwindowed_keys(content), questions.starts, scored[1:]
                    )
                total = total + aim.attention * parts["attention_kl"]
        if aim.text:
            following = questions.ids.roll(-1, dims=1).to(kl.device)[scored]
            parts["text_nll"] = text_nll(got, following).mean()
            total = total + aim.text * parts["text_nll"]
        if aim.pointwise:
            parts["pointwise"] = pointwise_error(content, own, self.variance)
            total = total + aim.pointwise * parts["pointwise"]
        return {"loss": total, **parts}

    def _unwindowed_keys(self, content: ContentKV) -> dict[int, Tensor]:
        """Mapped keys at their positions, of the layers that see all of the context."""
        read = {
            i
            for i, layer in enumerate(self.mapper.target.layers)
            if i >= self.mapper.native_layers and layer.window is None
        }
        part = replace(
            content,
            keys={i: x for i, x in content.keys.items() if i in read},
            values={i: x for i, x in content.values.items() if i in read},
        )
        return {i: keys for i, (keys, _) in self._target[0].rotated(part).items()}
