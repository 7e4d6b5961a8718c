"""Fetch a model from the hub into its cache; every refusal says what the model needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.errors import ModelUnavailableError
from kvferry.lm.sources import ModelSpec
from kvferry.lm.store import storage_errors

_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
# Second copies of the weights in other formats.
_UNWANTED = ["consolidated*", "original/*"]
_ELSEWHERE = "pair=smollm2_gemma3 runs here without the hub, and size=pico needs no weights at all."


def hub_folder(spec: ModelSpec, *, check: Callable[[Path, str], Any]) -> tuple[Path, str]:
    """Local snapshot of `spec.hub` and its commit.

    The configuration is fetched first and handed to `check(folder, name)`, which refuses an
    unsupported model before its weights are downloaded.

    Raises:
        ModelUnavailableError: gated, missing, or no network and nothing cached.
        StorageError: the disk is full.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE

    repository = str(spec.hub)
    try:
        with storage_errors(Path(HF_HUB_CACHE)):
            config = hf_hub_download(repository, "config.json", revision=spec.revision)
            check(Path(config).parent, spec.name)
            folder = Path(
                snapshot_download(
                    repository,
                    revision=spec.revision,
                    allow_patterns=_WANTED,
                    ignore_patterns=_UNWANTED,
                )
            )
    except Exception as error:
        refusal = _refusal(spec, error)
        if refusal is None:
            raise
        raise refusal from error
    return folder, folder.name


def hub_problem(error: Exception, repository: str) -> tuple[str, str] | None:
    """What the hub means by ``error`` ("is gated"), and what to do about it; None if it is ours."""
    import httpx
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repository}"
    gated = (
        "is gated",
        f"Accept its licence at {page} and run `hf auth login`, or use a local folder.",
    )
    silent = (
        "is not cached here and the hub does not answer",
        "Check the network and HF_HUB_OFFLINE, or use a local copy.",
    )
    absent = (
        "is not on the hub under this name and revision",
        f"Check {page} (a private or gated repository also needs `hf auth login`).",
    )
    failed = (
        "is refused by the hub",
        f"Try again later, and check {page} and `hf auth login`; or use a local folder.",
    )
    stranger = ("needs a login", "Run `hf auth login`, or set HF_TOKEN.")
    malformed = ("has a malformed hub name", "Write it as owner/name.")
    # From the special to the general: the first kind that fits is told.
    kinds: list[tuple[type[Exception], tuple[str, str]]] = [
        (errors.LocalTokenNotFoundError, stranger),
        (errors.GatedRepoError, gated),
        (errors.LocalEntryNotFoundError, silent),
        (errors.OfflineModeIsEnabled, silent),
        (errors.RepositoryNotFoundError, absent),
        (errors.RevisionNotFoundError, absent),
        (errors.EntryNotFoundError, absent),
        (errors.HFValidationError, malformed),
        (errors.HfHubHTTPError, failed),
        (httpx.HTTPError, silent),
        (ConnectionError, silent),
    ]
    return next((told for kind, told in kinds if isinstance(error, kind)), None)


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its type where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _refusal(spec: ModelSpec, error: Exception) -> ModelUnavailableError | None:
    told = hub_problem(error, str(spec.hub))
    if told is None:
        return None
    problem, fix = told
    size = f"{spec.parameters / 1e9:,.2f} billion parameters"
    return ModelUnavailableError(
        f"The model {spec.name} ({spec.hub}) {problem}.",
        found=first_line(error),
        expected=f"{size}, {2 * spec.parameters / 1e9:,.1f} GB in bfloat16; "
        f"licence: {spec.licence}",
        fix=f"{fix} {_ELSEWHERE}",
    )
