"""The other processes of a run on several devices of one machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvferry.calibration.ranks import Rank, free_port
from kvferry.errors import KVFerryError

COMMAND = (sys.executable, "-m", "kvferry.app.worker")
READY = "ready"
_PATIENCE = 30.0
"""Seconds in which a process that has nothing left to do must end."""


class RankError(KVFerryError):
    """One of the processes that run together has failed."""


@contextmanager
def companions(folder: Path, count: int) -> Iterator[Rank | None]:
    """Start ``count - 1`` further processes for a run, and end them with the block.

    Args:
        folder: the run's; its `config.yaml` tells them what to do, and their logs go there.
        count: ranks, this process among them; with one, nothing is started.

    Yields:
        The rank of this process, None where it is alone.

    Raises:
        RankError: one of them failed; its last words are in the message.
    """
    if count == 1:
        yield None
        return
    port = free_port()
    workers: list[_Worker] = []
    try:
        workers += [_Worker.start(folder, Rank(index, count, port)) for index in range(1, count)]
        for worker in workers:
            worker.wait_until_ready()
        yield Rank(0, count, port)
        for worker in workers:
            worker.wait_until_done()
    except RankError:
        raise
    except Exception as error:
        # A rank that waits for one that died sees only a closed connection.
        for worker in workers:
            worker.raise_if_failed(error)
        raise
    finally:
        for worker in workers:
            worker.end()
        _leave_group()


@dataclass(frozen=True)
class _Worker:
    index: int
    process: subprocess.Popen[str]
    log: Path

    @classmethod
    def start(cls, folder: Path, rank: Rank) -> _Worker:
        log = folder / f"rank-{rank.index}.log"
        words = [str(folder), str(rank.index), str(rank.count), str(rank.port)]
        with log.open("w") as errors:
            process = subprocess.Popen(
                [*COMMAND, *words],
                # It ends when this pipe closes, however this process comes to its end.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        return cls(rank.index, process, log)

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != READY:
            self._failed_within(_PATIENCE)
            raise self._failure()

    def wait_until_done(self) -> None:
        if self._failed_within(_PATIENCE):
            raise self._failure()

    def raise_if_failed(self, cause: Exception) -> None:
        if self._failed_within(5.0):
            raise self._failure() from cause

    def _failed_within(self, seconds: float) -> bool:
        """One that is still running has not failed: all that it has to give, it gave."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds) != 0
        return False

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _failure(self) -> RankError:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return RankError(
            f"Rank {self.index} of the run has failed.",
            found=lines[-1] if lines else f"exit code {self.process.returncode}",
            fix=f"See {self.log}; the same command goes on from the passages that were saved.",
        )


def _leave_group() -> None:
    """Forget the ranks that are gone: the next run of this process brings its own."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
