"""Reading a written folder back, and comparing it with what it was made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
import torch
from torch import Tensor

from alibi_lm.checkpoint.step import Step
from alibi_lm.data.indexed import TokenFile
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.hf.exporting.weights import StepWeights, same_bits, unset_weights
from alibi_lm.hf.parity import blockwise
from alibi_lm.hf.parity.logits import (
    NEW_TOKENS,
    TOLERANCE,
    common_prefix,
    compare_greedy,
    compare_logits,
)
from alibi_lm.hf.parity.transformers_reference import Mismatch, StockLayers, load_model, quiet
from alibi_lm.hf.specs.base import ImportSpec
from alibi_lm.hf.weights_reader import SourceFolder
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.flops import num_parameters
from alibi_lm.utils.errors import CheckpointError, ConfigError, DataError, Problem

ParityLevel = Literal["logits", "blockwise", "weights"]
"""What is compared: logits of both whole models and their greedy tokens; logits computed one
block at a time, for models that memory does not hold twice; or the bits of the weights only."""
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
class Pair:
    """A folder of a stock class and the weights that it must hold."""

    folder: Path
    source: SourceFolder
    import_spec: ImportSpec
    config: Any
    """Of the class, as it reads config.json."""
    model: ModelConfig
    weights: StepWeights

    def check_names(self) -> None:
        """The folder must hold the class's tensors, all of them and no others."""
        whole = replace(self.model, num_kv_heads=None)
        shapes = {name: tuple(t.shape) for name, t in unset_weights(whole).items()}
        expected = {theirs: shapes[ours] for ours, theirs in self.import_spec.names(whole)}
        tied = "lm_head.weight" if self.model.tied_embeddings else None
        problems = self.source.problems(expected, tied)
        if problems:
            raise Mismatch(" | ".join(str(problem) for problem in problems))

    def check_bits(self) -> int:
        """Number of tensors, all equal bit by bit to those that the weights make."""
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
        with torch.device("meta"):
            decoder = Decoder(self.model, seed=None)
        decoder = decoder.to_empty(device="cpu").eval()
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                parameter.copy_(self.weights[name])
        return decoder

    def stock(self, dtype: torch.dtype) -> StockLayers:
        """The stock model, one block at a time."""
        return StockLayers(self.config, self.import_spec, self.source, dtype)


def choose(parity: ParityLevel | str | None, model: ModelConfig) -> ParityLevel:
    """The proof asked for; by default `logits`, or `layers` where memory is short for it.

    Raises:
        ConfigError: there is no such proof.
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
    pair: Pair, parity: ParityLevel, texts: tuple[Tensor, str], length: int
) -> dict[str, Any]:
    """Compare bits, logits and greedy tokens; the numbers, if all agree.

    Args:
        pair: what is compared.
        proof: how much.
        texts: tokens [1, T] for the longest comparison, and where they come from.
        length: the shortest one.

    Raises:
        Mismatch: anything differs.
    """
    if parity != "logits":
        pair.check_names()
    facts: dict[str, Any] = {"kind": parity, "tensors_equal": pair.check_bits(), "logits": []}
    if parity == "weights":
        return facts
    tokens, facts["tokens"] = texts
    facts["tolerance"] = TOLERANCE
    lengths = [n for n in (multiple * length for multiple in MULTIPLES) if n <= tokens.shape[1]]
    longest = pair.import_spec.longest(pair.config) or length + NEW_TOKENS
    if parity == "blockwise":
        facts["logits"] = [
            blockwise.compare_logits_by_layer(pair.model, pair.weights, pair.stock, tokens[:, :n])
            for n in lengths
        ]
        num_tokens = min(blockwise.NEW_TOKENS, longest - 1)
        prompt = min(length, blockwise.PROMPT_TOKENS, longest - num_tokens)
        model = pair.stock(torch.float32)
        blockwise.compare_greedy_by_layer(
            pair.model, pair.weights, model, tokens[:, :prompt], num_tokens
        )
        return facts | {"greedy_tokens_equal": num_tokens}
    model, decoder = (
        load_model(pair.folder, pair.import_spec.export_spec.class_name),
        pair.decoder(),
    )
    facts["logits"] = [compare_logits(decoder, model, tokens[:, :n]) for n in lengths]
    prompt = min(length, LARGEST_PROMPT, max(1, longest - NEW_TOKENS))
    num_tokens = min(NEW_TOKENS, longest - prompt)
    compare_greedy(decoder, model, tokens[:, :prompt], num_tokens)
    facts["greedy_tokens_equal"] = num_tokens
    return facts


def check_export_parity(step: Step, pair: Pair, parity: ParityLevel, name: Path) -> dict[str, Any]:
    """Compare an exported folder's model with the run's; the numbers.

    Args:
        step: the checkpoint, for its validation text and training length.
        pair: its weights, rounded as the exported ones are, and the folder.
        proof: what is compared of the model.
        name: what the folder is called in an error.

    Raises:
        CheckpointError: anything differs.
    """
    longest = pair.import_spec.longest(pair.config)
    length = step.config.train.sequence_length
    length = length if longest is None else min(length, longest)
    wanted = max(MULTIPLES) * length
    try:
        with quiet():
            tokens = sample_tokens(step, min(wanted, longest or wanted), pair.model)
            return check_parity(pair, parity, tokens, length)
    except Mismatch as mismatch:
        raise CheckpointError(Problem(str(name), None, mismatch.rule, mismatch.fix)) from None


def prove_tokenizer(
    step: Step, tokenizer: Tokenizer, folder: Path, name: Path
) -> dict[str, int | str]:
    """Compare the folder's tokenizer with the run's on validation text; the numbers.

    Raises:
        CheckpointError: ids or texts differ.
    """
    try:
        with quiet():
            return _compare_tokenizers(tokenizer, folder, validation_texts(step, tokenizer))
    except Mismatch as mismatch:
        raise CheckpointError(Problem(str(name), None, mismatch.rule, mismatch.fix)) from None


def check_import_parity(pair: Pair, parity: ParityLevel) -> dict[str, Any]:
    """Compare an imported model with the stock class on seeded ids; the numbers.

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


