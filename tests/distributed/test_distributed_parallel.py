"""Ranks in every layout compute what one process computes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from started_ranks import needs_fp16, run_ranks
from torch.nn.functional import cross_entropy

from alibi_lm.model.attention.dispatch import attention
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.layers import Block
from alibi_lm.model.slopes import alibi_slopes
from alibi_lm.parallel.mesh import ParallelDim

SCRIPT = Path(__file__).with_name("parallel_variants.py")
BLOOM = {"architecture": "bloom", "tied_embeddings": False}
MQA, GQA = {"num_kv_heads": 1}, {"num_kv_heads": 2}
BF16 = {"precision": "bf16"}
COMPILED = {"compile": True}

NTK = {"scaling": {"kind": "ntk", "factor": 2.0}}
LEARNED_SLOPES = {"position": "alibi_learned"}
RIVALS: dict[str, dict[str, Any]] = {
    "learned slopes": LEARNED_SLOPES | {"stages": [0, 1]},
    "interpolated slopes": {"stages": [1], "scaling": {"kind": "linear", "factor": 2.0}},
    "ntk slopes, window": NTK | {"stages": [1], "window": 7},
    "sinusoidal": {"stages": [1], "position": "sinusoidal"},
    "learned": {"stages": [1], "position": "learned", "max_positions": 40},
    "t5": {"stages": [1], "position": "t5"},
    "none, window": {"stages": [1], "position": "none", "window": 7},
    "rotary": {"stages": [1], "position": "rotary"},
    "rotary interpolated": {
        "stages": [1], "position": "rotary", "scaling": {"kind": "linear", "factor": 2.0},
    },
    "rotary ntk": NTK | {"stages": [1], "position": "rotary"},
    "rotary yarn": {
        "stages": [1], "position": "rotary",
        "scaling": {"kind": "yarn", "factor": 2.0, "original_length": 10},
    },
    "rotary longrope": {
        "stages": [1], "position": "rotary",
        "scaling": {"kind": "longrope", "factor": 2.0, "original_length": 10,
                    "factors": [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]},
    },
}  # fmt: skip
"""Every scheme that ALiBi is compared with."""

# ranks, tp, pp
Layout = tuple[int, int, int]
Variants = dict[str, dict[str, Any]]

# What is trained in one start of a layout. The vocabulary of 61 divides by none of them.
LAYOUTS: dict[Layout, Variants] = {
    (2, 2, 1): {
        "mpt": {"stages": [0, 1]},
        "bloom mqa": BLOOM | MQA | {"stages": [1]},
        "mpt gqa recomputed": GQA | {"stages": [1], "recompute": True},
        "mpt of local slopes": {"stages": [1], "local_slopes": True},
        "learned slopes, ntk": NTK | LEARNED_SLOPES | {"stages": [1]},
    },
    (2, 1, 2): {
        "mpt recomputed": {"stages": [0, 1], "recompute": True},
        "bloom mqa": BLOOM | MQA | {"stages": [0, 1], "num_layers": 3},
        "mpt gqa bf16": GQA | BF16 | {"stages": [1]},
        "bloom tied": {"stages": [1], "architecture": "bloom"},
        "learned slopes, ntk": NTK | LEARNED_SLOPES | {"stages": [1]},
    },
    (4, 2, 1): {
        "mpt gqa": GQA | {"stages": [1]},
        "mpt of six blocks": GQA | {"stages": [2, 3], "num_layers": 6},
        "bloom mqa bf16": BLOOM | MQA | BF16 | {"stages": [1]},
    },
    (4, 2, 2): {
        "mpt gqa": GQA | {"stages": [0, 1]},
        "bloom mqa": BLOOM | MQA | {"stages": [1], "recompute": True},
        "bloom tied mqa bf16": MQA | BF16 | {"stages": [1], "architecture": "bloom"},
    },
}
MORE: dict[Layout, Variants] = {
    (2, 1, 1): {
        "mpt": {"stages": [0, 1, 2, 3]},
        "bloom mqa": BLOOM | MQA | {"stages": [0, 1, 2, 3]},
        "mpt untied gqa": GQA | {"stages": [0, 1, 2, 3], "tied_embeddings": False},
        "bloom tied bf16": BF16 | {"stages": [1, 2, 3], "architecture": "bloom"},
        "mpt compiled": COMPILED | {"stages": [1, 2], "recompute": True},
    },
    (2, 2, 1): {
        "bloom mqa compiled": BLOOM | MQA | COMPILED | {"stages": [1]},
        "mpt": {"stages": [2, 3]},
        "mpt bf16": BF16 | {"stages": [1, 2, 3]},
        "bloom tied": {"stages": [0, 1], "architecture": "bloom"},
        "mpt untied": {"stages": [0, 1], "tied_embeddings": False},
    },
    (4, 4, 1): {
        "mpt gqa": GQA | {"stages": [1]},
        "bloom mqa": BLOOM | MQA | {"stages": [1, 3], "num_heads": 12},
        "t5, nine tokens": {"stages": [0], "position": "t5", "vocab_size": 9},
        "learned, window": {"stages": [1], "position": "learned", "max_positions": 40, "window": 7},
        "rotary": {"stages": [1], "position": "rotary"},
        "sinusoidal": {"stages": [1], "position": "sinusoidal"},
        "mpt bf16": GQA | BF16 | {"stages": [1]},
    },
    (2, 1, 2): {
        "mpt": {"stages": [0, 1]},
        "mpt untied": {"stages": [0, 1], "tied_embeddings": False},
        "bloom bf16": BLOOM | BF16 | {"stages": [1], "recompute": True},
        "mpt compiled": COMPILED | {"stages": [1]},
    },
    (4, 1, 4): {
        "mpt": {"stages": [0, 1], "num_layers": 5},
        "bloom gqa": BLOOM | GQA | {"stages": [0, 1], "num_layers": 4},
        "mpt mqa bf16": MQA | BF16 | {"stages": [1], "num_layers": 4},
    },
    (4, 2, 1): {
        "mpt": {"stages": [0]},
        "bloom mqa": BLOOM | MQA | {"stages": [1, 2, 3]},
        "mpt bf16": BF16 | {"stages": [1, 2, 3]},
    },
    (4, 1, 2): {
        "mpt": {"stages": [0, 1]},
        "bloom mqa": BLOOM | MQA | {"stages": [1]},
        "mpt gqa bf16": GQA | BF16 | {"stages": [1]},
    },
    (4, 2, 2): {
        "mpt": {"stages": [1]},
        "mpt untied": {"stages": [0, 1], "tied_embeddings": False},
        "t5, nine tokens": {"stages": [1], "position": "t5", "vocab_size": 9},
    },
    (8, 2, 2): {
        "mpt gqa": GQA | {"stages": [1]},
        "bloom mqa": BLOOM | MQA | {"stages": [1]},
        "mpt untied": {"stages": [0], "tied_embeddings": False},
        "bloom tied bf16": BF16 | {"stages": [1], "architecture": "bloom"},
    },
}


MORE[2, 2, 1] |= RIVALS | {"learned slopes bf16": LEARNED_SLOPES | BF16 | {"stages": [1, 3]}}
MORE[2, 1, 2] |= RIVALS | {"learned slopes bf16": LEARNED_SLOPES | BF16 | {"stages": [1]}}


def train(folder: Path, layout: Layout, variants: Variants) -> dict[str, Any]:
    """Start the ranks and wait for them; what rank 0 found."""
    num_ranks, tp, pp = layout
    (folder / "variants.json").write_text(json.dumps(variants))
    found = run_ranks(SCRIPT, folder, num_ranks, tp, pp)
    assert len(found) == sum(len(variant["stages"]) for variant in variants.values())
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_first_steps_equal_one_processs(layout: Layout, tmp_path: Path) -> None:
    results = train(tmp_path, layout, LAYOUTS[layout])
    mistaken = {name: results.pop(name) for name in list(results) if "local slopes" in name}
    compare(results)
    if "mpt of six blocks stage 3" in results:
        # A block is split before the next one is made. Without ZeRO-3 a rank makes its whole slice.
        found = results["mpt of six blocks stage 3"]
        assert found["most_held"] < 0.25 * found["parameters"]
        found = results["mpt of six blocks stage 2"]
        assert found["most_held"] > 0.5 * found["parameters"]
    if mistaken:
        with pytest.raises(AssertionError):
            compare(mistaken)


@pytest.mark.slow
@pytest.mark.parametrize("layout", MORE, ids=str)
def test_first_steps_of_more_models(layout: Layout, tmp_path: Path) -> None:
    compare(train(tmp_path, layout, MORE[layout]))


@needs_fp16
@pytest.mark.parametrize(
    "layout", [(2, 1, 2), pytest.param((4, 2, 2), marks=pytest.mark.slow)], ids=str
)
def test_first_steps_in_fp16(layout: Layout, tmp_path: Path) -> None:
    compare(train(tmp_path, layout, {"mpt fp16": {"stages": [1], "precision": "fp16"}}))


def compare(results: dict[str, Any]) -> None:
    """Every variant's steps, losses and logits with those of one process."""
    for name, found in results.items():
        exact = "bf16" not in name and "fp16" not in name
        assert found["ranks_agree"], name
        assert found["copies_differ"] == [], name
        assert found["alone"][0][0] - found["alone"][-1][0] > 0.3, name  # it learns
        for (loss, norm), (loss_0, norm_0) in zip(found["steps"], found["alone"], strict=True):
            assert loss == pytest.approx(loss_0, abs=1e-5 if exact else 2e-2), name
            assert norm == pytest.approx(norm_0, abs=1e-5 if exact else 2e-2), name
        if "losses" not in found:
            continue
        losses = torch.tensor(found["losses"])
        # In bf16 products round by the size of the batch.
        close = 1e-6 if exact else 1e-3
        assert losses.mean().item() == pytest.approx(found["validation"], abs=close), name
        if "logits" in found and exact:
            logits, targets = torch.tensor(found["logits"]), torch.tensor(found["targets"])
            expected = cross_entropy(logits.mT, targets, reduction="none")
            torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)


