"""Checks between settings: what each value alone cannot show. Cheap, and before anything loads."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from kvferry.app.binding import Mistake
from kvferry.app.memory import cache_shape
from kvferry.app.schema import STAGES, RunConfig
from kvferry.lm.sharding import DIVISIBLE, PACKAGES, indivisible

Check = Callable[[RunConfig], Iterator[Mistake]]


def installed(package: str) -> bool:
    """Whether a package could be imported."""
    return importlib.util.find_spec(package) is not None


def recall_span(cfg: RunConfig) -> Iterator[Mistake]:
    """The span that recall repeats lies inside the context, its prompt before it."""
    end = cfg.eval.recall_start + cfg.eval.recall_tokens
    if end > cfg.eval.context_tokens:
        yield Mistake(
            "eval.recall_tokens",
            f"the recalled span ends at token {end}, after the context's {cfg.eval.context_tokens}",
        )
    if cfg.eval.recall_prompt_tokens > cfg.eval.recall_start:
        yield Mistake(
            "eval.recall_prompt_tokens",
            f"only {cfg.eval.recall_start} tokens precede the recalled span (eval.recall_start)",
        )


def native_tail(cfg: RunConfig) -> Iterator[Mistake]:
    """A tail as long as the context would leave nothing to carry over."""
    if cfg.eval.native_tail >= cfg.eval.context_tokens:
        yield Mistake(
            "eval.native_tail",
            f"must be shorter than eval.context_tokens={cfg.eval.context_tokens}, "
            f"found {cfg.eval.native_tail}",
        )
    if "mapped_tail" in cfg.eval.conditions and cfg.eval.native_tail == 0:
        yield Mistake(
            "eval.conditions", "mapped_tail needs eval.native_tail of at least 1, found 0"
        )


def enough_text(cfg: RunConfig) -> Iterator[Mistake]:
    """Every context is cut from a held-out passage of its own."""
    if cfg.eval.contexts > cfg.data.held_out_passages:
        yield Mistake(
            "eval.contexts",
            f"{cfg.eval.contexts} contexts need as many held-out passages, "
            f"but data.held_out_passages={cfg.data.held_out_passages}",
        )


def conditions(cfg: RunConfig) -> Iterator[Mistake]:
    """Retention is a ratio to native and needs the zero floor."""
    missing = {"native", "zero"} - set(cfg.eval.conditions)
    if missing:
        names = ", ".join(sorted(missing))
        yield Mistake("eval.conditions", f"retention cannot be computed without {names}")
    if len(set(cfg.eval.conditions)) < len(cfg.eval.conditions):
        yield Mistake("eval.conditions", "names a condition twice")


def same_model(cfg: RunConfig) -> Iterator[Mistake]:
    """Identity copies a cache, so both models must be the same one."""
    controls = cfg.mapper.name == "identity" or "identity" in cfg.eval.conditions
    if controls and cfg.pair.source.name != cfg.pair.target.name:
        where = "mapper" if cfg.mapper.name == "identity" else "eval.conditions"
        yield Mistake(
            where,
            f"identity copies the cache unchanged, but {cfg.pair.source.name} and "
            f"{cfg.pair.target.name} differ; take a same-model pair such as pair=smollm2_smollm2",
        )


def stages(cfg: RunConfig) -> Iterator[Mistake]:
    """At least one stage, none twice."""
    if not cfg.stages or len(set(cfg.stages)) < len(cfg.stages):
        yield Mistake("stages", f"must name each of {', '.join(STAGES)} at most once, and one")


def data_files(cfg: RunConfig) -> Iterator[Mistake]:
    """The user's own files are there, and the data source has what it needs."""
    data = cfg.data
    if data.source == "text" and data.path is None:
        yield Mistake("data.path", "needs a value: data.path=FILE")
    if data.source == "hub" and data.dataset is None:
        yield Mistake("data.dataset", "needs a value: data.dataset=NAME")
    if data.mixed_domain and data.source != "wikipedia" and not data.out_of_domain:
        yield Mistake("data.mixed_domain", "there is nothing to mix in: set data.out_of_domain")
    named = [("data.path", data.path)] if data.path is not None else []
    named += [("data.questions", data.questions)] if data.questions is not None else []
    named += [(f"data.out_of_domain[{i}]", path) for i, path in enumerate(data.out_of_domain)]
    for key, path in named:
        if not Path(str(path)).expanduser().is_file():
            yield Mistake(key, f"there is no file {path}")


