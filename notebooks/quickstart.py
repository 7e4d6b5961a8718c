# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A first run, from Python
#
# One model reads a context, its cache is carried over, another model goes on. Here both are random
# miniatures of SmolLM2 and Gemma-3, so that everything runs offline in seconds; leave out
# `size=pico` and `eval=smoke` for the real ones.

# %%
import os
import tempfile
from pathlib import Path

from kvferry.app.compose import compose
from kvferry.app.folder import RunFolder
from kvferry.app.run import execute

outputs = os.environ.get("KVFERRY_OUTPUTS", tempfile.mkdtemp())

# %% [markdown]
# ## The settings
#
# The same words as on the command line. A mistyped one is refused with a suggestion.

# %%
text = Path(outputs) / "text.txt"
text.parent.mkdir(parents=True, exist_ok=True)
sentences = [
    "The ferry leaves the harbour at dawn and carries letters, bread and news to the islands.",
    "On the far side another crew waits, reads the labels and goes on where the first one stopped.",
    "Nobody has to write the letters again; what was read once is carried over as it is.",
]
passage = " ".join(sentences * 12)
text.write_text("\n\n".join(f"Passage {i}. {passage}" for i in range(12)))

cfg = compose(
    [
        "experiment=smoke",
        "mapper=anchored",
        "data=text",
        f"data.path={text}",
        "data.calibration_passages=8",
        "data.held_out_passages=4",
        "data.passage_tokens=128",
        f"outputs={outputs}",
    ]
)
print(cfg.source.name, "->", cfg.target.name, "with", cfg.mapper.name, "hash", cfg.config_hash)

# %% [markdown]
# ## Fit, evaluate, report

# %%
code = execute(cfg)
assert code == 0
folder = RunFolder.of(cfg)
print(*sorted(path.name for path in folder.path.iterdir()), sep="\n")

# %% [markdown]
# ## The numbers
#
# Every printed number is a view of `rows.parquet`. Random miniatures recall nothing, so only the
# anchors mean something here: native is 1, the empty cache is 0.

# %%
from rich.console import Console  # noqa: E402

from kvferry.results.rows import read_rows  # noqa: E402
from kvferry.results.tables import print_tables  # noqa: E402

rows = read_rows(folder.path / "rows.parquet")
print_tables(rows, Console(width=110))

# %% [markdown]
# The same call again finds everything finished.

# %%
assert execute(cfg) == 0
