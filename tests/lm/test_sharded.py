"""Two ranks that hold a model together see what one process sees, bit for bit or to rounding."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.calibration.ranks import free_port
from kvferry.lm.sharding import PACKAGES

SECONDS = 900


def run_ranks(out: Path, sharding: str, dtype: str) -> list[dict[str, object]]:
    """What the first rank, and its companions of two rounds, have seen."""
    root = Path(__file__).parents[2]
    script, port = str(Path(__file__).with_name("one_shard_rank.py")), free_port()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}

    def start(index: int, port: int) -> subprocess.Popen[str]:
        words = [str(index), "2", str(port), str(out), sharding, dtype]
        return subprocess.Popen(
            [sys.executable, script, *words], env=environment, stderr=subprocess.PIPE, text=True
        )

    processes = [start(0, port), start(1, port), start(3, port + 1)]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return [json.loads((out / f"{index}.json").read_text()) for index in (0, 1, 3)]


@pytest.mark.parametrize(
    ("sharding", "dtype", "tolerance"),
    [("zero3", "float32", 0.0), ("zero3", "bfloat16", 0.0), ("tensor_parallel", "float32", 2e-5)],
)
def test_sharded_models_do_all_that_whole_ones_do(
    sharding: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    package = PACKAGES[sharding]  # type: ignore[index]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{sharding} needs {package}: pip install 'kvferry[distributed]'")
    first, *others = run_ranks(tmp_path, sharding, dtype)
    for told in (first, *others):
        shares = told.pop("held")
        assert isinstance(shares, list) and all(0.49 < share < 0.52 for share in shares)
    assert not any(others) and len(first) == 4
    for name, worst in first.items():
        assert isinstance(worst, dict) and len(worst) > 70
        assert {k: x for k, x in worst.items() if x > tolerance} == {}, name
