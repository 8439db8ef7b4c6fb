"""train.pruning_tolerance reaches the model that is trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from alibi_lm.config import Config
from alibi_lm.config_loading import build
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.layers import Attention
from alibi_lm.parallel.mesh import NO_PARALLEL, Mesh
from alibi_lm.train.config import TrainConfig
from alibi_lm.train.engine import base
from alibi_lm.train.engine.plain import PlainEngine


def test_the_engine_hands_it_to_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Decoder] = []

    def initialize(model: Decoder, **_: Any) -> tuple[Any]:
        made.append(model)
        return (SimpleNamespace(module=model),)

    monkeypatch.setattr(base.deepspeed, "initialize", initialize)
    tree = {
        "run": {"dir": "runs/x"},
        "data": {"corpora": [{"prefix": "x"}]},
        "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 50},
        "train": {"pruning_tolerance": 1e-4},
    }
    mesh = cast(Mesh, SimpleNamespace(tp=NO_PARALLEL, pp=NO_PARALLEL, dp=NO_PARALLEL))
    PlainEngine(build(Config, tree), {"zero_optimization": {"stage": 1}}, mesh)
    blocks = [module for module in made[0].modules() if isinstance(module, Attention)]
    assert [module.epsilon for module in blocks] == [1e-4, 1e-4]


@pytest.mark.parametrize(("epsilon", "bad"), [(0.0, 0), (1e-6, 0), (1.0, 1), (-1e-6, 1)])
def test_it_is_a_probability(epsilon: float, bad: int) -> None:
    train = TrainConfig()
    train.pruning_tolerance = epsilon
    assert [problem.key for problem in train.problems("train.")] == [
        "train.pruning_tolerance"
    ] * bad
