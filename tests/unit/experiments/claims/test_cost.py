"""The cost of a training step is that of the step, not of whoever asks."""

from __future__ import annotations

import numpy as np

from alibi_lm.experiments.claims.config import CostConfig
from alibi_lm.experiments.claims.cost import _memory

MODEL = {"num_layers": 1, "hidden_size": 64, "num_heads": 4, "vocab_size": 512}


def test_memory_is_of_the_step_alone() -> None:
    held = np.ones(1 << 27)  # 1 GiB here must not show there
    small, large = (CostConfig([128], tokens, 3, MODEL) for tokens in (512, 16384))
    few, many = _memory(small, "alibi", 128), _memory(large, "alibi", 128)
    assert held.sum() == held.size
    assert many < held.nbytes / 2
    # 32 times the tokens: at least the fp32 logits and hidden states of those more.
    assert many - few > (16384 - 512) * 4 * 64
