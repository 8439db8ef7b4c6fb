"""Blockwise parity: compare native and reference logits with one block of each in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from alibi_lm.hf.exporting.weights import StepWeights
from alibi_lm.hf.parity.logits import STEP_TOKENS, TOLERANCE, checked_difference, worst_difference
from alibi_lm.hf.parity.transformers_reference import (
    CachedState,
    Mismatch,
    ReferenceBlocks,
    bias_zero_at_newest_key,
)
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.inference.kv_cache import LayerKVCache
from alibi_lm.model.layers import Block, Embedding, Head
from alibi_lm.parallel.mesh import NO_PARALLEL
from alibi_lm.parallel.tensor_parallel import vocabulary_logits

NEW_TOKENS = 4
"""Tokens generated greedily; each reads all weights again."""
PROMPT_TOKENS = 64
_CHUNK_TOKENS = 4096
"""Tokens that the native block reads at once."""
_ROWS_BYTES = 1 << 26
"""Largest part of an embedding in memory."""
_SCORES_BYTES = 1 << 27
"""Largest score matrix of the reference, which holds about four copies."""


@torch.no_grad()
def compare_logits_blockwise(
    config: ModelConfig,
    weights: StepWeights,
    make_reference: Callable[[torch.dtype], ReferenceBlocks],
    tokens: Tensor,
) -> dict[str, float | int | None]:
    """`logits.compare_logits` with one block of each model in memory.

    Args:
        config: the native model.
        weights: its weights, read one tensor at a time.
        make_reference: builds the reference model in a dtype.
        tokens: [1, T].

    Raises:
        Mismatch: logits differ.
    """
    length = tokens.shape[1]
    twice = ("embedding.weight",) if config.tied_embeddings else ()
    most = max(1, _SCORES_BYTES // (4 * config.num_heads * length))

    def in_fp32() -> float:
        with weights.progress(f"compare {length:,} tokens", twice=twice):
            return _BlockwisePair(config, weights, make_reference(torch.float32)).difference(
                tokens, most
            )

    def in_fp64() -> float:
        model = make_reference(torch.float64)
        pair = _BlockwisePair(config, weights, model)
        with (
            bias_zero_at_newest_key(model.model),
            weights.progress(f"in fp64, {length:,} tokens", twice=twice),
        ):
            return pair.difference(tokens, min(STEP_TOKENS, max(1, most // 2)))

    return checked_difference(length, in_fp32, in_fp64)


@torch.no_grad()
def compare_greedy_blockwise(
    config: ModelConfig,
    weights: StepWeights,
    model: ReferenceBlocks,
    prompt: Tensor,
    num_tokens: int,
) -> None:
    """`logits.compare_greedy` with one block of each model, and all caches, in memory.

    Raises:
        Mismatch: a token differs by more than the tolerance in its logit.
    """
    pair = _BlockwisePair(config, weights, model)
    caches = [(LayerKVCache(), CachedState()) for _ in range(config.num_layers)]
    tokens = prompt
    twice = ("embedding.weight",) if config.tied_embeddings else ()
    with weights.progress(f"generate {num_tokens} tokens", num_tokens, twice):
        for number in range(1, num_tokens + 1):
            native, reference = pair.next_logits(tokens, caches)
            native_choice, choice = int(native.argmax()), int(reference.argmax())
            if native_choice != choice and not native[native_choice] - native[choice] <= TOLERANCE:
                raise Mismatch(f"greedy token {number} differs")
            tokens = torch.tensor([[choice]])


class _BlockwisePair:
    """Both models, each with one module in memory."""

    def __init__(self, config: ModelConfig, weights: StepWeights, model: ReferenceBlocks) -> None:
        self.config, self.weights, self.model = config, weights, model
        with torch.device("meta"):
            self.native_block, self.head = Block(config), Head(config)
        assert config.vocab_size is not None
        self.vocab_size = config.vocab_size
        self.rows = max(1, _ROWS_BYTES // (4 * config.hidden_size))

    def difference(self, tokens: Tensor, step_tokens: int) -> float:
        """Largest |logit difference| over tokens [1, T]; NaN in either gives NaN."""
        native, reference = self._embedded(tokens)
        for _ in self._blocks():
            native = self._native_block(native)
            reference = self.model.block(reference, step_tokens)
        native = self.head.norm(native)
        worst = torch.zeros((), dtype=native.dtype)
        for native_logits, reference_logits, number in self._outputs():
            found = worst_difference(native, reference, native_logits, reference_logits, number)
            worst = torch.maximum(worst, found)
        return float(worst)

    def next_logits(
        self, tokens: Tensor, caches: list[tuple[LayerKVCache, CachedState]]
    ) -> tuple[Tensor, Tensor]:
        """Both models' logits [V] after tokens [1, n], which follow the cached ones."""
        native, reference = self._embedded(tokens)
        for index in self._blocks():
            native_cache, reference_cache = caches[index]
            native = self.native_block(native, native_cache)
            reference = self.model.step(reference, reference_cache)
        native, reference = self.head.norm(native)[0, -1], reference[0, -1]
        parts = [
            (native_output(native), reference_output(reference))
            for native_output, reference_output, _ in self._outputs()
        ]
        return torch.cat([part for part, _ in parts]), torch.cat([part for _, part in parts])

    def _native_block(self, hidden: Tensor) -> Tensor:
        """[1, T, d] through the native block; a long input goes in chunks to save memory."""
        if hidden.shape[1] <= _CHUNK_TOKENS:
            return cast(Tensor, self.native_block(hidden))
        cache = LayerKVCache()
        return torch.cat(
            [self.native_block(part, cache) for part in hidden.split(_CHUNK_TOKENS, 1)], 1
        )

    def _blocks(self) -> Iterator[int]:
        """Block indices; each block is in memory until the next, and at the end the final norm."""
        last = self.config.num_layers - 1
        for index in range(last + 1):
            self._fill(self.native_block, f"blocks.{index}")
            self.model.place(index, last)
            yield index
        self.native_block.to("meta")
        self.model.remove()
        self._fill(self.head.norm, "head.norm")

    def _embedded(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [1, T, d] in both models; the reference norms in its first block."""
        ids, places = tokens.unique(return_inverse=True)
        rows = []
        for start in range(0, self.vocab_size, self.rows):
            wanted = ids[(ids >= start) & (ids < start + self.rows)] - start
            if len(wanted):
                stop = start + self.rows
                native_rows = self.weights.rows("embedding.weight", start, stop)[wanted]
                rows.append((native_rows, self.model.rows(start, stop)[wanted]))
        with torch.device("meta"):
            embedding = Embedding(replace(self.config, vocab_size=len(ids)))
        state = {"weight": torch.cat([native for native, _ in rows])}
        state |= {
            key: self.weights[f"embedding.{key}"]
            for key in embedding.state_dict()
            if key not in state
        }
        embedding.load_state_dict(state, assign=True)
        reference = torch.cat([rows for _, rows in rows])[places]
        return embedding.to(self.model.dtype)(places), reference

    def _outputs(
        self,
    ) -> Iterator[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], int]]:
        """Both output layers for consecutive ranges of ids, and the size of each range."""
        name = "embedding.weight" if self.config.tied_embeddings else "head.weight"
        for start in range(0, self.vocab_size, self.rows):
            stop = min(start + self.rows, self.vocab_size)
            weight = self.weights.rows(name, start, stop).to(self.model.dtype)

            def native_logits(hidden: Tensor, weight: Tensor = weight) -> Tensor:
                return vocabulary_logits(hidden, weight, len(weight), NO_PARALLEL)

            yield native_logits, self.model.output(start, stop), stop - start

    def _fill(self, module: nn.Module, name: str) -> None:
        module.to("meta")  # free the old weights first
        state = {
            key: self.weights[f"{name}.{key}"].to(self.model.dtype) for key in module.state_dict()
        }
        module.load_state_dict(state, assign=True)
