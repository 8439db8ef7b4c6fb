"""What the stock Hugging Face classes can hold, and what both of their layouts share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alibi_lm.errors import ConfigError, Problem
from alibi_lm.model.config import ModelConfig

Tensors = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class Layout:
    """One stock class: how it names weights and what its config.json says."""

    name: str
    """Model type, as in config.json; also the model shape that it holds."""
    class_name: str
    """The class of `transformers` that reads it."""
    tensors: Callable[[ModelConfig, Mapping[str, Tensor]], Tensors]
    """Canonical weights to the class's, one at a time."""
    config: Callable[[ModelConfig, int], dict[str, Any]]
    """Model and longest input to the class's own fields of config.json."""


@dataclass(frozen=True)
class TokenIds:
    """Ids of special tokens, None where there is none."""

    eos: int | None = None
    pad: int | None = None


def config_json(
    layout: Layout, model: ModelConfig, max_length: int, dtype: str, ids: TokenIds
) -> dict[str, Any]:
    """The whole config.json.

    Args:
        layout: the class.
        model: the model, its vocabulary size set.
        max_length: longest input in tokens.
        dtype: torch's name of the weights' type, such as `bfloat16`.
        ids: special tokens.
    """
    return {
        "model_type": layout.name,
        **layout.config(model, max_length),
        "vocab_size": model.vocab_size,
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tied_embeddings,
        "use_cache": True,
        # Every document of the training stream comes after an end token; no bos is ever put in.
        "bos_token_id": ids.eos,
        "eos_token_id": ids.eos,
        "pad_token_id": ids.pad,
        # transformers before 4.56, llama.cpp and vLLM know the second name only.
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def check_model(model: ModelConfig, layout: Layout) -> None:
    """Refuse a model that the class would compute differently.

    Raises:
        ConfigError: naming every setting that does not fit.
    """
    problems = []
    if model.shape != layout.name:
        problems.append(Problem("model.shape", model.shape, f"does not fit {layout.class_name}: "
                                + _difference(model.shape),
                                f"export it as format {model.shape}"))  # fmt: skip
    if model.position != "alibi":
        does = "has fixed slopes" if model.position == "alibi_learned" else "adds linear biases"
        problems.append(Problem("model.position", model.position,
                                f"{layout.class_name} {does}, whatever its config says",
                                "no stock class holds this model"))  # fmt: skip
    if model.scaling is not None:
        problems.append(Problem("model.scaling.kind", model.scaling.kind,
                                f"{layout.class_name} has the paper's slopes, unscaled",
                                "no stock class holds this model"))  # fmt: skip
    if model.window is not None:
        problems.append(Problem("model.window", model.window,
                                f"{layout.class_name} has no sliding window",
                                "no stock class holds this model"))  # fmt: skip
    if problems:
        raise ConfigError(*problems)


def _difference(shape: str) -> str:
    if shape == "bloom":
        return "it has biases, an embedding LayerNorm and a tanh GELU"
    return "it has no biases and no embedding LayerNorm, and an exact GELU"


def split_qkv(model: ModelConfig, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [Q | K | V] of a weight or bias as three [num_heads, head_dim, ...] tensors.

    Keys and values of grouped-query attention are repeated: query head h reads key/value head
    h // (num_heads / kv_heads), so multi-head attention with copies computes the same.
    """
    heads, groups = model.num_heads, model.kv_heads
    by_head = rows.unflatten(0, (heads + 2 * groups, model.head_dim))
    queries, keys, values = by_head.split([heads, groups, groups])
    repeats = heads // groups
    return (
        queries,
        torch.repeat_interleave(keys, repeats, dim=0),
        torch.repeat_interleave(values, repeats, dim=0),
    )
