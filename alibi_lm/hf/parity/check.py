"""Parity check: compare an exported or imported model with the `transformers` reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
import torch
from torch import Tensor

from alibi_lm.checkpoint.config_paths import find_corpus
from alibi_lm.checkpoint.step import Checkpoint
from alibi_lm.data.indexed import TokenFile
from alibi_lm.data.special_tokens import CONFIG, read_special_tokens
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.hf.exporting.weights import StepWeights, filled_decoder, same_bits, unset_weights
from alibi_lm.hf.parity import blockwise
from alibi_lm.hf.parity.logits import (
    NEW_TOKENS,
    TOLERANCE,
    common_prefix,
    compare_greedy,
    compare_logits,
)
from alibi_lm.hf.parity.transformers_reference import Mismatch, ReferenceBlocks, load_model, quiet
from alibi_lm.hf.specs.base import ImportSpec, TokenIds
from alibi_lm.hf.weights_reader import WeightsReader
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.flops import num_parameters
from alibi_lm.utils.errors import CheckpointError, ConfigError, DataError, Problem
from alibi_lm.utils.logging import console

ParityLevel = Literal["logits", "blockwise", "weights"]
"""What is compared: logits and greedy tokens of both models; the same computed one block at a time,
for models that do not fit in memory twice; or only the bits of the weights."""
MULTIPLES = (1, 4)
"""Lengths at which logits are compared, as multiples of the training length."""
LARGEST_PROMPT = 256
IMPORT_LENGTH = 128
"""The first length at which an imported model is compared."""
TEXT_CHARS = 10_000_000
"""Characters of validation text that both tokenizers encode."""
SEED = 20210827

HARD_TEXTS = (
    "",
    " leading, trailing ",
    "\n\n\n\t\t  \r\n\r lone \r return",
    "<s></s><unk><pad><0x0A> <|endoftext|>",
    "e\u0301 \u05e9\u05dc\u05d5\u05dd \U0001f468\u200d\U0001f469\u200d\U0001f467 \x00\x7f \ufeff",
    "a \u2581 b\u2581",
)


@dataclass(frozen=True)
class ModelPair:
    """A folder of a `transformers` class and the weights it must hold."""

    folder: Path
    source: WeightsReader
    import_spec: ImportSpec
    config: Any
    """Its config.json as an instance of the class's config."""
    model: ModelConfig
    weights: StepWeights

    def check_names(self) -> None:
        """The folder must hold exactly the class's tensors."""
        whole = replace(self.model, num_kv_heads=None)
        shapes = {name: tuple(t.shape) for name, t in unset_weights(whole).items()}
        expected = {hf: shapes[name] for name, hf in self.import_spec.names(whole)}
        tied = "lm_head.weight" if self.model.tied_embeddings else None
        problems = self.source.problems(expected, tied)
        if problems:
            raise Mismatch(" | ".join(str(problem) for problem in problems))

    def check_bits(self) -> int:
        """Number of tensors; each must equal the converted weights bit for bit."""
        count = 0
        with self.weights.progress("read back"):
            for name, tensor in self.import_spec.export_spec.tensors(self.model, self.weights):
                stored = self.source.tensor(name) if name in self.source.shapes else None
                if stored is None or not same_bits(tensor.to(stored.dtype), stored):
                    raise Mismatch(f"{name} does not read back as it was written: its bits differ")
                count += 1
        return count

    def decoder(self) -> Decoder:
        """The native model with these weights."""
        return filled_decoder(self.model, self.weights)

    def reference(self, dtype: torch.dtype) -> ReferenceBlocks:
        """The reference model, one block at a time."""
        return ReferenceBlocks(self.config, self.import_spec, self.source, dtype)


def choose_parity(parity: ParityLevel | str | None, model: ModelConfig) -> ParityLevel:
    """The requested level; by default `logits`, or `blockwise` where memory is short for it.

    Raises:
        ConfigError: there is no such level.
    """
    if parity is None:
        both = 2 * 4 * num_parameters(model)
        return "logits" if both <= psutil.virtual_memory().available // 2 else "blockwise"
    for known in get_args(ParityLevel):
        if parity == known:
            return known
    rule = f"is not one of {', '.join(get_args(ParityLevel))}"
    raise ConfigError(Problem("parity", parity, rule, "choose one of them"))


