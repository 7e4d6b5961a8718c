"""What a method sees besides moments: texts under both models, with the target's queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from kvferry.lm.attention import QueryTrace
from kvferry.lm.content import ContentKV
from kvferry.mappers.inputs import MapperInputs

Watch = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""A label and how many steps there will be -> what to call after each: a progress bar."""

ReplaySplit = Literal["calibration", "training", "selection", "other_domain"]
SINK_COSINE = 0.5
"""Between sinks (.73 and more on Gemma-3-270M) and ordinary tokens (.16 at most)."""
MIN_SHARED = 0.9
"""Below this share of shared token boundaries, dropping the other rows costs more than it cleans:
the hand-off will meet them all the time."""


@dataclass(frozen=True)
class Observation:
    """One calibration text.

    Args:
        inputs: what a mapper may read of it.
        target: the target's own content, every layer at full length.
        queries: by target layer.
        prefix: first target tokens that stay native: no mapped token is among them.
        recalled: by target token, where the one that follows it stood before, see
            :func:`kvferry.calibration.repeats.recalled_tokens`.
    """

    inputs: MapperInputs
    target: ContentKV
    queries: tuple[QueryTrace, ...]
    prefix: int
    recalled: Int64[Tensor, " tokens"]

    @property
    def counted(self) -> Bool[Tensor, " tokens"]:
        """Target tokens to fit on, as moments count them but judged by this text alone."""
        return counted_alone(
            self.target,
            self.inputs.alignment.exact,
            prefix=self.prefix,
            windowed=any(trace.window is not None for trace in self.queries),
        )


def counted_tokens(
    target: ContentKV,
    exact: Bool[Tensor, " tokens"],
    *,
    prefix: int,
    shared_only: bool,
    windowed: bool,
) -> Bool[Tensor, " tokens"]:
    """Target tokens of one text that maps are fitted on.

    The prefix stays native, and the first token after it has no left context to tell of. Sinks of
    windowed models are left out: nothing in the source foretells which tokens become one.

    Args:
        exact: tokens that end where a source token ends; only they, where ``shared_only``.
        windowed: whether some target layer has a window.
    """
    counted = exact.clone() if shared_only else torch.ones_like(exact)
    counted[: prefix + 1] = False
    if windowed:
        counted &= ~surrogate_sinks(target)
    return counted


def counted_alone(
    target: ContentKV, exact: Bool[Tensor, " tokens"], *, prefix: int, windowed: bool
) -> Bool[Tensor, " tokens"]:
    """As :func:`counted_tokens`; this text alone tells whether only shared ends count."""
    shared_only = float(exact.double().mean()) >= MIN_SHARED
    return counted_tokens(target, exact, prefix=prefix, shared_only=shared_only, windowed=windowed)


def surrogate_sinks(content: ContentKV) -> Bool[Tensor, " tokens"]:
    """Tokens whose values in the deeper half of the layers are those of the first token.

    Once the first token has left the window, some later ones take its part: attention that has no
    use for the context rests on them, and their values are as small and as constant as its own.
    """
    deep = [content.values[layer][0] for layer in sorted(content.values)]
    deep = deep[len(deep) // 2 :]
    flat = torch.stack([x.transpose(0, 1).flatten(1) for x in deep])
    cosine = torch.nn.functional.cosine_similarity(flat, flat[:, :1], dim=-1)
    return cosine.mean(dim=0) > SINK_COSINE


def unwatched(label: str, total: int) -> AbstractContextManager[Callable[[], None]]:
    """Nobody looks."""
    return nullcontext(lambda: None)


class Replay(Protocol):
    """Reads calibration texts again; each pass runs both models."""

    def __call__(
        self, passages: int, split: ReplaySplit = "calibration", *, copies: bool = False
    ) -> Iterator[Observation]:
        """Observations of up to ``passages`` texts, spread evenly over those of ``split``.

        Args:
            split: "calibration": texts of the moments. "training": what networks learn from, those
                or others. "selection": of the same domain, unseen by
                moments and evaluation, to choose settings on. "other_domain": likewise, of another.
            copies: repeat an early stretch at the end of each text, so that there is something to
                recall.
        """
        ...

    def count(self, split: ReplaySplit) -> int:
        """How many texts ``split`` has of its own."""
        ...
