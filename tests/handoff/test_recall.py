"""Long-range recall on a miniature that can copy: gate 13."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvferry.calibration.reader import PairReader
from kvferry.calibration.statistics import CalibrationPlan
from kvferry.handoff.handoff import Handoff
from kvferry.lm.induction import induction_batch
from kvferry.lm.model import LanguageModel
from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.base import Statistics
from kvferry.mappers.controls import Identity, Random

ROWS, LENGTH = 16, 40


def recall_nll(model: LanguageModel, mapper: AffineMapper | None) -> float:
    """NLL of a repeated span after native prefill (None) or after a hand-off of each row."""
    reader = PairReader(model, model)
    generator = torch.Generator().manual_seed(5)
    contexts, spans = induction_batch(model, ROWS, LENGTH, 1, generator)
    losses = []
    for context, span in zip(contexts, spans, strict=True):
        prefill = model.prefill(context[None])
        cache, mask = prefill.cache, prefill.mask
        if mapper is not None:
            handoff = Handoff(reader, mapper)
            ids = context.tolist()
            text, places = reader.source_text.character_spans(ids)
            tokens = reader.align(ids, places, ids, text)
            mapped = handoff.finish(
                [handoff.map_content(handoff.source_content(prefill), tokens)], [tokens]
            )
            cache, mask = mapped.cache, mapped.mask
        logits = model.extend(cache, span[None], mask)[0]
        losses.append(F.cross_entropy(logits[:-1], span[1:]))
    return float(torch.stack(losses).mean())


def test_an_identity_hand_off_recalls_what_native_prefill_recalls(copier: LanguageModel) -> None:
    reader = PairReader(copier, copier)
    layouts = CalibrationPlan(code_width=0).layouts(reader)
    shapes = Statistics(copier.geometry, copier.geometry, layouts, {}, None)
    native = recall_nll(copier, None)
    chance = float(torch.tensor(float(LENGTH)).log())
    assert native < 0.5 * chance, "control: the miniature has learned to copy"
    assert recall_nll(copier, Identity().fit(shapes)) == pytest.approx(native, abs=1e-3)
    assert recall_nll(copier, Random().fit(shapes)) > 0.8 * chance
