"""A run with one checkpoint of random weights, for the export tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from sentencepiece import SentencePieceTrainer

from alibi_lm.checkpoint.config_paths import CONFIG_FOLDERS, config_folders
from alibi_lm.checkpoint.folder import write_meta
from alibi_lm.checkpoint.fragments import fragment_key
from alibi_lm.checkpoint.step import Checkpoint, open_checkpoint
from alibi_lm.config import Config
from alibi_lm.config_loading import build, to_yaml
from alibi_lm.data.indexed import TokenFileWriter
from alibi_lm.data.tokenizer import load_tokenizer
from alibi_lm.model.decoder import Decoder
from alibi_lm.utils.files import sha256, write_text

LENGTH = 24
LINES = ["def f(x):\n", "\treturn x + 1\n", "class A:\n", "    pass\n", "for i in range(9):\n"]


def write_step(
    folder: Path,
    model: dict[str, Any],
    *,
    length: int = LENGTH,
    prepare: Callable[[Decoder], None] | None = None,
    **data: Any,
) -> Checkpoint:
    """A run with one checkpoint: random weights, LayerNorms and biases not at their defaults.

    `prepare` may do something else with the decoder instead, such as train it.
    """
    raw = {
        "run": {"dir": str(folder)},
        "model": {"num_layers": 2, "hidden_size": 48, "vocab_size": 307,
                  "initializer_range": 0.1, **model},
        "data": {"corpora": [{"prefix": "code_train"}], **data},
        "train": {"sequence_length": length},
    }  # fmt: skip
    config = build(Config, raw)
    decoder = Decoder(config.model, seed=1)
    (prepare or _shift_norms)(decoder)
    step_folder = folder / "checkpoints" / "step_00000007"
    step_folder.mkdir(parents=True)
    write_text(step_folder / "config.yaml", to_yaml(config))
    weights = decoder.state_dict()
    tensors = {fragment_key(n, "param", 0): t.flatten().clone() for n, t in weights.items()}
    save_file(tensors, step_folder / "shard_00000.safetensors")
    facts = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in step_folder.iterdir()
    }
    write_meta(
        step_folder,
        {
            "step": 7,
            "tokens": 7 * 8 * LENGTH,
            "parameters": {name: list(t.shape) for name, t in weights.items()},
            "shards": ["shard_00000.safetensors"],
            CONFIG_FOLDERS: config_folders(folder),
            "versions": {},
            "files": facts,
        },
    )
    return open_checkpoint(folder)


def _shift_norms(decoder: Decoder) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))


def add_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Train a small tokenizer on `LINES` and put it into the checkpoint."""
    prefix = folder / "tokenizer"
    SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 20), model_prefix=str(prefix), model_type="bpe",
        vocab_size=300, byte_fallback=True, normalization_rule_name="identity",
        add_dummy_prefix=False, remove_extra_whitespaces=False, unk_id=0, eos_id=1, bos_id=2,
        pad_id=3, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    (checkpoint.folder / "tokenizer").mkdir()
    shutil.copyfile(f"{prefix}.model", checkpoint.folder / "tokenizer" / "tokenizer.model")


def add_validation(checkpoint: Checkpoint, prefix: Path, texts: list[str]) -> None:
    """Tokenize documents with the step's tokenizer, each with its end token."""
    tokenizer = load_tokenizer(checkpoint.folder / "tokenizer")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    writer = TokenFileWriter(prefix, np.uint16)
    for text in texts:
        writer.add_document([*tokenizer.encode(text), tokenizer.eos_id])
    writer.finish()
    checkpoint.config.data.validation.append(str(prefix))
