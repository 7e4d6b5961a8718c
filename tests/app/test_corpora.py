"""The texts of a run are disjoint, also where other domains are mixed in."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from kvferry.app.compose import compose
from kvferry.app.corpora import SELECTION, Corpora, load_corpora
from kvferry.app.schema import RunConfig
from kvferry.errors import ConfigurationError, DataUnavailableError


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Forty passages of one domain, and two others that share passages with it and each other."""

    def write(name: str, lines: list[str]) -> None:
        (tmp_path / name).write_text("\n\n".join(lines) + "\n")

    write("wiki.txt", [f"wiki {i}" for i in range(40)])
    write("facts.txt", ["wiki 39", "wiki 0", *(f"fact {i}" for i in range(12))])
    write("novels.txt", ["fact 11", *(f"novel {i}" for i in range(30))])
    return tmp_path


def settings(files: Path, mixed: int, evaluated: int = 4) -> RunConfig:
    others = f"[{files / 'facts.txt'},{files / 'novels.txt'}]"
    return compose(
        [
            "data=text",
            f"data.path={files / 'wiki.txt'}",
            f"data.out_of_domain={others}",
            "data.calibration_passages=10",
            "data.held_out_passages=8",
            f"data.mixed_domain={mixed}",
            "eval.contexts=8",
            f"eval.out_of_domain_contexts={evaluated}",
        ]
    )


def load(files: Path, mixed: int, evaluated: int = 4) -> tuple[Corpora, RunConfig]:
    cfg = settings(files, mixed, evaluated)
    return load_corpora(cfg, files / "cache"), cfg


def test_what_is_mixed_in_is_neither_evaluated_nor_chosen_on(files: Path) -> None:
    corpora, cfg = load(files, mixed=7)
    mixed = corpora.calibration[10:]
    assert mixed == [*(f"fact {i}" for i in (8, 9, 10, 11)), *(f"novel {i}" for i in (27, 28, 29))]
    evaluated = corpora.evaluation(8, 4)
    assert {name: len(texts) for name, texts in evaluated.items()} == {
        "wiki": 8,
        "facts": 4,
        "novels": 4,
    }
    parts = {**evaluated, **corpora.replayed(cfg.eval)}
    assert parts.pop("training") == corpora.calibration
    for one, other in combinations(parts, 2):
        assert not set(parts[one]) & set(parts[other]), (one, other)
    assert len(parts["other_domain"]) == 4 + SELECTION
    assert parts["calibration"] == corpora.calibration


def test_the_number_mixed_in_moves_nothing_else(files: Path) -> None:
    (none, _), (some, _) = load(files, mixed=0), load(files, mixed=4)
    assert none.calibration == some.calibration[:10] and len(none.calibration) == 10
    assert none.evaluation(8, 4) == some.evaluation(8, 4)
    assert none.selection == some.selection


def test_networks_learn_from_text_of_their_own_where_it_is_named(files: Path) -> None:
    shared, cfg = load(files, mixed=0)
    assert shared.replayed(cfg.eval)["training"] == shared.calibration
    own = replace(cfg, data=replace(cfg.data, training_passages=6))
    apart = load_corpora(own, files / "cache")
    parts = {**apart.evaluation(8, 4), **apart.replayed(own.eval)}
    assert len(parts["training"]) == 6
    assert apart.calibration == shared.calibration and apart.held_out == shared.held_out
    assert apart.selection[0] == shared.selection[0]
    fewer = replace(own, data=replace(own.data, calibration_passages=4))
    assert load_corpora(fewer, files / "cache").training == apart.training
    for one, other in combinations(parts, 2):
        assert not set(parts[one]) & set(parts[other]), (one, other)


def test_too_few_texts_to_learn_from_are_said(files: Path) -> None:
    cfg = settings(files, 0, 4)
    with pytest.raises(DataUnavailableError, match=r"besides those.*\n.*training_passages=400"):
        load_corpora(replace(cfg, data=replace(cfg.data, training_passages=400)), files / "cache")


def test_too_little_to_mix_in_is_said(files: Path) -> None:
    with pytest.raises(ConfigurationError, match="too few passages of facts"):
        load(files, mixed=20, evaluated=6)
    with pytest.raises(ConfigurationError, match=r"data.mixed_domain: there is nothing to mix in"):
        compose(["data=text", f"data.path={files / 'wiki.txt'}", "data.mixed_domain=2"])


def test_miniatures_have_text_to_choose_on(tmp_path: Path) -> None:
    cfg = compose(["experiment=smoke"])
    corpora = load_corpora(cfg, tmp_path)
    assert len(corpora.selection) == SELECTION
    assert not set(corpora.selection) & {*corpora.calibration, *corpora.held_out}