@torch.no_grad()
def check_parity(
    pair: ModelPair, parity: ParityLevel, texts: tuple[Tensor, str], length: int
) -> dict[str, Any]:
    """Compare bits, logits and greedy tokens, and return the numbers.

    Args:
        pair: what is compared.
        parity: what to compare.
        texts: tokens [1, T] for the longest comparison, and where they come from.
        length: the shortest one.

    Raises:
        Mismatch: anything differs.
    """
    if parity != "logits":
        pair.check_names()
    summary: dict[str, Any] = {"kind": parity, "tensors_equal": pair.check_bits(), "logits": []}
    if parity == "weights":
        return summary
    tokens, summary["tokens"] = texts
    summary["tolerance"] = TOLERANCE
    lengths = [n for n in (multiple * length for multiple in MULTIPLES) if n <= tokens.shape[1]]
    longest = pair.import_spec.longest(pair.config) or length + NEW_TOKENS
    if parity == "blockwise":
        summary["logits"] = [
            blockwise.compare_logits_blockwise(
                pair.model, pair.weights, pair.reference, tokens[:, :n]
            )
            for n in lengths
        ]
        num_tokens = min(blockwise.NEW_TOKENS, longest - 1)
        prompt = min(length, blockwise.PROMPT_TOKENS, longest - num_tokens)
        model = pair.reference(torch.float32)
        blockwise.compare_greedy_blockwise(
            pair.model, pair.weights, model, tokens[:, :prompt], num_tokens
        )
        return summary | {"greedy_tokens_equal": num_tokens}
    model, decoder = (
        load_model(pair.folder, pair.import_spec.export_spec.class_name),
        pair.decoder(),
    )
    summary["logits"] = [compare_logits(decoder, model, tokens[:, :n]) for n in lengths]
    prompt = min(length, LARGEST_PROMPT, max(1, longest - NEW_TOKENS))
    num_tokens = min(NEW_TOKENS, longest - prompt)
    compare_greedy(decoder, model, tokens[:, :prompt], num_tokens)
    summary["greedy_tokens_equal"] = num_tokens
    return summary


def check_export_parity(
    checkpoint: Checkpoint, pair: ModelPair, parity: ParityLevel, name: Path
) -> dict[str, Any]:
    """Compare an exported folder's model with the run's, and return the numbers.

    Args:
        step: the checkpoint, for its validation text and training length.
        pair: its weights, rounded to the exported dtype, and the folder.
        parity: what to compare.
        name: the path to name in an error.

    Raises:
        CheckpointError: anything differs.
    """
    longest = pair.import_spec.longest(pair.config)
    length = checkpoint.config.train.sequence_length
    length = length if longest is None else min(length, longest)
    wanted = max(MULTIPLES) * length
    try:
        with quiet():
            tokens = sample_tokens(checkpoint, min(wanted, longest or wanted), pair.model)
            return check_parity(pair, parity, tokens, length)
    except Mismatch as mismatch:
        raise CheckpointError(Problem(str(name), None, mismatch.rule, mismatch.fix)) from None


def check_tokenizer_parity(
    checkpoint: Checkpoint, tokenizer: Tokenizer, folder: Path, name: Path, ids: TokenIds
) -> dict[str, int | str]:
    """Compare the folder's tokenizer with the run's on validation text, and return the numbers.

    Args:
        step: the checkpoint, for its validation text.
        tokenizer: the run's.
        folder: the exported folder.
        name: the path to name in an error.
        ids: special tokens in the folder's config.json.

    Raises:
        CheckpointError: ids, decoded texts or special tokens differ.
    """
    try:
        with quiet():
            loaded = load_auto_tokenizer(folder)
            _compare_special_tokens(tokenizer, loaded, ("eos", "pad", "unk"))
            stated = ids.eos if isinstance(ids.eos, list) else [ids.eos]
            if set(stated) != set(tokenizer.stop_ids):
                raise Mismatch(f"config.json ends texts at {stated}, not {tokenizer.stop_ids}")
            return _compare_tokenizers(tokenizer, loaded, validation_texts(checkpoint, tokenizer))
    except Mismatch as mismatch:
        raise CheckpointError(Problem(str(name), None, mismatch.rule, mismatch.fix)) from None


def check_import_parity(pair: ModelPair, parity: ParityLevel) -> dict[str, Any]:
    """Compare an imported model with its `transformers` class on seeded ids.

    Raises:
        CheckpointError: anything differs.
    """
    longest = pair.import_spec.longest(pair.config)
    length = min(IMPORT_LENGTH, longest or IMPORT_LENGTH)
    wanted = max(MULTIPLES) * length
    tokens = random_tokens(min(wanted, longest or wanted), pair.model)
    try:
        with quiet():
            return check_parity(pair, parity, tokens, length)
    except Mismatch as mismatch:
        raise CheckpointError(
            Problem(str(pair.folder), None, mismatch.rule, mismatch.fix)
        ) from None


def parity_summary(parity: Mapping[str, Any]) -> str:
    """A parity check on one line."""
    equal = f"{parity['tensors_equal']:,} tensors equal bit by bit"
    rows = [f"{row['max_difference']:.1e} at {row['length']:,} tokens" for row in parity["logits"]]
    if not rows:
        return f"{equal}; logits not compared"
    greedy = parity.get("greedy_tokens_equal")
    how = ", computed block by block" if parity["kind"] == "blockwise" else ""
    more = f", {greedy} greedy tokens equal" if greedy else ""
    return f"logits within {' and '.join(rows)}{how}{more}"


def sample_tokens(checkpoint: Checkpoint, length: int, model: ModelConfig) -> tuple[Tensor, str]:
    """[1, length] tokens of validation text, else seeded random ones, and a description."""
    for prefix, file in _validation_files(checkpoint):
        if file.num_tokens >= length:
            longest = int(file.document_lengths.argmax())
            start = min(int(file.document_starts[longest]), file.num_tokens - length)
            values = file.read(start, start + length).astype("int64")
            return torch.from_numpy(values)[None], f"validation text of {prefix}"
    return random_tokens(length, model)


