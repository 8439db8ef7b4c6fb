"""Folders of random models as `transformers` itself writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM

VOCAB_SIZE = 307
WIDTH = 96


def reference_model(architecture: str, heads: int, tied: bool, **settings: Any) -> Any:
    """A model with LayerNorms and biases that are not at their defaults."""
    torch.manual_seed(heads)
    common = {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": tied, "initializer_range": 0.05}
    if architecture == "bloom":
        sizes = {"hidden_size": WIDTH, "n_layer": 2, "n_head": heads}
        model: Any = BloomForCausalLM(BloomConfig(**common | sizes | settings))
    else:
        sizes = {"d_model": WIDTH, "n_layers": 2, "n_heads": heads, "max_seq_len": 300}
        model = MptForCausalLM(MptConfig(**common | sizes | settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def write_reference(
    folder: Path, architecture: str, heads: int = 12, tied: bool = True, **save: Any
) -> Any:
    """Write such a model, and return it."""
    model = reference_model(architecture, heads, tied)
    model.save_pretrained(folder, **save)
    return model
