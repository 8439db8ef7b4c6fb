"""Export and import specs of `BloomForCausalLM`.

Names and shapes are those of `transformers/models/bloom/modeling_bloom.py`; rows of
query_key_value are interleaved by head: [num_heads, 3, head_dim].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from alibi_lm.hf.specs.base import ExportSpec, ImportSpec, Tensors, split_qkv
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.layers import LAYER_NORM_EPSILON

_BLOCK_NAMES = {
    "input_layernorm": "attention_norm",
    "self_attention.dense": "attention.output",
    "post_attention_layernorm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}


def _names(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Canonical name and Hugging Face name of every tensor, in the class's order."""
    kinds = ("weight", "bias")
    yield "embedding.weight", "transformer.word_embeddings.weight"
    for kind in kinds:
        yield f"embedding.norm.{kind}", f"transformer.word_embeddings_layernorm.{kind}"
    for index in range(model.num_layers):
        native, hf = f"blocks.{index}", f"transformer.h.{index}"
        for kind in kinds:
            yield f"{native}.attention.qkv.{kind}", f"{hf}.self_attention.query_key_value.{kind}"
            for name, canonical in _BLOCK_NAMES.items():
                yield f"{native}.{canonical}.{kind}", f"{hf}.{name}.{kind}"
    for kind in kinds:
        yield f"head.norm.{kind}", f"transformer.ln_f.{kind}"
    if not model.tied_embeddings:
        yield "head.weight", "lm_head.weight"


def _tensors(model: ModelConfig, weights: Mapping[str, Tensor]) -> Tensors:
    for canonical, name in _names(model):
        if ".qkv." in canonical:
            qkv = split_qkv(model, weights[canonical])
            yield name, torch.stack(qkv, dim=1).flatten(0, 2)
        else:
            yield name, weights[canonical]


def _rows(model: ModelConfig, rows: Tensor) -> Tensor:
    """Rows of query_key_value, interleaved by head, as [Q | K | V]."""
    by_head = rows.unflatten(0, (model.num_heads, 3, model.head_dim))
    return by_head.transpose(0, 1).flatten(0, 2)


def _config(model: ModelConfig, max_length: int) -> dict[str, Any]:
    return {
        "architectures": ["BloomForCausalLM"],
        "hidden_size": model.hidden_size,
        "n_head": model.num_heads,
        "n_layer": model.num_layers,
        # transformers ignores it; llama.cpp and vLLM read it as the longest input.
        "seq_length": max_length,
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
        "apply_residual_connection_post_layernorm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "slow_but_exact": False,
    }


BLOOM = ExportSpec("bloom", "BloomForCausalLM", _tensors, _config)


def _model(config: Any) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "num_heads": config.n_head,
        "num_layers": config.n_layer,
    }


def _refused(config: Any) -> Iterator[tuple[str, Any, str]]:
    if config.apply_residual_connection_post_layernorm:
        rule = "moves the residual behind the LayerNorm, which this model does not do"
        yield "apply_residual_connection_post_layernorm", True, rule


BLOOM_IMPORT = ImportSpec(
    export_spec=BLOOM,
    names=_names,
    rows=_rows,
    model=_model,
    refused=_refused,
    length=lambda config: getattr(config, "seq_length", None),
    longest=lambda config: None,
    preserved=(
        "seq_length",
        "hidden_dropout",
        "attention_dropout",
        "pretraining_tp",
        "slow_but_exact",
    ),
    aliases={
        "num_attention_heads": "n_head",
        "n_embed": "hidden_size",
        "num_hidden_layers": "n_layer",
    },
    num_blocks="n_layer",
    embedding="word_embeddings",
    embedding_norm="word_embeddings_layernorm",
    blocks="h",
    norm="ln_f",
)
