"""Export and import specs: how `transformers` classes name weights and what they compute."""

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
    """How a `transformers` class names its weights and what its config.json says."""

    name: str
    """`model_type` in config.json, and our `model.architecture`."""
    class_name: str
    """The class of `transformers`."""
    tensors: Callable[[ModelConfig, Mapping[str, Tensor]], Tensors]
    """Canonical weights to (name, tensor) of the class, one at a time."""
    config: Callable[[ModelConfig, int], dict[str, Any]]
    """Model and longest input to the class's fields of config.json."""


@dataclass(frozen=True)
class ImportSpec:
    """How a folder of a `transformers` class is read; `config` is the class's config."""

    export_spec: ExportSpec
    """The class."""
    names: Callable[[ModelConfig], Iterator[tuple[str, str]]]
    """Canonical name and Hugging Face name of every tensor."""
    rows: Callable[[ModelConfig, Tensor], Tensor]
    """Rows of the class's joined query, key and value weight or bias as [Q | K | V]."""
    model: Callable[[Any], dict[str, Any]]
    """The sizes, as keys of our model section."""
    refused: Callable[[Any], Iterator[tuple[str, Any, str]]]
    """Key, value and rule of every unsupported setting."""
    length: Callable[[Any], int | None]
    """The training length, if the config states it."""
    longest: Callable[[Any], int | None]
    """The longest input that the class takes, None for any length."""
    preserved: tuple[str, ...]
    """Fields that do not change the model; an export writes them back."""
    aliases: dict[str, str]
    """Alternative field names, which must agree with the main ones."""
    num_blocks: str
    """The config's field for the number of blocks."""
    embedding: str
    """Embedding module of the base model."""
    embedding_norm: str | None
    """Embedding norm, if the class has one."""
    blocks: str
    """List of blocks."""
    norm: str
    """Final norm."""

    @property
    def prefix(self) -> str:
        """Prefix of the base model's tensor names."""
        return "transformer."


PRESERVED_FIELDS = (
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
)
"""Fields of every class that an export writes back."""


@dataclass(frozen=True)
class TokenIds:
    """Ids of special tokens, None for those that do not exist."""

    eos: int | list[int] | None = None
    pad: int | None = None


def config_json(
    export_spec: ExportSpec,
    model: ModelConfig,
    max_length: int,
    dtype: str,
    ids: TokenIds,
    preserved: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole config.json.

    Args:
        export_spec: the class.
        model: the model, its vocabulary size set.
        max_length: longest input in tokens.
        dtype: torch's name of the weights' dtype, such as `bfloat16`.
        ids: special tokens.
        preserved: fields of the folder that the model was imported from.
    """
    return {
        "model_type": export_spec.name,
        **export_spec.config(model, max_length),
        "vocab_size": model.vocab_size,
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tied_embeddings,
        "use_cache": True,
        # In training, an eos comes before every document; a bos is never added.
        "bos_token_id": ids.eos[0] if isinstance(ids.eos, list) else ids.eos,
        "eos_token_id": ids.eos,
        "pad_token_id": ids.pad,
        # transformers before 4.56, llama.cpp and vLLM only know torch_dtype.
        "dtype": dtype,
        "torch_dtype": dtype,
        **(preserved or {}),
    }


def check_model(model: ModelConfig, export_spec: ExportSpec) -> None:
    """Refuse a model that the class would compute differently.

    Raises:
        ConfigError: lists every unsupported setting.
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
        fix = "it cannot be exported yet" if learned else fix
        problems.append(Problem("model.position", model.position,
                                f"{export_spec.class_name} {does}, whatever its config says",
                                fix))  # fmt: skip
    if model.scaling is not None:
        problems.append(Problem("model.scaling.kind", model.scaling.kind,
                                f"{export_spec.class_name} has no scaling of positions",
                                "it cannot be exported yet"))  # fmt: skip
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
    """Refuse a model that our own modeling file would compute differently.

    Raises:
        ConfigError: lists every unsupported setting.
    """
    fix = "it cannot be exported yet"
    problems = []
    if model.position == "alibi_learned":
        rule = "the modeling file has fixed slopes"
        problems.append(Problem("model.position", model.position, rule, fix))
    if model.scaling is not None:
        rule = "the modeling file has no scaling of positions"
        problems.append(Problem("model.scaling.kind", model.scaling.kind, rule, fix))
    if problems:
        raise ConfigError(*problems)
