"""Hugging Face folders put into memory for use: as our own model, or as their own class."""

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
from alibi_lm.hf.manifest import FACTS, check_own_files
from alibi_lm.hf.parity.transformers_reference import quiet
from alibi_lm.hf.weights_reader import SourceFolder, inside, read_json
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder, filled_decoder
from alibi_lm.parallel.mesh import NO_PARALLEL, ParallelDim
from alibi_lm.parallel.strided_reader import StridedReader
from alibi_lm.utils.errors import CheckpointError, Problem
from alibi_lm.utils.files import sha256

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w.-]+)?", re.ASCII)
_READ = ("*.json", "*.safetensors", "*.model", "*.txt")
_LENGTHS = ("max_seq_len", "seq_length", "n_positions", "max_position_embeddings", "n_ctx")
_POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings")


def find_folder(name: str) -> Path:
    """The folder of a model: a folder here, or the hub's `organization/model[@revision]`.

    The hub's is downloaded into its cache, unless it is there.

    Raises:
        CheckpointError: there is neither.
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
    except Exception as error:  # the hub's client and what it stands on raise errors of many kinds
        detail = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        rule = f"is no folder here, and could not be had from the hub ({detail})"
        fix = "check the name, or name a folder"
        raise CheckpointError(Problem(f"hf:{name}", None, rule, fix)) from None
    return folder


def weights_digest(folder: Path) -> str:
    """SHA-256 over names and contents of the files that model and tokenizer are read from."""
    patterns = ("config.json", "*.safetensors", "*.bin", "tokenizer.*", "vocab.*", "merges.txt")
    names = sorted({path.name for pattern in patterns for path in folder.glob(pattern)})
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name} {sha256(folder / name)}\n".encode())
    return digest.hexdigest()


def training_length(folder: Path) -> int | None:
    """Tokens of a training sample as far as the folder says.

    A folder that was exported here says it beside its config, whose own field is the longest
    input there; any other is asked for its config's field.
    """
    if (folder / FACTS).is_file():
        stated = read_json(folder, FACTS).get("training_length")
        return stated if isinstance(stated, int) else None
    raw = read_json(folder, "config.json")
    values = [raw[key] for key in _LENGTHS if isinstance(raw.get(key), int) and raw[key] > 0]
    return values[0] if values else None


def why_not_native(folder: Path) -> str | None:
    """Why the folder's model cannot be computed as our own, or None where it can."""
    try:
        raw = read_json(folder, "config.json")
        checked_config(folder, raw, import_spec_of(folder, raw))
    except CheckpointError as error:
        return "; ".join(f"{p.key.rpartition(': ')[2]} {p.rule}" for p in error.problems)
    return None if any(folder.glob("*.safetensors")) else "it has no safetensors"


class ImportedFolder:
    """A BLOOM or MPT folder read as our own model; nothing is written.

    Attributes:
        config: as the run's that `import_folder` makes of it.

    Raises:
        CheckpointError: the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        raw = read_json(folder, "config.json")
        self._reading = import_spec_of(folder, raw)
        theirs = checked_config(folder, raw, self._reading)
        check_own_files(folder)
        self._tokenizer = folder_tokenizer(folder)
        self.config: Config = run_config(
            folder, folder, self._reading, theirs, self._tokenizer, []
        )  # fmt: skip
        with SourceFolder(folder, self._reading.prefix) as source:
            self._names = tensor_names(folder, source, self._reading, self.config)

    def tokenizer(self) -> Tokenizer | None:
        """The folder's tokenizer, or None where it has none."""
        return self._tokenizer

    def decoder(
        self,
        dtype: torch.dtype = torch.float32,
        model: ModelConfig | None = None,
        tp: ParallelDim = NO_PARALLEL,
    ) -> Decoder:
        """As `Step.decoder`."""
        with SourceFolder(self.folder, self._reading.prefix) as source:
            return filled_decoder(model or self.config.model, _Canonical(self, source), dtype, tp)

    def whole(self, source: SourceFolder, name: str) -> Tensor:
        """A tensor by its canonical name, flattened, fp32.

        Raises:
            CheckpointError: an element is not finite.
        """
        theirs = self._names[name][0]
        tensor = canonical(self._reading, self.config.model, name, source.tensor(theirs)).float()
        if not bool(tensor.isfinite().all()):
            rule = "has elements that are not finite"
            raise CheckpointError(Problem(theirs, None, rule, "restore the folder"))
        return tensor.reshape(-1)


