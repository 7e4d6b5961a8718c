"""Collect the moments of a pair over a calibration text, resumably."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from pytorch_lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset

from kvferry.calibration.code import fit_source_code
from kvferry.calibration.interruption import die_when_told, interruptible
from kvferry.calibration.moments_store import Collection, MomentsStore
from kvferry.calibration.reader import PairReader, PairTrace, TokenPair
from kvferry.calibration.shares import Share, shares
from kvferry.errors import InputError
from kvferry.lm.geometry import KVGeometry
from kvferry.mappers.base import Statistics
from kvferry.mappers.inputs import SourceCode
from kvferry.mappers.layout import COMPONENTS, Component, FeatureLayout, component_layout
from kvferry.mappers.observation import MIN_SHARED, counted_tokens
from kvferry.stats.moments import Moments

CODE_PASSAGES = 12


@dataclass(frozen=True)
class CalibrationPlan:
    """What is collected: wide enough that every closed-form method is a sub-block of it.

    Args:
        passage_tokens: source tokens that each passage is cut to.
        code_width: features of the source code of one component.
        anchor_context: predecessors whose layer-0 content is kept.
        native_layers: exact target layers that maps may read.
        seed: of the source code's decomposition.
    """

    passage_tokens: int = 1000
    code_width: int = 320
    anchor_context: int = 3
    native_layers: int = 4
    seed: int = 0

    def layouts(self, reader: PairReader) -> dict[Component, FeatureLayout]:
        """Input columns of each component."""
        reads = 2 if reader.mode == "owner_previous" else 1
        return self.layouts_of(reader.source.geometry, reader.target.geometry, reads)

    def layouts_of(
        self, source: KVGeometry, target: KVGeometry, reads: int = 1
    ) -> dict[Component, FeatureLayout]:
        """The same, told from the shapes of both caches; ``reads`` source tokens side by side."""
        return {
            component: component_layout(
                component,
                source,
                target,
                code_width=min(self.code_width, sum(source.widths)),
                anchor_context=self.anchor_context,
                native_layers=min(self.native_layers, len(target.layers)),
                reads=reads,
            )
            for component in COMPONENTS
        }

    def key(self, reader: PairReader, texts: Sequence[str]) -> str:
        """Sixteen hex digits that change with anything that changes the moments."""
        models = [
            (m.name, m.revision, m.geometry.fingerprint(), str(m.dtype))
            for m in (reader.source, reader.target)
        ]
        digest = hashlib.sha256()
        settings: list[object] = [models, vars(self), reader.mode]
        if _has_windows(reader):
            settings.append("without sinks")
        digest.update(json.dumps(settings).encode())
        for text in texts:
            digest.update(hashlib.sha256(text.encode()).digest())
        return digest.hexdigest()[:16]


class MomentsModule(LightningModule):
    """Adds the rows of each passage to the moments; there is nothing to optimise.

    A Lightning trainer drives it, so that devices, ranks and interruption are its business. It
    *predicts*: a strategy such as DDP wraps what it trains, and refuses what has no gradients.

    Args:
        reader: both models.
        layouts, code, moments: what is counted, and where.
        shared_only: count only rows at shared token boundaries.
        pairs: the passages.
        done: passages at the front of ``pairs`` that the moments hold already.
        batch_size: passages read at once.
        round_size: passages between two meetings of the ranks.
        read: told how many passages this rank has read.
        closed: told at each meeting how many passages all ranks have read since the last one;
            the moments are then those of all ranks.
    """

    def __init__(
        self,
        reader: PairReader,
        layouts: dict[Component, FeatureLayout],
        code: SourceCode | None,
        moments: dict[Component, Moments],
        shared_only: bool,
        pairs: Sequence[TokenPair] = (),
        done: int = 0,
        batch_size: int = 1,
        round_size: int = 32,
        read: Callable[[int], None] = lambda passages: None,
        closed: Callable[[int], None] = lambda passages: None,
    ) -> None:
        super().__init__()
        # A plain list keeps the frozen models out of the module's own parameters.
        self._reader = [reader]
        self.layouts, self.code, self.moments = layouts, code, moments
        self.shared_only, self.pairs, self.done = shared_only, pairs, done
        self.batch_size, self.round_size = batch_size, round_size
        self.read, self.closed = read, closed

    def setup(self, stage: str) -> None:
        """All ranks start where the first one stands, with its source code."""
        if self.trainer.world_size > 1:
            state = (self.code, self.done)
            code, self.done = self.trainer.strategy.broadcast(state)
            self.code = code and code.on(self._reader[0].content_device)

    def on_predict_start(self) -> None:
        """A run that is told to end has nothing to tidy up: what was saved is whole."""
        die_when_told()

    def predict_dataloader(self) -> DataLoader[Share]:
        """This rank's shares of what is left."""
        mine = shares(
            self.pairs[self.done :],
            rank=self.trainer.global_rank,
            ranks=self.trainer.world_size,
            batch_size=self.batch_size,
            round_size=self.round_size,
        )
        return DataLoader(_Stream(tuple(mine)), batch_size=None)

    # Lightning predicts in inference mode; moments outlive it and go on growing.
    @torch.inference_mode(False)
    @torch.no_grad()
    def predict_step(self, batch: Share, batch_idx: int) -> int:
        """Read one share with both models and count its rows; meet the others at a round's end.

        Returns:
            How many passages that were.
        """
        if batch.pairs:
            for trace in self._reader[0].read(batch.pairs):
                self.add(trace)
            self.read(len(batch.pairs))
        if batch.closes or batch.last:
            self._meet(batch)
        return len(batch.pairs)

    def _meet(self, share: Share) -> None:
        many = self.trainer.world_size > 1
        if many:
            add_up = partial(self.trainer.strategy.reduce, reduce_op="sum")
            for moments in self.moments.values():
                moments.reduce(add_up)
        self.closed(share.closes)
        # Between meetings the first rank keeps the whole, and the others what they add to it.
        if many and not share.last and not self.trainer.is_global_zero:
            for moments in self.moments.values():
                moments.clear()

    def transfer_batch_to_device(
        self, batch: Share, device: torch.device, dataloader_idx: int
    ) -> Share:
        """Token ids go to each model's own device when they are read."""
        return batch

    def add(self, trace: PairTrace) -> None:
        """Count the rows of one text: all, or those whose token ends where a source token ends.

        Sinks are left out: nothing in the source foretells which tokens the target makes one of.
        """
        inputs, tokens = trace.inputs(self.code), trace.target.tokens
        counted = counted_tokens(
            trace.target,
            inputs.alignment.exact,
            prefix=len(self._reader[0].target.sink_ids),
            shared_only=self.shared_only,
            windowed=_has_windows(self._reader[0]),
        )
        for component in COMPONENTS:
            content: dict[int, torch.Tensor] = getattr(trace.target, component)
            wanted = torch.cat([x[0].transpose(0, 1).flatten(1) for x in content.values()], dim=1)
            rows = inputs.rows(self.layouts[component].blocks, 0, tokens)
            self.moments[component].update(rows[counted], wanted[counted])


