"""What vLLM's MPT and BLOOM loaders ask of a folder; vLLM itself was not run.

The conditions are read off vllm/model_executor/models/{mpt,bloom}.py, models/registry.py and
transformers_utils/model_arch_config_convertor.py, and said here in our own words.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from alibi_lm.hf.exporting.exporter import export
from alibi_lm.model.slopes import alibi_slopes
from tests.unit.hf.small_step import LENGTH, add_tokenizer, write_step

HIDDEN, LAYERS, VOCABULARY = 48, 2, 307
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length",
               "model_max_length", "max_target_positions", "max_sequence_length",
               "max_seq_length", "seq_len")  # fmt: skip
LINEARS = {
    "mpt": {"attn.Wqkv": (3, 1), "attn.out_proj": (1, 1), "ffn.up_proj": (4, 1),
            "ffn.down_proj": (1, 4)},
    "bloom": {"self_attention.query_key_value": (3, 1), "self_attention.dense": (1, 1),
              "mlp.dense_h_to_4h": (4, 1), "mlp.dense_4h_to_h": (1, 4)},
}  # fmt: skip
NORMS = {
    "mpt": ("norm_1", "norm_2"),
    "bloom": ("input_layernorm", "post_attention_layernorm"),
}
OUTSIDE = {
    "mpt": ("transformer.blocks", "transformer.wte", ["transformer.norm_f"]),
    "bloom": ("transformer.h", "transformer.word_embeddings",
              ["transformer.word_embeddings_layernorm", "transformer.ln_f"]),
}  # fmt: skip


def parameters(architecture: str) -> dict[str, tuple[int, ...]]:
    """The parameters that the loader makes: it knows no name beside them."""
    blocks, embedding, norms = OUTSIDE[architecture]
    found: dict[str, tuple[int, ...]] = {f"{embedding}.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        norms = [*norms, *(f"{blocks}.{layer}.{name}" for name in NORMS[architecture])]
        for name, (rows, columns) in LINEARS[architecture].items():
            found[f"{blocks}.{layer}.{name}.weight"] = (rows * HIDDEN, columns * HIDDEN)
            found[f"{blocks}.{layer}.{name}.bias"] = (rows * HIDDEN,)
    found |= {f"{name}.{kind}": (HIDDEN,) for name in norms for kind in ("weight", "bias")}
    if architecture == "mpt":  # no_bias takes them all away
        found = {name: size for name, size in found.items() if not name.endswith(".bias")}
    return found


def exported(architecture: str, tmp_path: Path) -> tuple[Path, Any]:
    model = {"num_heads": 12, "num_kv_heads": 4, "architecture": architecture}
    step = write_step(tmp_path / "run", model | {"vocab_size": VOCABULARY})
    add_tokenizer(step, tmp_path)
    export(step, tmp_path / "out", parity="weights", precision="bf16")
    return tmp_path / "out", AutoConfig.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("architecture", ["mpt", "bloom"])
def test_what_both_loaders_ask(architecture: str, tmp_path: Path) -> None:
    folder, config = exported(architecture, tmp_path)
    names = {"mpt": ("MPTForCausalLM", "MptForCausalLM"), "bloom": ("BloomForCausalLM",)}
    assert config.architectures[0] in names[architecture]
    assert config.num_hidden_layers == LAYERS
    assert (config.hidden_size, config.num_attention_heads) == (HIDDEN, 12)
    assert config.vocab_size == VOCABULARY
    assert config.dtype is torch.bfloat16
    # Heads of keys and values are looked for under these names; here each head has its own.
    for key in ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num"):
        assert getattr(config, key, 12) == 12
    # The longest input is the smallest of these.
    found = {key: getattr(config, key) for key in LENGTH_KEYS if getattr(config, key, None)}
    assert found == {{"mpt": "max_seq_len", "bloom": "seq_length"}[architecture]: 65536}
    assert 64 * LENGTH <= 65536
    # Without a setting of its own it takes a LayerNorm's epsilon, 1e-5.
    assert config.layer_norm_epsilon == torch.nn.LayerNorm(1).eps
    # The output is the embedding. (For an untied BLOOM it looks for a name that no folder has.)
    assert config.tie_word_embeddings is True
    stored = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == parameters(
        architecture
    )
    assert AutoTokenizer.from_pretrained(folder).is_fast


def test_what_the_mpt_loader_asks(tmp_path: Path) -> None:
    _, config = exported("mpt", tmp_path)
    attention = config.attn_config
    assert attention.alibi
    assert not attention.prefix_lm
    assert not attention.qk_ln
    assert attention.clip_qkv is None
    assert attention.alibi_bias_max == 8
    assert getattr(attention, "kv_n_heads", None) is None
    assert (config.embedding_fraction, config.expansion_ratio) == (1.0, 4)
    assert config.norm_type == "low_precision_layernorm"
    assert config.no_bias
    assert getattr(config, "logit_scale", None) is None


def test_what_the_bloom_loader_asks(tmp_path: Path) -> None:
    _, config = exported("bloom", tmp_path)
    assert config.n_head == config.num_attention_heads
    assert config.hidden_size % config.n_head == 0
    assert config.apply_residual_connection_post_layernorm is False


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 16, 20, 40, 71, 112])
def test_the_slopes_are_ours(heads: int) -> None:
    """MPT's: those of the next power of two, every second one from the second, then the others.
    BLOOM's: those of the last power of two, then every second one of the double of it."""
    after = 2 ** math.ceil(math.log2(heads))
    mpt = [2 ** -(8 * i / after) for i in range(1, after + 1)]
    if after != heads:
        mpt = (mpt[1::2] + mpt[::2])[:heads]
    before = 2 ** math.floor(math.log2(heads))
    bloom = [2 ** -(8 * i / before) for i in range(1, before + 1)]
    bloom += [2 ** -(4 * i / before) for i in range(1, 2 * (heads - before), 2)]
    assert alibi_slopes(heads) == pytest.approx(mpt, rel=1e-6)
    assert alibi_slopes(heads) == pytest.approx(bloom, rel=1e-6)
