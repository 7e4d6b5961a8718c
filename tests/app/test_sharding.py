"""Models that do not fit one device: mistakes before anything loads, plans, and a whole run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from kvferry.app import checks
from kvferry.app.compose import compose
from kvferry.app.folder import RunFolder
from kvferry.app.memory import kept_keys_bytes, moments_bytes
from kvferry.app.run import execute
from kvferry.app.schema import RunConfig
from kvferry.app.stages import describe_plan
from kvferry.calibration.statistics import CalibrationPlan, empty_moments
from kvferry.errors import ConfigurationError
from kvferry.lm.sources import CacheShape
from kvferry.mappers.behaviour import read_mapped
from kvferry.mappers.behaviour_samples import layer_samples
from kvferry.results.rows import read_rows
from tests.matrix import fitted
from tests.pairs import reader_of, statistics_of

BIG = "pair=llama70b_qwen7b"
ON_CPU = ["trainer.accelerator=cpu", "trainer.model_dtype=float32", "trainer.threads=1"]
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="zero3 needs deepspeed: pip install 'kvferry[distributed]'",
)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is installed, as far as settings are concerned."""
    monkeypatch.setattr(checks, "installed", lambda name: True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trainer=deepspeed_zero3", "trainer.devices=1"], "divides the models among ranks"),
        (["trainer.sharding=zero3"], "trainer.devices: sharding=zero3 divides"),
        (
            ["trainer=tensor_parallel", "trainer.devices=auto", "trainer.accelerator=cpu"],
            "sharding=tensor_parallel divides the models among ranks",
        ),
        (["trainer=device_map", "trainer.devices=2"], "CUDA_VISIBLE_DEVICES"),
        (["trainer=tensor_parallel"], "SmolLM2-135M-Instruct has 3 KV heads, which 2 ranks"),
        (["trainer=tensor_parallel", "size=pico"], "has 1 KV heads, which 2 ranks"),
        ([BIG, "trainer=tensor_parallel", "trainer.devices=8"], "Qwen2.5-7B has 4 KV heads"),
        (["trainer.sharding=zero"], "must be none or zero3 or tensor_parallel or device_map"),
        (["trainer.source_device=gpu1"], "must be cpu or cuda:NUMBER, found 'gpu1'"),
        (["trainer=cpu", "trainer.target_device=cuda:1"], "cuda:1 is no CPU"),
        (["trainer.devices=2", "trainer.target_device=cuda:1"], "cannot all lie on one device"),
        (
            [BIG, "trainer=deepspeed_zero3", "trainer.source_device=cuda:0",
             "trainer.target_device=cuda:1"],
            "nothing is left to divide",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_told_before_anything_loads(
    words: list[str], expected: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        compose(words)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("trainer", "package"),
    [("deepspeed_zero3", "deepspeed"), ("tensor_parallel", "accelerate"),
     ("device_map", "accelerate")],
)  # fmt: skip
def test_a_missing_package_is_named(
    trainer: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "installed", lambda name: False)
    with pytest.raises(ConfigurationError, match=f"needs {package}: pip install") as caught:
        compose([BIG, f"trainer={trainer}", "trainer.source_device=x"])
    assert str(caught.value).startswith("2 settings are wrong"), "all of them at once"


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("pair", ["llama70b_qwen7b", "llama8b_llama70b"])
def test_large_pairs_compose_and_say_what_each_device_holds(pair: str) -> None:
    def plan(*words: str) -> str:
        return "\n".join(describe_plan(compose([f"pair={pair}", *words])))

    whole = plan("trainer=gpu")
    assert "131.4 GiB of weights in bfloat16;" in whole and "on the target's device" in whole
    sliced = plan("trainer=deepspeed_zero3", "trainer.devices=4")
    assert "zero3 over 4 ranks, 32.9 GiB each" in sliced and "GiB on cpu" in sliced
    assert "KV cache of 4,000 tokens: 1.2 GiB" in sliced
    own = plan("trainer=tensor_parallel", "trainer.devices=4", "trainer.target_device=cuda:3")
    assert "tensor_parallel over 4 ranks" in own and "in bfloat16 on cuda:3" in own
    assert "spread over all devices" in plan("trainer=device_map")
    assert "a random miniature, zero3 over 2" in plan("trainer=deepspeed_zero3", "size=pico")


def test_the_planned_moments_are_those_that_are_collected() -> None:
    reader = reader_of("llama3", "gemma2")
    cfg = compose([])
    moments = [empty_moments(reader, x) for x in CalibrationPlan().layouts(reader).values()]
    sums = sum(x._xx.nbytes + x._xy.nbytes + sum(y.nbytes for y in x._yy) for x in moments)
    assert moments_bytes(cfg, CacheShape(4, 2, 16), CacheShape(4, 4, 8)) == sums


def test_the_planned_keys_are_those_that_are_kept() -> None:
    mapper, statistics = fitted("anchored", "llama3", "gemma2"), statistics_of("llama3", "gemma2")
    (text,) = read_mapped(mapper, statistics.observe(1), rows=8, seed=0)
    sample = layer_samples(mapper, text, codes={})
    kept = sum(x.keys.native.nbytes + x.keys.mapped.nbytes for x in sample.values())
    shape = CacheShape(4 - mapper.native_layers, 4, 8)
    words = [f"data.passage_tokens={text.content.tokens}", "mapper.passages=5", "mapper.held_out=2"]
    assert kept_keys_bytes(compose(["mapper=anchored", *words]), shape) == 7 * kept
    behind = ["mapper=mobility", *(word.replace("mapper.", "mapper.start.") for word in words)]
    assert kept_keys_bytes(compose(behind), shape) == 7 * kept
    assert not kept_keys_bytes(compose(["mapper=full_head_ridge", words[0]]), shape)
    assert "keys of the texts" in "\n".join(describe_plan(compose([BIG])))


def collected(cache: Path) -> dict[str, Any]:
    """Every tensor of the moments in a cache, by file and name."""
    files = sorted((cache / "moments").rglob("*.safetensors"))
    return {
        f"{place} {name}": tensor
        for place, file in enumerate(files)
        for name, tensor in load_file(file).items()
    }


def pico_run(folder: Path, *words: str) -> RunConfig:
    few = ["data.calibration_passages=5", "data.held_out_passages=4", "data.passage_tokens=140"]
    short = ["eval.contexts=1", "eval.out_of_domain_contexts=1", "eval.latency_tokens=[32]"]
    places = [f"outputs={folder / 'out'}", f"cache={folder / 'cache'}"]
    cfg = compose(["experiment=smoke", "mapper=anchored", *few, *short, *places, *words])
    assert execute(cfg) == 0
    return cfg


@needs_deepspeed
def test_a_run_over_two_ranks_is_the_run_of_one(tmp_path: Path) -> None:
    """Calibration, mapper and evaluation; batches of three rows, the last one of two."""
    same = ["trainer.batch_size=3", "trainer.map_dtype=float32"]
    shared = pico_run(tmp_path / "two", "trainer=deepspeed_zero3", *same, *ON_CPU)
    alone = pico_run(tmp_path / "one", "trainer=cpu", "trainer.threads=1", *same)
    got, wanted = (collected(tmp_path / name / "cache") for name in ("two", "one"))
    assert got.keys() == wanted.keys() and len(got) > 10
    for name, tensor in wanted.items():
        scale = float(tensor.double().abs().max()) or 1.0
        assert float((got[name].double() - tensor.double()).abs().max()) <= 1e-6 * scale, name

    def numbers(cfg: RunConfig) -> dict[tuple[Any, ...], float]:
        rows = read_rows(RunFolder.of(cfg).path / "rows.parquet")
        assert rows
        return {
            (row.split, row.condition, row.metric, row.layer): row.value
            for row in rows
            if row.task == "ladder"
        }

    assert numbers(shared) == pytest.approx(numbers(alone), rel=1e-3, abs=1e-4, nan_ok=True)
    rows = read_rows(RunFolder.of(shared).path / "rows.parquet")
    assert {row.device for row in rows} == {"cpu, 1 threads, zero3 over 2 ranks"}
