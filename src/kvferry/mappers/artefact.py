"""A fitted mapper as a folder: weights, manifest, the settings that made it, a model card."""

from __future__ import annotations

import importlib
import json
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import kvferry
from kvferry.errors import ArtefactError
from kvferry.lm.model import LanguageModel
from kvferry.lm.store import file_sha256, new_folder
from kvferry.mappers.affine import FITTED_ROWS, AffineGroup, AffineMapper
from kvferry.mappers.card import model_card
from kvferry.mappers.inputs import SourceCode
from kvferry.mappers.layout import COMPONENTS, FeatureBlock
from kvferry.mappers.mapper import Mapper
from kvferry.mappers.refined import RefinedMapper, Refiner

FORMAT_VERSION = 2
REFINER = "refiner."
WEIGHTS, MANIFEST, CONFIG, CARD = "mapper.safetensors", "manifest.json", "config.yaml", "README.md"
MEASURED = "measured.json"
"""What an evaluation found, for a policy to decide on; absent before the first one."""


@dataclass(frozen=True)
class ModelIdentity:
    """What a mapper must find again in a model before it may be used with it.

    Args:
        origin: where the model came from, for loading it again: the values of its `ModelSpec`
            under "spec", with "dtype" and "seed"; empty where nobody said.
    """

    name: str
    revision: str
    geometry: str
    tokenizer: str
    architecture: str
    rope_parameters: str
    origin: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: LanguageModel, origin: Mapping[str, Any] | None = None) -> ModelIdentity:
        """Read it off a loaded model."""
        return cls(
            name=model.name,
            revision=model.revision,
            geometry=model.geometry.fingerprint(),
            tokenizer=model.tokenizer_hash,
            architecture=model.geometry.architecture,
            rope_parameters=model.geometry.rope_parameters,
            origin=dict(origin or {}),
        )


@dataclass(frozen=True)
class Manifest:
    """Everything about a fitted mapper but its weights.

    Args:
        method, reference_url, fields: how it was fitted.
        calibration: corpus hash, passages, rows.
        weights_sha256: digest of the weights file.
        refiner: class and settings of the network behind the affine map, if there is one.
        metrics: what the fit chose and measured.
    """

    pair: str
    method: str
    reference_url: str
    fields: dict[str, Any]
    source: ModelIdentity
    target: ModelIdentity
    calibration: dict[str, Any]
    weights_sha256: str = ""
    native_layers: int = 0
    planted_sinks: int = 0
    groups: list[dict[str, Any]] = field(default_factory=list)
    refiner: dict[str, Any] | None = None
    git_commit: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def short_hash(self) -> str:
        """Ten hex digits that name these weights."""
        return self.weights_sha256[:10]

    @property
    def calibration_tokens(self) -> int:
        """Target tokens that the map was fitted on: all that were read, or those read again."""
        return int(self.metrics.get(FITTED_ROWS, self.calibration.get("rows", 0)))

    @property
    def report(self) -> dict[str, float]:
        """What the mapper says of its fit, wherever it is saved again."""
        return {**self.metrics, FITTED_ROWS: self.calibration_tokens}


def save_mapper(folder: Path, mapper: Mapper, manifest: Manifest, config: str) -> Manifest:
    """Write the folder beside its place, then rename: it is whole or not there.

    Args:
        manifest: what is known but the digest, the groups and the versions, which are filled in.
        config: the YAML that made it.

    Raises:
        StorageError: the disk is full or the folder cannot be written.
    """
    base, refiner = mapper.affine, mapper.refiner
    tensors = _tensors(base)
    if refiner is not None:
        own = refiner.state_dict()
        tensors |= {f"{REFINER}{name}": x.cpu().contiguous() for name, x in own.items()}
    with new_folder(folder) as temporary:
        save_file(tensors, temporary / WEIGHTS)
        complete = replace(
            manifest,
            weights_sha256=file_sha256(temporary / WEIGHTS),
            native_layers=base.native_layers,
            planted_sinks=base.planted_sinks,
            metrics={**mapper.report, **manifest.metrics},
            groups=[_group_record(group) for group in base.groups],
            refiner=None if refiner is None else _refiner_record(refiner),
            versions={
                "kvferry": kvferry.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
        )
        (temporary / MANIFEST).write_text(json.dumps(asdict(complete), indent=2))
        (temporary / CONFIG).write_text(config)
        size = (temporary / WEIGHTS).stat().st_size
        (temporary / CARD).write_text(model_card(complete, mapper.parameters, size))
        shutil.rmtree(folder, ignore_errors=True)
    return complete


def read_manifest(folder: Path) -> Manifest:
    """The manifest alone, without weights.

    Raises:
        ArtefactError: missing, unreadable, or of another format version.
    """
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text())
        version = raw["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtefactError(
            f"There is no readable mapper in {folder}.",
            found=f"{type(error).__name__} in {MANIFEST}",
            expected=f"{MANIFEST}, {WEIGHTS} and {CONFIG}",
            fix="fit one with `python run.py`, or name the folder of a fitted mapper",
        ) from error
    if version != FORMAT_VERSION:
        raise ArtefactError(
            "This mapper was written in another format.",
            found=f"format version {version}",
            expected=f"format version {FORMAT_VERSION}",
            fix="fit it again with this version of kvferry",
        )
    try:
        raw["source"] = ModelIdentity(**raw["source"])
        raw["target"] = ModelIdentity(**raw["target"])
        return Manifest(**raw)
    except (TypeError, KeyError) as error:
        raise ArtefactError(
            "The manifest of this mapper is incomplete or edited.",
            found=str(error),
            fix="fit the mapper again",
        ) from error


