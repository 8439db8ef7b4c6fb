"""The scorer of transformers' classes against whole passes of the classes themselves."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MptConfig,
    OPTConfig,
    RobertaConfig,
)

from alibi_lm.evals.base import chosen_lengths
from alibi_lm.evals.models.base import EvalOptions
from alibi_lm.evals.models.resolve import resolve_model
from alibi_lm.evals.models.transformers_scorer import TransformersScorer
from alibi_lm.evals.perplexity.protocols import target_losses
from alibi_lm.evals.perplexity.windows import non_overlapping_windows
from alibi_lm.hf.importing.loading import TransformersFolder
from alibi_lm.utils.errors import CheckpointError, ConfigError, DataError

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
CONFIGS: dict[str, Any] = {
    "bloom": BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4),
    "mpt": MptConfig(vocab_size=61, d_model=32, n_layers=2, n_heads=4, max_seq_len=16),
    "gpt2": GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt_neox": GPTNeoXConfig(**SIZES, intermediate_size=48),
    "llama": LlamaConfig(**GATED),
    "mistral": MistralConfig(**GATED, sliding_window=7),
    "gemma2": Gemma2Config(**GATED, head_dim=8, sliding_window=7, final_logit_softcapping=3.0),
    "mamba": MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4),
}


def model_of(name: str) -> Any:
    """A random model whose logits differ from token to token."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model.eval()


@torch.no_grad()
def whole(model: Any, tokens: Tensor) -> Tensor:
    """Log probabilities `[B, T, V]` in one pass."""
    if hasattr(model.config, "max_seq_len"):
        model.config.max_seq_len = max(model.config.max_seq_len, tokens.shape[1])
    return model(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)