def collect_statistics(
    reader: PairReader,
    texts: Sequence[str],
    plan: CalibrationPlan,
    trainer: Trainer,
    folder: Path,
    batch_size: int = 1,
    save_every: int = 32,
    each: Callable[[int], None] = lambda passages: None,
) -> Statistics:
    """Moments of ``texts``, from ``folder`` where they are already there.

    Where only the first of them are, under whatever list of passages, those are not read again.
    The source code stays the one that was fitted to the shorter list, so moments that were extended
    differ a little from those of a fresh collection, whose code has seen other passages.

    Each rank of the trainer reads its share; the first one reads and writes the folder, and all
    return the same statistics.

    Args:
        folder: holds one folder a key; a partly collected one is taken up where it stopped.
        save_every: passages between two saves, where the ranks also meet.
        each: told on the first rank how many more passages are done, for a progress bar.

    Raises:
        InputError: no passage can be read.
    """
    if not texts:
        raise InputError("There is nothing to calibrate on.", fix="raise data.calibration_passages")
    layouts = plan.layouts(reader)
    pairs = [reader.tokenize(text, plan.passage_tokens) for text in texts]
    module = MomentsModule(
        reader,
        layouts,
        None,
        {c: empty_moments(reader, layouts[c]) for c in COMPONENTS},
        mostly_shared(pairs),
        pairs,
        batch_size=batch_size,
        round_size=save_every,
    )
    if trainer is None or trainer.is_global_zero:
        store = MomentsStore(folder, plan.key(reader, ()), reader.content_device)
        key = plan.key(reader, texts)
        with store.writing(key):
            _collect(module, store, key, [_digest(text) for text in texts], plan, trainer, each)
    else:
        _read(module, trainer)
    geometries = reader.source.geometry, reader.target.geometry
    return Statistics(*geometries, layouts, module.moments, module.code)


