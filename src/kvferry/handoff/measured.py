"""What a mapper was measured to keep and to take: a small file beside its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvferry.errors import ArtefactError
from kvferry.handoff.costs import CostModel
from kvferry.lm.store import new_file
from kvferry.mappers.artefact import MEASURED, Manifest

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Measured:
    """The facts that a policy decides on.

    Args:
        weights_sha256: of the mapper that was measured.
        device: kind of device that it was timed on, "cpu" or "cuda".
        quality: by domain of the held-out text, and metric.
        context_tokens: target tokens of the contexts behind ``quality``.
        carry, prefill: milliseconds to carry N source tokens over, and for the target to read their
            text; None where too few lengths were timed.
        timed_tokens: shortest and longest length behind them.
    """

    weights_sha256: str
    device: str
    quality: Mapping[str, Mapping[str, float]]
    context_tokens: int
    carry: CostModel | None = None
    prefill: CostModel | None = None
    timed_tokens: tuple[int, int] | None = None

    def save(self, folder: Path) -> None:
        """Write it into a mapper's folder, whole or not at all.

        Raises:
            StorageError: the disk is full or the folder cannot be written.
        """
        with new_file(folder / MEASURED) as temporary:
            values = {"format_version": FORMAT_VERSION, **asdict(self)}
            temporary.write_text(json.dumps(values, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path, manifest: Manifest) -> Measured | None:
        """What a mapper's folder says of it; None where it was never measured.

        Raises:
            ArtefactError: unreadable, of another format or other weights, or with impossible
                numbers.
        """
        path = folder / MEASURED
        if not path.is_file():
            return None
        try:
            measured = cls._of(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _refused(f"{type(error).__name__}: {error}") from error
        if measured.weights_sha256 != manifest.weights_sha256:
            raise _refused(f"measured with weights {measured.weights_sha256[:10]}")
        return measured

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> Measured:
        if values["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format version {values['format_version']}")
        quality = {
            str(domain): {str(metric): _number(value) for metric, value in metrics.items()}
            for domain, metrics in values["quality"].items()
        }
        timed = values["timed_tokens"]
        return cls(
            weights_sha256=str(values["weights_sha256"]),
            device=str(values["device"]),
            quality=quality,
            context_tokens=int(values["context_tokens"]),
            carry=_cost(values["carry"]),
            prefill=_cost(values["prefill"]),
            timed_tokens=None if timed is None else (int(timed[0]), int(timed[1])),
        )


def _cost(values: Mapping[str, Any] | None) -> CostModel | None:
    if values is None:
        return None
    cost = CostModel(**{name: _number(value) for name, value in values.items()})
    if min(cost.coefficients) < 0:
        raise ValueError(f"a negative cost {cost.coefficients}")
    return cost


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is no number")
    return number


def _refused(found: str) -> ArtefactError:
    return ArtefactError(
        "What was measured of this mapper cannot be used.",
        found=f"{MEASURED}: {found}",
        expected="times and held-out quality of these weights",
        fix=f"delete {MEASURED}, or evaluate the mapper again: python run.py stages=[evaluate]",
    )
