"""Export and import specs of `MptForCausalLM`.

Names and shapes are those of `transformers/models/mpt/modeling_mpt.py`; rows of Wqkv are
[Q | K | V], each head after head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from alibi_lm.hf.specs.base import ExportSpec, ImportSpec, Tensors, split_qkv
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.layers import LAYER_NORM_EPSILON

_BLOCK_NAMES = {
    "norm_1": "attention_norm",
    "attn.out_proj": "attention.output",
    "norm_2": "mlp_norm",
    "ffn.up_proj": "mlp.up",
    "ffn.down_proj": "mlp.down",
}


def _names(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Canonical name and Hugging Face name of every tensor, in the class's order."""
    yield "embedding.weight", "transformer.wte.weight"
    for index in range(model.num_layers):
        native, hf = f"blocks.{index}", f"transformer.blocks.{index}"
        yield f"{native}.attention.qkv.weight", f"{hf}.attn.Wqkv.weight"
        for name, canonical in _BLOCK_NAMES.items():
            yield f"{native}.{canonical}.weight", f"{hf}.{name}.weight"
    yield "head.norm.weight", "transformer.norm_f.weight"
    if not model.tied_embeddings:
        yield "head.weight", "lm_head.weight"


def _tensors(model: ModelConfig, weights: Mapping[str, Tensor]) -> Tensors:
    for canonical, name in _names(model):
        if ".qkv." in canonical:
            yield name, torch.cat(split_qkv(model, weights[canonical])).flatten(0, 1)
        else:
            yield name, weights[canonical]


def _config(model: ModelConfig, max_length: int) -> dict[str, Any]:
    """The class's fields, and those that only vLLM or llama.cpp read."""
    return {
        # llama.cpp knows only this spelling; transformers uses model_type.
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


MPT = ExportSpec("mpt", "MptForCausalLM", _tensors, _config)


def _model(config: Any) -> dict[str, Any]:
    return {
        "hidden_size": config.d_model,
        "num_heads": config.n_heads,
        "num_layers": config.n_layers,
    }


def _refused(config: Any) -> Iterator[tuple[str, Any, str]]:
    """Settings that `MptForCausalLM` computes unlike this model, or silently ignores."""
    attention = config.attn_config
    scale = attention.softmax_scale
    if scale is not None and not math.isclose(scale, math.sqrt(config.n_heads / config.d_model)):
        yield "attn_config.softmax_scale", scale, "is not 1/sqrt(head width)"
    if attention.clip_qkv:
        yield "attn_config.clip_qkv", attention.clip_qkv, "is not supported by this model"
    ignored = {
        "expansion_ratio": (config.expansion_ratio, 4),
        "logit_scale": (config.logit_scale, None),
        "attn_config.alibi": (attention.alibi, True),
        "attn_config.alibi_bias_max": (attention.alibi_bias_max, 8),
        "attn_config.attn_type": (attention.attn_type, "multihead_attention"),
        "attn_config.prefix_lm": (attention.prefix_lm, False),
        "attn_config.qk_ln": (attention.qk_ln, False),
    }
    for key, (value, only) in ignored.items():
        if value != only:
            yield key, value, f"is not supported by MptForCausalLM, which computes {only}"


MPT_IMPORT = ImportSpec(
    export_spec=MPT,
    names=_names,
    rows=lambda model, rows: rows,
    model=_model,
    refused=_refused,
    length=lambda config: config.max_seq_len,
    longest=lambda config: config.max_seq_len,
    preserved=(
        "max_seq_len",
        "norm_type",
        "no_bias",
        "learned_pos_emb",
        "attn_config",
        "resid_pdrop",
        "emb_pdrop",
        "embedding_fraction",
        "init_device",
    ),
    aliases={
        "num_attention_heads": "n_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
    },
    num_blocks="n_layers",
    embedding="wte",
    embedding_norm=None,
    blocks="blocks",
    norm="norm_f",
)
