"""What a mapper says of its models and settings, without where things lie on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from kvferry.app.schema import RunConfig, to_plain
from kvferry.lm.model import LanguageModel
from kvferry.lm.sources import ModelSpec
from kvferry.mappers.artefact import ModelIdentity


def portable_settings(cfg: RunConfig) -> str:
    """The YAML of what changes results, without where things lie on this machine."""
    values = _without_folders({"name": cfg.name, **cfg.identity()})
    text: str = OmegaConf.to_yaml(OmegaConf.create(values))
    return text


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(inner) for inner in value]
    local = isinstance(value, str) and Path(value).expanduser().is_absolute()
    return Path(value).name if local else value


def model_identity(cfg: RunConfig, model: LanguageModel, spec: ModelSpec) -> ModelIdentity:
    """The model's identity, and where it is found again."""
    return ModelIdentity.of(model, _origin(cfg, spec, model.revision))


def _origin(cfg: RunConfig, spec: ModelSpec, revision: str) -> dict[str, Any]:
    """Where a mapper finds this model again; a folder of this machine says nothing elsewhere."""
    if spec.folder is not None and spec.size == "full":
        return {"spec": {}, "dtype": cfg.trainer.model_dtype, "licence": spec.licence}
    # The commit that was loaded, not the branch that was asked for.
    values = {**to_plain(spec), "folder": None, **({"revision": revision} if spec.hub else {})}
    return {"spec": values, "dtype": cfg.trainer.model_dtype, "seed": cfg.seed}
