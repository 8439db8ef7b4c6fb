"""Tensor-parallel ranks compute what one process computes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from alibi_lm.model.attention import attention
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.layers import Block
from alibi_lm.model.slopes import alibi_slopes
from alibi_lm.parallel.mesh import Axis

SCRIPT = Path(__file__).with_name("tensor_parallel_variants.py")
BLOOM = {"shape": "bloom", "tied_embeddings": False}

# (ranks, tp): what is trained in one start. The vocabulary of 61 divides by none of them.
LAYOUTS: dict[tuple[int, int], dict[str, dict[str, Any]]] = {
    (2, 2): {
        "mpt": {"stages": [0, 1]},
        "bloom mqa": BLOOM | {"stages": [1], "num_kv_heads": 1},
        "mpt gqa recomputed": {"stages": [1], "num_kv_heads": 2, "recompute": True},
    },
    (4, 2): {
        "mpt gqa": {"stages": [1, 2, 3], "num_kv_heads": 2},
        "bloom mqa bf16": BLOOM | {"stages": [1], "num_kv_heads": 1, "precision": "bf16"},
    },
    (4, 4): {
        "mpt gqa": {"stages": [1], "num_kv_heads": 2},
        "bloom mqa": BLOOM | {"stages": [1], "num_kv_heads": 1, "num_heads": 12},
        "t5, nine tokens": {"stages": [0], "position": "t5", "vocab_size": 9},
    },
}
MORE: dict[tuple[int, int], dict[str, dict[str, Any]]] = {
    (2, 2): {
        "mpt": {"stages": [2, 3]},
        "mpt bf16": {"stages": [1, 2, 3], "precision": "bf16"},
        "bloom tied": {"stages": [0, 1], "shape": "bloom"},
        "mpt untied": {"stages": [0, 1], "tied_embeddings": False},
    },
    (4, 2): {
        "mpt": {"stages": [0]},
        "bloom mqa": BLOOM | {"stages": [1, 2, 3], "num_kv_heads": 1},
        "mpt bf16": {"stages": [1, 2, 3], "precision": "bf16"},
    },
    (4, 4): {
        "bloom mqa": BLOOM | {"stages": [3], "num_kv_heads": 1, "num_heads": 12},
        "learned, window": {"stages": [1], "position": "learned", "max_positions": 40, "window": 7},
        "rotary": {"stages": [1], "position": "rotary"},
        "sinusoidal": {"stages": [1], "position": "sinusoidal"},
        "mpt bf16": {"stages": [1], "precision": "bf16", "num_kv_heads": 2},
    },
}


def train(
    folder: Path, num_ranks: int, tp: int, variants: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Start the ranks and wait for them; what rank 0 found."""
    (folder / "variants.json").write_text(json.dumps(variants))
    out = folder / "out.json"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(str, (rank, num_ranks, tp, folder / "store", out))],
            env=environment | {"LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        errors = [rank.communicate(timeout=600)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(e[-2000:] for e in errors)
    found: dict[str, Any] = json.loads(out.read_text())
    assert len(found) == sum(len(variant["stages"]) for variant in variants.values())
    return found


@pytest.mark.parametrize(
    ("num_ranks", "tp"), [(2, 2), (4, 2), pytest.param(4, 4, marks=pytest.mark.slow)]
)
def test_first_steps_equal_one_processs(num_ranks: int, tp: int, tmp_path: Path) -> None:
    compare(train(tmp_path, num_ranks, tp, LAYOUTS[num_ranks, tp]))


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "tp"), MORE)
def test_first_steps_of_more_models(num_ranks: int, tp: int, tmp_path: Path) -> None:
    compare(train(tmp_path, num_ranks, tp, MORE[num_ranks, tp]))


def compare(results: dict[str, Any]) -> None:
    """Every variant's steps, losses and logits with those of one process."""
    for name, found in results.items():
        exact = "bf16" not in name
        assert found["ranks_agree"], name
        assert found["copies_differ"] == [], name
        assert found["alone"][0][0] - found["alone"][-1][0] > 0.3, name  # it learns
        for (loss, norm), (loss_0, norm_0) in zip(found["steps"], found["alone"], strict=True):
            assert loss == pytest.approx(loss_0, abs=1e-5 if exact else 2e-2), name
            assert norm == pytest.approx(norm_0, abs=1e-5 if exact else 2e-2), name
        losses = torch.tensor(found["losses"])
        assert losses.mean().item() == pytest.approx(found["validation"], abs=1e-6), name
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
        block = Decoder(config, None, Axis(rank, size)).blocks[0]
        assert isinstance(block, Block)
        assert block.attention.slopes is not None
        slopes.append(block.attention.slopes)
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

    def together(slopes: list[tuple[float, ...]]) -> torch.Tensor:
        parts = [
            attention(*(x.chunk(size, dim=1)[rank] for x in (q, k, v)), slopes=slopes[rank])
            for rank in range(size)
        ]
        return torch.cat(parts, dim=1)

    torch.testing.assert_close(together(rank_slopes(num_heads, size)), whole, rtol=0, atol=1e-5)
    mistaken = together([alibi_slopes(num_heads // size)] * size)
    assert (mistaken - whole).abs().max() > 0.05
