"""A mapper from a folder, in place of fitting: what it saves must not change what comes out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvferry.errors import ArtefactError, ConfigurationError, SettingsError
from kvferry.mappers.affine_start import affine_start
from kvferry.mappers.artefact import load_mapper
from kvferry.mappers.base import Statistics
from kvferry.mappers.fitted import Fitted
from kvferry.mappers.mobility import Mobility
from tests.mappers.saved import SOURCE, TARGET, save_miniature
from tests.matrix import METHODS
from tests.pairs import learnable, reader_of, statistics_of


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "mapper"
    save_miniature(folder)
    return folder


def loading(statistics: Statistics, source: str = SOURCE, target: str = TARGET) -> Statistics:
    reader = reader_of(source, target)
    return replace(
        statistics, load=lambda name: load_mapper(Path(name), reader.source, reader.target)[0]
    )


def test_it_is_what_was_saved(artefact: Path) -> None:
    method, statistics = Fitted(str(artefact)), loading(statistics_of(SOURCE, TARGET))
    found, saved = method.fit(statistics), METHODS["anchored"].fit(statistics)
    assert method.native_depth(statistics.target) == saved.native_layers > 0
    assert found.report["fitted_rows"] == 1500, "those of the fit, not of a run that loads it"
    for one, other in zip(found.affine.groups, saved.affine.groups, strict=True):
        assert one.blocks == other.blocks and torch.equal(one.weight, other.weight)


def test_learning_behind_it_is_learning_behind_a_start_fitted_now(
    artefact: Path, tmp_path: Path
) -> None:
    method = METHODS["mobility"]
    assert isinstance(method, Mobility)
    starts = {"now": METHODS["anchored"], "before": Fitted(str(artefact))}
    learned = {
        name: replace(method, start=start).fit(
            loading(learnable(SOURCE, TARGET, tmp_path / name, tmp_path / "traces"))
        )
        for name, start in starts.items()
    }
    ours, theirs = (learned[name].refiner.state_dict() for name in ("before", "now"))  # type: ignore[union-attr]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
    assert any(x.abs().max() > 0 for name, x in ours.items() if name.startswith("up"))


def test_a_start_that_has_read_other_text_is_refused(artefact: Path) -> None:
    other = loading(statistics_of(SOURCE, TARGET, passages=8))
    with pytest.raises(ConfigurationError, match="calibrated on other text"):
        Fitted(str(artefact)).fit(other)


def test_it_needs_no_text_to_be_measured_again(artefact: Path) -> None:
    whole = loading(statistics_of(SOURCE, TARGET))
    nothing = replace(whole, moments={}, code=None)
    assert not Fitted.needs_moments
    assert (
        Fitted(str(artefact)).fit(nothing).parameters == Fitted(str(artefact)).fit(whole).parameters
    )


def test_another_pair_is_refused(artefact: Path) -> None:
    other = loading(statistics_of("llama", "gemma2"), target="gemma2")
    with pytest.raises(ArtefactError, match="another target"):
        Fitted(str(artefact)).fit(other)


def test_a_network_cannot_start_behind_a_network(artefact: Path, tmp_path: Path) -> None:
    behind = METHODS["mobility"].fit(learnable(SOURCE, TARGET, tmp_path))
    statistics = replace(statistics_of(SOURCE, TARGET), load=lambda name: behind)
    with pytest.raises(ConfigurationError, match="starts from an affine map"):
        affine_start(Fitted(str(artefact)), statistics, "This")


@pytest.mark.parametrize("name", ["nowhere", "./nowhere/mapper", "outputs/run/mapper", "", "/x/y"])
def test_a_folder_without_a_mapper_is_told_at_once(name: str) -> None:
    with pytest.raises(SettingsError, match="artefact must be the folder of a fitted mapper"):
        Fitted(name)


def test_a_hub_id_is_looked_up_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Fitted("owner/name").artefact == "owner/name"
    (tmp_path / "owner" / "name").mkdir(parents=True)
    with pytest.raises(SettingsError):
        Fitted("owner/name")
