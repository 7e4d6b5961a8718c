"""Random miniatures of real architectures: same mechanisms, a few thousand weights, no download."""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvferry.errors import ConfigurationError
from kvferry.lm.miniature_tokenizer import TokenizerRecipe, train_tokenizer

if TYPE_CHECKING:
    from kvferry.lm.model import LanguageModel

_POSITIONS = 4096
_WINDOW = 32


@dataclass(frozen=True)
class PicoRecipe:
    """A miniature: the class of its configuration, what differs from the common shape."""

    config_class: str
    tokenizer: TokenizerRecipe
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    options: dict[str, Any] = field(default_factory=dict)


def _rope(theta: float, kind: str = "default", **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **scaling}}


# Ratios of query to KV heads, rope kinds and window patterns are those of the real models. Every
# vocabulary differs, so that any pair of miniatures needs token alignment.
RECIPES: dict[str, PicoRecipe] = {
    "llama": PicoRecipe(
        "LlamaConfig",
        TokenizerRecipe(384, "<|im_start|>", "<|im_end|>"),
        layers=5,
        heads=9,
        kv_heads=3,
        head_dim=8,
        hidden=54,
        options=_rope(1e5) | {"tie_word_embeddings": True},
    ),
    "llama3": PicoRecipe(
        "LlamaConfig",
        TokenizerRecipe(448, "<|begin_of_text|>", "<|end_of_text|>", adds_bos=True),
        layers=4,
        heads=8,
        kv_heads=2,
        head_dim=16,
        hidden=64,
        options=_rope(
            5e5,
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=_POSITIONS // 8,
        ),
    ),
    "qwen2": PicoRecipe(
        "Qwen2Config",
        TokenizerRecipe(512, "<|endoftext|>", "<|endoftext|>"),
        layers=4,
        heads=14,
        kv_heads=2,
        head_dim=8,
        hidden=56,
        options=_rope(1e6) | {"tie_word_embeddings": True},
    ),
    "qwen3": PicoRecipe(
        "Qwen3Config",
        TokenizerRecipe(544, "<|endoftext|>", "<|im_end|>"),
        layers=4,
        heads=8,
        kv_heads=2,
        head_dim=16,
        hidden=64,
        options=_rope(1e6),
    ),
    "gemma2": PicoRecipe(
        "Gemma2Config",
        TokenizerRecipe(640, "<bos>", "<eos>", adds_bos=True, sentencepiece=True),
        layers=4,
        heads=8,
        kv_heads=4,
        head_dim=8,
        hidden=64,
        options=_rope(1e4) | {"sliding_window": _WINDOW, "query_pre_attn_scalar": 8},
    ),
    "gemma3": PicoRecipe(
        "Gemma3TextConfig",
        TokenizerRecipe(672, "<bos>", "<eos>", adds_bos=True, sentencepiece=True),
        layers=6,
        heads=4,
        kv_heads=1,
        head_dim=16,
        hidden=40,
        options={
            "sliding_window": _WINDOW,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "ministral3": PicoRecipe(
        "Ministral3Config",
        TokenizerRecipe(416, "<s>", "</s>", adds_bos=True),
        layers=5,
        heads=8,
        kv_heads=2,
        head_dim=16,
        hidden=64,
        # Without mscale the YaRN attention factor is 1.42; the short original context makes the
        # position-dependent scaling of queries start at token 64.
        options=_rope(
            1e6,
            "yarn",
            factor=_POSITIONS / 64,
            original_max_position_embeddings=64,
            max_position_embeddings=_POSITIONS,
            beta_fast=32.0,
            beta_slow=1.0,
            llama_4_scaling_beta=0.1,
        ),
    ),
    "mistral": PicoRecipe(
        "MistralConfig",
        TokenizerRecipe(480, "<s>", "</s>", adds_bos=True, sentencepiece=True),
        layers=3,
        heads=8,
        kv_heads=2,
        head_dim=8,
        hidden=48,
        options=_rope(1e4) | {"sliding_window": _WINDOW},
    ),
}
ARCHITECTURES = tuple(RECIPES)


def pico_language_model(architecture: str, seed: int = 0, **overrides: Any) -> LanguageModel:
    """A random miniature of `architecture` with a tokenizer trained in process.

    The same architecture, seed and overrides give the same weights and the same tokenizer.

    Args:
        architecture: one of `ARCHITECTURES`.
        seed: of the weights; the tokenizer depends on the architecture alone.
        overrides: fields of the transformers configuration that replace the recipe's.

    Raises:
        ConfigurationError: unknown architecture, with the closest known name.
    """
    import transformers

    from kvferry.lm.attention import attention_implementation
    from kvferry.lm.model import LanguageModel

    if architecture not in RECIPES:
        close = difflib.get_close_matches(architecture, ARCHITECTURES, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "Choose a known one."
        raise ConfigurationError(
            f"There is no miniature of {architecture!r}.",
            expected=", ".join(ARCHITECTURES),
            fix=hint,
        )
    recipe = RECIPES[architecture]
    tokenizer = train_tokenizer(recipe.tokenizer, seed=ARCHITECTURES.index(architecture))
    config = _config(recipe, tokenizer, overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build: Any = transformers.AutoModelForCausalLM.from_config
        model = build(config, attn_implementation=attention_implementation(config))
        _wake(model)
    changed = hashlib.sha256(repr(sorted(overrides.items())).encode()).hexdigest()[:8]
    return LanguageModel(
        model.to(torch.float32),
        tokenizer,
        name=f"pico-{architecture}",
        revision=f"pico-{architecture}-{seed}" + (f"-{changed}" if overrides else ""),
    )


def _config(recipe: PicoRecipe, tokenizer: Any, overrides: dict[str, Any]) -> Any:
    import transformers

    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.hidden,
        "intermediate_size": 2 * recipe.hidden,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "max_position_embeddings": _POSITIONS,
        "initializer_range": recipe.hidden**-0.5,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config_class = getattr(transformers, recipe.config_class)
    return config_class(**(common | recipe.options | overrides))


def _wake(model: torch.nn.Module) -> None:
    """Give biases and norms random values: left at their constants they would test nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
