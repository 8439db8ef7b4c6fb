"""Load Hugging Face folders for use: as our own model, or as their `transformers` class."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alibi_lm.config import Config
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.hf.importing.importer import (
    canonical,
    checked_config,
    folder_tokenizer,
    import_spec_of,
    run_config,
    tensor_names,
)
from alibi_lm.hf.manifest import EXPORT_MANIFEST, check_manifest
from alibi_lm.hf.parity.transformers_reference import quiet
from alibi_lm.hf.weights_reader import WeightsReader, plain_file, read_json
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder, filled_decoder
from alibi_lm.parallel.mesh import NO_PARALLEL, ParallelDim
from alibi_lm.parallel.shard import StridedReader
from alibi_lm.utils.errors import CheckpointError, Problem
from alibi_lm.utils.files import sha256

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w.-]+)?", re.ASCII)
_READ = ("*.json", "*.safetensors", "*.model", "*.txt")
_LENGTHS = ("max_seq_len", "seq_length", "n_positions", "max_position_embeddings", "n_ctx")
_POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings")


def find_folder(name: str) -> Path:
    """The folder of a model: a local folder, or the Hub's `organization/model[@revision]`.

    A Hub model is downloaded into the Hub cache unless it is there already.

    Raises:
        CheckpointError: neither exists.
    """
    if Path(name).is_dir():
        return Path(name)
    if not _HUB_NAME.fullmatch(name):
        raise CheckpointError(Problem(f"hf:{name}", None, "no such folder", "check the path"))
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    try:
        folder = Path(snapshot_download(
            repository, revision=revision or None, allow_patterns=list(_READ)
        ))  # fmt: skip
        if not any(folder.glob("*.safetensors")):
            snapshot_download(repository, revision=revision or None, allow_patterns=["*.bin"])
    except Exception as error:  # the Hub client raises errors of many kinds
        detail = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        rule = f"is not a local folder and could not be downloaded from the Hub ({detail})"
        fix = "check the name, or name a folder"
        raise CheckpointError(Problem(f"hf:{name}", None, rule, fix)) from None
    return folder


def weights_digest(folder: Path) -> str:
    """SHA-256 over names and contents of the model and tokenizer files."""
    patterns = ("config.json", "*.safetensors", "*.bin", "tokenizer.*", "vocab.*", "merges.txt")
    names = sorted({path.name for pattern in patterns for path in folder.glob(pattern)})
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name} {sha256(folder / name)}\n".encode())
    return digest.hexdigest()


def training_length(folder: Path) -> int | None:
    """Training sequence length of the folder's model, or None if it is not stated.

    An export states it in alibi_lm_export.json, because its config field is the longest input.
    Other folders state it in config.json.
    """
    if (folder / EXPORT_MANIFEST).is_file():
        stated = read_json(folder, EXPORT_MANIFEST).get("training_length")
        return stated if isinstance(stated, int) else None
    raw = read_json(folder, "config.json")
    values = [raw[key] for key in _LENGTHS if isinstance(raw.get(key), int) and raw[key] > 0]
    return values[0] if values else None


def unsupported_reason(folder: Path) -> str | None:
    """Why the folder cannot be loaded as our own model, or None if it can."""
    try:
        raw = read_json(folder, "config.json")
        checked_config(folder, raw, import_spec_of(folder, raw))
    except CheckpointError as error:
        return "; ".join(f"{p.key.rpartition(': ')[2]} {p.rule}" for p in error.problems)
    return None if any(folder.glob("*.safetensors")) else "it has no safetensors"


class ImportedFolder:
    """A BLOOM or MPT folder loaded as our own model; nothing is written.

    Attributes:
        config: the config of the run that `import_folder` would write.

    Raises:
        CheckpointError: the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        raw = read_json(folder, "config.json")
        self._import_spec = import_spec_of(folder, raw)
        hf_config = checked_config(folder, raw, self._import_spec)
        check_manifest(folder)
        self._tokenizer = folder_tokenizer(folder)
        self.config: Config = run_config(
            folder, folder, self._import_spec, hf_config, self._tokenizer, []
        )  # fmt: skip
        with WeightsReader(folder, self._import_spec.prefix) as source:
            self._names = tensor_names(folder, source, self._import_spec, self.config)

    def tokenizer(self) -> Tokenizer | None:
        """The folder's tokenizer, or None if it has none."""
        return self._tokenizer

    def decoder(
        self,
        dtype: torch.dtype = torch.float32,
        model: ModelConfig | None = None,
        tp: ParallelDim = NO_PARALLEL,
    ) -> Decoder:
        """As `Checkpoint.decoder`."""
        with WeightsReader(self.folder, self._import_spec.prefix) as source:
            return filled_decoder(model or self.config.model, _Canonical(self, source), dtype, tp)

    def whole(self, source: WeightsReader, name: str) -> Tensor:
        """A tensor by its canonical name: fp32, flattened.

        Raises:
            CheckpointError: an element is not finite.
        """
        hf_name = self._names[name][0]
        tensor = canonical(
            self._import_spec, self.config.model, name, source.tensor(hf_name)
        ).float()
        if not bool(tensor.isfinite().all()):
            rule = "has elements that are not finite"
            raise CheckpointError(Problem(hf_name, None, rule, "restore the folder"))
        return tensor.reshape(-1)


