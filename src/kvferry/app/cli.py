"""The installed command line: `kvferry ask`, `turns`, `compare`, `plot`, and so on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvferry import __version__
from kvferry.errors import KVFerryError

app = typer.Typer(
    name="kvferry",
    help="Hand one language model's KV cache to another, different model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run a command; a mistake in the input is a message and exit code 1, not a traceback."""
    try:
        app()
    except KVFerryError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Say which."),
    ] = False,
) -> None:
    pass


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What the target is asked.")],
    document: Annotated[Path, typer.Option(help="UTF-8 text that the source model reads.")],
    pair: Annotated[
        str | None, typer.Option(help="A pair of conf/pair; default: the mapper's own.")
    ] = None,
    mapper: Annotated[
        str, typer.Option(help="A fitted mapper folder, a run folder, or `latest`.")
    ] = "latest",
    native_tail: Annotated[
        int, typer.Option(min=0, help="Last document tokens that the target reads itself.")
    ] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of each answer.")] = 64,
    outputs: Annotated[Path, typer.Option(help="Where `latest` looks for runs.")] = Path("outputs"),
) -> None:
    """Ask about a document: answered from the carried-over cache, and from a native prefill."""
    from kvferry.app.asking import AskRequest
    from kvferry.app.documents import check_question, read_document
    from kvferry.app.screen import AskScreen

    text, asked = read_document(document), check_question(question)
    request = AskRequest.create(
        document=text,
        question=asked,
        pair=pair,
        mapper=mapper,
        outputs=outputs,
        native_tail=native_tail,
        max_new_tokens=max_new_tokens,
    )
    title = f"{request.config.source.name} -> {request.config.target.name}   {asked}"
    from kvferry.app.ask import ask as answer

    with AskScreen(Console(), title).showing() as screen:
        answer(request, screen)


@app.command()
def turns(
    there: Annotated[Path, typer.Argument(help="Run folder; its source reads first.")],
    back: Annotated[Path, typer.Argument(help="Run folder of the opposite direction.")],
    hand_offs: Annotated[int, typer.Option("--turns", min=1, help="Hand-offs.")] = 3,
    contexts: Annotated[int, typer.Option(min=1, help="Conversations, a passage each.")] = 8,
    first_tokens: Annotated[
        int,
        typer.Option(min=1, help="Read before the first hand-off, in its tokens."),
    ] = 512,
    turn_tokens: Annotated[int, typer.Option(min=8, help="Read after each hand-off.")] = 96,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; default: beside the first run.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure again.")] = False,
) -> None:
    """Hand a conversation back and forth between two models, and measure what each turn loses."""
    from kvferry.app.turns import TurnsRequest
    from kvferry.app.turns import turns as measure

    request = TurnsRequest.create(
        there,
        back,
        turns=hand_offs,
        contexts=contexts,
        first_tokens=first_tokens,
        turn_tokens=turn_tokens,
        out=out,
    )
    measure(request, Console(), force=force)


@app.command()
def plot(
    kind: Annotated[str, typer.Argument(help="sample-efficiency, or tradeoff.")],
    runs: Annotated[
        list[str], typer.Argument(help="Run folders, or LABEL=FOLDER; those without rows are left.")
    ],
    to: Annotated[Path, typer.Option(help="Folder that receives the figures.")] = Path("figures"),
) -> None:
    """Draw several runs together: what is kept by calibration tokens, or KL against recall."""
    from kvferry.app.plot import plot as draw

    for path in draw(kind, runs, to):
        print(path)


@app.command()
def compare(
    runs: Annotated[
        list[str], typer.Argument(help="Run folders, or LABEL=FOLDER; those without rows are left.")
    ],
    to: Annotated[Path | None, typer.Option(help="Markdown file that receives it too.")] = None,
    intervals: Annotated[
        bool, typer.Option("--intervals", help="Show them for KL and recall kept.")
    ] = False,
) -> None:
    """One markdown table a pair: quality, recall, other domains, size and cost of several runs."""
    from kvferry.app.compare import compare as tabulate

    print(tabulate(runs, to=to, intervals=intervals))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    cache: Annotated[Path | None, typer.Option(help="The cache folder to look into.")] = None,
) -> None:
    """Say what is installed, cached and missing, and what this machine can run."""
    from kvferry.app import doctor as examination

    report = examination.examine(cache)
    if as_json:
        print(examination.to_json(report))
    else:
        examination.show(report, Console())


@app.command()
def push(
    run: Annotated[Path, typer.Argument(help="A run folder, or a fitted mapper folder.")],
    repo_id: Annotated[str, typer.Argument(help="OWNER/NAME on the hub; made if not there.")],
    private: Annotated[bool, typer.Option("--private", help="If it is made.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to commit to.")] = None,
) -> None:
    """Publish a fitted mapper with its model card (`hf auth login` first)."""
    from kvferry.app.publish import push as publish

    done = publish(run, repo_id, private=private, revision=revision)
    print(done.address)
    if not done.evaluated:
        print("Its card shows no numbers: the run was not evaluated.", file=sys.stderr)


@app.command()
def clean(
    to_gb: Annotated[
        float | None,
        typer.Option(min=0, help="What may stay; default: the cache's limit. 0 frees all of it."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Free it; without, only say what.")] = False,
    cache: Annotated[Path | None, typer.Option(help="The cache folder to clean.")] = None,
) -> None:
    """Free moments and traces that were not used for longest; models and text stay."""
    from kvferry.app.clean import clean as shrink

    shrink(cache, to_gb, yes, Console())
