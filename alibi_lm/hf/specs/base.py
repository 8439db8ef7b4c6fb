"""What the stock Hugging Face classes can hold, and what both of their layouts share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alibi_lm.model.config import ModelConfig
from alibi_lm.utils.errors import ConfigError, Problem

Tensors = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class ExportSpec:
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
class ImportSpec:
    """How a folder of one stock class is read. `config` is an instance of its config class."""

    export_spec: ExportSpec
    """The class."""
    names: Callable[[ModelConfig], Iterator[tuple[str, str]]]
    """Canonical name and the class's of every tensor."""
    rows: Callable[[ModelConfig, Tensor], Tensor]
    """Rows of the class's joined query, key and value weight or bias as [Q | K | V]."""
    model: Callable[[Any], dict[str, Any]]
    """Sizes as our model section has them."""
    refused: Callable[[Any], Iterator[tuple[str, Any, str]]]
    """Key, value and rule of every setting that this model does not compute."""
    length: Callable[[Any], int | None]
    """The training length that the config tells of."""
    longest: Callable[[Any], int | None]
    """The longest input that the class takes; None where any length goes."""
    kept: tuple[str, ...]
    """Fields that say nothing about the model, and are given back at export."""
    aliases: dict[str, str]
    """Second names of fields, which may not contradict the first ones."""
    num_blocks: str
    """The config's field for their number."""
    embedding: str
    """Modules of the base model: the embedding,"""
    embedding_norm: str | None
    """its norm, if the class has one,"""
    blocks: str
    """the list of blocks,"""
    norm: str
    """and the final norm."""

    @property
    def prefix(self) -> str:
        """What the names of the base model's tensors begin with."""
        return "transformer."


KEPT = ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
"""Fields of every class that are given back at export."""


@dataclass(frozen=True)
class TokenIds:
    """Ids of special tokens, None where there is none."""

    eos: int | None = None
    pad: int | None = None


def config_json(
    export_spec: ExportSpec,
    model: ModelConfig,
    max_length: int,
    dtype: str,
    ids: TokenIds,
    kept: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole config.json.

    Args:
        layout: the class.
        model: the model, its vocabulary size set.
        max_length: longest input in tokens.
        dtype: torch's name of the weights' type, such as `bfloat16`.
        ids: special tokens.
        kept: fields that an imported model came with.
    """
    return {
        "model_type": export_spec.name,
        **export_spec.config(model, max_length),
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
        **(kept or {}),
    }


def check_model(model: ModelConfig, export_spec: ExportSpec) -> None:
    """Refuse a model that the class would compute differently.

    Raises:
        ConfigError: naming every setting that does not fit.
    """
    problems = []
    if model.architecture != export_spec.name:
        problems.append(Problem("model.architecture", model.architecture,
                                f"does not fit {export_spec.class_name}: "
                                + _difference(model.architecture),
                                f"export it as format {model.architecture}"))  # fmt: skip
    if model.position != "alibi":
        learned = model.position == "alibi_learned"
        does = "has fixed slopes" if learned else "adds linear biases"
        fix = "export it --with-code, for trust_remote_code"
        fix = "there is no folder for it yet" if learned else fix
        problems.append(Problem("model.position", model.position,
                                f"{export_spec.class_name} {does}, whatever its config says",
                                fix))  # fmt: skip
    if model.scaling is not None:
        problems.append(Problem("model.scaling.kind", model.scaling.kind,
                                f"{export_spec.class_name} has no scaling of positions",
                                "there is no folder for it yet"))  # fmt: skip
    if model.window is not None:
        problems.append(Problem("model.window", model.window,
                                f"{export_spec.class_name} has no sliding window",
                                "export it --with-code, for trust_remote_code"))  # fmt: skip
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


def check_code(model: ModelConfig) -> None:
    """Refuse what our own modeling file does not compute either.

    Raises:
        ConfigError: naming every setting that does not fit.
    """
    fix = "there is no folder for it yet"
    problems = []
    if model.position == "alibi_learned":
        rule = "the modeling file has fixed slopes"
        problems.append(Problem("model.position", model.position, rule, fix))
    if model.scaling is not None:
        rule = "the modeling file has no scaling of positions"
        problems.append(Problem("model.scaling.kind", model.scaling.kind, rule, fix))
    if problems:
        raise ConfigError(*problems)
