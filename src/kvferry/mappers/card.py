"""The model card of a mapper: what it is, what was measured, how to load it, what it may not do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCardData

from kvferry.lm.store import new_file
from kvferry.mappers.licences import hub_licence, licence_notes

if TYPE_CHECKING:
    from kvferry.mappers.artefact import Manifest, ModelIdentity

PLACE = "OWNER/NAME"
"""Stands for the hub id until the mapper is published."""

NOT_EVALUATED = (
    "Not evaluated yet. Nothing is known of what this mapper keeps: run "
    "`python run.py stages=[evaluate]` with the settings in `config.yaml` before relying on it."
)

SNIPPET = f"""from kvferry.handoff.handoff import Handoff

# The hub id of this mapper, or a folder that holds it. Both models are loaded as they were fitted;
# pass source= and target= for models that are in memory already.
handoff = Handoff.load("{PLACE}", native_tail=64)
source, target = handoff.reader.source, handoff.reader.target

document = "The ferry carries letters and bread to the islands every morning. " * 20
ids, mask = source.batch([[*source.sink_ids, *source.encode(document)]])
carried = handoff.transfer(source.prefill(ids, mask), suffix="\\n\\nQuestion: What for?\\nAnswer:")
tokens = target.generate(carried.cache, carried.suffix_ids[0], carried.mask, 32)
print(target.text_of(list(tokens)))
"""

_LIMITS = """* A carried cache is an approximation of the target's own. Its provenance says
  `exact=False`; never put it where an exact prefix is expected.
* It fits these two models alone, in these revisions and with these tokenizers; loading checks all
  of it, and the weights' sha256, and refuses anything else by name.
* The numbers hold for text of the kind and length they were measured on, and no further.
* Errors and biases of both models stay; a mapper can add its own."""


def model_card(manifest: Manifest, parameters: int, storage_bytes: int, results: str = "") -> str:
    """The README of an artefact folder, with front matter as the hub reads it.

    Args:
        parameters: numbers in the weights.
        storage_bytes: size of the weights file.
        results: markdown of what was measured, controls and intervals in it; empty before.
    """
    sides = (manifest.source, manifest.target)
    source, target = sides
    settings = {
        "parameters": f"{parameters:,}",
        "storage": f"{storage_bytes / 1e6:,.1f} MB",
        "weights sha256": manifest.weights_sha256,
        "fitted with": ", ".join(f"{k} {v}" for k, v in manifest.versions.items()),
        "commit": manifest.git_commit,
    }
    return f"""---
{_front_matter(manifest)}
---
# {source.name} to {target.name}: {manifest.method}

When **{source.name}** has read a long context and **{target.name}** must go on from there, this
mapper carries the KV cache over, so that the target does not read the context again. Both models
stay as they are. Method: [{manifest.method}]({manifest.reference_url}), fitted and checked with
kvferry.
{_miniature_warning(sides)}
## The pair

| | model | revision | licence |
|---|---|---|---|
{_pair_rows(sides)}

## What is kept

{results.strip() or NOT_EVALUATED}

## How to use it

```python
{SNIPPET}```

## How it was fitted

| calibration text | |
|---|---|
{_table(manifest.calibration)}

| hyper-parameter | |
|---|---|
{_table(manifest.fields)}

| weights | |
|---|---|
{_table({name: value for name, value in settings.items() if value})}

The settings of the whole run are in `config.yaml`, digests of both models in `manifest.json`.

## Limits

{_LIMITS}

## Licences

The weights were computed from the caches of both models, so the terms of both apply to them.
{_licence_lines(sides)}
"""


def write_card(
    folder: Path, manifest: Manifest, parameters: int, storage_bytes: int, results: str
) -> None:
    """Replace the card of an artefact folder, once there is something measured to tell.

    Raises:
        StorageError: the disk is full or the folder cannot be written.
    """
    with new_file(folder / "README.md") as temporary:
        temporary.write_text(model_card(manifest, parameters, storage_bytes, results))


def named_at(card: str, repo_id: str) -> str:
    """A card whose snippet loads the mapper from the hub."""
    return re.sub(r'Handoff\.load\("[^"]*"', f'Handoff.load("{repo_id}"', card)


def _front_matter(manifest: Manifest) -> str:
    sides = (manifest.source, manifest.target)
    licence: dict[str, Any] = {**hub_licence([licence_of(side) for side in sides])}
    data = ModelCardData(
        library_name="kvferry",
        tags=["kvferry", "kv-cache", "cache-transfer"],
        base_model=list(dict.fromkeys(_spec(side).get("hub") or side.name for side in sides)),
        **licence,
    )
    text: str = data.to_yaml()
    return text.strip()


def licence_of(side: ModelIdentity) -> str:
    """Licence of a model's weights, "unknown" where nobody said."""
    return str(_spec(side).get("licence") or side.origin.get("licence") or "unknown")


def _spec(side: ModelIdentity) -> dict[str, Any]:
    return dict(side.origin.get("spec") or {})


def _pair_rows(sides: tuple[ModelIdentity, ModelIdentity]) -> str:
    return "\n".join(
        f"| {role} | {side.name} | `{side.revision}` | {licence_of(side)} |"
        for role, side in zip(("source", "target"), sides, strict=True)
    )


def _table(values: dict[str, Any]) -> str:
    return "\n".join(
        f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in values.items()
    )


def _licence_lines(sides: tuple[ModelIdentity, ModelIdentity]) -> str:
    notes = [f"{side.name}: {licence_of(side)}." for side in sides]
    notes = [*dict.fromkeys(notes), *licence_notes([licence_of(side) for side in sides])]
    return "\n".join(["", *(f"* {note}" for note in notes)])


def _miniature_warning(sides: tuple[ModelIdentity, ModelIdentity]) -> str:
    if all(_spec(side).get("size") != "pico" for side in sides):
        return ""
    return "\n**Random miniatures of these architectures: every number below means nothing.**\n"
