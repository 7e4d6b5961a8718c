"""The models and the fitted mapper of a run, ready to use."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

import kvferry
from kvferry.app.folder import MAPPER
from kvferry.app.schema import RunConfig
from kvferry.calibration.reader import PairReader
from kvferry.handoff.handoff import Handoff
from kvferry.lm.loading import load_language_model
from kvferry.mappers.artefact import load_mapper
from kvferry.results.rows import RowStamp


def load_reader(cfg: RunConfig, rank: int = 0) -> PairReader:
    """Both models of a run, ready to read; each rank has a device of its own."""
    if cfg.trainer.threads is not None:
        torch.set_num_threads(cfg.trainer.threads)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = f"cuda:{rank}" if rank and device_name(cfg) == "cuda" else device_name(cfg)

    def load(spec: Any) -> Any:
        return load_language_model(
            spec,
            cache_dir=cache_folder(cfg),
            dtype=cfg.trainer.model_dtype,
            device=device,
            seed=cfg.seed,
        )

    source = load(cfg.source)
    same = cfg.source == cfg.target
    return PairReader(source, source if same else load(cfg.target))


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
        device=f"{reader.target.device.type}, {torch.get_num_threads()} threads",
        dtype=f"model {cfg.trainer.model_dtype}, map {str(dtype).removeprefix('torch.')}",
        config_hash=cfg.config_hash,
        git_commit=git_commit(),
    )
    return handoff, stamp


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