def check_mapper(folder: Path) -> Manifest:
    """The manifest of a mapper that is whole; which models it fits is not asked.

    Raises:
        ArtefactError: as `read_manifest`, or damaged weights.
    """
    manifest = read_manifest(folder)
    path = folder / WEIGHTS
    if not path.is_file() or file_sha256(path) != manifest.weights_sha256:
        raise ArtefactError(
            "The weights of this mapper are missing, truncated or changed.",
            found=f"{path.stat().st_size} bytes of other content" if path.is_file() else "no file",
            expected=f"sha256 {manifest.weights_sha256[:16]}…",
            fix="fit the mapper again, or copy its folder again from where it came",
        )
    return manifest


def load_mapper(
    folder: Path, source: LanguageModel, target: LanguageModel
) -> tuple[Mapper, Manifest]:
    """Weights and manifest, after every check has passed.

    Raises:
        ArtefactError: damaged weights, or a mapper of another pair, revision or tokenizer.
    """
    manifest = check_mapper(folder)
    for role, model, expected in (
        ("source", source, manifest.source),
        ("target", target, manifest.target),
    ):
        _require_same(role, ModelIdentity.of(model), expected)
    try:
        tensors = load_file(folder / WEIGHTS)
        mapper = _mapper(manifest, tensors, source, target)
    except (SafetensorError, KeyError, TypeError, RuntimeError) as error:
        raise ArtefactError(
            "Weights and manifest of this mapper do not belong together.",
            found=str(error),
            fix="fit the mapper again",
        ) from error
    return mapper, manifest


def _require_same(role: str, found: ModelIdentity, expected: ModelIdentity) -> None:
    differing = [
        name
        for name in ("architecture", "geometry", "rope_parameters", "tokenizer", "revision")
        if getattr(found, name) != getattr(expected, name)
    ]
    if differing:
        what = differing[0]
        raise ArtefactError(
            f"This mapper was fitted for another {role}: the {what.replace('_', ' ')} differs.",
            found=f"{found.name}, {what} {getattr(found, what)}",
            expected=f"{expected.name}, {what} {getattr(expected, what)}",
            fix="choose the pair that the mapper names, or fit a mapper for this one",
        )


def _tensors(mapper: AffineMapper) -> dict[str, Tensor]:
    tensors = {}
    for index, group in enumerate(mapper.groups):
        for name in ("weight", "input_mean", "output_mean"):
            tensors[f"{index}.{name}"] = getattr(group, name).detach().cpu().contiguous()
    if mapper.code is not None:
        for component in COMPONENTS:
            tensors[f"code.{component}"] = mapper.code.projection[component].cpu().contiguous()
    return tensors


def _group_record(group: AffineGroup) -> dict[str, Any]:
    return {
        "component": group.component,
        "target_layers": list(group.target_layers),
        "blocks": [[b.kind, b.component, b.index, b.width, b.head] for b in group.blocks],
        "head": group.head,
    }


def _refiner_record(refiner: Refiner) -> dict[str, Any]:
    cls = type(refiner)
    return {"class": f"{cls.__module__}.{cls.__qualname__}", "settings": refiner.settings}


def _refiner_class(name: str) -> type[Refiner]:
    """A refiner of this package: a mapper from elsewhere names no other code to run.

    Raises:
        ArtefactError: there is none of that name.
    """
    module, _, cls = name.rpartition(".")
    if module.startswith(f"{__package__}."):
        try:
            found = getattr(importlib.import_module(module), cls, None)
        except ImportError:
            found = None
        if isinstance(found, type) and issubclass(found, Refiner):
            return found
    raise ArtefactError(
        "This mapper has a network that this version of kvferry does not know.",
        found=name,
        expected=f"a class of {__package__}",
        fix="install the version that wrote it: the manifest names it",
    )


def _mapper(
    manifest: Manifest, tensors: dict[str, Tensor], source: LanguageModel, target: LanguageModel
) -> Mapper:
    base = _affine(manifest, tensors, source, target)
    if manifest.refiner is None:
        return base
    cls = _refiner_class(manifest.refiner["class"])
    build: Any = cls
    refiner: Refiner = build(source.geometry, target.geometry, **manifest.refiner["settings"])
    own = {n.removeprefix(REFINER): x for n, x in tensors.items() if n.startswith(REFINER)}
    refiner.load_state_dict(own)
    refiner = refiner.to(target.device).eval().requires_grad_(False)
    return RefinedMapper(base, refiner, manifest.report)


def _affine(
    manifest: Manifest, tensors: dict[str, Tensor], source: LanguageModel, target: LanguageModel
) -> AffineMapper:
    groups = tuple(
        AffineGroup(
            component=record["component"],
            target_layers=tuple(record["target_layers"]),
            blocks=tuple(FeatureBlock(*block) for block in record["blocks"]),
            weight=tensors[f"{index}.weight"].to(target.device),
            input_mean=tensors[f"{index}.input_mean"].to(target.device),
            output_mean=tensors[f"{index}.output_mean"].to(target.device),
            head=record["head"],
        )
        for index, record in enumerate(manifest.groups)
    )
    code = None
    if "code.keys" in tensors:
        code = SourceCode({c: tensors[f"code.{c}"].to(target.device) for c in COMPONENTS})
    return AffineMapper(
        source.geometry,
        target.geometry,
        groups,
        code,
        native_layers=manifest.native_layers,
        planted_sinks=manifest.planted_sinks,
        report=manifest.report,
    )
