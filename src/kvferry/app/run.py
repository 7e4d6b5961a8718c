"""The main job: words on a command line to run folders. Heavy imports wait until a run starts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import hydra
from omegaconf import DictConfig, OmegaConf

from kvferry.app import arguments
from kvferry.app.arguments import Arguments
from kvferry.app.binding import Mistake
from kvferry.app.compose import (
    CONFIG_NAME,
    HYDRA_VERSION_BASE,
    compose,
    from_values,
    raise_if_any,
    survey,
)
from kvferry.app.paths import conf_dir
from kvferry.app.schema import RunConfig
from kvferry.errors import ConfigurationError, KVFerryError

WRONG_SETTINGS = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the words describe.

    Returns:
        Exit code: 0 done, 1 failed, 2 wrong settings, 130 interrupted.
    """
    return guarded(lambda: _main(arguments.split(sys.argv[1:] if argv is None else argv)))


def guarded(action: Callable[[], int]) -> int:
    """Turn what an action raises into a message and an exit code."""
    try:
        return action()
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return WRONG_SETTINGS
    except KVFerryError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def execute(cfg: RunConfig) -> int:
    """Run one configuration in its folder; returns the exit code."""
    if cfg.plan:
        from kvferry.app.stages import describe_plan

        print("\n".join(describe_plan(cfg)))
        return 0
    from kvferry.app import pipeline
    from kvferry.app.stages import run_stages

    return run_stages(
        cfg,
        {"fit": pipeline.fit, "evaluate": pipeline.evaluate, "report": pipeline.report},
    )


def _main(args: Arguments) -> int:
    if args.needs_no_check:
        return _hand_to_hydra(args)
    if args.multirun:
        return _grid(args)
    cfg = compose(args.overrides, deep=not args.only_shows)
    return _hand_to_hydra(args) if args.only_shows else execute(cfg)


def job(composed: DictConfig) -> int:
    """One job of a grid, as Hydra's launchers call it, perhaps in another process."""
    values = OmegaConf.to_container(composed, resolve=True)
    mistakes: list[Mistake] = []
    assert isinstance(values, dict)
    cfg = from_values({str(key): value for key, value in values.items()}, mistakes)
    raise_if_any(mistakes)
    assert cfg is not None
    return execute(cfg)


def _grid(args: Arguments) -> int:
    configs = survey(args.overrides, deep=True)
    code = _hand_to_hydra(args)
    if code or any(cfg.plan for cfg in configs):
        return code
    from rich.console import Console

    from kvferry.app.grid import summarise

    return summarise(configs, Console())


def _hand_to_hydra(args: Arguments) -> int:
    """Let Hydra answer `--help` and `--cfg`, or launch a grid."""
    conf = conf_dir()
    parsed = arguments.parse(args.overrides, [])
    words = [arguments.forced(override, conf) for override in parsed]
    before = sys.argv
    sys.argv = [before[0], *args.options, *words]
    try:
        launch = hydra.main(
            version_base=HYDRA_VERSION_BASE, config_path=str(conf), config_name=CONFIG_NAME
        )
        launch(job)()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        sys.argv = before
    return 0
