"""The layout of `BloomForCausalLM`.

Names and shapes are those of `transformers/models/bloom/modeling_bloom.py`; rows of
query_key_value are interleaved by head: [num_heads, 3, head_dim].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from alibi_lm.hf.layout import Layout, Tensors, split_qkv
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.layers import LAYER_NORM_EPSILON

_BLOCK_NAMES = {
    "input_layernorm": "attention_norm",
    "self_attention.dense": "attention.output",
    "post_attention_layernorm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}


def _tensors(model: ModelConfig, weights: Mapping[str, Tensor]) -> Tensors:
    yield "transformer.word_embeddings.weight", weights["embedding.weight"]
    for kind in ("weight", "bias"):
        yield f"transformer.word_embeddings_layernorm.{kind}", weights[f"embedding.norm.{kind}"]
    for index in range(model.num_layers):
        ours, theirs = f"blocks.{index}", f"transformer.h.{index}"
        for kind in ("weight", "bias"):
            qkv = split_qkv(model, weights[f"{ours}.attention.qkv.{kind}"])
            rows = torch.stack(qkv, dim=1).flatten(0, 2)
            yield f"{theirs}.self_attention.query_key_value.{kind}", rows
            for name, canonical in _BLOCK_NAMES.items():
                yield f"{theirs}.{name}.{kind}", weights[f"{ours}.{canonical}.{kind}"]
    for kind in ("weight", "bias"):
        yield f"transformer.ln_f.{kind}", weights[f"head.norm.{kind}"]
    if not model.tied_embeddings:
        yield "lm_head.weight", weights["head.weight"]


def _config(model: ModelConfig, max_length: int) -> dict[str, Any]:
    return {
        "architectures": ["BloomForCausalLM"],
        "hidden_size": model.hidden_size,
        "n_head": model.num_heads,
        "n_layer": model.num_layers,
        # transformers does not look at it; llama.cpp and vLLM take it for the longest input.
        "seq_length": max_length,
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
        "apply_residual_connection_post_layernorm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "slow_but_exact": False,
    }


BLOOM = Layout("bloom", "BloomForCausalLM", _tensors, _config)