class _Canonical(StridedReader):
    """The folder's tensors, read like a checkpoint's; the last one is cached."""

    def __init__(self, folder: ImportedFolder, source: WeightsReader) -> None:
        self._folder, self._source = folder, source
        self._last: OrderedDict[str, Tensor] = OrderedDict()

    def read(self, name: str, kind: str, start: int, numel: int) -> Tensor:
        """Elements [start, start + numel) of a flattened whole tensor, fp32 `[numel]`."""
        assert kind == "param", f"a folder has no {kind}"
        if name not in self._last:
            self._last.clear()
            self._last[name] = self._folder.whole(self._source, name)
        return self._last[name][start : start + numel]


class TransformersFolder:
    """A folder of any causal language model that `AutoModelForCausalLM` supports.

    Raises:
        CheckpointError: the class is unknown or needs remote code.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.folder = folder
        try:
            with quiet(), torch.device("meta"):
                self.config = AutoConfig.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False
                )
                self._meta_model: nn.Module = AutoModelForCausalLM.from_config(
                    self.config, trust_remote_code=False
                )
        except Exception as error:  # the classes raise errors of many kinds
            raise _unusable(folder, error) from None

    @cached_property
    def num_parameters(self) -> int:
        """Number of weights, shared ones counted once."""
        return sum(parameter.numel() for parameter in self._meta_model.parameters())

    @cached_property
    def longest_input(self) -> int | None:
        """Rows of the position table, or None if the class takes any length."""
        for name, module in self._meta_model.named_modules():
            table = name.rpartition(".")[2] in _POSITION_TABLES
            learned = "Sinusoidal" not in type(module).__name__
            if table and learned and isinstance(module, nn.Embedding):
                return self._stated(module)
        for name, _ in self._meta_model.named_buffers():
            if name.rpartition(".")[2] == "embed_positions":
                return self._stated()
        return None

    def _stated(self, table: nn.Embedding | None = None) -> int | None:
        longest = getattr(self.config, "max_position_embeddings", None)
        if table is not None and table.padding_idx is not None:
            # As in RoBERTa: positions begin after the padding row.
            rows = table.num_embeddings - table.padding_idx - 1
            longest = min(longest, rows) if isinstance(longest, int) else rows
        return longest if isinstance(longest, int) else None

    def load(self, dtype: torch.dtype) -> Any:
        """The model, loaded by `AutoModelForCausalLM` without remote code.

        Raises:
            CheckpointError: it cannot be loaded, or a tensor is missing or of another shape.
        """
        from transformers import AutoModelForCausalLM

        try:
            with quiet():
                model, report = AutoModelForCausalLM.from_pretrained(
                    self.folder,
                    dtype=dtype,
                    output_loading_info=True,
                    local_files_only=True,
                    trust_remote_code=False,
                )
        except Exception as error:
            raise _unusable(self.folder, error) from None
        errors = [*report.get("missing_keys", ()), *report.get("mismatched_keys", ())]
        if errors:
            named = ", ".join(sorted(str(name) for name in errors)[:4])
            rule = f"{len(errors)} tensors are missing or of another shape ({named})"
            raise CheckpointError(Problem(str(self.folder), None, rule, "restore the folder"))
        return model.eval()

    def tokenizer(self) -> Tokenizer | None:
        """The folder's tokenizer, loaded by `AutoTokenizer`, or None if it has none.

        Raises:
            CheckpointError: it cannot be loaded or has no end-of-sequence token.
        """
        from alibi_lm.hf.importing.auto_tokenizer import AutoTokenizerAdapter, has_tokenizer

        return AutoTokenizerAdapter(self.folder) if has_tokenizer(self.folder) else None


def _unusable(folder: Path, error: Exception) -> CheckpointError:
    detail = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    rule = f"transformers cannot load it ({detail})"
    fix = "name the folder of a causal language model that needs no remote code"
    return CheckpointError(Problem(str(plain_file(folder, "config.json").parent), None, rule, fix))
