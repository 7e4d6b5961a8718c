"""A miniature mapper, saved as a run saves it."""

from __future__ import annotations

from pathlib import Path

from kvferry.app.schema import to_plain
from kvferry.lm.sources import ModelSpec
from kvferry.mappers.artefact import Manifest, ModelIdentity, save_mapper
from tests.matrix import METHODS
from tests.pairs import reader_of, statistics_of

SOURCE, TARGET = "llama", "gemma3"
LICENCES = {"llama": "Apache-2.0", "gemma3": "Gemma Terms of Use"}


def origin(architecture: str) -> dict[str, object]:
    """What a run writes down about a miniature."""
    spec = ModelSpec(
        name=f"pico-{architecture}",
        pico_architecture=architecture,
        licence=LICENCES[architecture],
        size="pico",
    )
    return {"spec": to_plain(spec), "dtype": "float32", "seed": 0}


def save_miniature(folder: Path, method: str = "anchored") -> Manifest:
    """Fit and save; the manifest as written."""
    reader = reader_of(SOURCE, TARGET)
    fitted = METHODS[method]
    manifest = Manifest(
        pair="pico",
        method=fitted.pretty_name,
        reference_url=fitted.reference_url,
        fields=dict(vars(fitted)),
        source=ModelIdentity.of(reader.source, origin(SOURCE)),
        target=ModelIdentity.of(reader.target, origin(TARGET)),
        calibration={"corpus": "00ff", "passages": 12, "rows": 1500},
        git_commit="abc",
    )
    return save_mapper(folder, fitted.fit(statistics_of(SOURCE, TARGET)), manifest, "pair: pico\n")