class _Canonical(StridedReader):
    """The folder's tensors as a checkpoint's; the one read last is kept for its next parts."""

    def __init__(self, folder: ImportedFolder, source: SourceFolder) -> None:
        self._folder, self._source = folder, source
        self._last: OrderedDict[str, Tensor] = OrderedDict()

    def read(self, name: str, kind: str, start: int, numel: int) -> Tensor:
        """Elements [start, start + numel) of a flattened whole tensor, fp32 `[numel]`."""
        assert kind == "param", f"a folder has no {kind}"
        if name not in self._last:
            self._last.clear()
            self._last[name] = self._folder.whole(self._source, name)
        return self._last[name][start : start + numel]


class StockFolder:
    """A folder of any causal language model that `AutoModelForCausalLM` knows.

    Raises:
        CheckpointError: the class is not known, or needs code of its own.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.folder = folder
        try:
            with quiet(), torch.device("meta"):
                self.config = AutoConfig.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False
                )
                self._unset: nn.Module = AutoModelForCausalLM.from_config(
                    self.config, trust_remote_code=False
                )
        except Exception as error:  # classes raise errors of many kinds on what they cannot read
            raise _unusable(folder, error) from None

    @cached_property
    def num_parameters(self) -> int:
        """Its weights, each counted once."""
        return sum(parameter.numel() for parameter in self._unset.parameters())

    @cached_property
    def longest_input(self) -> int | None:
        """Rows of a table of positions, or None where the class takes any length."""
        for name, module in self._unset.named_modules():
            table = name.rpartition(".")[2] in _POSITION_TABLES
            learned = "Sinusoidal" not in type(module).__name__
            if table and learned and isinstance(module, nn.Embedding):
                return self._stated(module)
        for name, _ in self._unset.named_buffers():
            if name.rpartition(".")[2] == "embed_positions":
                return self._stated()
        return None

    def _stated(self, table: nn.Embedding | None = None) -> int | None:
        found = getattr(self.config, "max_position_embeddings", None)
        if table is not None and table.padding_idx is not None:
            # RoBERTa's kind: positions begin after the row of the padding.
            rows = table.num_embeddings - table.padding_idx - 1
            found = min(found, rows) if isinstance(found, int) else rows
        return found if isinstance(found, int) else None

    def load(self, dtype: torch.dtype) -> Any:
        """The model as `AutoModelForCausalLM` gives it; code in the folder is not run.

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
        amiss = [*report.get("missing_keys", ()), *report.get("mismatched_keys", ())]
        if amiss:
            named = ", ".join(sorted(str(name) for name in amiss)[:4])
            rule = f"{len(amiss)} tensors are missing or of another shape ({named})"
            raise CheckpointError(Problem(str(self.folder), None, rule, "restore the folder"))
        return model.eval()

    def tokenizer(self) -> Tokenizer | None:
        """The folder's tokenizer as `AutoTokenizer` gives it, or None where it has none.

        Raises:
            CheckpointError: it has one that cannot be loaded, or that ends no document.
        """
        from alibi_lm.hf.importing.auto_tokenizer import StockTokenizer, has_tokenizer

        return StockTokenizer(self.folder) if has_tokenizer(self.folder) else None


def _unusable(folder: Path, error: Exception) -> CheckpointError:
    detail = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    rule = f"transformers cannot load it ({detail})"
    fix = "name the folder of a causal language model that needs no code of its own"
    return CheckpointError(Problem(str(inside(folder, "config.json").parent), None, rule, fix))
