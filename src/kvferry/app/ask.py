"""One question about one document, answered from a carried-over cache and natively."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvferry.app.asking import AskRequest
from kvferry.app.documents import check_length
from kvferry.app.models import open_reader, product_dtype
from kvferry.app.screen import AskScreen, Side
from kvferry.calibration.reader import PairReader
from kvferry.handoff.handoff import Handoff
from kvferry.handoff.measured import Measured
from kvferry.handoff.policy import Policy
from kvferry.lm.model import LanguageModel
from kvferry.mappers.artefact import load_mapper

WARM_UP_TOKENS = 64
PROMPT = "\n\nQuestion: {question}\nAnswer:"


def ask(request: AskRequest, screen: AskScreen) -> None:
    """Read the document once with the source, then answer both ways, streamed.

    Raises:
        ArtefactError: the mapper belongs to another pair or is damaged.
        InputError: document and question are longer than a model's context.
    """
    with open_reader(request.config, Path(request.mapper).parent) as reader:
        _answer(request, reader, screen)


def _answer(request: AskRequest, reader: PairReader, screen: AskScreen) -> None:
    mapper, manifest = load_mapper(Path(request.mapper), reader.source, reader.target)
    handoff = Handoff(
        reader,
        mapper.with_precision(product_dtype(request.config)),
        mapper_name=manifest.method,
        mapper_hash=manifest.short_hash,
        native_tail=request.native_tail,
        measured=Measured.load(request.mapper, manifest),
    )
    prompt = PROMPT.format(question=request.question)
    source, target = reader.source, reader.target
    body = source.encode(request.document)
    check_length(
        len(body),
        model=source.name,
        limit=source.geometry.max_positions,
        reserve=len(source.sink_ids),
    )
    check_length(
        len(target.encode(request.document)),
        model=target.name,
        limit=target.geometry.max_positions,
        reserve=len(target.sink_ids) + len(target.encode(prompt)) + request.max_new_tokens,
    )

    _warm_up(handoff, body[:WARM_UP_TOKENS], prompt)
    started = time.perf_counter()
    ids, mask = source.batch([[*source.sink_ids, *body]])
    prefill = source.prefill(ids, mask)
    screen.step("carried", f"{source.name} reads {len(body):,} tokens", _since(started))

    # Both ways are shown, whatever a policy would have done.
    screen.note(f"policy: {handoff.decide(prefill, Policy()).reason}")
    started = time.perf_counter()
    mapped = handoff.transfer(prefill, suffix=prompt)
    screen.step("carried", "carry the cache over", _since(started))
    answer = target.generate(
        mapped.cache, mapped.suffix_ids[0], mapped.mask, request.max_new_tokens
    )
    _stream(screen, "carried", target, answer, started)

    whole = [*target.sink_ids, *target.encode(request.document + prompt)]
    ids, mask = target.batch([whole[:-1]])
    started = time.perf_counter()
    native = target.prefill(ids, mask, full_length=False)
    screen.step("native", f"{target.name} reads {len(whole):,} tokens", _since(started))
    answer = target.generate(native.cache, whole[-1:], native.mask, request.max_new_tokens)
    _stream(screen, "native", target, answer, started)


def _warm_up(handoff: Handoff, body: list[int], prompt: str) -> None:
    """Both ways once over a few tokens: what a machine does only the first time is not timed."""
    source, target = handoff.reader.source, handoff.reader.target
    mapped = handoff.transfer(source.prefill(*source.batch([[*source.sink_ids, *body]])), prompt)
    list(target.generate(mapped.cache, mapped.suffix_ids[0], mapped.mask, 1))
    target.prefill(*target.batch([[*target.sink_ids, *target.encode(prompt)]]), full_length=False)


def _stream(
    screen: AskScreen, side: Side, target: LanguageModel, tokens: Iterator[int], started: float
) -> None:
    """Show the answer as it grows, up to its first line break."""
    made: list[int] = []
    shown, first = "", None
    for token in tokens:
        first = _since(started) if first is None else first
        made.append(token)
        text = _complete(target, made).lstrip()
        line, *rest = text.split("\n", 1)
        screen.write(side, line[len(shown) :])
        shown = line
        if rest and line.strip():
            break
    screen.finish(side, first if first is not None else _since(started))


def _complete(target: LanguageModel, ids: Sequence[int]) -> str:
    """Text of ``ids`` without the broken character that a cut token leaves at the end."""
    return target.text_of(ids).rstrip("�")


def _since(started: float) -> float:
    return time.perf_counter() - started
