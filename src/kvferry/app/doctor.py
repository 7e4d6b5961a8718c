"""`kvferry doctor`: what is installed, cached and missing, and what this machine can run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from kvferry.app.binding import bind
from kvferry.app.folder import latest
from kvferry.app.paths import conf_dir
from kvferry.lm.cache_limit import BOUNDED, VARIABLE, cache_limit_bytes, entries
from kvferry.lm.convert import converted_path
from kvferry.lm.sources import ModelSpec
from kvferry.lm.store import MANIFEST, cache_root

Where = Literal["folder", "cached", "wheel", "hub", "nowhere"]

_NAME = re.compile(r"^([A-Za-z0-9._-]+)")
_HEADROOM = 1.25
"""Weights, and a quarter more for caches, activations and the fit."""


@dataclass(frozen=True)
class Package:
    """A package this project names: the version found, and the tested one."""

    name: str
    found: str | None
    tested: str | None
    optional: bool


@dataclass(frozen=True)
class Model:
    """A model of `conf/model`, and where its weights are now."""

    key: str
    name: str
    parameters: int
    where: Where
    download_bytes: int
    licence: str


@dataclass(frozen=True)
class Pair:
    """A pair of `conf/pair`, and the memory that its weights take."""

    name: str
    weight_bytes: int
    fits: bool
    ready: bool


@dataclass(frozen=True)
class Machine:
    """What there is to compute with; the type of the weights follows from it."""

    python: str
    system: str
    cores: int
    memory_bytes: int
    free_memory_bytes: int
    gpu: str | None
    gpu_bytes: int
    dtype: str


@dataclass(frozen=True)
class Report:
    """The whole examination."""

    machine: Machine
    packages: tuple[Package, ...]
    cache: str
    cache_bytes: dict[str, int]
    cache_free_bytes: int
    cache_limit_bytes: int
    cache_bounded_bytes: int
    models: tuple[Model, ...]
    pairs: tuple[Pair, ...]
    next_step: str


def examine(cache: Path | None = None) -> Report:
    """Look at everything; fetches and loads nothing.

    Args:
        cache: the cache folder; by default the one that a run would use.
    """
    root = cache_root(cache)
    machine = _machine()
    packages = tuple(_packages())
    models = tuple(_model(path, cache) for path in sorted((conf_dir() / "model").glob("*.yaml")))
    pairs = tuple(_pairs({model.key: model for model in models}, machine))
    return Report(
        machine=machine,
        packages=packages,
        cache=str(root),
        cache_bytes=_sizes(root),
        cache_limit_bytes=cache_limit_bytes(),
        cache_bounded_bytes=sum(entry.bytes for entry in entries(root)),
        cache_free_bytes=shutil.disk_usage(_existing(root)).free,
        models=models,
        pairs=pairs,
        next_step=_next_step(packages, pairs),
    )


def to_json(report: Report) -> str:
    """The report for programs."""
    return json.dumps(asdict(report), indent=2)


def show(report: Report, console: Console) -> None:
    """The report for people."""
    machine = report.machine
    gpu = f"{machine.gpu}, {_size(machine.gpu_bytes)}" if machine.gpu else "no GPU"
    console.print(
        f"[bold]machine[/]    Python {machine.python}, {machine.system}, {machine.cores} cores, "
        f"{_size(machine.memory_bytes)} of memory ({_size(machine.free_memory_bytes)} free), {gpu}",
        highlight=False,
        soft_wrap=True,
    )
    wrong = [p for p in report.packages if p.found != (p.tested or p.found) or p.found is None]
    console.print(
        f"[bold]installed[/]  {sum(p.found is not None for p in report.packages)} of "
        f"{len(report.packages)} packages, {len(wrong)} other than tested",
        highlight=False,
    )
    if wrong:
        table = _table("package", "found", "tested", "")
        for package in wrong:
            needed = "optional" if package.optional else "[bold red]needed[/]"
            table.add_row(
                package.name, package.found or "-", package.tested or "any", needed if
                package.found is None else ""
            )  # fmt: skip
        console.print(table)
    console.print(
        f"[bold]cache[/]      {report.cache} ({_size(report.cache_free_bytes)} free on its disk)",
        highlight=False,
        soft_wrap=True,
    )
    for name, held in report.cache_bytes.items():
        console.print(f"           {name}: {_size(held)}", highlight=False)
    console.print(
        f"           limit of {' and '.join(BOUNDED)}: {_size(report.cache_limit_bytes)} "
        f"({VARIABLE}), {_size(report.cache_bounded_bytes)} held; `kvferry clean` frees some",
        highlight=False,
        soft_wrap=True,
    )
    here = [model for model in report.models if model.where in ("folder", "cached")]
    wheels = [model for model in report.models if model.where == "wheel"]
    for label, members in (("models", here), ("to fetch", wheels)):
        for model in members:
            size = f", {_size(model.download_bytes)} to fetch" if members is wheels else ""
            console.print(
                f"[bold]{label:<10}[/] {model.name} ({model.licence}{size})", highlight=False
            )
    others = sum(model.where == "hub" for model in report.models)
    console.print(f"[bold]hub[/]        {others} more models need the hub", highlight=False)
    table = _table("pair", f"weights in {machine.dtype}", "here")
    for pair in (pair for pair in report.pairs if pair.fits):
        verdict = "[green]ready[/]" if pair.ready else "to fetch"
        table.add_row(pair.name, _size(pair.weight_bytes), verdict)
    console.print(table)
    large = sorted(pair.weight_bytes for pair in report.pairs if not pair.fits)
    if large:
        console.print(
            f"{len(large)} more pairs need {_size(large[0])} to {_size(large[-1])} for their "
            "weights; size=pico runs every pair anywhere.",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"[bold]next[/]       {report.next_step}", highlight=False, soft_wrap=True)


def _packages() -> Iterator[Package]:
    pins = _pins(conf_dir().parent / "constraints.txt")
    seen: set[str] = set()
    for requirement in importlib.metadata.requires("kvferry") or []:
        match = _NAME.match(requirement)
        if match is None or match.group(1) in seen:
            continue
        name = match.group(1)
        seen.add(name)
        try:
            # A local label such as +cpu names the build, not the version.
            found = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found = None
        yield Package(name, found, pins.get(_canonical(name)), "extra ==" in requirement)


def _pins(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    pairs = (line.split("==", 1) for line in lines if "==" in line)
    return {_canonical(name): version.split(";")[0].strip() for name, version in pairs}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _model(path: Path, cache: Path | None) -> Model:
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    spec = bind(ModelSpec, values, [])  # type: ignore[arg-type]
    if spec is None:
        return Model(path.stem, path.stem, 0, "nowhere", 0, "unknown")
    wheel_bytes = spec.wheel.bytes if spec.wheel else 0
    return Model(
        path.stem, spec.name, spec.parameters, _where(spec, cache), wheel_bytes, spec.licence
    )


def _where(spec: ModelSpec, cache: Path | None) -> Where:
    if spec.folder is not None:
        return "folder" if Path(spec.folder).expanduser().is_dir() else "nowhere"
    if spec.wheel is not None:
        there = (converted_path(spec.wheel, cache_dir=cache) / MANIFEST).exists()
        return "cached" if there else "wheel"
    if spec.hub is not None:
        from huggingface_hub.constants import HF_HUB_CACHE

        snapshots = Path(HF_HUB_CACHE) / f"models--{spec.hub.replace('/', '--')}" / "snapshots"
        return "cached" if any(snapshots.glob("*/*.safetensors")) else "hub"
    return "nowhere"


def _pairs(models: dict[str, Model], machine: Machine) -> Iterator[Pair]:
    width = 2 if machine.dtype == "bfloat16" else 4
    room = machine.gpu_bytes if machine.gpu else machine.memory_bytes
    for path in sorted((conf_dir() / "pair").glob("*.yaml")):
        loaded = OmegaConf.to_container(OmegaConf.load(path))
        defaults = loaded.get("defaults", []) if isinstance(loaded, dict) else []
        choices = [choice for default in defaults for choice in default.values()]
        sides = [models.get(str(choice)) for choice in choices]
        known = [side for side in sides if side is not None]
        # One model on both sides is loaded once.
        size = sum(model.parameters * width for model in {m.key: m for m in known}.values())
        fits = size * _HEADROOM <= room
        ready = fits and all(model.where in ("folder", "cached") for model in known)
        yield Pair(path.stem, size, fits, ready)


def _machine() -> Machine:
    memory = psutil.virtual_memory()
    gpu, gpu_bytes = _gpu()
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory_bytes=memory.total,
        free_memory_bytes=memory.available,
        gpu=gpu,
        gpu_bytes=gpu_bytes,
        dtype="bfloat16" if gpu else "float32",
    )


def _gpu() -> tuple[str | None, int]:
    try:
        import torch
    except ImportError:
        return None, 0
    if not torch.cuda.is_available():
        return None, 0
    sizes = [torch.cuda.get_device_properties(i).total_memory
             for i in range(torch.cuda.device_count())]  # fmt: skip
    return f"{len(sizes)} x {torch.cuda.get_device_name(0)}", max(sizes)


def _next_step(packages: tuple[Package, ...], pairs: tuple[Pair, ...]) -> str:
    missing = [package.name for package in packages if not package.optional and not package.found]
    if missing:
        return f"pip install {' '.join(missing)} (or: make demo)"
    if latest(Path("outputs"), holding="mapper") is not None:
        return 'kvferry ask --document FILE "your question"   (uses the latest run below outputs)'
    if any(pair.ready for pair in pairs):
        return "python run.py   (models are cached)"
    return "make demo   (fetches the two small models, then runs)"


def _sizes(root: Path) -> dict[str, int]:
    if not root.is_dir():
        return {}
    return {
        path.name: sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for path in sorted(root.iterdir())
        if path.is_dir()
    }


def _existing(path: Path) -> Path:
    return next((p for p in (path, *path.parents) if p.exists()), Path("/"))


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"


def _table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for head in heads:
        table.add_column(head, overflow="fold")
    return table
