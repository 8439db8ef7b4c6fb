"""Models of one size that `bench train` compares, as modules that return their mean loss."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alibi_lm.config_loading import build
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.layers import Attention, set_pruning_tolerance
from alibi_lm.model.position_scaling import head_slopes
from alibi_lm.train.config import TrainConfig
from alibi_lm.train.engine.compile import compile_blocks

SIZES: dict[str, dict[str, int]] = {
    "4m": {"num_layers": 4, "hidden_size": 256, "num_heads": 8, "vocab_size": 4096},
    "125m": {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "vocab_size": 32000},
}
DENSE = "alibi-dense"
"""ALiBi with dense attention (`train.pruning_tolerance` 0)."""
COMPILED = "alibi-compiled"
"""ALiBi whose blocks go through torch.compile (`train.compile`)."""
OURS = ("alibi", DENSE, COMPILED, "alibi_learned", "none", "sinusoidal", "rotary", "t5")
"""This project's model with each position scheme."""
SAME_PARAMETERS = ("alibi", DENSE, "none")
"""Those of them with the same trained parameters: `become` turns one into another."""
TRANSFORMERS = ("mpt", "bloom")
"""Classes of transformers, with eager attention, the only kind they have."""
X_TRANSFORMERS = "x-transformers"
"""Its decoder with `alibi_pos_bias` and fused attention."""


@dataclass(frozen=True)
class ModelSize:
    """A model's size, and the length of its inputs."""

    name: str
    """A key of `SIZES`."""
    sequence_length: int

    def config(self, position: str) -> ModelConfig:
        """The config of this project's model of this size."""
        position = "alibi" if position in (DENSE, COMPILED) else position
        return build(ModelConfig, SIZES[self.name] | {"position": position})


class MeanLoss(nn.Module):
    """A model whose forward pass is the mean loss in nats of tokens [B, L + 1]."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss."""
        return self.loss(self.model, tokens)


def available(name: str) -> bool:
    """Whether the package that a model needs is installed."""
    return name != X_TRANSFORMERS or importlib.util.find_spec("x_transformers") is not None


def import_packages(name: str) -> None:
    """Import the packages of a model, to keep their memory out of the model's."""
    if name in TRANSFORMERS:
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    if name == X_TRANSFORMERS:
        importlib.import_module("x_transformers")


def make(name: str, size: ModelSize) -> MeanLoss:
    """The model of that name, randomly initialized, in fp32."""
    torch.manual_seed(0)
    if name in TRANSFORMERS:
        return MeanLoss(_transformers_model(name, size), _transformers_loss)
    if name == X_TRANSFORMERS:
        return MeanLoss(_x_transformers_model(size), _logits_loss)
    model = MeanLoss(Decoder(size.config(name)), _decoder_loss)
    _set_tolerance(model, name)
    if name == COMPILED:
        compile_blocks(model)
    return model


def become(model: MeanLoss, name: str, size: ModelSize) -> None:
    """Turn one of `SAME_PARAMETERS` into another, weights unchanged."""
    slopes = head_slopes(size.config(name))
    for module in model.modules():
        if isinstance(module, Attention):
            module.set_slopes(slopes)
    _set_tolerance(model, name)


def _set_tolerance(model: MeanLoss, name: str) -> None:
    set_pruning_tolerance(model, 0.0 if name == DENSE else TrainConfig().pruning_tolerance)


def _decoder_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens[:, :-1], tokens[:, 1:]).mean()


def _transformers_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    # The class shifts the labels itself.
    inputs = tokens[:, :-1]
    return model(input_ids=inputs, labels=inputs, use_cache=False).loss


def _logits_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _transformers_model(name: str, size: ModelSize) -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM

    sizes = SIZES[size.name]
    width, heads, layers = sizes["hidden_size"], sizes["num_heads"], sizes["num_layers"]
    vocab_size = sizes["vocab_size"]
    if name == "mpt":
        length = {"max_seq_len": size.sequence_length}
        return MptForCausalLM(
            MptConfig(
                d_model=width, n_heads=heads, n_layers=layers, vocab_size=vocab_size, **length
            )
        )
    return BloomForCausalLM(
        BloomConfig(hidden_size=width, n_head=heads, n_layer=layers, vocab_size=vocab_size)
    )


def _x_transformers_model(size: ModelSize) -> nn.Module:
    from x_transformers import Decoder as XDecoder
    from x_transformers import TransformerWrapper

    sizes = SIZES[size.name]
    options: dict[str, Any] = {"alibi_pos_bias": True, "attn_flash": True}
    options["attn_dim_head"] = sizes["hidden_size"] // sizes["num_heads"]
    return TransformerWrapper(
        num_tokens=sizes["vocab_size"],
        max_seq_len=size.sequence_length,
        attn_layers=XDecoder(
            dim=sizes["hidden_size"],
            depth=sizes["num_layers"],
            heads=sizes["num_heads"],
            **options,
        ),
        use_abs_pos_emb=False,
        tie_embedding=True,
    )
