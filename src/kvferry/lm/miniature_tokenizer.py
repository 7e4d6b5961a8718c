"""Small tokenizers of the two kinds that matter, trained in process in a fraction of a second."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from kvferry.lm.miniature_text import miniature_text

_BYTE_PIECES = [f"<0x{value:02X}>" for value in range(256)]


@dataclass(frozen=True)
class TokenizerRecipe:
    """How a family cuts text.

    Attributes:
        vocabulary: number of ids, special tokens included; at least 320.
        bos, eos: the special tokens.
        adds_bos: whether encoding a text puts `bos` in front.
        sentencepiece: pieces with "▁" and byte fallback, else byte-level BPE.
    """

    vocabulary: int
    bos: str
    eos: str
    adds_bos: bool = False
    sentencepiece: bool = False


def train_tokenizer(recipe: TokenizerRecipe, seed: int) -> Any:
    """A fast transformers tokenizer with exactly `recipe.vocabulary` ids, the same for a seed."""
    from transformers import PreTrainedTokenizerFast

    specials = list(dict.fromkeys(("<pad>", recipe.eos, recipe.bos, "<unk>")))
    text = miniature_text(400, seed)
    make = _sentencepiece if recipe.sentencepiece else _byte_level
    tokenizer = make(text, recipe.vocabulary, specials)
    if recipe.adds_bos:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{recipe.bos} $A",
            pair=f"{recipe.bos} $A {recipe.bos} $B",
            special_tokens=[(recipe.bos, tokenizer.token_to_id(recipe.bos))],
        )
    build: Any = PreTrainedTokenizerFast
    return build(
        tokenizer_object=tokenizer,
        bos_token=recipe.bos,
        eos_token=recipe.eos,
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def _byte_level(text: str, vocabulary: int, specials: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def _sentencepiece(text: str, vocabulary: int, specials: list[str]) -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    # Pieces may span no second space, as in the real ones.
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁]*"), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(_BYTE_PIECES),
        special_tokens=specials,
        show_progress=False,
    )
    trained.train_from_iterator([text], trainer)
    model = json.loads(trained.to_str())["model"]
    ids = {piece: number for piece, number in model["vocab"].items() if number < len(specials)}
    rest = [piece for piece in model["vocab"] if piece not in ids]
    for piece in (*_BYTE_PIECES, *rest):
        ids[piece] = len(ids)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=[tuple(merge) for merge in model["merges"]],
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",
        )
    )
    tokenizer.add_special_tokens(specials)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer
