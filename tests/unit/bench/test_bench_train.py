"""Benchmarks of a training step and of attention run and say what they measured."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
import torch
from click.testing import CliRunner

from alibi_lm.bench.attention import AttentionBenchmark, _eager, _ways, benchmark_attention
from alibi_lm.bench.baselines import (
    DENSE,
    OURS,
    SIZES,
    TRANSFORMERS,
    X_TRANSFORMERS,
    ModelSize,
    become,
    make,
)
from alibi_lm.bench.roofline import PARTS, Matmul, matmul_rate, matmuls, profile_step
from alibi_lm.bench.train import groups
from alibi_lm.cli.bench import MODELS
from alibi_lm.cli.main import main
from alibi_lm.model.flops import num_parameters
from alibi_lm.model.layers import Attention

SMALL = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 256}


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "4m", SMALL)


def test_a_package_that_is_missing_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("alibi_lm.bench.train.available", lambda name: name != "x-transformers")
    done = CliRunner().invoke(main, ["bench", "train", "--model", "x-transformers"])
    assert done.exit_code == 2
    assert done.output.strip().endswith(
        "is not installed; pip install x-transformers, or leave it out"
    )
    assert len(done.output.strip().splitlines()) == 1


def test_a_step_has_whole_sequences() -> None:
    arguments = ["bench", "train", "--sequence-length", "512", "--num-tokens", "256"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert "--num-tokens = 256: is no multiple of --sequence-length 512" in done.output
    done = CliRunner().invoke(main, ["bench", "attention", "--num-tokens", "256"])
    assert done.exit_code == 2
    assert "--num-tokens = 256: holds no sequence of 2048" in done.output


def test_models_take_turns_in_processes_of_their_own(tmp_path: Path) -> None:
    """The command itself, on its smaller size: three steps of ours and of a stock class."""
    path = tmp_path / "result.json"
    done = CliRunner().invoke(
        main, ["bench", "train", "--sequence-length", "32", "--num-tokens", "64", "--repeats", "3",
               "--memory-starts", "2", "--model", "alibi", "--model", "none", "--model", "mpt",
               "--json", str(path)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    assert list(result["models"]) == ["alibi", "none", "mpt"]
    for found in result["models"].values():
        assert len(found["seconds"]) == 3
        assert len(found["peak_bytes"]) == 2
        assert min(found["peak_bytes"]) > 4e6 * 12  # fp32 weights and moments at least
        flops = 64 * (6 * (4 * 12 * 256**2 + 4096 * 256) + 12 * 4 * 256 * 32)
        pairs = zip(found["seconds"], result["matmul_rates"], strict=True)
        assert found["mfu"] == pytest.approx(
            median(flops / (taken * rate) for taken, rate in pairs)
        )
    assert result["models"]["alibi"]["time"]["median"] == 1
    assert result["models"]["alibi"]["memory"]["high"] == 1
    assert result["models"]["mpt"]["memory"]["median"] > 0
    assert "| mpt |" in done.output
    assert set(result["profile"]) == {*PARTS, "other", "all"}
    assert result["profile"]["matmuls"] > 0


def test_the_command_takes_every_model_there_is() -> None:
    """The command names them itself, since its help must not wait for torch."""
    assert sorted(MODELS) == sorted([*OURS, *TRANSFORMERS, X_TRANSFORMERS])


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("name", [*OURS, *TRANSFORMERS])
def test_peers_are_of_the_same_size_and_learn(name: str) -> None:
    losses = make(name, ModelSize("4m", 32))
    tokens = torch.randint(SMALL["vocab_size"], (2, 33), generator=torch.Generator().manual_seed(0))
    wanted = num_parameters(ModelSize("4m", 32).config("alibi"))
    assert sum(p.numel() for p in losses.parameters()) == pytest.approx(wanted, rel=0.03)
    optimizer = torch.optim.AdamW(losses.parameters(), lr=1e-2)
    values = []
    for _ in range(6):
        loss = losses(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(float(loss.detach()))
    assert values[-1] < values[0] - 0.3


@pytest.mark.usefixtures("_small")
def test_a_model_becomes_another_of_the_same_parameters() -> None:
    size = ModelSize("4m", 32)
    tokens = torch.randint(SMALL["vocab_size"], (2, 33), generator=torch.Generator().manual_seed(0))
    model = make("none", size)
    for name in ("alibi", DENSE, "none"):
        become(model, name, size)
        fresh = make(name, size)
        assert model(tokens) == fresh(tokens)
        epsilons = [[m.epsilon for m in x.modules() if isinstance(m, Attention)]
                    for x in (model, fresh)]  # fmt: skip
        assert epsilons[0] == epsilons[1]
    assert model(tokens) != make("alibi", size)(tokens)
    assert groups(["mpt", "none", "rotary", "alibi"]) == [("mpt",), ("none", "alibi"), ("rotary",)]


def test_products_are_those_of_a_forward_pass() -> None:
    found = matmuls(SMALL, 10)
    matrices = 2 * 12 * 64 * 64 + 256 * 64
    assert sum(each.flops for each in found) == 2 * 10 * matrices
    assert Matmul(10, 64, 256, 1) in found
    rate = matmul_rate(SMALL, 10)()
    assert min(rate.forward, rate.step) > 0


def test_a_profile_finds_the_parts() -> None:
    left = torch.randn(200, 200)

    def step() -> None:
        torch.nn.functional.gelu(left @ left).sum()

    parts = profile_step(step)
    assert parts["matmuls"] > 0
    assert parts["gelu"] > 0
    assert parts["attention"] == 0
    assert parts["all"] == pytest.approx(sum(v for k, v in parts.items() if k != "all"))


def test_every_way_of_attention_is_the_same_attention() -> None:
    q, k, v = torch.randn(3, 1, 4, 300, 16).bfloat16().unbind(0)
    ways = _ways(4, 300, 4096, q)
    distance = torch.arange(300)[:, None] - torch.arange(300)
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]).view(-1, 1, 1)
    bias = (-slopes * distance).masked_fill(distance < 0, -torch.inf)
    exact = {True: _eager(bias.double(), q.double(), k.double(), v.double()),
             False: _eager((0 * bias).nan_to_num(0).masked_fill(distance < 0, -torch.inf).double(),
                           q.double(), k.double(), v.double())}  # fmt: skip
    for name, way in ways.items():
        biased = "no bias" not in name and "without" not in name
        # A bias in 16 bits is what makes the dense and the eager way coarse.
        tolerance = 0.1 if name in ("eager", "torch, dense bias") else 0.03
        assert (way(q, k, v).double() - exact[biased]).abs().max() < tolerance, name


def test_attention_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    result = benchmark_attention(AttentionBenchmark("4m", [64], 128, repeats=2))
    assert {row["length"] for row in result["rows"]} == {64}
    assert all(row["both"] > 0 and row["forward"] > 0 for row in result["rows"])
    said = capsys.readouterr().out
    assert all(row["way"] in said for row in result["rows"])