def is_collected(
    reader: PairReader, texts: Sequence[str], plan: CalibrationPlan, folder: Path
) -> bool:
    """Whether nothing is left to read for `collect_statistics`."""
    return MomentsStore(folder, "").done(plan.key(reader, texts)) >= len(texts)


def _collect(
    module: MomentsModule,
    store: MomentsStore,
    key: str,
    texts: Sequence[str],
    plan: CalibrationPlan,
    trainer: Trainer | None,
    each: Callable[[int], None],
) -> None:
    """On the first rank: go on from what is stored, and store what is read."""
    stored = store.find(key, texts, module.shared_only)
    if stored is None:
        module.code = source_code(module._reader[0], module.pairs, plan)
    else:
        module.code, module.moments, module.done = stored.code, stored.moments, len(stored.texts)
    told = done = module.done
    each(done)

    def read(passages: int) -> None:
        nonlocal told
        told += passages
        each(passages)

    def closed(passages: int) -> None:
        nonlocal told, done
        done += passages
        if done > told:  # what the other ranks have read
            each(done - told)
            told = done
        if passages:
            here = tuple(texts[:done])
            store.save(key, Collection(here, module.code, module.moments, module.shared_only))

    module.read, module.closed = read, closed
    if trainer is not None and (done < len(texts) or trainer.world_size > 1):
        _read(module, trainer)


def _read(module: MomentsModule, trainer: Trainer) -> None:
    with interruptible(trainer):
        trainer.predict(module, return_predictions=False)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def mostly_shared(pairs: Sequence[TokenPair]) -> bool:
    """Whether nearly all target tokens end at a source token's end."""
    exact = torch.cat([pair.alignment.exact for pair in pairs])
    return bool(exact.double().mean() >= MIN_SHARED)


class _Stream(IterableDataset[Share]):
    """Shares in their order: an iterable is what Lightning does not divide among ranks again."""

    def __init__(self, items: Sequence[Share]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Share]:
        return iter(self.items)


def source_code(
    reader: PairReader, pairs: Sequence[TokenPair], plan: CalibrationPlan
) -> SourceCode | None:
    """The source code of a few of the passages, or None where the plan wants none."""
    if plan.code_width == 0:
        return None
    samples: dict[Component, list[torch.Tensor]] = {c: [] for c in COMPONENTS}
    step = max(len(pairs) // CODE_PASSAGES, 1)
    for pair in list(pairs)[::step][:CODE_PASSAGES]:
        ids, mask = reader.source.batch([pair.source_ids])
        read = reader.source.prefill(ids, mask)
        content = reader.source.content(read).to(reader.content_device)
        for component in COMPONENTS:
            by_layer: dict[int, torch.Tensor] = getattr(content, component)
            flat = [x[0, :, 1::2].transpose(0, 1).flatten(1) for x in by_layer.values()]
            samples[component].append(torch.stack(flat))
    return fit_source_code(samples, plan.code_width, plan.seed)


def _has_windows(reader: PairReader) -> bool:
    return any(layer.window is not None for layer in reader.target.geometry.layers)


def empty_moments(reader: PairReader, layout: FeatureLayout) -> Moments:
    """Moments of one component, outputs in blocks of a target layer."""
    edges = [0, *torch.tensor(reader.target.geometry.widths).cumsum(0).tolist()]
    blocks = [slice(a, b) for a, b in pairwise(edges)]
    return Moments(layout.width, edges[-1], y_blocks=blocks, device=reader.content_device)
