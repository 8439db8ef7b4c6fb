"""Reading an exported folder back through stock `transformers` and comparing it with the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alibi_lm.checkpoint.step import Step
from alibi_lm.data.indexed import TokenFile
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.errors import CheckpointError, DataError, Problem
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.generation import generate

TOLERANCE = 1e-4
"""Largest difference of two logits."""
MULTIPLES = (1, 4)
"""Lengths at which logits are compared, as multiples of the training length."""
NEW_TOKENS = 64
"""Tokens generated greedily."""
LARGEST_PROMPT = 256

STEP_TOKENS = 128
"""Tokens read at once in the exact comparison: the bias is rounded at its distance from them."""
ATTENTION_BYTES = 1 << 31
"""Score matrices that the stock class may hold, some four times over."""
LOGITS_AT_ONCE = 1 << 24
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


class _Mismatch(Exception):
    """What differs, and what the user can do."""

    def __init__(self, rule: str, fix: str = "the export is taken away; report this") -> None:
        super().__init__(rule)
        self.rule, self.fix = rule, fix


def prove(
    step: Step, decoder: Decoder, folder: Path, class_name: str, name: Path
) -> dict[str, Any]:
    """Compare the folder's model and tokenizer with the run's; the numbers, if all agree.

    Args:
        step: the checkpoint, for its validation text and training length.
        decoder: its model in fp32, with weights rounded as the exported ones are.
        folder: the exported folder.
        class_name: the class of `transformers` that must come out.
        name: what the folder is called in an error.

    Raises:
        CheckpointError: anything differs.
    """
    try:
        return _prove(step, decoder, folder, class_name)
    except _Mismatch as mismatch:
        raise CheckpointError(Problem(str(name), None, mismatch.rule, mismatch.fix)) from None


def _prove(step: Step, decoder: Decoder, folder: Path, class_name: str) -> dict[str, Any]:
    with _quiet():
        model = _load_model(folder, class_name)
        length = step.config.train.sequence_length
        tokens, source = sample_tokens(step, max(MULTIPLES) * length, decoder)
        results = [
            _compare_logits(decoder, model, tokens[:, : multiple * length])
            for multiple in MULTIPLES
        ]
        _compare_greedy(decoder, model, tokens[:, : min(length, LARGEST_PROMPT)])
        proof = {
            "tokens": source,
            "tolerance": TOLERANCE,
            "logits": results,
            "greedy_tokens_equal": NEW_TOKENS,
        }
        tokenizer = step.tokenizer()
        if tokenizer is not None and (folder / "tokenizer.json").exists():
            proof["tokenizer"] = _compare_tokenizers(tokenizer, folder, validation_texts(step))
        return proof


def sample_tokens(step: Step, length: int, decoder: Decoder) -> tuple[Tensor, str]:
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
    generator = torch.Generator().manual_seed(SEED)
    size = decoder.embedding.weight.shape[0]
    return torch.randint(size, (1, length), generator=generator), "random tokens"


def validation_texts(step: Step) -> Iterator[str]:
    """Validation documents as text, up to `TEXT_CHARS` characters in all."""
    tokenizer = step.tokenizer()
    total = 0
    for prefix in step.config.data.validation if tokenizer is not None else ():
        try:
            file = TokenFile(prefix)
        except DataError:
            continue
        for index in range(file.num_documents):
            assert tokenizer is not None
            ids = [int(token) for token in file.document(index) if token != tokenizer.eos_id]
            text = tokenizer.decode(ids)
            yield text
            total += len(text)
            if total >= TEXT_CHARS:
                return


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no advice from `transformers`."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _load_model(folder: Path, class_name: str) -> Any:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
        local_files_only=True,
    )
    amiss = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if amiss or type(model).__name__ != class_name:
        raise _Mismatch(f"{type(model).__name__} loads it with {amiss or 'nothing amiss'}")
    return model.eval()


@torch.no_grad()
def _compare_logits(decoder: Decoder, model: Any, tokens: Tensor) -> dict[str, float | int | None]:
    """Largest logit difference over tokens [1, T].

    The stock classes hold the bias of the whole input in fp32, so past some thousand tokens their
    rounding alone can exceed the tolerance. What does is compared once more in fp64, the tokens
    read in small steps through the cache, where the bias of near keys is small and exact.
    """
    length = tokens.shape[1]
    scores = 4 * decoder.config.num_heads * length * length
    step_tokens = length if scores <= ATTENTION_BYTES else 1024
    plain = _largest_difference(decoder, model, tokens, step_tokens)
    exact = None
    if not plain <= TOLERANCE:
        decoder.double()
        model.double()
        with _bias_from_the_end(model):
            exact = _largest_difference(decoder, model, tokens, STEP_TOKENS)
        decoder.float()
        model.float()
        if not exact <= TOLERANCE:
            rule = f"logits differ by {plain:.3g} at {length:,} tokens, {exact:.3g} in fp64"
            raise _Mismatch(f"{rule}, more than {TOLERANCE:g}")
    return {"length": length, "max_difference": plain, "max_difference_fp64": exact}


def _largest_difference(decoder: Decoder, model: Any, tokens: Tensor, step_tokens: int) -> float:
    """Largest |logit difference|; the stock model reads `step_tokens` at a time.

    NaN in either gives NaN.
    """
    ours = decoder.hidden_states(tokens)
    portion = max(1, LOGITS_AT_ONCE // decoder.embedding.weight.shape[0])
    worst = torch.zeros((), dtype=ours.dtype)
    for start, theirs in _stock_hidden_states(model, tokens, step_tokens):
        rows = ours[:, start : start + theirs.shape[1]]
        for ours_part, theirs_part in zip(
            rows.split(portion, 1), theirs.split(portion, 1), strict=True
        ):
            logits = model.get_output_embeddings()(theirs_part)
            difference = (decoder.logits(ours_part) - logits).abs().max()
            worst = torch.maximum(worst, difference)
    return float(worst)


def _stock_hidden_states(
    model: Any, tokens: Tensor, step_tokens: int
) -> Iterator[tuple[int, Tensor]]:
    """(first position, normed hidden states [1, n, d]) of each portion, kept in a cache."""
    if step_tokens >= tokens.shape[1]:
        yield 0, model.base_model(tokens, use_cache=False).last_hidden_state
        return
    state: dict[str, Any] = {}
    start = 0
    for part in tokens.split(step_tokens, dim=1):
        # With a mask, BLOOM makes its bias by a method that the exact comparison can replace.
        mask = torch.ones(1, start + part.shape[1], dtype=torch.int64)
        out = model.base_model(part, attention_mask=mask, use_cache=True, **state)
        name = "cache" if "cache" in out else "past_key_values"  # renamed in transformers 5
        state = {name: out[name]}
        yield start, out.last_hidden_state
        start += part.shape[1]


@contextmanager
def _bias_from_the_end(model: Any) -> Iterator[None]:
    """Have BLOOM's bias zero at the newest key, as MPT's is; softmax does not see the shift."""
    base = model.base_model
    original = getattr(base, "build_alibi_tensor", None)
    if original is None:
        yield
        return

    def shifted(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        slopes = original(torch.ones(1, 2, dtype=mask.dtype), num_heads, torch.float32)[..., 1:]
        distance = torch.arange(1 - mask.shape[1], 1)
        return slopes.to(dtype) * distance

    base.build_alibi_tensor = shifted
    try:
        yield
    finally:
        del base.build_alibi_tensor


@torch.no_grad()
def _compare_greedy(decoder: Decoder, model: Any, prompt: Tensor) -> None:
    """Both models' greedy continuations of prompt [1, T], by their caches, must be equal.

    Where the two likeliest tokens are as near as the tolerance either may come first; the
    comparison then goes on from the stock model's choice.
    """
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig()  # no end token: all are wanted
    settings = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
    mask = torch.ones_like(prompt)
    whole = model.generate(prompt, attention_mask=mask, generation_config=settings)
    theirs = whole[0, prompt.shape[1] :].tolist()
    done = 0
    while done < NEW_TOKENS:
        start = prompt[0].tolist() + theirs[:done]
        ours = generate(decoder, [start], NEW_TOKENS - done)[0]
        equal = _common_prefix(ours, theirs[done:])
        done += equal
        if done == NEW_TOKENS:
            return
        last = decoder(torch.tensor([start + ours[:equal]]))[0, -1]
        if len(theirs) <= done or last[ours[equal]] - last[theirs[done]] > TOLERANCE:
            raise _Mismatch(f"greedy token {done + 1} differs")
        done += 1


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _compare_tokenizers(
    tokenizer: Tokenizer, folder: Path, texts: Iterator[str]
) -> dict[str, int | str]:
    """Ids and decoded text of the run's tokenizer and of `AutoTokenizer` must be equal."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not loaded.is_fast or len(loaded) > tokenizer.vocab_size:
        raise _Mismatch(f"AutoTokenizer loads {len(loaded)} ids, fast: {loaded.is_fast}")
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
        at = _common_prefix(ids, theirs)
        before = tokenizer.decode(ids[:at])
        shown = repr(text[len(before) : len(before) + 20])
        raise _Mismatch(
            f"token {at:,} of a text differs: AutoTokenizer gives {theirs[at : at + 3]}, not "
            f"{ids[at : at + 3]}, for {shown}",
            "export without the tokenizer, and hand on the run's own tokenizer file",
        )
    if loaded.decode(ids) != tokenizer.decode(ids):
        raise _Mismatch("AutoTokenizer decodes ids to another text")
    return len(ids)
