"""Two processes collect what one does: gate 5."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvferry.calibration.ranks import free_port
from kvferry.calibration.reader import TokenPair
from kvferry.calibration.shares import shares
from kvferry.calibration.statistics import MomentsModule, empty_moments, mostly_shared
from kvferry.mappers.inputs import SourceCode
from kvferry.mappers.layout import COMPONENTS, Component
from kvferry.stats.moments import Moments
from tests.calibration.test_statistics import PLAN, TEXTS
from tests.pairs import reader_of

SECONDS = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left: their moments, and what each was told."""
    out = tmp_path_factory.mktemp("ranks")
    root = Path(__file__).parents[2]
    script, port = str(Path(__file__).with_name("one_rank.py")), str(free_port())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(index), "2", port, str(out)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return out


def moments_of(tensors: dict[str, torch.Tensor], component: Component) -> Moments:
    prefix = f"{component}."
    own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    return Moments.from_state_dict(own)


def assert_close(one: Moments, other: Moments, relative: float) -> None:
    assert one.rows == other.rows and one.weight == other.weight
    for name in ("mean_x", "mean_y", "c_xx", "c_xy"):
        got, expected = getattr(one, name), getattr(other, name)
        error = float((got - expected).abs().max() / expected.abs().max())
        assert error <= relative, f"{name}: {error:.1e}"


def test_both_ranks_end_with_the_statistics_of_one_process(folder: Path) -> None:
    first, second = (load_file(folder / f"{index}.safetensors") for index in range(2))
    assert first.keys() == second.keys()
    reader = reader_of("llama", "gemma3")
    pairs = [reader.tokenize(text, PLAN.passage_tokens) for text in TEXTS]
    layouts = PLAN.layouts(reader)
    code = SourceCode({c: first[f"code.{c}"] for c in COMPONENTS})

    def reading(part: list[TokenPair], onto: MomentsModule | None = None) -> MomentsModule:
        moments = {c: empty_moments(reader, layouts[c]) for c in COMPONENTS}
        module = onto or MomentsModule(reader, layouts, code, moments, mostly_shared(pairs))
        for pair in part:
            module.add(reader.read([pair])[0])
        return module

    # The same shares, read one after the other by this process.
    first_rank = reading([pairs[0]])
    other = reading([pairs[1]])
    for component in COMPONENTS:
        first_rank.moments[component].merge(other.moments[component])
    reading([pairs[2]], onto=first_rank)
    for component in COMPONENTS:
        first_rank.moments[component].state_dict()  # the ranks met and saved here
    reading([pairs[3]], onto=first_rank)
    other = reading([pairs[4]])
    plain = reading(pairs)
    for component in COMPONENTS:
        expected = first_rank.moments[component].merge(other.moments[component])
        mine, theirs = moments_of(first, component), moments_of(second, component)
        assert_close(mine, expected, 1e-10)
        assert_close(theirs, mine, 1e-14)
        assert_close(mine, plain.moments[component], 1e-5)


def test_the_second_call_went_on_from_the_first(folder: Path) -> None:
    first = json.loads((folder / "0.json").read_text())
    assert [sum(told) for told in first] == [3, 5] and first[1][0] == 3
    assert json.loads((folder / "1.json").read_text()) == [[], []], "one progress bar is enough"
    records = [json.loads(p.read_text()) for p in (folder / "moments").rglob("progress.json")]
    assert sorted(record["passages"] for record in records) == [3, 5]


@pytest.mark.parametrize("count", [0, 1, 4, 5, 9])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_passage_has_one_reader_and_every_round_all_of_them(count: int, ranks: int) -> None:
    pairs = list(range(count))
    plans = [
        list(shares(pairs, rank=r, ranks=ranks, batch_size=2, round_size=4))  # type: ignore[arg-type]
        for r in range(ranks)
    ]
    read = [pair for plan in plans for share in plan for pair in share.pairs]
    assert sorted(read) == pairs  # type: ignore[type-var]
    closes = [[share.closes for share in plan if share.closes or share.last] for plan in plans]
    assert all(each == closes[0] for each in closes) and sum(closes[0]) == count
    assert all([share.last for share in plan].index(True) == len(plan) - 1 for plan in plans)