def told(parity: Mapping[str, Any]) -> str:
    """A proof in one line."""
    equal = f"{parity['tensors_equal']:,} tensors equal bit by bit"
    rows = [f"{row['max_difference']:.1e} at {row['length']:,} tokens" for row in parity["logits"]]
    if not rows:
        return f"{equal}; logits not compared"
    greedy = parity.get("greedy_tokens_equal")
    how = ", computed block by block" if parity["kind"] == "blockwise" else ""
    more = f", {greedy} greedy tokens equal" if greedy else ""
    return f"logits within {' and '.join(rows)}{how}{more}"


def sample_tokens(step: Step, length: int, model: ModelConfig) -> tuple[Tensor, str]:
    """[1, length] tokens of validation text and where they come from; else seeded random ones."""
    for prefix in step.config.data.validation:
        try:
            file = TokenFile(prefix)
        except DataError:  # a run is exported on other machines than it was trained on
            continue
        if file.num_tokens >= length:
            longest = int(file.document_lengths.argmax())
            start = min(int(file.document_starts[longest]), file.num_tokens - length)
            values = file.read(start, start + length).astype("int64")
            return torch.from_numpy(values)[None], f"validation text of {prefix}"
    return random_tokens(length, model)


def random_tokens(length: int, model: ModelConfig) -> tuple[Tensor, str]:
    """[1, length] seeded random tokens, and that they are."""
    generator = torch.Generator().manual_seed(SEED)
    assert model.vocab_size is not None
    return torch.randint(model.vocab_size, (1, length), generator=generator), "random tokens"


def validation_texts(step: Step, tokenizer: Tokenizer) -> Iterator[str]:
    """Validation documents as text, up to `TEXT_CHARS` characters in all."""
    total = 0
    for prefix in step.config.data.validation:
        try:
            file = TokenFile(prefix)
        except DataError:
            continue
        for index in range(file.num_documents):
            ids = [int(token) for token in file.document(index) if token != tokenizer.eos_id]
            text = tokenizer.decode(ids)
            yield text
            total += len(text)
            if total >= TEXT_CHARS:
                return


def _compare_tokenizers(
    tokenizer: Tokenizer, folder: Path, texts: Iterator[str]
) -> dict[str, int | str]:
    """Ids and decoded text of the run's tokenizer and of `AutoTokenizer` must be equal."""
    from transformers import AutoTokenizer

    with quiet():
        # Without the last, transformers asks on the terminal about a folder with code of its own.
        loaded = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
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
    """Number of tokens of `text`, which both tokenizers must encode and decode alike."""
    ids = tokenizer.encode(text)
    theirs = loaded(text)["input_ids"]
    if theirs != ids:
        at = common_prefix(ids, theirs)
        before = tokenizer.decode(ids[:at])
        shown = repr(text[len(before) : len(before) + 20])
        raise Mismatch(
            f"token {at:,} of a text differs: AutoTokenizer gives {theirs[at : at + 3]}, not "
            f"{ids[at : at + 3]}, for {shown}",
            "export without the tokenizer, and hand on the run's own tokenizer file",
        )
    if loaded.decode(ids) != tokenizer.decode(ids):
        raise Mismatch("AutoTokenizer decodes ids to another text")
    return len(ids)
