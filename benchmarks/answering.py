"""What the target answers on a carried cache and a cue, without the text: one run beside another.

    python benchmarks/answering.py outputs/RUN [outputs/RUN ...] [--answers 24]
    python benchmarks/answering.py outputs/RUN [outputs/RUN ...] --planted

Protocol: see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from kvferry.app.corpora import load_corpora
from kvferry.app.folder import load_config
from kvferry.app.models import cache_folder, load_handoff, load_reader
from kvferry.app.progress import progress
from kvferry.calibration.trace_store import TraceStore
from kvferry.evals.answering import CONDITIONS, score_answers
from kvferry.evals.planted_facts import planted_facts
from kvferry.lm.store import cache_root
from kvferry.results.statistics import Interval, floor_normalised, mean_interval, paired_difference
from kvferry.training.answers import Answerer, OwnAnswer


def held_out_answers(answerer: Answerer, texts: list[str], longest: int) -> list[OwnAnswer]:
    """How the target goes on after texts that nothing was fitted on."""
    pairs = [answerer.reader.tokenize(text, answerer.passage_tokens) for text in texts]
    return answerer.continuations(pairs, longest)


def shown(value: Interval) -> str:
    """With its interval."""
    # What is exactly nothing may come out as -1e-17.
    middle, low, high = (round(x, 3) + 0.0 for x in (value.value, value.low, value.high))
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    """Score the mappers of some runs of one pair on the same held-out answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--answers", type=int, default=24)
    parser.add_argument("--answer-tokens", type=int, default=48)
    parser.add_argument("--context-tokens", type=int, default=384)
    parser.add_argument("--planted", action="store_true", help="ask for facts planted in the texts")
    options = parser.parse_args()
    cfg = load_config(options.runs[0])
    reader, cache = load_reader(cfg), cache_root(cache_folder(cfg))
    texts = load_corpora(cfg, cache).held_out[: options.answers]
    longest = cfg.data.passage_tokens
    if options.planted:
        answers = planted_facts(reader, texts, longest, cfg.seed)
    else:
        answerer = Answerer(reader, cache / "answers", options.answer_tokens, longest)
        answers = held_out_answers(answerer, texts, options.context_tokens)
    store = TraceStore(cache / "traces", reader, torch.bfloat16)
    columns = ("mapper", "cache", "NLL", "exact", "kept", "NLL above the first run's")
    table = Table(*columns, title=f"n = {len(answers)}")
    first: dict[str, list[float]] = {}
    for run in options.runs:
        handoff, stamp = load_handoff(load_config(run), run, reader)
        with progress(f"score {run.name}", len(answers)) as step:
            scores = score_answers(handoff, answers, store, step)
        nll = {name: [score.nll for score in scores[name]] for name in CONDITIONS}
        first = first or nll
        for name in CONDITIONS:
            above = paired_difference(nll[name], first[name], seed=cfg.seed)
            kept = floor_normalised(nll[name], nll["zero"], nll["native"], seed=cfg.seed)
            exact = mean_interval([float(s.exact) for s in scores[name]], seed=cfg.seed)
            whole = mean_interval(nll[name], seed=cfg.seed)
            named = f"{stamp.mapper} {stamp.mapper_hash}"
            table.add_row(named, name, *map(shown, (whole, exact, kept, above)))
    Console().print(table)


if __name__ == "__main__":
    main()
