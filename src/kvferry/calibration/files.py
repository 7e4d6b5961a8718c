"""Passages from the user's own files and from data sets on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvferry.calibration.corpus import Passage
from kvferry.errors import DataUnavailableError, KVFerryError
from kvferry.lm.store import cache_root, storage_errors

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")


def load_text_file(
    path: Path | str,
    *,
    field: str = "text",
    limit: int | None = None,
    cache_dir: Path | None = None,
) -> list[Passage]:
    """Passages of a file: text (a blank line between passages), JSON lines or parquet.

    Args:
        path: the suffix decides: `.jsonl`, `.json`, `.parquet`, and text for any other.
        field: the column that holds the text, in JSON lines and parquet.
        limit: at most so many passages.
        cache_dir: where the `datasets` library may keep its own copy.

    Raises:
        DataUnavailableError: missing, a folder, empty, binary, or without such a column.
    """
    file = Path(path).expanduser()
    _require_file(file)
    builder = _BUILDERS.get(file.suffix.lower())
    if builder is None:
        texts: Iterable[Any] = _BLANK_LINES.split(_read_text(file))
    else:
        folder = cache_root(cache_dir) / "datasets"
        rows = _load_dataset(
            builder, what=str(file), data_files=str(file), split="train", cache_dir=str(folder)
        )
        texts = _column(rows, field, str(file))
    return _passages(texts, str(file), limit)


def load_hub(
    name: str,
    config: str | None = None,
    split: str = "train",
    field: str = "text",
    *,
    limit: int | None = None,
) -> list[Passage]:
    """Passages from one column of a data set: a hub name, or a local folder.

    Raises:
        DataUnavailableError: no network and nothing cached, gated, or no such name,
            configuration, split or column.
    """
    rows = _load_dataset(name, what=f"{name} ({split})", name=config, split=split)
    return _passages(_column(rows, field, name), name, limit)


def _require_file(file: Path) -> None:
    problem = ""
    if not file.exists():
        problem = "There is no such file"
    elif file.is_dir():
        problem = "This is a folder, not a file"
    elif file.stat().st_size == 0:
        problem = "The file is empty"
    if problem:
        raise DataUnavailableError(
            f"{problem}: {file}",
            expected="a text file with a blank line between passages, JSON lines or parquet",
            fix="Correct the path (data.path=FILE).",
        )


def _read_text(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _binary(file, f"byte {error.start} is not UTF-8") from error
    except OSError as error:
        raise DataUnavailableError(
            f"The file cannot be read: {file}", found=error.strerror, fix="Check its permissions."
        ) from error
    if "\0" in text:
        raise _binary(file, "it holds zero bytes")
    return text


def _binary(file: Path, found: str) -> DataUnavailableError:
    return DataUnavailableError(
        f"This is not a text file: {file}",
        found=found,
        expected="UTF-8 text",
        fix="Extract the text first (from PDF or Word), or convert the file to UTF-8.",
    )


def _load_dataset(path: str, *, what: str, **options: Any) -> Any:
    from datasets import load_dataset  # type: ignore[import-untyped]
    from datasets.utils.logging import (  # type: ignore[import-untyped]
        disable_progress_bar,
        enable_progress_bar,
        is_progress_bar_enabled,
    )

    loud = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        with storage_errors(cache_root()):
            return load_dataset(path, **options)
    except KVFerryError:
        raise
    except Exception as error:
        # The cause names the broken line of a file; the outer message only says "failed".
        reason = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]
        raise DataUnavailableError(
            f"The data set cannot be loaded: {what}",
            found=f"{type(error).__name__}: {reason}",
            fix="Check the name, configuration and split, the network (HF_HUB_OFFLINE), and "
            "`hf auth login` for a gated one. data=text and data=wikipedia need no hub.",
        ) from error
    finally:
        if loud:
            enable_progress_bar()


def _column(rows: Any, field: str, what: str) -> Iterable[Any]:
    if field not in rows.column_names:
        raise DataUnavailableError(
            f"The data set {what} has no column {field!r}.",
            found=", ".join(rows.column_names),
            fix="Name the column that holds the text (data.column=NAME).",
        )
    return (row[field] for row in rows)


def _passages(texts: Iterable[Any], source: str, limit: int | None) -> list[Passage]:
    passages: list[Passage] = []
    for text in texts:
        if limit is not None and len(passages) == limit:
            break
        if not isinstance(text, str):
            raise DataUnavailableError(
                f"The column of {source} does not hold text.",
                found=type(text).__name__,
                fix="Name the column that holds the text (data.column=NAME).",
            )
        if text.strip():
            passages.append(Passage(text.strip(), source))
    if not passages:
        raise DataUnavailableError(
            f"There is no text in {source}.", fix="Give a file with at least one passage."
        )
    return passages
