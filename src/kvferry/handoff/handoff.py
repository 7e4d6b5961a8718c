"""Strip positions, align, map, put positions back, build the target's cache."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvferry.align.tokens import context_token_count
from kvferry.calibration.reader import PairReader, TokenPair
from kvferry.errors import ArtefactError, InputError
from kvferry.handoff.mapped import MappedCache, pad_left
from kvferry.handoff.measured import Measured
from kvferry.handoff.origins import load_pair
from kvferry.handoff.policy import Decision, Policy
from kvferry.handoff.provenance import Provenance
from kvferry.handoff.sinks import beneath, lift_sinks, plant_sinks
from kvferry.lm.cache import full_length_cache_of, read_cache
from kvferry.lm.content import ContentKV
from kvferry.lm.device import synchronize
from kvferry.lm.model import LanguageModel, Prefill
from kvferry.mappers.hub import MapperArtefact
from kvferry.mappers.inputs import MapperInputs
from kvferry.mappers.mapper import Mapper
from kvferry.mappers.prefix import keep_prefix


class Handoff:
    """Carries contexts from one source to one target with one mapper.

    Args:
        reader: the two models and how their tokens are aligned.
        mapper: maps position-free KV.
        mapper_name, mapper_hash: for the provenance stamp.
        native_tail: last context tokens that the target runs itself on top of the mapped cache.
        measured: of the mapper, what a policy decides on.

    Raises:
        ArtefactError: the mapper was fitted for other models.
    """

    def __init__(
        self,
        reader: PairReader,
        mapper: Mapper,
        *,
        mapper_name: str = "mapper",
        mapper_hash: str = "",
        native_tail: int = 0,
        measured: Measured | None = None,
    ) -> None:
        for role, model, geometry in (
            ("source", reader.source, mapper.source),
            ("target", reader.target, mapper.target),
        ):
            if model.geometry.fingerprint() != geometry.fingerprint():
                raise ArtefactError(
                    f"This mapper was fitted for another {role} model.",
                    found=f"{model.name}: {model.geometry.architecture}, "
                    f"{len(model.geometry.layers)} layers",
                    expected=f"{geometry.architecture}, {len(geometry.layers)} layers",
                    fix="choose the pair that the mapper names, or fit a mapper for this one",
                )
        self.reader = reader
        self.mapper = mapper
        self.mapper_name = mapper_name
        self.mapper_hash = mapper_hash
        self.native_tail = native_tail
        self.measured = measured

    @classmethod
    def load(
        cls,
        name: str | Path,
        source: LanguageModel | None = None,
        target: LanguageModel | None = None,
        *,
        native_tail: int = 0,
        revision: str | None = None,
        cache_dir: Path | None = None,
        device: str = "cpu",
    ) -> Handoff:
        """A hand-off with a saved mapper.

        Args:
            name: folder of a fitted mapper, or its hub id.
            source, target: the two models; those left out are loaded as the mapper knew them.
            native_tail: see the class.
            revision: of the mapper on the hub.
            cache_dir, device: for models that are loaded here.

        Raises:
            ArtefactError: damaged, or a mapper of another pair, revision or tokenizer.
            HubError: the mapper cannot be fetched.
            ModelUnavailableError: a model that was left out cannot be loaded.
        """
        artefact = MapperArtefact.from_pretrained(name, revision=revision)
        source, target = load_pair(artefact.manifest, source, target, cache_dir, device)
        mapper, manifest = artefact.load(source, target)
        return cls(
            PairReader(source, target),
            mapper,
            mapper_name=manifest.method,
            mapper_hash=manifest.short_hash,
            native_tail=native_tail,
            measured=Measured.load(artefact.folder, manifest),
        )

    @cached_property
    def prefix(self) -> ContentKV:
        """The target's own KV of its input-independent prefix, computed once."""
        target = self.reader.target
        ids, mask = target.batch([target.sink_ids])
        return target.content(target.prefill(ids, mask))

    @torch.inference_mode()
    def transfer(
        self,
        prefill: Prefill,
        suffix: str = "",
        native_tail: int | None = None,
        full_length: bool = False,
        policy: Policy | None = None,
    ) -> MappedCache:
        """Carry a source cache over, row by row.

        Context and suffix are tokenised together by the target. A target token that straddles
        their boundary belongs to the suffix, so that the target itself reads it whole.

        Args:
            prefill: what the source has read, with every layer at full length.
            suffix: text that follows the context; its tokens come back in ``suffix_ids``.
            native_tail: overrides the hand-off's own.
            full_length: map windowed layers at every token, and native layers too, so that the
                target's cache can be carried on; see :meth:`read_on`.
            policy: asked whether to carry at all; if not, the target reads the context itself, and
                decision and provenance say so. None always carries.

        Raises:
            InputError: a row without text, or longer than the target's context.
            ArtefactError: the source cache has lost tokens.
        """
        decision = None if policy is None else self.decide(prefill, policy, native_tail)
        if decision is not None and not decision.carry:
            return self._read_natively(prefill, suffix, full_length, decision)
        clock: dict[str, float] = {}
        source, target = self.reader.source.device, self.reader.target.device
        with _clock(clock, "align_ms", target):
            rows = [self._split(ids, suffix) for ids in self._row_ids(prefill)]
        with _clock(clock, "strip_ms", source):
            content = self.source_content(prefill)
        mapped = []
        for index, (tokens, _) in enumerate(rows):
            start = content.tokens - len(tokens.source_ids)
            row = content.select_row(index).slice_tokens(start, content.tokens)
            with _clock(clock, "map_ms", target):
                tail = self._tail(tokens, native_tail)
                mapped.append(self.map_content(row, tokens, tail, full_length))
        out = self.finish(mapped, [tokens for tokens, _ in rows], clock, full_length)
        return replace(
            out,
            suffix_ids=[suffix_ids for _, suffix_ids in rows],
            provenance=[replace(p, hand_offs=prefill.hand_offs + 1) for p in out.provenance],
            decision=decision,
        )

    def decide(self, prefill: Prefill, policy: Policy, native_tail: int | None = None) -> Decision:
        """What ``policy`` says of carrying the longest row of ``prefill``; nothing is run.

        Raises:
            InputError: the policy asks for a domain or metric that was not measured.
        """
        return policy.decide(
            self.measured,
            int(prefill.mask.sum(dim=1).max()),
            device=self.reader.target.device.type,
            native_tail=self.native_tail if native_tail is None else native_tail,
        )

    def _read_natively(
        self, prefill: Prefill, suffix: str, full_length: bool, decision: Decision
    ) -> MappedCache:
        """The target reads the text that ``prefill`` holds; the source's cache is not looked at."""
        clock: dict[str, float] = {}
        target = self.reader.target
        with _clock(clock, "align_ms", target.device):
            rows = [self._split(ids, suffix) for ids in self._row_ids(prefill)]
        with _clock(clock, "prefill_ms", target.device):
            read = target.prefill(*target.batch([t.target_ids for t, _ in rows]), full_length)
        nothing = replace(self.prefix, keys={}, values={}) if full_length else None
        return MappedCache(
            cache=read.cache,
            ids=read.ids,
            mask=read.mask,
            suffix_ids=[suffix_ids for _, suffix_ids in rows],
            provenance=[self._native_stamp(len(t.target_ids), decision) for t, _ in rows],
            milliseconds=clock,
            beneath=nothing,
            decision=decision,
        )

    @torch.inference_mode()
    def read_on(
        self, carried: MappedCache, ids: Int[Tensor, "batch new"]
    ) -> tuple[Prefill, Float[Tensor, "batch new vocab"]]:
        """The target reads ``ids`` on top of a carried cache, which grows in place.

        Returns:
            What the target then holds, to be carried on by the mapper of the way back, with mapped
            tokens in the place of planted sinks; and the logits of each token.

        Raises:
            ArtefactError: windowed layers hold their windows alone.
        """
        if carried.beneath is None:
            raise ArtefactError(
                "This cache cannot be carried on: its windowed layers hold their windows alone.",
                fix="carry it over with transfer(..., full_length=True)",
            )
        target = self.reader.target
        logits = target.extend(carried.cache, ids, carried.mask)
        held = lift_sinks(read_cache(carried.cache), target.rotated(carried.beneath))
        before = Prefill(
            cache=full_length_cache_of(held),
            ids=carried.ids,
            mask=carried.mask,
            logits=logits[:, -1],
            hand_offs=max(stamp.hand_offs for stamp in carried.provenance),
        )
        return before.grown(ids, logits), logits

    def source_content(self, prefill: Prefill) -> ContentKV:
        """Strip the layers that the mapper reads, and no others."""
        reads = self.mapper.source_layers
        content = self.reader.source.content(prefill, reads["keys"], reads["values"])
        return content.to(self.reader.target.device)

    @torch.inference_mode()
    def map_content(
        self, source: ContentKV, tokens: TokenPair, tail: int = 0, full_length: bool = False
    ) -> ContentKV:
        """Target content of one context, all but its last ``tail`` tokens.

        The prefix is the target's own; windowed layers hold their last ``window - 1`` tokens, or,
        with ``full_length``, all of them and no planted sinks.
        """
        target = self.reader.target
        ids = tokens.target_ids[: len(tokens.target_ids) - tail]
        anchors = self.reader.anchors(ids)
        native = None
        first = self.mapper.first_tokens(len(ids))
        if full_length:
            first = [0] * len(first)
        if self.mapper.native_layers > 1:
            start = 0 if full_length else len(ids) - self.mapper.native_tokens(len(ids))
            native = target.native_prefix(
                *target.batch([ids[start:]]),
                self.mapper.native_layers,
                self.mapper.product_dtype,
                first_position=start,
            )
        inputs = MapperInputs(
            source=source,
            alignment=tokens.alignment.narrow(0, len(ids)).to(target.device),
            anchors=anchors,
            native=native,
        )
        return self.keep_prefix(self.mapper.map(inputs, first))

    def finish(
        self,
        mapped: Sequence[ContentKV],
        tokens: Sequence[TokenPair],
        clock: dict[str, float] | None = None,
        full_length: bool = False,
    ) -> MappedCache:
        """Rotate, batch with left padding, build the cache and run the native tails.

        Args:
            mapped: by row, what :meth:`map_content` gives, with the same ``full_length``.
        """
        clock = {} if clock is None else clock
        target = self.reader.target
        below = None
        with _clock(clock, "build_ms", target.device):
            content = pad_left(mapped)
            if full_length:
                bare = content
                content = pad_left([plant_sinks(r, self.prefix, self.mapper) for r in mapped])
                below = beneath(bare, content)
            cache = target.cache_from(content, full_length)
        tails = [t.target_ids[c.tokens :] for t, c in zip(tokens, mapped, strict=True)]
        mask = content.mask
        with _clock(clock, "tail_ms", target.device):
            if tails[0]:
                ids = torch.tensor(tails, device=mask.device)
                target.extend(cache, ids, mask, keep_logits=1)
                mask = torch.cat((mask, torch.ones_like(ids, dtype=torch.bool)), dim=1)
        return MappedCache(
            cache=cache,
            ids=target.batch([t.target_ids for t in tokens])[0],
            mask=mask,
            suffix_ids=[[] for _ in mapped],
            provenance=[self._stamp(c, len(t)) for c, t in zip(mapped, tails, strict=True)],
            milliseconds=clock,
            beneath=below,
        )

    def _row_ids(self, prefill: Prefill) -> list[list[int]]:
        return [row[keep].tolist() for row, keep in zip(prefill.ids, prefill.mask, strict=True)]

    def _split(self, source_ids: list[int], suffix: str) -> tuple[TokenPair, list[int]]:
        """The context's tokens, and those of the suffix with a straddling token healed."""
        context = self.reader.pair_from_source(source_ids)
        target = self.reader.target
        if suffix:
            whole = [*target.sink_ids, *target.encode(context.text + suffix)]
            _, spans = self.reader.target_text.character_spans(whole)
            kept = context_token_count(spans, len(context.text))
            _, source_spans = self.reader.source_text.character_spans(source_ids)
            pair = self.reader.align(source_ids, source_spans, whole, context.text + suffix)
            context = replace(
                context, target_ids=whole[:kept], alignment=pair.alignment.narrow(0, kept)
            )
            rest = whole[kept:]
        else:
            rest = []
        target.require_room(len(context.target_ids) + len(rest))
        return context, rest

    def _tail(self, tokens: TokenPair, native_tail: int | None) -> int:
        """Tail tokens, never more than the body of the context."""
        wanted = self.native_tail if native_tail is None else native_tail
        if wanted < 0:
            raise InputError(
                "The native tail cannot be negative.", found=wanted, fix="set native_tail=0 or more"
            )
        return min(wanted, len(tokens.target_ids) - len(self.reader.target.sink_ids) - 1)

    @torch.inference_mode()
    def keep_prefix(self, content: ContentKV) -> ContentKV:
        """Put the target's own prefix over the mapped one, in place."""
        return keep_prefix(content, self.prefix, self.mapper)

    def _stamp(self, content: ContentKV, tail: int) -> Provenance:
        return Provenance(
            source=self.reader.source.name,
            target=self.reader.target.name,
            mapper=self.mapper_name,
            mapper_hash=self.mapper_hash,
            mapped_tokens=content.tokens - self.prefix.tokens,
            native_tokens=self.prefix.tokens + tail,
        )

    def _native_stamp(self, tokens: int, decision: Decision) -> Provenance:
        return Provenance(
            source=self.reader.source.name,
            target=self.reader.target.name,
            mapper="",
            mapper_hash="",
            mapped_tokens=0,
            native_tokens=tokens,
            hand_offs=0,
            instead=decision.reason,
            exact=True,
        )


@contextmanager
def _clock(milliseconds: dict[str, float], step: str, device: torch.device) -> Iterator[None]:
    """Add the milliseconds of a step to ``milliseconds[step]``, its work on ``device`` included."""
    started = time.perf_counter()
    yield
    synchronize(device)
    milliseconds[step] = milliseconds.get(step, 0.0) + 1e3 * (time.perf_counter() - started)
