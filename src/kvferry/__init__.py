"""kvferry carries one language model's KV cache over to another, different model."""

__version__ = "0.1.0"
