"""The settings of a run, as typed values. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from kvferry.app.binding import Range
from kvferry.lm.sharding import OVER_RANKS, Sharding
from kvferry.lm.sources import ModelSpec, Size

Positive = Annotated[int, Range(1)]
Count = Annotated[int, Range(0)]
StageName = Literal["fit", "evaluate", "report"]
Precision = Literal["float32", "bfloat16"]
Condition = Literal[
    "native",
    "mapped",
    "mapped_tail",
    "identity",
    "zero",
    "mean",
    "random",
    "shuffled",
    "wrong_passage",
    "source",
]

STAGES: tuple[StageName, ...] = ("fit", "evaluate", "report")


@dataclass(frozen=True)
class PairConfig:
    """Which model has read the context, and which one goes on from there."""

    name: str
    source: ModelSpec
    target: ModelSpec


@dataclass(frozen=True)
class MapperConfig:
    """The method: the class that is fitted and the values of its fields.

    Attributes:
        name: short name for tables and run folders.
        target: dotted path of the mapper class, `_target_` in the YAML.
        options: field values of that class.
    """

    name: str
    target: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataConfig:
    """The text to calibrate on, and the text that is held out.

    Attributes:
        source: where the passages come from.
        path: `source=text`: a UTF-8 file, one passage a paragraph, blank lines between.
        out_of_domain: files of another domain, in the same form.
        dataset: `source=hub`: name of a data set for the `datasets` library, or a local folder.
        subset: configuration of that data set.
        split: split of that data set.
        column: column that holds the text.
        calibration_passages: passages that the mapper is fitted on.
        training_passages: passages that networks learn from, apart from those; 0: from those.
        held_out_passages: passages that are never fitted on.
        passage_tokens: length that each passage is cut to, in source tokens.
        seed: order of the passages; null keeps the file's order.
        mixed_domain: passages of other domains that calibrate besides these; none is evaluated.
        questions: JSON lines of questions with answers, for mappers that learn from what the target
            answers.
    """

    source: Literal["wikipedia", "text", "hub"]
    path: str | None = None
    out_of_domain: tuple[str, ...] = ()
    dataset: str | None = None
    subset: str | None = None
    split: str = "train"
    column: str = "text"
    calibration_passages: Positive = 200
    training_passages: Count = 0
    held_out_passages: Positive = 64
    passage_tokens: Annotated[int, Range(8)] = 1000
    seed: int | None = None
    mixed_domain: Count = 0
    questions: str | None = None


@dataclass(frozen=True)
class EvalConfig:
    """What is measured, on how much text and against which controls. Lengths are target tokens."""

    contexts: Positive
    out_of_domain_contexts: Count
    context_tokens: Annotated[int, Range(2)]
    continuation_tokens: Positive
    recall_start: Count
    recall_tokens: Positive
    recall_prompt_tokens: Count
    native_tail: Count
    conditions: tuple[Condition, ...]
    latency_tokens: tuple[Positive, ...]
    latency_repeats: Positive
    latency_warmup: Count
    samples: Count
    bootstrap_resamples: Positive = 2000


@dataclass(frozen=True)
class TrainerConfig:
    """The machine: devices, threads and number formats.

    Attributes:
        accelerator: where the models run; "auto" takes a GPU when there is one.
        devices: number of devices, or "auto", a process each: a rank. Ranks share the calibration
            text or, with `sharding`, the models.
        threads: CPU threads; null leaves them as PyTorch chooses.
        model_dtype: number format of both frozen models.
        map_dtype: number format of the mapper's products at hand-off; "auto" takes bfloat16 where
            the machine multiplies it faster.
        batch_size: passages that are read at once.
        training_precision: of mappers that learn; "auto" takes bf16-mixed where `map_dtype` is
            bfloat16 and the models are float32.
        gradient_clip: largest norm of a gradient; 0 clips nothing.
        gradient_checkpointing: run the target again in the backward pass, row by row, and keep
            nothing of the forward one: less memory, a third more time.
        ema: decay of an average of the weights, which is then what is kept; 0 averages nothing.
        sharding: how the frozen models are held where they do not fit one device. "zero3" and
            "tensor_parallel" divide them among ranks, "device_map" among the devices of one
            process.
        source_device, target_device: keeps that model whole, on a device of its own ("cuda:1").
        fit_device: where calibration counts and the mapper is fitted; null: where the target lies,
            "cpu": in the machine's memory, where moments do not fit beside weights.
    """

    accelerator: Literal["auto", "cpu", "gpu"]
    devices: Positive | Literal["auto"] = 1
    threads: Positive | None = None
    model_dtype: Precision = "float32"
    map_dtype: Precision | Literal["auto"] = "auto"
    batch_size: Positive = 1
    training_precision: Literal["auto", "32-true", "bf16-mixed", "bf16-true"] = "auto"
    gradient_clip: Annotated[float, Range(0)] = 1.0
    gradient_checkpointing: bool = False
    ema: Annotated[float, Range(0, 1)] = 0.0
    sharding: Sharding = "none"
    source_device: str | None = None
    target_device: str | None = None
    fit_device: Literal["cpu"] | None = None

    @property
    def shares_models(self) -> bool:
        """Whether ranks hold the models together, and not a copy each."""
        return self.sharding in OVER_RANKS


@dataclass(frozen=True)
class LocalLoggerConfig:
    """Lines in a file of the run folder."""

    file: str = "metrics.jsonl"


@dataclass(frozen=True)
class CsvLoggerConfig:
    """Two comma-separated tables in the run folder."""

    folder: str = "csv"


@dataclass(frozen=True)
class TensorBoardLoggerConfig:
    """TensorBoard event files in the run folder."""

    folder: str = "tensorboard"


@dataclass(frozen=True)
class WandbLoggerConfig:
    """A W&B run; without a network it is written to the run folder and synchronised later."""

    project: str = "kvferry"
    entity: str | None = None
    mode: Literal["online", "offline", "disabled"] | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoggerConfig:
    """Every logger that is on; null is off."""

    local: LocalLoggerConfig | None = None
    wandb: WandbLoggerConfig | None = None
    tensorboard: TensorBoardLoggerConfig | None = None
    csv: CsvLoggerConfig | None = None


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run needs to know.

    Attributes:
        name: first part of the run folder's name.
        seed: of every random draw.
        size: "pico" replaces both models by random miniatures of the same architectures.
        stages: which of `fit`, `evaluate`, `report` this call takes.
        force: run stages again that are already finished.
        plan: say what would be done and stop.
        outputs: folder that receives the run folder.
        cache: folder for models and text; null means `$KVFERRY_CACHE` or the user's cache folder.
        cache_limit_gb: size that moments and traces in it are kept to; what this run uses always
            stays. null means `$KVFERRY_CACHE_LIMIT_GB` or 40.
    """

    pair: PairConfig
    mapper: MapperConfig
    data: DataConfig
    eval: EvalConfig
    trainer: TrainerConfig
    logger: LoggerConfig
    name: str
    seed: Count = 0
    size: Size = "full"
    stages: tuple[StageName, ...] = STAGES
    force: bool = False
    plan: bool = False
    outputs: str = "outputs"
    cache: str | None = None
    cache_limit_gb: Annotated[float, Range(0)] | None = None

    @property
    def source(self) -> ModelSpec:
        """The model that reads the context, in the size of this run."""
        return self._sized(self.pair.source)

    @property
    def target(self) -> ModelSpec:
        """The model that goes on, in the size of this run."""
        return self._sized(self.pair.target)

    def _sized(self, model: ModelSpec) -> ModelSpec:
        return dataclasses.replace(model, size="pico") if self.size == "pico" else model

    def identity(self) -> dict[str, Any]:
        """The settings that change results, as plain containers: what the hash is taken of."""
        values: dict[str, Any] = to_plain(self)
        for key in (
            "name",
            "stages",
            "force",
            "plan",
            "outputs",
            "cache",
            "cache_limit_gb",
            "logger",
        ):
            del values[key]
        return values

    @property
    def config_hash(self) -> str:
        """Ten hexadecimal digits that change with any setting that changes results."""
        text = json.dumps(self.identity(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]


def to_plain(value: Any) -> Any:
    """Dataclasses, tuples and mappings as the dictionaries and lists of YAML and JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value
