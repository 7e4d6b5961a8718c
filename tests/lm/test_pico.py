"""Miniatures: the same mechanisms as the real architectures, the same numbers for a seed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvferry.errors import ConfigurationError
from kvferry.lm import pico
from kvferry.lm.model import LanguageModel
from kvferry.lm.pico import pico_language_model
from tests.conftest import ARCHITECTURES

TRICKY = "The  old gardener's café à 🎉 e\u0301 你好\n\tmarked 1,871 ﬁ "


def test_conftest_lists_every_architecture() -> None:
    assert ARCHITECTURES == pico.ARCHITECTURES


def test_same_seed_same_model(pico_model: LanguageModel) -> None:
    architecture = pico_model.name.removeprefix("pico-")
    before = torch.get_rng_state()
    again, other = pico_language_model(architecture, 0), pico_language_model(architecture, 1)
    assert torch.equal(before, torch.get_rng_state())
    pairs = list(zip(pico_model.model.parameters(), again.model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(next(other.model.parameters()), pairs[0][0])
    assert again.tokenizer.backend_tokenizer.to_str() == other.tokenizer.backend_tokenizer.to_str()


def test_tokenizer_is_the_same_in_another_process(pico: Callable[..., LanguageModel]) -> None:
    code = (
        "from kvferry.lm.pico import RECIPES; from kvferry.lm.miniature_tokenizer import *;"
        "import hashlib;"
        "t = train_tokenizer(RECIPES['gemma3'].tokenizer, 5).backend_tokenizer.to_str();"
        "print(hashlib.sha256(t.encode()).hexdigest())"
    )
    import hashlib

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = pico("gemma3").tokenizer.backend_tokenizer.to_str()
    assert out.stdout.strip() == hashlib.sha256(here.encode()).hexdigest()


def test_text_survives_the_tokenizer(pico_model: LanguageModel) -> None:
    assert pico_model.text_of(pico_model.encode(TRICKY)) == TRICKY
    assert pico_model.encode("") == []
    encoded = pico_model.tokenizer(TRICKY, return_offsets_mapping=True, add_special_tokens=False)
    covered = {at for first, last in encoded.offset_mapping for at in range(first, last)}
    assert covered == set(range(len(TRICKY)))
    assert len(pico_model.tokenizer) == pico_model.geometry.vocab_size


def test_vocabularies_and_tokens_differ(pico: Callable[..., LanguageModel]) -> None:
    models = [pico(name) for name in ARCHITECTURES]
    assert len({model.geometry.vocab_size for model in models}) == len(models)
    text = "The engineer repaired the wooden bridge."
    counts = {len(model.encode(text)) for model in models}
    assert len(counts) > 2 and max(counts) < len(text)


@pytest.mark.parametrize("name", ["llama3", "gemma2", "gemma3", "ministral3", "mistral"])
def test_bos_is_added_as_by_the_real_tokenizer(
    pico: Callable[..., LanguageModel], name: str
) -> None:
    model = pico(name)
    assert model.tokenizer("a").input_ids == [model.tokenizer.bos_token_id, *model.encode("a")]
    assert model.sink_ids == [model.tokenizer.bos_token_id]


def attention(model: LanguageModel) -> Any:
    return model.base.layers[0].self_attn


def test_mechanisms_are_there(pico: Callable[..., LanguageModel]) -> None:
    windows = {
        name: [layer.window for layer in pico(name).geometry.layers] for name in ARCHITECTURES
    }
    assert windows["mistral"] == [32] * 3
    assert windows["gemma2"] == [32, None] * 2
    assert windows["gemma3"] == [32] * 5 + [None]
    assert not any(any(windows[name]) for name in ("llama", "llama3", "qwen2", "qwen3"))
    assert attention(pico("qwen2")).k_proj.bias.abs().max() > 0.1
    assert attention(pico("llama")).k_proj.bias is None
    assert (attention(pico("qwen3")).k_norm.weight - 1).abs().max() > 0.1
    assert attention(pico("gemma2")).attn_logit_softcapping == 50.0
    assert pico("gemma2").model.config._attn_implementation == "eager"
    assert {layer.rope for layer in pico("gemma3").geometry.layers} == {
        "full_attention",
        "sliding_attention",
    }
    rotary = pico("ministral3").base.rotary_emb
    assert rotary.attention_scaling == pytest.approx(1.4159, abs=1e-4)
    plain, scaled = pico("llama").base.rotary_emb, pico("llama3").base.rotary_emb
    assert not torch.allclose(scaled.inv_freq, 5e5 ** -(torch.arange(8) / 8))
    assert torch.allclose(plain.inv_freq, 1e5 ** -(torch.arange(4) / 4))


def test_ministral_scales_late_queries(pico: Callable[..., LanguageModel]) -> None:
    """Query scaling depends on the absolute position, so moving a text changes its logits."""
    ids = torch.tensor([pico("ministral3").encode(TRICKY)[:20]])

    def effect_of_moving(name: str) -> float:
        model = pico(name).model
        here, there = (
            model(ids, position_ids=torch.arange(20)[None] + shift).logits for shift in (0, 640)
        )
        return float((here - there).abs().max())

    assert effect_of_moving("ministral3") > 1e-2
    assert effect_of_moving("llama3") < 1e-3


def test_context_matters(pico_model: LanguageModel) -> None:
    """Logits must hang on the cache, or no test on miniatures would notice a broken one."""
    ids = torch.tensor([pico_model.encode(TRICKY * 2)[:48]])
    other = ids.clone()
    other[:, 30] = (other[:, 30] + 7) % 300 + 4
    whole, changed = pico_model.prefill(ids).logits, pico_model.prefill(other).logits
    alone = pico_model.prefill(ids[:, -1:]).logits
    assert (whole - alone).std() > 0.1
    assert (whole - changed).std() > 0.005


def test_unknown_architecture() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'gemma3'"):
        pico_language_model("gema3")


def test_overrides_change_shape_and_revision(pico: Callable[..., LanguageModel]) -> None:
    model = pico_language_model("llama", 0, num_hidden_layers=2)
    assert len(model.geometry.layers) == 2
    assert model.revision != pico("llama").revision
