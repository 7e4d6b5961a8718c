"""`kvferry turns`: a conversation handed back and forth by the mappers of two opposite runs."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from kvferry.app.corpora import load_corpora
from kvferry.app.folder import CONFIG, MAPPER, REPORT, ROWS, load_config
from kvferry.app.models import cache_folder, load_handoff, load_reader, versions
from kvferry.app.progress import progress
from kvferry.app.schema import RunConfig, to_plain
from kvferry.calibration.reader import PairReader
from kvferry.errors import ConfigurationError
from kvferry.evals.multi_turn import ConversationShape, MultiTurn
from kvferry.evals.rows import multi_turn_rows
from kvferry.lm.store import cache_root, new_folder
from kvferry.mappers.artefact import Manifest, ModelIdentity, read_manifest
from kvferry.results.report import write_report
from kvferry.results.rows import ResultRow, read_rows, write_rows
from kvferry.results.tables import print_tables


@dataclass(frozen=True)
class TurnsRequest:
    """Two runs and the conversations that they are to hand over.

    Attributes:
        there, back: run folders of opposite directions; the source of ``there`` starts.
        configs, manifests: of both, in that order.
        shape: of the conversations.
        contexts: how many of them, each from a passage that neither run was fitted on.
        out: folder for rows, report and figure.
    """

    there: Path
    back: Path
    configs: tuple[RunConfig, RunConfig]
    manifests: tuple[Manifest, Manifest]
    shape: ConversationShape
    contexts: int
    out: Path

    @classmethod
    def create(
        cls,
        there: Path,
        back: Path,
        *,
        turns: int,
        contexts: int,
        first_tokens: int,
        turn_tokens: int,
        out: Path | None,
    ) -> TurnsRequest:
        """Look at both runs; nothing is loaded.

        Raises:
            ArtefactError: a run holds no mapper.
            ConfigurationError: not run folders, or not opposite directions of one pair.
            InputError: turns that cannot be cut or scored.
        """
        runs = there.expanduser(), back.expanduser()
        configs = load_config(runs[0]), load_config(runs[1])
        manifests = read_manifest(runs[0] / MAPPER), read_manifest(runs[1] / MAPPER)
        _require_opposite(*manifests)
        asked = configs[0].eval
        shape = ConversationShape(
            turns=turns,
            first_tokens=first_tokens,
            turn_tokens=turn_tokens,
            recall_start=asked.recall_start,
            recall_tokens=asked.recall_tokens,
            recall_prompt_tokens=asked.recall_prompt_tokens,
        )
        named = [m.weights_sha256 for m in manifests], asdict(shape), contexts, configs[0].seed
        digest = hashlib.sha256(json.dumps(named).encode()).hexdigest()[:10]
        place = runs[0].parent / f"{configs[0].pair.name}-turns-{digest}"
        return cls(*runs, configs, manifests, shape, contexts, out or place)


def turns(request: TurnsRequest, console: Console, *, force: bool = False) -> Path:
    """Measure every turn, write the folder whole, and show the tables.

    Args:
        force: measure again what is there already.

    Returns:
        The folder.

    Raises:
        ConfigurationError: too few passages that neither run was fitted on.
        InputError: a passage is too short.
        StorageError: the folder cannot be written.
    """
    rows_file = request.out / ROWS
    if rows_file.is_file() and not force:
        print_tables(read_rows(rows_file), console)
        console.print(f"Already measured: {request.out} (--force measures again)", markup=False)
        return request.out
    rows = measure(request)
    settings = _settings(request)
    cfg = request.configs[0]
    with new_folder(request.out) as folder:
        write_rows(folder / ROWS, rows)
        (folder / CONFIG).write_text(settings)
        write_report(
            folder / REPORT,
            rows,
            config_yaml=settings,
            versions=versions(),
            title=f"{cfg.source.name} and {cfg.target.name} in turns, {cfg.mapper.name}",
        )
        shutil.rmtree(request.out, ignore_errors=True)
    print_tables(rows, console)
    console.print(f"Done. {request.out / REPORT}", markup=False, soft_wrap=True)
    return request.out


def measure(request: TurnsRequest) -> list[ResultRow]:
    """Load both models and mappers and score the conversations, one after another."""
    cfg, way_back = request.configs
    split, texts = _texts(request)
    reader = load_reader(cfg)
    there, stamp = load_handoff(cfg, request.there, reader)
    turned = PairReader(reader.target, reader.source)
    back, back_stamp = load_handoff(way_back, request.back, turned)
    stamp = replace(
        stamp,
        mapper=" and ".join(dict.fromkeys((stamp.mapper, back_stamp.mapper))),
        mapper_hash=f"{stamp.mapper_hash}+{back_stamp.mapper_hash}",
    )
    bench = MultiTurn(there, back, request.shape)
    with progress("hand over", len(texts) * request.shape.turns) as step:
        scored = [bench.score(text, step) for text in texts]
    draws = cfg.eval.bootstrap_resamples
    return multi_turn_rows(stamp, scored, request.shape, split=split, draws=draws)


def _texts(request: TurnsRequest) -> tuple[str, list[str]]:
    """The name of the first run's domain, and passages that neither run was fitted on."""
    corpora = [load_corpora(cfg, cache_root(cache_folder(cfg))) for cfg in request.configs]
    seen = {*corpora[1].calibration, *corpora[1].selection}
    unseen = [text for text in corpora[0].held_out if text not in seen]
    if len(unseen) < request.contexts:
        raise ConfigurationError(
            "There are too few passages that neither run was fitted on.",
            found=f"{len(unseen)} held out by both",
            expected=f"{request.contexts} conversations",
            fix="lower --contexts, or name two runs on the same text",
        )
    return corpora[0].domain, unseen[: request.contexts]


def _require_opposite(there: Manifest, back: Manifest) -> None:
    def known(model: ModelIdentity) -> tuple[str, str, str]:
        return model.geometry, model.revision, model.tokenizer

    if (known(back.source), known(back.target)) != (known(there.target), known(there.source)):
        raise ConfigurationError(
            "The second run is not the way back of the first.",
            found=f"{_told(back.source)} to {_told(back.target)}",
            expected=f"{_told(there.target)} to {_told(there.source)}",
            fix="name a run of the opposite pair, fitted to the same revisions",
        )


def _told(model: ModelIdentity) -> str:
    return f"{model.name} ({model.revision[:16]})"


def _settings(request: TurnsRequest) -> str:
    values: dict[str, Any] = {
        "turns": {**asdict(request.shape), "contexts": request.contexts},
        "there": to_plain(request.configs[0]),
        "back": to_plain(request.configs[1]),
    }
    text: str = OmegaConf.to_yaml(OmegaConf.create(values))
    return text
