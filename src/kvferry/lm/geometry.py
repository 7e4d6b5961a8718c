"""The shape of a model's KV cache, known from its configuration alone."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from kvferry.errors import UnsupportedModelError

_LATENT_ATTENTION_FIELDS = ("kv_lora_rank", "qk_rope_head_dim")
_KEY_VALUE_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


@dataclass(frozen=True)
class LayerGeometry:
    """One layer's cache: ``kv_heads`` x ``head_dim`` a token.

    ``window`` is the number of tokens that the layer attends to, itself included, or None for
    all. ``rope`` names the rotary table of models that have one per layer type.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    rope: str | None = None

    @property
    def width(self) -> int:
        """Features of one component (keys or values) a token."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class KVGeometry:
    """What a mapper must know of a model: no weights are needed to tell it."""

    architecture: str
    layers: tuple[LayerGeometry, ...]
    query_heads: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    rope_parameters: str

    @classmethod
    def from_config(cls, config: Any) -> KVGeometry:
        """Read the geometry off a transformers configuration.

        Raises:
            UnsupportedModelError: encoder-decoder, latent (MLA), linear or recurrent attention,
                or a model without rotary positions.
        """
        text = config.get_text_config(decoder=True)
        _refuse_unsupported(config, text)
        count = int(text.num_hidden_layers)
        heads = int(text.num_attention_heads)
        kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        types = list(getattr(text, "layer_types", None) or ["full_attention"] * count)
        window = getattr(text, "sliding_window", None)
        if not getattr(text, "layer_types", None) and window is not None:
            types = ["sliding_attention"] * count
        parameters = getattr(text, "rope_parameters", None) or {}
        per_type = bool(parameters) and set(types) <= set(parameters)
        layers = tuple(
            LayerGeometry(
                kv_heads=kv_heads,
                head_dim=head_dim,
                window=int(window) if kind == "sliding_attention" and window else None,
                rope=kind if per_type else None,
            )
            for kind in types
        )
        return cls(
            architecture=str(text.model_type),
            layers=layers,
            query_heads=heads,
            hidden_size=int(text.hidden_size),
            vocab_size=int(text.vocab_size),
            max_positions=int(text.max_position_embeddings),
            rope_parameters=json.dumps(parameters, sort_keys=True, default=str),
        )

    @property
    def widths(self) -> tuple[int, ...]:
        """Features of one component a token, layer by layer."""
        return tuple(layer.width for layer in self.layers)

    def bytes_per_token(self, itemsize: int) -> int:
        """Cache size of one token in bytes, keys and values of all layers."""
        return 2 * sum(self.widths) * itemsize

    def fingerprint(self) -> str:
        """Twelve hex digits that change when anything a mapper relies on changes."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _refuse_unsupported(config: Any, text: Any) -> None:
    kind = str(text.model_type)
    if getattr(config, "is_encoder_decoder", False):
        raise _unsupported(kind, "an encoder-decoder, whose cache is not a prefix of the text")
    if any(getattr(text, field, None) for field in _LATENT_ATTENTION_FIELDS):
        raise _unsupported(kind, "multi-head latent attention, which caches no keys per head")
    others = set(getattr(text, "layer_types", None) or []) - _KEY_VALUE_LAYER_TYPES
    if others:
        raise _unsupported(kind, f"layers of type {', '.join(sorted(others))}")
    needed = ("num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    if any(getattr(text, field, None) is None for field in needed) or hasattr(text, "state_size"):
        raise _unsupported(kind, "a recurrent state instead of a key-value cache")
    if not getattr(text, "rope_parameters", None) and not hasattr(text, "rope_theta"):
        raise _unsupported(kind, "positions other than rotary ones")


def _unsupported(kind: str, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Model type '{kind}' has no cache that kvferry can carry over.",
        found=found,
        expected="a decoder with rotary positions and full or sliding-window attention",
        fix="choose a llama, mistral, ministral3, qwen2, qwen3, gemma2 or gemma3 model",
    )
