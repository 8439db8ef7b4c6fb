"""Models of the same size, ours and others', each as a plain module that gives its mean loss."""

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
"""ALiBi whose attention leaves nothing out (`train.pruning_tolerance` 0)."""
COMPILED = "alibi-compiled"
"""ALiBi whose blocks go through torch.compile (`train.compile`)."""
OURS = ("alibi", DENSE, COMPILED, "alibi_learned", "none", "sinusoidal", "rotary", "t5")
"""This project's model with each position scheme."""
SAME_PARAMETERS = ("alibi", DENSE, "none")
"""Those of them that differ in nothing that is trained: `become` makes one of another."""
STOCK = ("mpt", "bloom")
"""Classes of transformers, with eager attention: they have no other."""
X_TRANSFORMERS = "x-transformers"
"""Its decoder with `alibi_pos_bias` and fused attention."""


@dataclass(frozen=True)
class Shape:
    """A model's size and its inputs."""

    size: str
    sequence_length: int

    def model(self, position: str) -> ModelConfig:
        """This project's config of it."""
        position = "alibi" if position in (DENSE, COMPILED) else position
        return build(ModelConfig, SIZES[self.size] | {"position": position})


class Losses(nn.Module):
    """A model and how its mean loss is had from tokens [B, L + 1]."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss in nats."""
        return self.loss(self.model, tokens)


def available(name: str) -> bool:
    """Whether the peer's package is installed."""
    package = {X_TRANSFORMERS: "x_transformers"}.get(name)
    return package is None or importlib.util.find_spec(package) is not None


def import_packages(name: str) -> None:
    """Import what a model needs, so that its memory is not taken for the model's."""
    if name in STOCK:
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    if name == X_TRANSFORMERS:
        importlib.import_module("x_transformers")


def make(name: str, shape: Shape) -> Losses:
    """The model of that name in fp32, its weights random."""
    torch.manual_seed(0)
    if name in STOCK:
        return Losses(_stock(name, shape), _stock_loss)
    if name == X_TRANSFORMERS:
        return Losses(_x_transformers(shape), _logits_loss)
    losses = Losses(Decoder(shape.model(name)), _our_loss)
    _set_epsilon(losses, name)
    if name == COMPILED:
        compile_blocks(losses)
    return losses


def become(losses: Losses, name: str, shape: Shape) -> None:
    """Let one of `SAME_PARAMETERS` go on as another."""
    slopes = head_slopes(shape.model(name))
    for module in losses.modules():
        if isinstance(module, Attention):
            module.slopes = slopes
    _set_epsilon(losses, name)


def _set_epsilon(losses: Losses, name: str) -> None:
    """What a run leaves out by default, or nothing."""
    set_pruning_tolerance(losses, 0.0 if name == DENSE else TrainConfig().pruning_tolerance)


def _our_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens[:, :-1], tokens[:, 1:]).mean()


def _stock_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    # The class shifts the labels itself.
    inputs = tokens[:, :-1]
    return model(input_ids=inputs, labels=inputs, use_cache=False).loss


def _logits_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _stock(name: str, shape: Shape) -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM

    size = SIZES[shape.size]
    if name == "mpt":
        return MptForCausalLM(
            MptConfig(d_model=size["hidden_size"], n_heads=size["num_heads"],
                      n_layers=size["num_layers"], vocab_size=size["vocab_size"],
                      max_seq_len=shape.sequence_length)
        )  # fmt: skip
    return BloomForCausalLM(
        BloomConfig(hidden_size=size["hidden_size"], n_head=size["num_heads"],
                    n_layer=size["num_layers"], vocab_size=size["vocab_size"])
    )  # fmt: skip


def _x_transformers(shape: Shape) -> nn.Module:
    from x_transformers import Decoder as XDecoder
    from x_transformers import TransformerWrapper

    size = SIZES[shape.size]
    options: dict[str, Any] = {"alibi_pos_bias": True, "attn_flash": True}
    layers = XDecoder(
        dim=size["hidden_size"], depth=size["num_layers"], heads=size["num_heads"],
        attn_dim_head=size["hidden_size"] // size["num_heads"], **options,
    )  # fmt: skip
    return TransformerWrapper(
        num_tokens=size["vocab_size"], max_seq_len=shape.sequence_length, attn_layers=layers,
        use_abs_pos_emb=False, tie_embedding=True,
    )  # fmt: skip
