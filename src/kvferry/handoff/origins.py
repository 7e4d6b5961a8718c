"""Load the two models that a mapper was fitted to, from what its manifest says of them."""

from __future__ import annotations

from pathlib import Path

from kvferry.errors import ModelUnavailableError
from kvferry.lm.loading import load_language_model
from kvferry.lm.model import LanguageModel
from kvferry.lm.sources import ModelSpec
from kvferry.mappers.artefact import Manifest, ModelIdentity


def load_pair(
    manifest: Manifest,
    source: LanguageModel | None,
    target: LanguageModel | None,
    cache_dir: Path | None = None,
    device: str = "cpu",
) -> tuple[LanguageModel, LanguageModel]:
    """Source and target, those given as they are; one model on both sides is loaded once.

    Raises:
        ModelUnavailableError: the manifest does not say where a model is, or it is not there.
    """
    if source is None:
        source = _load("source", manifest.source, cache_dir, device)
    if target is None:
        same = bool(manifest.target.origin.get("spec")) and (
            (manifest.source.origin, manifest.source.revision)
            == (manifest.target.origin, manifest.target.revision)
        )
        target = source if same else _load("target", manifest.target, cache_dir, device)
    return source, target


def _load(role: str, identity: ModelIdentity, cache_dir: Path | None, device: str) -> LanguageModel:
    origin = identity.origin
    if not origin.get("spec"):
        raise ModelUnavailableError(
            f"This mapper does not say where its {role} comes from.",
            found=f"{identity.name}, revision {identity.revision}",
            fix=f"load the model yourself and pass it as {role}=",
        )
    return load_language_model(
        ModelSpec.from_values(origin["spec"]),
        cache_dir=cache_dir,
        dtype=str(origin.get("dtype", "float32")),
        device=device,
        seed=int(origin.get("seed", 0)),
    )
