"""Collect the moments of a pair over a calibration text, resumably."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from pytorch_lightning import LightningModule, Trainer
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, Dataset

from kvferry.calibration.code import fit_source_code
from kvferry.calibration.reader import PairReader, PairTrace, TokenPair
from kvferry.errors import InputError
from kvferry.lm.store import new_folder
from kvferry.mappers.base import Statistics
from kvferry.mappers.inputs import SourceCode
from kvferry.mappers.layout import COMPONENTS, Component, FeatureLayout, component_layout
from kvferry.mappers.observation import MIN_SHARED
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
        source, target = reader.source.geometry, reader.target.geometry
        return {
            component: component_layout(
                component,
                source,
                target,
                code_width=min(self.code_width, sum(source.widths)),
                anchor_context=self.anchor_context,
                native_layers=min(self.native_layers, len(target.layers)),
                reads=2 if reader.mode == "owner_previous" else 1,
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
        digest.update(json.dumps([models, vars(self), reader.mode]).encode())
        for text in texts:
            digest.update(hashlib.sha256(text.encode()).digest())
        return digest.hexdigest()[:16]


class MomentsModule(LightningModule):
    """Adds the rows of each passage to the moments; there is nothing to optimise.

    A Lightning trainer drives it, so that devices, progress and interruption are its business.
    """

    def __init__(
        self,
        reader: PairReader,
        layouts: dict[Component, FeatureLayout],
        code: SourceCode | None,
        moments: dict[Component, Moments],
        shared_only: bool,
        finished: Callable[[int], None] = lambda passages: None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        # A plain list keeps the frozen models out of the module's own parameters.
        self._reader = [reader]
        self.layouts, self.code, self.moments = layouts, code, moments
        self.shared_only, self.finished = shared_only, finished

    @torch.no_grad()
    def training_step(self, batch: list[TokenPair], batch_idx: int) -> None:
        """Read one batch of texts with both models and count its rows."""
        for trace in self._reader[0].read(batch):
            self.add(trace)
        self.finished(len(batch))

    def transfer_batch_to_device(
        self, batch: list[TokenPair], device: torch.device, dataloader_idx: int
    ) -> list[TokenPair]:
        """Token ids go to each model's own device when they are read."""
        return batch

    def add(self, trace: PairTrace) -> None:
        """Count the rows of one text: all, or those whose token ends where a source token ends."""
        inputs, tokens = trace.inputs(self.code), trace.target.tokens
        exact = trace.tokens.alignment.exact
        counted = exact.clone() if self.shared_only else torch.ones_like(exact)
        # The prefix stays native, and the first token after it has no left context to tell of.
        counted[: len(self._reader[0].target.sink_ids) + 1] = False
        for component in COMPONENTS:
            content: dict[int, torch.Tensor] = getattr(trace.target, component)
            wanted = torch.cat([x[0].transpose(0, 1).flatten(1) for x in content.values()], dim=1)
            rows = inputs.rows(self.layouts[component].blocks, 0, tokens)
            self.moments[component].update(rows[counted], wanted[counted])

    def configure_optimizers(self) -> None:
        """None: closed form."""


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

    Args:
        folder: holds one folder a key; a partly collected one is taken up where it stopped.
        save_every: passages between two saves.
        each: told how many more passages are done, for a progress bar.

    Raises:
        InputError: no passage can be read.
    """
    if not texts:
        raise InputError("There is nothing to calibrate on.", fix="raise data.calibration_passages")
    layouts = plan.layouts(reader)
    place = folder / plan.key(reader, texts)
    pairs = [reader.tokenize(text, plan.passage_tokens) for text in texts]
    if (place / "progress.json").exists():
        code, moments, done = _load(place)
    else:
        code = source_code(reader, pairs, plan)
        moments, done = {c: empty_moments(reader, layouts[c]) for c in COMPONENTS}, 0
    each(done)
    saved = done

    def finished(passages: int) -> None:
        nonlocal done, saved
        done += passages
        each(passages)
        if done - saved >= save_every or done == len(pairs):
            _save(place, code, moments, done)
            saved = done

    if done < len(pairs):
        module = MomentsModule(reader, layouts, code, moments, mostly_shared(pairs), finished)
        rest = _Texts(pairs[done:])
        with _interruptible(trainer):
            trainer.fit(module, DataLoader(rest, batch_size=batch_size, collate_fn=list))
    return Statistics(reader.source.geometry, reader.target.geometry, layouts, moments, code)


@contextmanager
def _interruptible(trainer: Trainer) -> Iterator[None]:
    """Ctrl-C arrives as KeyboardInterrupt: Lightning would exit, with ctrl-C switched off."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as stop:
        if not trainer.interrupted:
            raise
        raise KeyboardInterrupt from stop
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


def mostly_shared(pairs: Sequence[TokenPair]) -> bool:
    """Whether nearly all target tokens end at a source token's end."""
    exact = torch.cat([pair.alignment.exact for pair in pairs])
    return bool(exact.double().mean() >= MIN_SHARED)


class _Texts(Dataset[TokenPair]):
    """Tokenised passages as Lightning wants them."""

    def __init__(self, pairs: Sequence[TokenPair]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> TokenPair:
        return self.pairs[index]


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
        content = reader.source.content(reader.source.prefill(ids, mask))
        for component in COMPONENTS:
            by_layer: dict[int, torch.Tensor] = getattr(content, component)
            flat = [x[0, :, 1::2].transpose(0, 1).flatten(1) for x in by_layer.values()]
            samples[component].append(torch.stack(flat))
    return fit_source_code(samples, plan.code_width, plan.seed)


def empty_moments(reader: PairReader, layout: FeatureLayout) -> Moments:
    """Moments of one component, outputs in blocks of a target layer."""
    edges = [0, *torch.tensor(reader.target.geometry.widths).cumsum(0).tolist()]
    blocks = [slice(a, b) for a, b in pairwise(edges)]
    return Moments(layout.width, edges[-1], y_blocks=blocks, device=reader.target.device)


def _save(
    place: Path, code: SourceCode | None, moments: dict[Component, Moments], done: int
) -> None:
    with new_folder(place) as temporary:
        for component in COMPONENTS:
            save_file(moments[component].state_dict(), temporary / f"{component}.safetensors")
        if code is not None:
            tensors = {str(c): p.contiguous() for c, p in code.projection.items()}
            save_file(tensors, temporary / "code.safetensors")
        (temporary / "progress.json").write_text(json.dumps({"passages": done}))
        shutil.rmtree(place, ignore_errors=True)


def _load(place: Path) -> tuple[SourceCode | None, dict[Component, Moments], int]:
    moments = {
        c: Moments.from_state_dict(load_file(place / f"{c}.safetensors")) for c in COMPONENTS
    }
    stored = place / "code.safetensors"
    projection = load_file(stored) if stored.exists() else None
    code = None if projection is None else SourceCode({c: projection[c] for c in COMPONENTS})
    done = int(json.loads((place / "progress.json").read_text())["passages"])
    return code, moments, done