HEADS_AND_RANKS = [
    (heads, size)
    for heads, size in itertools.product((8, 12, 40, 112), (1, 2, 4, 8))
    if heads % size == 0
]


def rank_slopes(num_heads: int, size: int) -> list[tuple[float, ...]]:
    """The slopes that each rank's attention applies."""
    config = ModelConfig(num_layers=1, hidden_size=num_heads, num_heads=num_heads, vocab_size=9)
    slopes = []
    for rank in range(size):
        block = Decoder(config, None, ParallelDim(rank, size)).blocks[0]
        assert isinstance(block, Block)
        assert block.attention.exact_slopes is not None
        slopes.append(block.attention.exact_slopes)
    return slopes


@pytest.mark.parametrize(("num_heads", "size"), HEADS_AND_RANKS)
def test_the_ranks_slopes_together_are_the_papers(num_heads: int, size: int) -> None:
    power = 2 ** (num_heads.bit_length() - 1)
    paper = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    extra = [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1)]
    paper += extra[::2][: num_heads - power]
    assert [slope for part in rank_slopes(num_heads, size) for slope in part] == paper


@pytest.mark.parametrize(("num_heads", "size"), [pair for pair in HEADS_AND_RANKS if pair[1] > 1])
def test_slopes_of_local_heads_are_another_model(num_heads: int, size: int) -> None:
    """The mistake that ranks must not make is one that comparing attention's output shows."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, num_heads, 33, 4, generator=generator)
    whole = attention(q, k, v, slopes=alibi_slopes(num_heads))

    def run_on_all_ranks(slopes: list[tuple[float, ...]]) -> torch.Tensor:
        parts = [
            attention(*(x.chunk(size, dim=1)[rank] for x in (q, k, v)), slopes=slopes[rank])
            for rank in range(size)
        ]
        return torch.cat(parts, dim=1)

    torch.testing.assert_close(
        run_on_all_ranks(rank_slopes(num_heads, size)), whole, rtol=0, atol=1e-5
    )
    mistaken = run_on_all_ranks([alibi_slopes(num_heads // size)] * size)
    assert (mistaken - whole).abs().max() > 0.05
