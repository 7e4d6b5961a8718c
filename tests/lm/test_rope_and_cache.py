"""Positions off and on again, and native content put back: gates 1 and 2."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvferry.errors import ArtefactError, InputError, UnsupportedModelError
from kvferry.lm import cache as kv_cache
from kvferry.lm.content import ContentKV
from kvferry.lm.geometry import KVGeometry
from kvferry.lm.model import LanguageModel, Prefill
from kvferry.lm.rope import apply_rope, strip_rope

from kvferry.lm.pico import pico_language_model  # isort: skip


def prefill_of(model: LanguageModel, tokens: int, rows: int = 1, seed: int = 1) -> Prefill:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, model.geometry.vocab_size - 5, (rows, tokens), generator=generator)
    return model.prefill(ids)


def test_stripping_and_applying_gives_the_keys_back(pico_model: LanguageModel) -> None:
    positions = torch.tensor([[0, 1, 17, 500, 4095, 32_000]])
    for layer, (cos, sin) in enumerate(pico_model.rotary.at(positions)):
        shape = pico_model.geometry.layers[layer]
        keys = torch.randn(1, shape.kv_heads, 6, shape.head_dim)
        again = apply_rope(strip_rope(keys, cos, sin), cos, sin)
        assert (again - keys).abs().max() <= 1e-5


def test_first_layer_content_does_not_depend_on_the_position(pico_model: LanguageModel) -> None:
    """A token's layer-0 key at position p is its content rotated to p: relocation."""
    token = 7
    ids = torch.tensor([[token] * 40])
    content = pico_model.content(pico_model.prefill(ids))
    anchors = pico_model.anchors(ids)
    assert torch.allclose(
        content.keys[0], content.keys[0][:, :, :1].expand_as(content.keys[0]), atol=1e-5
    )
    assert torch.allclose(content.keys[0], anchors[0], atol=1e-5)
    assert torch.allclose(content.values[0], anchors[1], atol=1e-5)
    raw = kv_cache.read_cache(pico_model.prefill(ids).cache)[0][0]
    assert not torch.allclose(raw[:, :, 0], raw[:, :, 39], atol=1e-2), "control: rotation matters"


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda p: p["rope_type"],
)
def test_every_rope_scaling_survives_the_round_trip(parameters: dict[str, object]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        rope_parameters=parameters,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    tokenizer = pico_language_model("llama", 0).tokenizer
    model = LanguageModel(LlamaForCausalLM(config), tokenizer, "rope", "0")
    prefill = prefill_of(model, 300)
    content = model.content(prefill)
    rebuilt = kv_cache.read_cache(model.cache_from(content))
    for (keys, values), (own_keys, own_values) in zip(
        rebuilt, kv_cache.read_cache(prefill.cache), strict=True
    ):
        assert (keys - own_keys).abs().max() <= 1e-5
        assert torch.equal(values, own_values)


def test_native_content_put_back_gives_the_native_logits(pico_model: LanguageModel) -> None:
    """Longer than the window, so that windowed layers are cut."""
    prefill = prefill_of(pico_model, 90)
    suffix = torch.tensor([[9, 11, 13]])
    native = pico_model.extend(kv_cache.copy_cache(prefill.cache), suffix, prefill.mask)
    cache = pico_model.cache_from(pico_model.content(prefill))
    assert (pico_model.extend(cache, suffix, prefill.mask) - native).abs().max() <= 1e-3
    shifted = pico_model.content(prefill)
    wrong = ContentKV(shifted.keys, shifted.values, shifted.positions + 3, shifted.mask)
    broken = pico_model.extend(pico_model.cache_from(wrong), suffix, prefill.mask)
    assert (broken - native).abs().max() > 1e-3, "control: wrong positions must show"


def test_a_padded_batch_equals_each_row_alone(pico_model: LanguageModel) -> None:
    rows = [[3, 8, 21, 34, 55, 6, 7], list(range(10, 60))]
    ids, mask = pico_model.batch(rows)
    prefill = pico_model.prefill(ids, mask)
    suffix = torch.tensor([[12, 14], [12, 14]])
    cache = pico_model.cache_from(pico_model.content(prefill))
    together = pico_model.extend(cache, suffix, mask)
    for index, row in enumerate(rows):
        alone = pico_model.prefill(torch.tensor([row]))
        expected = pico_model.extend(alone.cache, suffix[:1], alone.mask)
        assert (together[index] - expected[0]).abs().max() <= 1e-3


def test_native_prefix_is_exact_and_stops_early(pico_model: LanguageModel) -> None:
    ids = torch.arange(10, 60)[None]
    whole = pico_model.content(pico_model.prefill(ids))
    prefix = pico_model.native_prefix(ids, torch.ones_like(ids, dtype=torch.bool), 3)
    assert sorted(prefix.keys) == [0, 1, 2]
    for layer in range(3):
        assert (prefix.keys[layer] - whole.keys[layer]).abs().max() <= 1e-4
        assert (prefix.values[layer] - whole.values[layer]).abs().max() <= 1e-4


def test_a_truncated_source_cache_is_refused(pico: Callable[..., LanguageModel]) -> None:
    model = pico("gemma3")
    ids = torch.arange(10, 90)[None]
    with pytest.raises(ArtefactError, match="truncated"):
        model.content(model.prefill(ids, full_length=False))


def test_too_many_tokens_are_refused_with_both_numbers(pico: Callable[..., LanguageModel]) -> None:
    model = pico("llama")
    with pytest.raises(InputError, match=str(model.geometry.max_positions)):
        model.batch([[1] * (model.geometry.max_positions + 1)])


def test_generation_equals_recomputing_from_scratch(pico_model: LanguageModel) -> None:
    context, prompt = list(range(20, 70)), [5, 6]
    prefill = pico_model.prefill(torch.tensor([context]))
    made = list(pico_model.generate(prefill.cache, prompt, prefill.mask, 6))
    ids = [*context, *prompt]
    for token in made:
        logits = pico_model.prefill(torch.tensor([ids])).logits[0]
        assert float(logits.max() - logits[token]) <= 1e-4
        ids.append(token)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("DeepseekV3Config", {}),
        ("T5Config", {}),
        ("MambaConfig", {}),
        ("Qwen3NextConfig", {}),
        ("GPT2Config", {}),
    ],
)
def test_models_without_a_mappable_cache_are_refused(name: str, options: dict[str, int]) -> None:
    import transformers

    with pytest.raises(UnsupportedModelError, match="no cache that kvferry can carry over"):
        KVGeometry.from_config(getattr(transformers, name)(**options))
