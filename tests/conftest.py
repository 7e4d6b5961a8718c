"""Fixtures shared by all tests: no network, one thread, cached miniatures."""

from __future__ import annotations

import os

# Before torch, transformers and datasets are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvferry.lm.model import LanguageModel

ARCHITECTURES = (
    "llama",
    "llama3",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "ministral3",
    "mistral",
)


@cache
def _pico(architecture: str, seed: int) -> LanguageModel:
    import torch

    from kvferry.lm.pico import pico_language_model

    torch.set_num_threads(1)
    return pico_language_model(architecture, seed)


@pytest.fixture(scope="session")
def pico() -> Callable[..., LanguageModel]:
    """`pico(architecture, seed=0)`: a miniature, built once a session; do not change it."""

    def build(architecture: str, seed: int = 0) -> LanguageModel:
        return _pico(architecture, seed)

    return build


@pytest.fixture(params=ARCHITECTURES)
def pico_model(request: pytest.FixtureRequest) -> LanguageModel:
    """Every miniature in turn."""
    return _pico(request.param, 0)


@pytest.fixture(scope="session")
def copier() -> LanguageModel:
    """A miniature that recalls from its cache; trained once a session, in seconds."""
    import torch

    from kvferry.lm.induction import induction_language_model

    torch.set_num_threads(1)
    return induction_language_model("llama", seed=0)


@pytest.fixture(autouse=True)
def private_cache(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path | None]:
    """Unit tests never see the user's cache; integration tests share it, for the real weights."""
    if request.node.get_closest_marker("integration"):
        yield None
        return
    folder = tmp_path_factory.getbasetemp() / "kvferry-cache"
    monkeypatch.setenv("KVFERRY_CACHE", str(folder))
    yield folder
