"""The layout of `MptForCausalLM`.

Names and shapes are those of `transformers/models/mpt/modeling_mpt.py`; rows of Wqkv are
[Q | K | V], each head after head.
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
    "norm_1": "attention_norm",
    "attn.out_proj": "attention.output",
    "norm_2": "mlp_norm",
    "ffn.up_proj": "mlp.up",
    "ffn.down_proj": "mlp.down",
}


def _tensors(model: ModelConfig, weights: Mapping[str, Tensor]) -> Tensors:
    yield "transformer.wte.weight", weights["embedding.weight"]
    for index in range(model.num_layers):
        ours, theirs = f"blocks.{index}", f"transformer.blocks.{index}"
        qkv = split_qkv(model, weights[f"{ours}.attention.qkv.weight"])
        yield f"{theirs}.attn.Wqkv.weight", torch.cat(qkv).flatten(0, 1)
        for name, canonical in _BLOCK_NAMES.items():
            yield f"{theirs}.{name}.weight", weights[f"{ours}.{canonical}.weight"]
    yield "transformer.norm_f.weight", weights["head.norm.weight"]
    if not model.tied_embeddings:
        yield "lm_head.weight", weights["head.weight"]


def _config(model: ModelConfig, max_length: int) -> dict[str, Any]:
    """The class's fields. Those that only other readers (vLLM, llama.cpp) look at are right too."""
    return {
        # llama.cpp knows this spelling only; transformers goes by model_type.
        "architectures": ["MPTForCausalLM"],
        "d_model": model.hidden_size,
        "n_heads": model.num_heads,
        "n_layers": model.num_layers,
        "expansion_ratio": 4,
        "max_seq_len": max_length,
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
        # The name under which vLLM knows MPT's LayerNorm; transformers computes it in fp32.
        "norm_type": "low_precision_layernorm",
        "no_bias": True,
        "learned_pos_emb": False,
        "attn_config": {
            "attn_type": "multihead_attention",
            "attn_impl": "torch",
            "attn_pdrop": 0,
            "clip_qkv": None,
            "softmax_scale": None,
            "prefix_lm": False,
            "qk_ln": False,
            "attn_uses_sequence_id": False,
            "alibi": True,
            "alibi_bias_max": 8,
        },
        "resid_pdrop": 0.0,
        "emb_pdrop": 0.0,
        "embedding_fraction": 1.0,
        "logit_scale": None,
        "init_device": "cpu",
    }


MPT = Layout("mpt", "MptForCausalLM", _tensors, _config)
