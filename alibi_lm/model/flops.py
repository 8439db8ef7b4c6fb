"""What a model costs: parameters and arithmetic, by formula, without making it."""

from __future__ import annotations

from alibi_lm.model.config import ModelConfig
from alibi_lm.model.layers import vocab_size
from alibi_lm.model.positions import NUM_BUCKETS


def num_parameters(config: ModelConfig) -> int:
    """Number of weights of the model; a shared one counts once.

    Raises:
        ConfigError: the vocabulary size is not set.
    """
    width, vocabulary = config.hidden_size, vocab_size(config)
    bloom = config.architecture == "bloom"
    matrices = _block_matrices(config)
    norms = config.num_layers * 2 * width + width
    biases = 0
    if bloom:
        qkv = width + 2 * config.kv_heads * config.head_dim
        biases = config.num_layers * (qkv + width + 4 * width + width) + norms + 2 * width
    position = 0
    if config.position == "learned":
        position = (config.max_positions or 0) * width
    elif config.position == "t5":
        position = config.num_layers * NUM_BUCKETS * config.num_heads
    elif config.position == "alibi_learned":
        position = config.num_layers * config.num_heads
    embeddings = vocabulary * width * (1 if config.tied_embeddings else 2)
    return matrices + norms + biases + position + embeddings


def _block_matrices(config: ModelConfig) -> int:
    width = config.hidden_size
    qkv = width * (width + 2 * config.kv_heads * config.head_dim)
    return config.num_layers * (qkv + width * width + 8 * width * width)


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Floating-point operations of forward and backward for one training token.

    6 N + 12 L H Q T, as in PaLM (Chowdhery et al. 2022, appendix B): N counts the weights that
    multiply (blocks and output matrix, not the embedding look-up, norms or biases), L layers, H
    heads of width Q, T the sequence length, or the window where that is shorter. As there, the
    attention term counts the whole square, of which causal attention needs half, and
    recomputation is not counted.

    Raises:
        ConfigError: the vocabulary size is not set.
    """
    matrices = _block_matrices(config) + vocab_size(config) * config.hidden_size
    span = sequence_length if config.window is None else min(sequence_length, config.window)
    return 6.0 * matrices + 12.0 * config.num_layers * config.num_heads * config.head_dim * span
