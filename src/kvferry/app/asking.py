"""What `kvferry ask` needs to know, found and checked before a model loads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kvferry.app.compose import compose
from kvferry.app.folder import CONFIG, MAPPER, latest, load_config
from kvferry.app.schema import RunConfig
from kvferry.errors import ArtefactError

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class AskRequest:
    """One question about one document.

    Attributes:
        document: its text.
        question: what the target is asked about it.
        config: names the pair, the size of the models and the number formats.
        mapper: folder of a fitted mapper.
        native_tail: last document tokens that the target reads itself.
        max_new_tokens: length of each answer.
    """

    document: str
    question: str
    config: RunConfig
    mapper: Path
    native_tail: int
    max_new_tokens: int

    @classmethod
    def create(
        cls,
        *,
        document: str,
        question: str,
        pair: str | None,
        mapper: str,
        outputs: Path,
        native_tail: int,
        max_new_tokens: int,
    ) -> AskRequest:
        """Find the mapper and the settings of its run.

        Raises:
            ArtefactError: there is no fitted mapper where one is named.
            ConfigurationError: no pair of this name.
        """
        config = compose([f"pair={pair}"] if pair else [])
        folder, run = _find(mapper, outputs, pair)
        if run is not None:
            fitted = load_config(run)
            # The run knows the size and the number formats that its mapper was fitted with. With
            # another pair named, loading the mapper has to refuse it.
            config = fitted if pair is None else replace(fitted, pair=config.pair)
        return cls(document, question, config, folder, native_tail, max_new_tokens)


def _find(mapper: str, outputs: Path, pair: str | None) -> tuple[Path, Path | None]:
    """(mapper folder, run folder it lies in or None)."""
    if mapper == "latest":
        found = latest(outputs, pair=pair, holding=MAPPER)
        if found is None:
            raise ArtefactError(
                f"There is no finished run below {outputs}"
                + (f" for pair {pair}." if pair else "."),
                fix=f"Fit one: python run.py{f' pair={pair}' if pair else ''}",
            )
        return found.path / MAPPER, found.path
    folder = Path(mapper).expanduser()
    if (folder / MAPPER / MANIFEST).is_file():
        return folder / MAPPER, folder
    if not (folder / MANIFEST).is_file():
        raise ArtefactError(
            f"There is no fitted mapper in {folder}.",
            expected=f"{MANIFEST} in it, or in its folder {MAPPER}",
            fix="Name a mapper or run folder, or `latest`; `python run.py` makes one.",
        )
    return folder, folder.parent if (folder.parent / CONFIG).is_file() else None
