"""Whether a stock folder's weights were trained with the number of heads that its config claims.

No tensor of BLOOM or MPT has a shape that tells it: any count that divides the width fits. A
trained model tells it by what it makes of a text: with another count, BLOOM's interleaved rows fall
to the wrong heads, and every head has another slope and scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from alibi_lm.config import Config
from alibi_lm.data.indexed import TokenFile
from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.utils.errors import CheckpointError, DataError, Problem

USUAL_WIDTHS = (64, 80, 96, 112, 128)
"""Widths of the heads of published BLOOM and MPT models."""
NUM_TOKENS = 256
LEARNED = 1.0
"""Nats a token by which a text must be likelier than chance for a model to tell anything,"""
MARGIN = 0.25
"""and by which another count must be better before the claimed one is refused."""
SAMPLE = """\
The library opens at nine in the morning and closes at six in the evening. On the first floor there
are newspapers from every part of the country, and on the second floor you will find books about
history, science and music. If you want to take a book home, bring it to the desk by the door, where
someone will write down your name and the day on which it must come back. Children may stay in the
reading room as long as they are quiet. In winter the building is warm, and many people come in the
afternoon to read for an hour or two before they go home.

def total(values):
    result = 0
    for value in values:
        result = result + value
    return result
"""


def check_heads(
    folder: Path,
    config: Config,
    tokenizer: Tokenizer | None,
    weight: Callable[[ModelConfig, str], Tensor],
) -> dict[str, float] | None:
    """Nats a token of a text by number of heads, the claimed one first; None without a text.

    Args:
        folder: what is imported, for the error.
        config: the run's: validation text is taken before the sample above.
        tokenizer: the folder's.
        weight: the canonical weight of a name, read as that model's.

    Raises:
        CheckpointError: another count makes more of the text than the claimed one.
    """
    tokens = _tokens(config, tokenizer)
    if tokens is None:
        return None
    claimed = config.model.num_heads
    found = {
        count: _nats(replace(config.model, num_heads=count), tokens, weight)
        for count in (claimed, *other_counts(config.model))
    }
    best = min(found, key=lambda count: found[count])
    assert config.model.vocab_size is not None
    learned = found[best] < math.log(config.model.vocab_size) - LEARNED
    if learned and found[best] < found[claimed] - MARGIN:
        rule = (
            f"is not what the weights were trained with: a text costs {found[claimed]:.2f} nats a "
            f"token with it, and {found[best]:.2f} with {best} heads"
        )
        fix = "restore it, or import with --parity weights, which computes nothing"
        key = f"{folder}/config.json: number of heads"
        raise CheckpointError(Problem(key, claimed, rule, fix))
    return {str(count): value for count, value in found.items()}


def other_counts(model: ModelConfig) -> list[int]:
    """Half, double, and those of the usual widths, where they divide the model's width."""
    claimed, width = model.num_heads, model.hidden_size
    counts = {2 * claimed, *(width // w for w in USUAL_WIDTHS if width % w == 0)}
    if claimed % 2 == 0:
        counts.add(claimed // 2)
    return sorted(count for count in counts - {claimed} if width % count == 0)


def _tokens(config: Config, tokenizer: Tokenizer | None) -> Tensor | None:
    assert config.model.vocab_size is not None
    for prefix in config.data.validation:
        try:
            file = TokenFile(prefix)
        except DataError:
            continue
        ids = file.read(0, min(NUM_TOKENS, file.num_tokens)).astype("int64")
        if len(ids) > 1 and ids.max() < config.model.vocab_size:
            return torch.from_numpy(ids)[None]
    if tokenizer is None:
        return None
    try:
        sample = tokenizer.encode(SAMPLE)[:NUM_TOKENS]
    except DataError:  # characters that this tokenizer refuses
        return None
    return torch.tensor([sample]) if len(sample) > 1 else None


@torch.no_grad()
def _nats(
    model: ModelConfig, tokens: Tensor, weight: Callable[[ModelConfig, str], Tensor]
) -> float:
    with torch.device("meta"):
        decoder = Decoder(model, seed=None)
    state: Mapping[str, Tensor] = {
        name: weight(model, name).float() for name in decoder.state_dict()
    }
    decoder.load_state_dict(state, assign=True)
    return float(decoder.eval().losses(tokens[:, :-1], tokens[:, 1:]).mean())
