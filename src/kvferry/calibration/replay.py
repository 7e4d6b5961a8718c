"""Calibration texts read again, with the target's queries: for methods that weigh attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvferry.calibration.reader import PairReader, PairTrace, TokenPair
from kvferry.calibration.repeats import recalled_tokens
from kvferry.lm.attention import QueryTrace
from kvferry.mappers.inputs import SourceCode
from kvferry.mappers.observation import Observation, ReplaySplit, Watch, unwatched


@dataclass(frozen=True)
class TextReplay:
    """Runs both models over some texts, one at a time.

    Args:
        texts: by split.
        passage_tokens: source tokens that each text is cut to.
        watch: shows how many texts have been read.
    """

    reader: PairReader
    texts: Mapping[ReplaySplit, Sequence[str]]
    passage_tokens: int
    code: SourceCode | None
    watch: Watch = unwatched

    def __call__(
        self, passages: int, split: ReplaySplit = "calibration", *, copies: bool = False
    ) -> Iterator[Observation]:
        """See :class:`kvferry.mappers.observation.Replay`."""
        texts = self.texts.get(split, ())
        count = min(passages, len(texts))
        chosen = [texts[place * len(texts) // count] for place in range(count)]
        with self.watch(f"read {split.replace('_', ' ')} text again", len(chosen)) as step:
            for text in chosen:
                pair = self.reader.tokenize(text, self.passage_tokens)
                if copies:
                    pair = self.reader.tokenize(with_copy(pair.text), self.passage_tokens)
                yield observe(self.reader, pair, self.code)
                step()

    def count(self, split: ReplaySplit) -> int:
        """See :class:`kvferry.mappers.observation.Replay`."""
        return len(self.texts.get(split, ()))


def with_copy(text: str) -> str:
    """About as long as ``text``: its first two thirds, then an early stretch of them once more."""
    kept, start, stop = (len(text) * share // 12 for share in (8, 1, 5))
    return f"{text[:kept]} {text[start:stop]}"


@torch.inference_mode()
def observe(reader: PairReader, pair: TokenPair, code: SourceCode | None) -> Observation:
    """Read one text with both models and keep the target's queries."""
    ids, mask = reader.source.batch([pair.source_ids])
    target = reader.target
    place = reader.content_device
    source = reader.source.content(reader.source.prefill(ids, mask)).to(place)
    ids, mask = target.batch([pair.target_ids])
    with target.recording() as calls:
        read = target.prefill(ids, mask)
    trace = PairTrace(pair, source, target.content(read).to(place))
    tables = target.rotary.at(read.positions)
    queries = tuple(
        QueryTrace(
            queries=call.queries[0].to(place),
            cos=tables[call.layer][0].to(place),
            sin=tables[call.layer][1].to(place),
            scale=call.scale,
            softcap=call.softcap,
            window=target.geometry.layers[call.layer].window,
        )
        for call in calls
    )
    return Observation(
        trace.inputs(code),
        trace.target,
        queries,
        len(target.sink_ids),
        recalled_tokens(pair.target_ids).to(place),
    )
