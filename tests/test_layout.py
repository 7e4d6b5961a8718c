"""Imports go one way, and configuration objects stop at the application."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvferry

PACKAGE = Path(kvferry.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS: tuple[tuple[str, ...], ...] = (
    ("app",),
    ("evals",),
    ("handoff",),
    ("training",),
    ("calibration",),
    ("mappers", "proxy"),
    ("align", "stats"),
    ("lm",),
)
"""From the top down; a package imports from its own layer's lines below, never above."""

DEPTH = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}
CONFIGURATION = {"hydra", "omegaconf"}


def imported(source: str) -> Iterator[str]:
    """Every module that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offences(package: str, source: str) -> list[str]:
    """The imports of a file of ``package`` that go the wrong way."""
    found: list[str] = []
    for name in imported(source):
        top, _, rest = name.partition(".")
        if top in CONFIGURATION and package != "app":
            found.append(name)
        other = rest.split(".")[0]
        if top != "kvferry" or other == package:
            continue
        if package == "results":
            wrong = other in DEPTH
        elif other == "results":
            # The application and the evaluations write rows; what is below measures nothing.
            wrong = DEPTH.get(package, 0) > DEPTH["evals"]
        else:
            # Two packages of one layer are siblings: neither knows the other.
            wrong = other in DEPTH and DEPTH.get(package, 99) >= DEPTH[other]
        if wrong:
            found.append(name)
    return found


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(PACKAGE)) for p in FILES])
def test_imports_go_one_way(path: Path) -> None:
    parts = path.relative_to(PACKAGE).parts
    package = parts[0] if len(parts) > 1 else ""
    if parts == ("__main__.py",):
        package = "app"  # the command is all that it is
    assert offences(package, path.read_text()) == []


def test_every_package_has_its_place() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= set(DEPTH) | {"results"}


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("lm", "from kvferry.align.tokens import align_tokens"),
        ("stats", "from kvferry.align import tokens"),
        ("mappers", "import kvferry.handoff"),
        ("handoff", "from kvferry.results.rows import ResultRow"),
        ("results", "from kvferry.lm.model import LanguageModel"),
        ("mappers", "from omegaconf import DictConfig"),
        ("evals", "def f():\n    import hydra"),
    ],
)
def test_the_check_sees_what_it_forbids(package: str, line: str) -> None:
    assert offences(package, line)


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("evals", "from kvferry.results.rows import ResultRow"),
        ("app", "import hydra"),
        ("handoff", "from kvferry.lm.model import LanguageModel"),
        ("lm", "from kvferry.errors import KVFerryError"),
    ],
)
def test_the_check_allows_the_rest(package: str, line: str) -> None:
    assert not offences(package, line)
