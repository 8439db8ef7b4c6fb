"""Exports with our own modeling file, for models that no `transformers` class computes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alibi_lm.hf.exporting.weights import StepWeights, filled_decoder, same_bits
from alibi_lm.hf.parity.check import LARGEST_PROMPT, MULTIPLES, NEW_TOKENS, ParityLevel
from alibi_lm.hf.parity.logits import TOLERANCE, compare_greedy
from alibi_lm.hf.parity.transformers_reference import Mismatch, quiet
from alibi_lm.hf.specs.base import ExportSpec, Tensors
from alibi_lm.hf.weights_reader import WeightsReader
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.layers import LAYER_NORM_EPSILON
from alibi_lm.utils.errors import CheckpointError, Problem

FILE = "modeling_alibi_lm.py"
_PADDING = 3


def _tensors(model: ModelConfig, weights: Mapping[str, Tensor]) -> Tensors:
    for name in weights:
        yield name, weights[name]


def _config(model: ModelConfig, max_length: int) -> dict[str, Any]:
    module = FILE.removesuffix(".py")
    return {
        "architectures": ["AlibiLmForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{module}.AlibiLmConfig",
            "AutoModelForCausalLM": f"{module}.AlibiLmForCausalLM",
        },
        "architecture": model.architecture,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "position": model.position,
        "window": model.window,
        "max_positions": model.max_positions,
        "tied_embeddings": model.tied_embeddings,
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
    }


CUSTOM_CODE = ExportSpec("alibi_lm", "AlibiLmForCausalLM", _tensors, _config)
"""The export spec of our own modeling file: canonical names and shapes."""


def write_code(folder: Path) -> None:
    """Copy the modeling file into an exported folder."""
    with as_file(files("alibi_lm.hf.exporting").joinpath(FILE)) as path:
        shutil.copyfile(path, folder / FILE)


def check_code_parity(
    folder: Path,
    model: ModelConfig,
    weights: StepWeights,
    parity: ParityLevel,
    texts: tuple[Tensor, str],
    length: int,
    name: Path,
) -> dict[str, Any]:
    """Compare the folder, loaded with `trust_remote_code`, with the native model.

    Args:
        folder: the exported folder.
        model: the native model.
        weights: its weights, rounded to the exported dtype.
        parity: `weights` compares bits only; any other level compares logits as well.
        texts: tokens [1, T] of the longest comparison, and a description of them.
        length: tokens of the shortest comparison.
        name: the path to name in an error.

    Raises:
        CheckpointError: anything differs.
    """
    summary: dict[str, Any] = {"kind": "weights" if parity == "weights" else "logits", "logits": []}
    try:
        summary["tensors_equal"] = _equal_tensors(folder, weights)
        if parity != "weights":
            tokens, summary["tokens"] = texts
            summary |= {"tolerance": TOLERANCE} | _compare(folder, model, weights, tokens, length)
    except Mismatch as mismatch:
        raise CheckpointError(Problem(str(name), None, mismatch.rule, mismatch.fix)) from None
    return summary


def _equal_tensors(folder: Path, weights: StepWeights) -> int:
    with WeightsReader(folder, "") as source:
        if source.shapes.keys() != set(weights):
            raise Mismatch("the stored tensors are not those of the model")
        with weights.progress("read back"):
            for name in weights:
                stored = source.tensor(name)
                if not same_bits(weights[name].to(stored.dtype), stored):
                    raise Mismatch(f"{name} does not read back as it was written: its bits differ")
        return len(weights)


@torch.no_grad()
def _compare(
    folder: Path, config: ModelConfig, weights: StepWeights, tokens: Tensor, length: int
) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    with quiet():
        reference, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=True,
            output_loading_info=True,
        )
    errors = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if errors:
        raise Mismatch(f"{type(reference).__name__} loads it with {errors}")
    reference.eval()
    decoder = filled_decoder(config, weights)
    rows = []
    for size in (multiple * length for multiple in MULTIPLES):
        if size <= tokens.shape[1]:
            difference = _difference(decoder, reference, tokens[:, :size])
            if not difference <= TOLERANCE:
                raise Mismatch(f"logits differ by {difference:.3g} at {size:,} tokens")
            rows.append({"length": size, "max_difference": difference,
                         "max_difference_fp64": None})  # fmt: skip
    prompt = min(length, LARGEST_PROMPT)
    limit = config.max_positions or prompt + NEW_TOKENS
    prompt = min(prompt, max(1, limit - NEW_TOKENS))
    num_tokens = min(NEW_TOKENS, limit - prompt)
    compare_greedy(decoder, reference, tokens[:, :prompt], num_tokens)
    return {"logits": rows, "greedy_tokens_equal": num_tokens}


def _difference(decoder: Decoder, reference: Any, tokens: Tensor) -> float:
    """Largest logit difference of a whole forward, a cached one, and one with left padding."""
    expected = decoder(tokens)
    differences = [reference(tokens).logits - expected]
    first = reference(tokens[:, :-2], use_cache=True)
    name = "cache" if "cache" in first else "past_key_values"  # renamed in transformers 5
    second = reference(tokens[:, -2:], use_cache=True, **{name: first[name]})
    differences += [first.logits - expected[:, :-2], second.logits - expected[:, -2:]]
    padding = torch.zeros(1, _PADDING, dtype=tokens.dtype)
    mask = torch.cat([padding, torch.ones_like(tokens)], dim=1)
    padded = reference(torch.cat([padding, tokens], dim=1), attention_mask=mask).logits
    differences.append(padded[:, _PADDING:] - expected)
    return float(torch.stack([part.abs().max() for part in differences]).max())