def tokens_of(*shape: int) -> Tensor:
    """Random token ids."""
    return torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_in_pieces_and_in_parts_of_a_batch_are_those_of_one_pass(name: str) -> None:
    model = model_of(name)
    tokens = tokens_of(3, 41)
    logs = whole(model, tokens[:, :-1])
    wanted = F.nll_loss(logs.transpose(1, 2), tokens[:, 1:], reduction="none")
    assert wanted.std() > 0.1
    # Logits of all rows; of two; of 7 positions of one row; scores of 5 positions of one row.
    cases: list[dict[str, Any]] = [{}, {"logits_at_once": 2 * 40 * 61}, {"logits_at_once": 7 * 61},
                                   {"scores_at_once": 5 * 4 * 40}]  # fmt: skip
    for limits in cases:
        found = TransformersScorer(model, None, **limits).token_losses(tokens)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_answers_are_those_of_whole_passes(name: str) -> None:
    model = model_of(name)
    prompts, candidates = tokens_of(3, 29), tokens_of(3, 5, 4)
    found = TransformersScorer(
        model, None, logits_at_once=7 * 61, scores_at_once=3 * 4 * 29 * 5
    ).loglikelihood_and_generate(prompts, candidates, 6)
    for index in range(5):
        joined = torch.cat([prompts, candidates[:, index]], dim=1)
        logs = whole(model, joined)[:, 28:-1]
        wanted = logs.gather(2, candidates[:, index, :, None]).squeeze(2).sum(1)
        torch.testing.assert_close(found.loglikelihoods[:, index], wanted, rtol=1e-4, atol=1e-3)
    text = prompts
    for _ in range(6):
        text = torch.cat([text, whole(model, text)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(found.generated, text[:, 29:])
    assert TransformersScorer(model, None).generate(prompts[1].tolist(), 6) == text[1, 29:].tolist()


def test_logits_and_scores_of_a_long_input_are_never_held_whole() -> None:
    model = model_of("mpt")
    seen: list[tuple[int, int]] = []
    forward = model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        seen.append((out.logits.numel(), kwargs["input_ids"].shape[1]))
        return out

    model.forward = watched
    limits = {"logits_at_once": 200 * 61, "scores_at_once": 100 * 4 * 2000}
    losses = TransformersScorer(model, None, None, **limits).token_losses(tokens_of(1, 2001))
    assert losses.shape == (1, 2000)
    assert max(logits for logits, _ in seen) <= 200 * 61
    assert max(queries for _, queries in seen) <= 100


def test_a_class_whose_cache_does_not_work_is_given_whole_inputs() -> None:
    model = model_of("llama")
    forward = model.forward

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("past_key_values", None)
        kwargs.pop("cache", None)
        return forward(*args, **kwargs)

    tokens = tokens_of(2, 31)
    wanted = TransformersScorer(model, None).token_losses(tokens)
    model.forward = forgetful
    found = TransformersScorer(model, None, logits_at_once=61).token_losses(tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_mpt_takes_more_than_its_max_seq_len() -> None:
    model = model_of("mpt")
    assert model.config.max_seq_len == 16
    with pytest.raises(RuntimeError):
        model(input_ids=tokens_of(1, 40))
    assert TransformersScorer(model, None).token_losses(tokens_of(1, 41)).isfinite().all()


def test_real_limits_are_found_and_overlong_input_is_refused(tmp_path: Path) -> None:
    limits = {
        "gpt2": CONFIGS["gpt2"],
        "opt": OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64),
        "gptj": GPTJConfig(
            vocab_size=61, n_embd=32, n_layer=1, n_head=2, n_positions=64, rotary_dim=8
        ),
    }
    for name, config in {**CONFIGS, **limits}.items():
        folder = tmp_path / name
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        stock = TransformersFolder(folder)
        assert stock.longest_input == (64 if name in limits else None), name
        scorer = TransformersScorer(stock.load(torch.float32), stock.longest_input)
        if name in limits:
            scorer.token_losses(tokens_of(1, 65))  # 64 inputs
            with pytest.raises(ConfigError, match="length = 65: .* has 64 positions"):
                scorer.token_losses(tokens_of(1, 66))
            with pytest.raises(ConfigError, match="length = 65: .* input is never cut"):
                scorer.loglikelihood_and_generate(tokens_of(1, 60), tokens_of(1, 2, 3), 5)
        else:
            scorer.token_losses(tokens_of(1, 200))
    eval_model = resolve_model(f"hf:{tmp_path / 'gpt2'}", EvalOptions(training_length=32))
    assert chosen_lengths(eval_model, None) == [16, 32, 64]
    with pytest.raises(ConfigError, match="lengths = 128: exceeds the model's 64 positions"):
        chosen_lengths(eval_model, [64, 128])


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(DataError, match="has a token id outside 0 to 60"):
        TransformersScorer(model_of("llama"), None).token_losses(torch.tensor([[1, 61, 2]]))


BY_LENGTH: dict[str, Any] = {
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}, 16),
    "longrope": (
        {"rope_type": "longrope", "factor": 4.0, "rope_theta": 10000.0, "short_factor": [1.0] * 4,
         "long_factor": [4.0] * 4, "original_max_position_embeddings": 16},
        64,
    ),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("kind", BY_LENGTH)
def test_frequencies_that_go_by_the_length_are_those_of_each_input_alone(kind: str) -> None:
    """Whatever came before, in batches of windows of unequal lengths, and with candidates."""
    parameters, longest = BY_LENGTH[kind]
    config = LlamaConfig(**GATED, max_position_embeddings=longest, rope_parameters=parameters)

    def fresh() -> Any:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
        return model.eval()

    def exclusive_lock(tokens: Tensor) -> Tensor:
        logs = whole(fresh(), tokens[:, :-1])
        return F.nll_loss(logs.transpose(1, 2), tokens[:, 1:], reduction="none")

    scorer = TransformersScorer(fresh(), None, scores_at_once=5 * 4 * 40)
    for length in (40, 60, 24, 9, 33):
        tokens = tokens_of(1, length + 1)
        found = scorer.token_losses(tokens)
        torch.testing.assert_close(found, exclusive_lock(tokens), rtol=1e-4, atol=1e-4)
    documents = [tokens_of(1, n)[0].numpy() for n in (61, 45, 70)]
    losses = target_losses(scorer, documents, non_overlapping_windows(documents, 40), 10_000)
    for document, own in zip(documents, losses, strict=True):
        parts = [torch.from_numpy(document[s : s + 41])[None] for s in (0, 40)]
        wanted = torch.cat([exclusive_lock(part)[0] for part in parts if part.shape[1] > 1])
        np.testing.assert_allclose(own, wanted, rtol=1e-4, atol=1e-4)
    # The candidates reach past the length at which the frequencies change.
    prompts, candidates = tokens_of(2, 14), tokens_of(2, 2, 5)
    answers = scorer.loglikelihood_and_generate(prompts, candidates, 4)
    for index in range(2):
        joined = torch.cat([prompts, candidates[:, index]], dim=1)
        wanted = -exclusive_lock(joined)[:, -5:].sum(1)
        torch.testing.assert_close(answers.loglikelihoods[:, index], wanted, rtol=1e-4, atol=1e-3)


def test_a_class_that_reads_what_it_predicts_is_refused() -> None:
    torch.manual_seed(0)
    config = BertConfig(**SIZES, intermediate_size=48, initializer_range=0.3)
    with pytest.raises(CheckpointError, match="BertLMHeadModel reads the tokens after"):
        TransformersScorer(AutoModelForCausalLM.from_config(config), None)
    config = BertConfig(**SIZES, intermediate_size=48, is_decoder=True)
    assert TransformersScorer(AutoModelForCausalLM.from_config(config), None).vocab_size == 61


def test_a_table_whose_first_rows_are_no_positions_ends_earlier(tmp_path: Path) -> None:
    """RoBERTa's positions begin after its padding's: 66 rows are 64 positions."""
    config = RobertaConfig(**SIZES, intermediate_size=48, is_decoder=True,
                           max_position_embeddings=66)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    folder = TransformersFolder(tmp_path)
    assert folder.longest_input == 64
    scorer = TransformersScorer(folder.load(torch.float32), folder.longest_input)
    tokens = torch.full((1, 66), 5)
    assert scorer.token_losses(tokens[:, :65]).shape == (1, 64)
    with pytest.raises(ConfigError, match="64 positions"):
        scorer.token_losses(tokens)
    # Where nobody knows the table's size, the class's own failure is told in a line too.
    with pytest.raises(ConfigError, match="no place for so many tokens"):
        TransformersScorer(model, None).token_losses(tokens)


def test_scores_that_are_no_numbers_are_no_answers() -> None:
    model = model_of("llama")
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    scorer = TransformersScorer(model, None)
    with pytest.raises(CheckpointError, match="not numbers"):
        scorer.loglikelihood_and_generate(tokens_of(2, 9), tokens_of(2, 3, 2), 2)
    with pytest.raises(CheckpointError, match="not numbers"):
        scorer.generate(tokens_of(1, 9)[0].tolist(), 2)
