"""The models and the fitted mapper of a run, ready to use."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch
import transformers

import kvferry
from kvferry.app.folder import MAPPER
from kvferry.app.ranks import companions
from kvferry.app.schema import RunConfig
from kvferry.calibration.ranks import Rank
from kvferry.calibration.reader import PairReader
from kvferry.handoff.handoff import Handoff
from kvferry.lm.loading import load_language_model
from kvferry.lm.model import LanguageModel
from kvferry.lm.rank_group import RankGroup, joined
from kvferry.lm.sources import ModelSpec
from kvferry.mappers.artefact import load_mapper
from kvferry.results.rows import RowStamp


@contextmanager
def open_reader(cfg: RunConfig, folder: Path, device: str | None = None) -> Iterator[PairReader]:
    """Both models of a run, for the block's length; with other ranks, where they share them.

    Args:
        folder: the run's, which the other ranks read their settings from.
        device: of the content that is read, where it is not the target's.

    Raises:
        RankError: another rank has failed.
    """
    with companions(folder, rank_count(cfg) if cfg.trainer.shares_models else 1) as rank:
        if rank is None:
            yield load_reader(cfg, device=device)
            return
        with joined(rank.index, rank.count, rank.port, rank_device(cfg, rank.index)) as group:
            yield load_reader(cfg, group=group, device=device)


def share_models(cfg: RunConfig, rank: Rank, ready: Callable[[], None]) -> None:
    """What a further rank does where ranks hold the models together: its part of each pass.

    Args:
        ready: called when the first rank may begin to load.
    """
    device = rank_device(cfg, rank.index)
    torch.empty(0, device=device)  # a device that is not here must show before the others wait
    ready()
    with joined(rank.index, rank.count, rank.port, device) as group:
        _load_models(cfg, rank.index, group)
        group.follow()


def load_reader(
    cfg: RunConfig, rank: int = 0, group: RankGroup | None = None, device: str | None = None
) -> PairReader:
    """Both models of a run, ready to read; each rank has a device of its own.

    Args:
        group: the ranks that hold them together, where the settings want it.
        device: as in `open_reader`.
    """
    models = _load_models(cfg, rank, group)
    source, target = (models[side] for side in _sides(cfg))
    return PairReader(source, target, device=None if device is None else torch.device(device))


def _sides(cfg: RunConfig) -> list[tuple[ModelSpec, str | None]]:
    """Source and target, each with the device that it has for itself."""
    return [(cfg.source, cfg.trainer.source_device), (cfg.target, cfg.trainer.target_device)]


def _load_models(
    cfg: RunConfig, rank: int, group: RankGroup | None
) -> dict[tuple[ModelSpec, str | None], LanguageModel]:
    """The models in which a rank has a part, one on both sides once."""
    if cfg.trainer.threads is not None:
        torch.set_num_threads(cfg.trainer.threads)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # Whole models first: what is spread over devices takes the room that is left.
    sides = sorted(dict.fromkeys(_sides(cfg)), key=lambda side: side[1] is None)
    return {
        (spec, own): load_language_model(
            spec,
            cache_dir=cache_folder(cfg),
            dtype=cfg.trainer.model_dtype,
            device=own or str(rank_device(cfg, rank)),
            seed=cfg.seed,
            sharding="none" if own else cfg.trainer.sharding,
            group=group,
        )
        for spec, own in sides
        if own is None or rank == 0
    }


def load_handoff(
    cfg: RunConfig, folder: Path, reader: PairReader, map_dtype: torch.dtype | None = None
) -> tuple[Handoff, RowStamp]:
    """The fitted mapper of a run, ready to carry caches, and the stamp of its rows."""
    mapper, manifest = load_mapper(folder / MAPPER, reader.source, reader.target)
    dtype = product_dtype(cfg) if map_dtype is None else map_dtype
    handoff = Handoff(
        reader,
        mapper.with_precision(dtype),
        mapper_name=manifest.method,
        mapper_hash=manifest.short_hash,
    )
    stamp = RowStamp(
        pair=cfg.pair.name,
        source=cfg.source.name,
        target=cfg.target.name,
        mapper=cfg.mapper.name,
        mapper_hash=manifest.short_hash,
        seed=cfg.seed,
        device=f"{reader.target.device.type}, {torch.get_num_threads()} threads{_shares(cfg)}",
        dtype=f"model {cfg.trainer.model_dtype}, map {str(dtype).removeprefix('torch.')}",
        config_hash=cfg.config_hash,
        git_commit=git_commit(),
    )
    return handoff, stamp


def _shares(cfg: RunConfig) -> str:
    """How the models are held, where it is not on one device."""
    if cfg.trainer.sharding == "none":
        return ""
    ranks = f" over {rank_count(cfg)} ranks" if cfg.trainer.shares_models else ""
    return f", {cfg.trainer.sharding}{ranks}"


def product_dtype(cfg: RunConfig) -> torch.dtype:
    """Number format of the mapper's products on this machine."""
    if cfg.trainer.map_dtype != "auto":
        named: torch.dtype = getattr(torch, cfg.trainer.map_dtype)
        return named
    on_gpu = device_name(cfg) == "cuda"
    fast = on_gpu or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def cache_folder(cfg: RunConfig) -> Path | None:
    """The cache that the settings name; None leaves it to the environment."""
    return None if cfg.cache is None else Path(cfg.cache).expanduser()


def device_name(cfg: RunConfig) -> str:
    """ "cuda" or "cpu", as settings and machine have it."""
    wants_gpu = cfg.trainer.accelerator == "gpu" or (
        cfg.trainer.accelerator == "auto" and torch.cuda.is_available()
    )
    return "cuda" if wants_gpu else "cpu"


def rank_device(cfg: RunConfig, rank: int) -> torch.device:
    """The device of a rank."""
    name = device_name(cfg)
    return torch.device(name, rank) if rank and name == "cuda" else torch.device(name)


def rank_count(cfg: RunConfig) -> int:
    """Processes that read together: one a device."""
    if cfg.trainer.devices != "auto":
        return cfg.trainer.devices
    return torch.cuda.device_count() if device_name(cfg) == "cuda" else 1


def git_commit() -> str:
    """Commit of this checkout, or the version where there is none."""
    root = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else f"v{kvferry.__version__}"


def versions() -> dict[str, str]:
    """What the numbers of a report were made with."""
    return {
        "kvferry": kvferry.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "pytorch-lightning": version("pytorch-lightning"),
        "platform": platform.platform(),
    }