def _validation_files(checkpoint: Checkpoint) -> Iterator[tuple[str, TokenFile]]:
    """The run's validation corpora that are on this machine, by their prefix in the config."""
    for prefix in checkpoint.config.data.validation:
        try:
            file = TokenFile(find_corpus(checkpoint, "data.validation", prefix, "put it back"))
        except DataError:  # a run may be exported on a machine without its corpora
            continue
        yield prefix, file


def random_tokens(length: int, model: ModelConfig) -> tuple[Tensor, str]:
    """[1, length] seeded random tokens and their description."""
    generator = torch.Generator().manual_seed(SEED)
    assert model.vocab_size is not None
    return torch.randint(model.vocab_size, (1, length), generator=generator), "random tokens"


def validation_texts(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Iterator[str]:
    """Validation documents as text, `TEXT_CHARS` characters at most."""
    total = 0
    for _, file in _validation_files(checkpoint):
        for index in range(file.num_documents):
            ids = [int(token) for token in file.document(index) if token != tokenizer.eos_id]
            text = tokenizer.decode(ids)
            yield text
            total += len(text)
            if total >= TEXT_CHARS:
                return


def check_imported_tokenizer(tokenizer: Tokenizer, folder: Path, hf_config: Any) -> None:
    """Compare the special tokens that an imported folder declares with the run's tokenizer.

    A config.json that ends texts elsewhere is reported; generation follows the tokenizer.

    Raises:
        CheckpointError: `AutoTokenizer` gives another token for a declared role.
    """
    declared = read_special_tokens(folder).tokens
    if (folder / CONFIG).is_file():
        try:
            loaded = load_auto_tokenizer(folder)
        except Exception as error:  # classes that need other files or packages
            detail = " ".join(f"{type(error).__name__}: {error}".split())[:120]
            console.warning(
                f"{folder}: special tokens not compared, AutoTokenizer fails ({detail})"
            )
        else:
            try:
                _compare_special_tokens(tokenizer, loaded, declared)
            except Mismatch as mismatch:
                fix = "correct tokenizer_config.json, or import with --no-tokenizer"
                raise CheckpointError(Problem(str(folder), None, mismatch.rule, fix)) from None
    stated = hf_config.eos_token_id
    if tokenizer.eos_id not in (stated if isinstance(stated, list) else [stated]):
        console.warning(
            f"{folder}/config.json: eos_token_id = {stated} is not the tokenizer's, "
            f"{tokenizer.eos_id}; generation and exports use the tokenizer's"
        )


def load_auto_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, loaded by `AutoTokenizer` without remote code."""
    from transformers import AutoTokenizer

    with quiet():
        # Without trust_remote_code, transformers asks on the terminal about folders with code.
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _compare_special_tokens(tokenizer: Tokenizer, loaded: Any, roles: Iterable[str]) -> None:
    for role in roles:
        own, other = getattr(tokenizer, f"{role}_id"), getattr(loaded, f"{role}_token_id")
        if own != other:
            raise Mismatch(f"{role} token differs: AutoTokenizer has id {other}, the run {own}")


def _compare_tokenizers(
    tokenizer: Tokenizer, loaded: Any, texts: Iterator[str]
) -> dict[str, int | str]:
    """Ids and decoded text of the run's tokenizer and of `AutoTokenizer` must be equal."""
    if not loaded.is_fast or len(loaded) > tokenizer.vocab_size:
        raise Mismatch(f"AutoTokenizer loads {len(loaded)} ids, fast: {loaded.is_fast}")
    num_documents = num_tokens = 0
    for text in texts:
        num_documents += 1
        num_tokens += _compare_text(tokenizer, loaded, text)
    for text in HARD_TEXTS:
        try:
            tokenizer.encode(text)
        except DataError:  # a character that this tokenizer refuses
            continue
        _compare_text(tokenizer, loaded, text)
    return {
        "documents_equal": num_documents,
        "tokens_equal": num_tokens,
        "class": type(loaded).__name__,
    }


def _compare_text(tokenizer: Tokenizer, loaded: Any, text: str) -> int:
    """Number of tokens of `text`; both tokenizers must encode and decode it alike."""
    ids = tokenizer.encode(text)
    loaded_ids = loaded(text)["input_ids"]
    if loaded_ids != ids:
        at = common_prefix(ids, loaded_ids)
        before = tokenizer.decode(ids[:at])
        shown = repr(text[len(before) : len(before) + 20])
        raise Mismatch(
            f"token {at:,} of a text differs: AutoTokenizer gives {loaded_ids[at : at + 3]}, not "
            f"{ids[at : at + 3]}, for {shown}",
            "export with --no-tokenizer and pass on the run's own tokenizer file",
        )
    if loaded.decode(ids) != tokenizer.decode(ids):
        raise Mismatch("AutoTokenizer decodes ids to another text")
    return len(ids)