def model_sources(cfg: RunConfig) -> Iterator[Mistake]:
    """A full-size model has a place to come from."""
    for side, model in (("source", cfg.source), ("target", cfg.target)):
        if model.size == "full" and not (model.folder or model.wheel or model.hub):
            yield Mistake(f"pair.{side}", f"{model.name} names no folder, wheel or hub to load")


def sharding(cfg: RunConfig) -> Iterator[Mistake]:
    """There are devices to divide the models among, and what it takes is installed."""
    trainer = cfg.trainer
    if trainer.sharding == "none":
        return
    ranks = 1 if trainer.devices == "auto" and trainer.accelerator == "cpu" else trainer.devices
    if trainer.shares_models and ranks == 1:
        yield Mistake(
            "trainer.devices",
            f"sharding={trainer.sharding} divides the models among ranks, one a device: "
            "set the number of devices, or trainer.sharding=none",
        )
    if trainer.sharding == "device_map" and ranks not in (1, "auto"):
        yield Mistake(
            "trainer.devices",
            "sharding=device_map spreads the models from one process over all devices it sees: "
            "leave 1, and choose devices with CUDA_VISIBLE_DEVICES",
        )
    package = PACKAGES[trainer.sharding]
    if not installed(package):
        yield Mistake(
            "trainer.sharding",
            f"{trainer.sharding} needs {package}: pip install 'kvferry[distributed]'",
        )
    if trainer.source_device and trainer.target_device:
        yield Mistake(
            "trainer.sharding",
            "nothing is left to divide: source_device and target_device keep both models whole",
        )
    if trainer.sharding == "tensor_parallel" and isinstance(ranks, int):
        sides = ((cfg.source, trainer.source_device), (cfg.target, trainer.target_device))
        for model in dict.fromkeys(model for model, own in sides if own is None):
            shape = cache_shape(model)
            problem = shape and indivisible(model.name, shape.kv_heads, ranks)
            if problem:
                yield Mistake("trainer.sharding", f"{problem}; {DIVISIBLE}")


def own_devices(cfg: RunConfig) -> Iterator[Mistake]:
    """A device of its own is one that can be named, for one process."""
    trainer = cfg.trainer
    for key in ("source_device", "target_device"):
        named = getattr(trainer, key)
        if named is None:
            continue
        if not re.fullmatch(r"cpu|cuda:\d+", named):
            yield Mistake(f"trainer.{key}", f"must be cpu or cuda:NUMBER, found {named!r}")
        elif named != "cpu" and trainer.accelerator == "cpu":
            yield Mistake(f"trainer.{key}", f"{named} is no CPU, but trainer.accelerator=cpu")
        elif trainer.devices != 1 and not trainer.shares_models:
            yield Mistake(
                f"trainer.{key}",
                f"a copy of each model on each of devices={trainer.devices}: "
                "they cannot all lie on one device",
            )


def loggers(cfg: RunConfig) -> Iterator[Mistake]:
    """The packages behind the loggers are installed."""
    for name, package in (("wandb", "wandb"), ("tensorboard", "tensorboard")):
        if getattr(cfg.logger, name) and not installed(package):
            yield Mistake("logger", f"{name} is not installed: pip install 'kvferry[tracking]'")


CHECKS: tuple[Check, ...] = (
    stages,
    recall_span,
    native_tail,
    enough_text,
    conditions,
    same_model,
    data_files,
    model_sources,
    sharding,
    own_devices,
    loggers,
)


def check(cfg: RunConfig) -> list[Mistake]:
    """Every mistake that the checks find, in their order."""
    return [mistake for rule in CHECKS for mistake in rule(cfg)]
