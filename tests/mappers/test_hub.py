"""Published and found again: what comes from a hub passes every check of a local folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from huggingface_hub import errors

from kvferry.errors import ArtefactError, HubError, ModelUnavailableError
from kvferry.handoff.handoff import Handoff
from kvferry.handoff.measured import Measured
from kvferry.lm.pico import pico_language_model
from kvferry.mappers import hub
from kvferry.mappers.artefact import CARD, MANIFEST, WEIGHTS
from kvferry.mappers.card import PLACE
from kvferry.mappers.hub import FILES, MapperArtefact
from tests.mappers.saved import SOURCE, TARGET, save_miniature
from tests.pairs import reader_of


class FakeHub:
    """The three calls of `HfApi` that are used, on a folder."""

    def __init__(self, root: Path, user: str | None = "me") -> None:
        self.root, self.user = root, user

    def whoami(self) -> dict[str, Any]:
        if self.user is None:
            raise errors.LocalTokenNotFoundError("Token is required, but no token found.")
        return {"name": self.user}

    def create_repo(self, repo_id: str, **options: Any) -> None:
        assert options["exist_ok"]
        (self.root / repo_id).mkdir(parents=True, exist_ok=True)

    def upload_folder(self, *, repo_id: str, folder_path: str, **options: Any) -> Any:
        for name in options["allow_patterns"]:
            shutil.copy(Path(folder_path) / name, self.root / repo_id / name)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    def snapshot_download(self, repo_id: str, **options: Any) -> str:
        if not (self.root / repo_id).is_dir():
            response = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
            raise errors.RepositoryNotFoundError("404", response=response)
        return str(self.root / repo_id)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "mapper"
    save_miniature(folder)
    return folder


@pytest.fixture
def mapper(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "mapper"))


def test_what_is_pushed_is_loaded_again(
    mapper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = FakeHub(tmp_path / "hub")
    (mapper / "secret.txt").write_text("not for the hub")
    artefact = MapperArtefact.from_pretrained(mapper)
    quality = {"wiki": {"kl_retention": 0.9}}
    measured = Measured(artefact.manifest.weights_sha256, "cpu", quality, 768)
    measured.save(mapper)
    address = artefact.push_to_hub("me/ferry", api=api)
    assert address == "https://hub/me/ferry/commit/1"
    assert artefact.push_to_hub("me/boat", api=api).endswith("me/boat/commit/1")
    assert 'Handoff.load("me/boat"' in (tmp_path / "hub/me/boat" / CARD).read_text()
    assert sorted(p.name for p in (tmp_path / "hub/me/ferry").iterdir()) == sorted(FILES)
    card = (tmp_path / "hub/me/ferry" / CARD).read_text()
    assert 'Handoff.load("me/ferry"' in card and PLACE not in card
    monkeypatch.setattr(hub, "_default_api", lambda: api)
    handoff = Handoff.load("me/ferry", native_tail=3)
    assert handoff.mapper_hash == artefact.manifest.short_hash and handoff.native_tail == 3
    assert handoff.measured == measured
    assert handoff.reader.source.revision == reader_of(SOURCE, TARGET).source.revision


def test_a_copy_is_whole_and_overwrites_nothing(mapper: Path, tmp_path: Path) -> None:
    artefact = MapperArtefact.from_pretrained(mapper)
    copy = artefact.save_pretrained(tmp_path / "copy")
    assert copy.manifest == artefact.manifest and (copy.folder / CARD).is_file()
    with pytest.raises(ArtefactError, match="something in"):
        artefact.save_pretrained(tmp_path / "copy")


def _flip(folder: Path) -> None:
    raw = bytearray((folder / WEIGHTS).read_bytes())
    raw[-5] ^= 1
    (folder / WEIGHTS).write_bytes(raw)


def _truncate(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9])


def _other_tokenizer(folder: Path) -> None:
    record = json.loads((folder / MANIFEST).read_text())
    record["target"]["tokenizer"] = "0" * 16
    (folder / MANIFEST).write_text(json.dumps(record))


REFUSALS: dict[str, tuple[Callable[[Path], None], str]] = {
    "tampered": (_flip, "missing, truncated or changed"),
    "truncated": (_truncate, "missing, truncated or changed"),
    "tokenizer": (_other_tokenizer, "another target: the tokenizer differs"),
}


@pytest.mark.parametrize("place", ["folder", "hub"])
@pytest.mark.parametrize("damage", REFUSALS)
def test_damage_is_refused_wherever_it_comes_from(
    damage: str, place: str, mapper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, message = REFUSALS[damage]
    change(mapper)
    (tmp_path / "me").mkdir()
    mapper.rename(tmp_path / "me" / "ferry")
    monkeypatch.setattr(hub, "_default_api", lambda: FakeHub(tmp_path))
    reader = reader_of(SOURCE, TARGET)
    name = "me/ferry" if place == "hub" else tmp_path / "me" / "ferry"
    with pytest.raises(ArtefactError, match=message):
        Handoff.load(name, reader.source, reader.target)


def test_another_pair_is_refused(mapper: Path) -> None:
    reader = reader_of(SOURCE, TARGET)
    with pytest.raises(ArtefactError, match="another source"):
        Handoff.load(mapper, pico_language_model("qwen3"), reader.target)
    with pytest.raises(ArtefactError, match="revision"):
        Handoff.load(mapper, pico_language_model(SOURCE, 1), reader.target)


def test_a_mapper_that_names_no_models_asks_for_them(mapper: Path) -> None:
    record = json.loads((mapper / MANIFEST).read_text())
    record["target"]["origin"] = {}
    (mapper / MANIFEST).write_text(json.dumps(record))
    reader = reader_of(SOURCE, TARGET)
    with pytest.raises(ModelUnavailableError, match="where its target comes from"):
        Handoff.load(mapper, reader.source)
    assert Handoff.load(mapper, reader.source, reader.target).mapper_hash


def test_a_damaged_mapper_is_not_published(mapper: Path, tmp_path: Path) -> None:
    artefact = MapperArtefact.from_pretrained(mapper)
    _flip(mapper)
    with pytest.raises(ArtefactError, match="changed"):
        artefact.push_to_hub("me/ferry", api=FakeHub(tmp_path / "hub"))
    assert not (tmp_path / "hub").exists()


def test_a_failed_upload_leaves_the_card_as_it_was(mapper: Path, tmp_path: Path) -> None:
    class Unreachable(FakeHub):
        def upload_folder(self, **_: Any) -> Any:  # type: ignore[override]
            raise httpx.ConnectError("no route")

    before = (mapper / CARD).read_text()
    with pytest.raises(HubError, match="does not answer"):
        MapperArtefact.from_pretrained(mapper).push_to_hub("me/x", api=Unreachable(tmp_path))
    assert (mapper / CARD).read_text() == before


def test_without_a_login_it_says_how(mapper: Path, tmp_path: Path) -> None:
    artefact = MapperArtefact.from_pretrained(mapper)
    with pytest.raises(HubError, match="needs a login") as caught:
        artefact.push_to_hub("me/ferry", api=FakeHub(tmp_path, user=None))
    assert "hf auth login" in caught.value.fix
    assert PLACE in (mapper / CARD).read_text(), "the card names no place it did not reach"


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("./nowhere", ArtefactError, "no folder"),
        ("/no/such/mapper", ArtefactError, "no folder"),
        ("a/b/c", ArtefactError, "no folder"),
        ("me/absent", HubError, "not on the hub"),
    ],
)
def test_a_name_that_leads_nowhere(
    name: str,
    kind: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "_default_api", lambda: FakeHub(tmp_path))
    with pytest.raises(kind, match=message):
        MapperArtefact.from_pretrained(name)


def test_the_real_api_offline_is_a_message() -> None:
    with pytest.raises(HubError, match="does not answer"):
        MapperArtefact.from_pretrained("kvferry-tests/absent")
