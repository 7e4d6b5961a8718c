"""Ranks on one machine, as Lightning wants them described."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from pytorch_lightning.strategies import DDPStrategy


@dataclass(frozen=True)
class Rank:
    """One of several processes on this machine that calibrate together.

    Args:
        index: from 0; the first one reads and writes the disk.
        count: of all of them.
        port: where the first one waits for the others.
    """

    index: int
    count: int
    port: int

    def strategy(self, timeout: timedelta = timedelta(minutes=60)) -> DDPStrategy:
        """Processes that reduce together. Statistics have no gradients, so nothing is wrapped.

        Args:
            timeout: how long a rank waits for a slower one before it gives up.
        """
        return DDPStrategy(cluster_environment=_OneMachine(self), timeout=timeout)


def free_port() -> int:
    """A port that nothing listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class _OneMachine(ClusterEnvironment):
    """Says what `Rank` says; the processes are started by whoever made the ranks."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    creates_processes_externally = True
    main_address = "127.0.0.1"

    @property
    def main_port(self) -> int:
        return self._rank.port

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._rank.count

    def set_world_size(self, size: int) -> None:
        """It is known."""

    def global_rank(self) -> int:
        return self._rank.index

    def set_global_rank(self, rank: int) -> None:
        """It is known."""

    def local_rank(self) -> int:
        return self._rank.index

    def node_rank(self) -> int:
        return 0
