"""One more rank of a run: `python -m kvferry.app.worker FOLDER INDEX COUNT PORT`."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from kvferry.app.calibrate import collect_share
from kvferry.app.folder import load_config
from kvferry.app.models import share_models
from kvferry.app.ranks import READY
from kvferry.calibration.ranks import Rank
from kvferry.errors import KVFerryError


def main(folder: str, index: str, count: str, port: str) -> None:
    """Read this rank's passages, or run its part of the models, and end with the run."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank = Rank(int(index), int(count), int(port))
    try:
        cfg = load_config(Path(folder))
        part = share_models if cfg.trainer.shares_models else collect_share
        part(cfg, rank, _say_ready)
    except KVFerryError as error:
        # The last line is what the first process tells.
        print(f"{error}\n{error.problem}", file=sys.stderr)
        sys.exit(1)


def _say_ready() -> None:
    print(READY, flush=True)
    os.dup2(2, 1)


def _end_with_parent() -> None:
    # Not through sys.stdin, whose lock a thread may not hold when the interpreter ends.
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
