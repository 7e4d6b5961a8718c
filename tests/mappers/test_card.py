"""A card is read by the hub, by people, and by whoever pastes its snippet."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from kvferry.mappers.artefact import CARD, Manifest
from kvferry.mappers.card import NOT_EVALUATED, PLACE, write_card
from kvferry.mappers.licences import hub_licence
from tests.mappers.saved import save_miniature


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    folder = tmp_path_factory.mktemp("card") / "mapper"
    return folder, save_miniature(folder)


def test_the_front_matter_is_what_the_hub_reads(saved: tuple[Path, Manifest]) -> None:
    _, front, body = (saved[0] / CARD).read_text().split("---\n", 2)
    about = yaml.safe_load(front)
    assert about["license"] == "gemma" and about["library_name"] == "kvferry"
    assert about["base_model"] == ["pico-llama", "pico-gemma3"] and "kv-cache" in about["tags"]
    manifest = saved[1]
    for told in (
        f"[{manifest.method}]({manifest.reference_url})",
        f"`{manifest.source.revision}`",
        f"`{manifest.target.revision}`",
        manifest.weights_sha256,
        "| corpus | 00ff |",
        "| passages | 12 |",
        "ai.google.dev/gemma/terms",
        "every number below means nothing",
        NOT_EVALUATED,
        *manifest.fields,
    ):
        assert told in body, told


def test_what_was_measured_takes_the_place_of_not_evaluated(
    saved: tuple[Path, Manifest],
) -> None:
    folder, manifest = saved
    before = (folder / CARD).read_text()
    write_card(folder, manifest, 10, 100, "| zero | 0.7 [0.6, 0.8] |")
    after = (folder / CARD).read_text()
    (folder / CARD).write_text(before)
    assert "[0.6, 0.8]" in after and NOT_EVALUATED not in after
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_the_snippet_runs(saved: tuple[Path, Manifest], capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", (saved[0] / CARD).read_text(), re.DOTALL)
    assert PLACE in snippet
    scope: dict[str, object] = {}
    exec(snippet.replace(PLACE, str(saved[0])), scope)
    assert capsys.readouterr().out.strip()
    assert scope["carried"].provenance[0].exact is False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("licences", "expected"),
    [
        (["Apache-2.0", "Apache-2.0"], "apache-2.0"),
        (["Apache-2.0", "Gemma Terms of Use"], "gemma"),
        (["Llama 3.1 Community License", "Apache-2.0"], "llama3.1"),
        (["Llama 3.1 Community License", "Gemma Terms of Use"], "other"),
        (["unknown", "Apache-2.0"], "other"),
    ],
)
def test_the_stricter_licence_is_named(licences: list[str], expected: str) -> None:
    assert hub_licence(licences)["license"] == expected
