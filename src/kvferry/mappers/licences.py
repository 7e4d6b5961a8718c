"""Licences of the two models, as the hub names them, and what they ask of a mapper."""

from __future__ import annotations

from collections.abc import Sequence

HUB_NAMES: dict[str, str] = {
    "Apache-2.0": "apache-2.0",
    "MIT": "mit",
    "Gemma Terms of Use": "gemma",
    "Llama 3.1 Community License": "llama3.1",
    "Llama 3.2 Community License": "llama3.2",
    "Llama 3.3 Community License": "llama3.3",
}
_PERMISSIVE = ("apache-2.0", "mit")
_NOTES: dict[str, str] = {
    "gemma": "Gemma is provided under and subject to the Gemma Terms of Use found at "
    "https://ai.google.dev/gemma/terms. Hand those terms and their use restrictions on with this "
    "mapper.",
    "llama": "Built with Llama. Llama is licensed under the Llama Community License, Copyright © "
    "Meta Platforms, Inc. All Rights Reserved; see https://www.llama.com/license.",
}


def hub_licence(licences: Sequence[str]) -> dict[str, str]:
    """Front-matter entries for weights that were computed from models under these licences.

    One licence of its own kind beside permissive ones is named; several are "other".
    """
    known = [HUB_NAMES.get(licence, "other") for licence in licences]
    strict = list(dict.fromkeys(name for name in known if name not in _PERMISSIVE))
    if len(strict) > 1 or "other" in strict:
        return {"license": "other", "license_name": "licences-of-both-models"}
    return {"license": (strict or known)[0]}


def licence_notes(licences: Sequence[str]) -> list[str]:
    """What some of these licences want said."""
    names = [HUB_NAMES.get(licence, "") for licence in licences]
    return [note for key, note in _NOTES.items() if any(name.startswith(key) for name in names)]
