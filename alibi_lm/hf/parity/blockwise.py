"""Comparing the native model with the stock class's where memory holds one block of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from alibi_lm.hf.exporting.weights import StepWeights
from alibi_lm.hf.parity.logits import STEP_TOKENS, TOLERANCE, judged, worst_difference
from alibi_lm.hf.parity.transformers_reference import (
    CachedState,
    Mismatch,
    StockLayers,
    bias_from_the_end,
)
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.inference.kv_cache import LayerKVCache
from alibi_lm.model.layers import Block, Embedding, Head
from alibi_lm.parallel.mesh import NO_PARALLEL
from alibi_lm.parallel.tensor_parallel import vocabulary_logits

NEW_TOKENS = 4
"""Tokens generated greedily: each takes another reading of all weights."""
PROMPT_TOKENS = 64
_PORTION = 4096
"""Tokens that are in the native block at once."""
_ROWS_BYTES = 1 << 26
"""Rows of an embedding that are in memory at once."""
_SCORES_BYTES = 1 << 27
"""A score matrix of the stock class, which holds it some four times over."""


@torch.no_grad()
def compare_logits_by_layer(
    config: ModelConfig,
    weights: StepWeights,
    stock: Callable[[torch.dtype], StockLayers],
    tokens: Tensor,
) -> dict[str, float | int | None]:
    """`logits.compare_logits` with one block of each model in memory.

    Args:
        config: the native model.
        weights: its weights, read one at a time.
        stock: makes the stock model for a dtype.
        tokens: [1, T].

    Raises:
        Mismatch: logits differ.
    """
    length = tokens.shape[1]
    twice = ("embedding.weight",) if config.tied_embeddings else ()
    most = max(1, _SCORES_BYTES // (4 * config.num_heads * length))

    def plainly() -> float:
        with weights.progress(f"compare {length:,} tokens", twice=twice):
            return _Layered(config, weights, stock(torch.float32)).difference(tokens, most)

    def exactly() -> float:
        model = stock(torch.float64)
        layered = _Layered(config, weights, model)
        with (
            bias_from_the_end(model.model),
            weights.progress(f"in fp64, {length:,} tokens", twice=twice),
        ):
            return layered.difference(tokens, min(STEP_TOKENS, max(1, most // 2)))

    return judged(length, plainly, exactly)


@torch.no_grad()
def compare_greedy_by_layer(
    config: ModelConfig, weights: StepWeights, model: StockLayers, prompt: Tensor, num_tokens: int
) -> None:
    """`logits.compare_greedy` with one block of each model in memory, and all of their caches.

    Raises:
        Mismatch: a token differs that is likelier than the other one by more than the tolerance.
    """
    layered = _Layered(config, weights, model)
    caches = [(LayerKVCache(), CachedState()) for _ in range(config.num_layers)]
    tokens = prompt
    twice = ("embedding.weight",) if config.tied_embeddings else ()
    with weights.progress(f"generate {num_tokens} tokens", num_tokens, twice):
        for number in range(1, num_tokens + 1):
            ours, theirs = layered.next_logits(tokens, caches)
            our_choice, choice = int(ours.argmax()), int(theirs.argmax())
            if our_choice != choice and not ours[our_choice] - ours[choice] <= TOLERANCE:
                raise Mismatch(f"greedy token {number} differs")
            tokens = torch.tensor([[choice]])


class _Layered:
    """The two models, each with one module in memory."""

    def __init__(self, config: ModelConfig, weights: StepWeights, model: StockLayers) -> None:
        self.config, self.weights, self.model = config, weights, model
        with torch.device("meta"):
            self.our_block, self.head = Block(config), Head(config)
        assert config.vocab_size is not None
        self.vocab_size = config.vocab_size
        self.rows = max(1, _ROWS_BYTES // (4 * config.hidden_size))

    def difference(self, tokens: Tensor, step_tokens: int) -> float:
        """Largest |logit difference| over tokens [1, T]; NaN in either gives NaN."""
        ours, theirs = self._embedded(tokens)
        for _ in self._blocks():
            ours = self._our_block(ours)
            theirs = self.model.block(theirs, step_tokens)
        ours = self.head.norm(ours)
        worst = torch.zeros((), dtype=ours.dtype)
        for our_logits, their_logits, number in self._outputs():
            found = worst_difference(ours, theirs, our_logits, their_logits, number)
            worst = torch.maximum(worst, found)
        return float(worst)

    def next_logits(
        self, tokens: Tensor, caches: list[tuple[LayerKVCache, CachedState]]
    ) -> tuple[Tensor, Tensor]:
        """Both models' logits [V] after tokens [1, n], which follow those in the caches."""
        ours, theirs = self._embedded(tokens)
        for index in self._blocks():
            our_cache, their_cache = caches[index]
            ours = self.our_block(ours, our_cache)
            theirs = self.model.step(theirs, their_cache)
        ours, theirs = self.head.norm(ours)[0, -1], theirs[0, -1]
        parts = [(our(ours), their(theirs)) for our, their, _ in self._outputs()]
        return torch.cat([part for part, _ in parts]), torch.cat([part for _, part in parts])

    def _our_block(self, hidden: Tensor) -> Tensor:
        """[1, T, d] to the same; a long input goes in by portions, for what lies between."""
        if hidden.shape[1] <= _PORTION:
            return cast(Tensor, self.our_block(hidden))
        cache = LayerKVCache()
        return torch.cat([self.our_block(part, cache) for part in hidden.split(_PORTION, 1)], 1)

    def _blocks(self) -> Iterator[int]:
        """The blocks' numbers, each in memory until the next; then the final norms are."""
        last = self.config.num_layers - 1
        for index in range(last + 1):
            self._fill(self.our_block, f"blocks.{index}")
            self.model.place(index, last)
            yield index
        self.our_block.to("meta")
        self.model.remove()
        self._fill(self.head.norm, "head.norm")

    def _embedded(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [1, T, d] in both models; the stock one's norm comes with its first block."""
        ids, places = tokens.unique(return_inverse=True)
        found = []
        for start in range(0, self.vocab_size, self.rows):
            wanted = ids[(ids >= start) & (ids < start + self.rows)] - start
            if len(wanted):
                stop = start + self.rows
                our_rows = self.weights.rows("embedding.weight", start, stop)[wanted]
                found.append((our_rows, self.model.rows(start, stop)[wanted]))
        with torch.device("meta"):
            embedding = Embedding(replace(self.config, vocab_size=len(ids)))
        state = {"weight": torch.cat([ours for ours, _ in found])}
        state |= {
            key: self.weights[f"embedding.{key}"]
            for key in embedding.state_dict()
            if key not in state
        }
        embedding.load_state_dict(state, assign=True)
        theirs = torch.cat([rows for _, rows in found])[places]
        return embedding.to(self.model.dtype)(places), theirs

    def _outputs(
        self,
    ) -> Iterator[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], int]]:
        """Both output layers for some ids after others, and how many; one is used at a time."""
        name = "embedding.weight" if self.config.tied_embeddings else "head.weight"
        for start in range(0, self.vocab_size, self.rows):
            stop = min(start + self.rows, self.vocab_size)
            weight = self.weights.rows(name, start, stop).to(self.model.dtype)

            def our_logits(hidden: Tensor, weight: Tensor = weight) -> Tensor:
                return vocabulary_logits(hidden, weight, len(weight), NO_PARALLEL)

            yield our_logits, self.model.output(start, stop), stop - start

    def _fill(self, module: nn.Module, name: str) -> None:
        module.to("meta")  # what it held goes before more comes
        state = {
            key: self.weights[f"{name}.{key}"].to(self.model.dtype) for key in module.state_dict()
        }
        module.load_state_dict(state, assign=True)
