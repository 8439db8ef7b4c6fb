"""Which settings may change on resume, and what is said about them."""

from typing import Any

import pytest

from alibi_lm.config import Config
from alibi_lm.config_loading import build, to_dict
from alibi_lm.train.checkpointing.resume import (
    RESUME_MAY_CHANGE,
    config_problems,
    data_problems,
    schedule_change,
)


def config(**changes: Any) -> Config:
    raw = to_dict(build(Config, {"run": {"dir": "a"}, "data": {"corpora": [{"prefix": "x"}]}}))
    for key, value in changes.items():
        section, name = key.split("__")
        raw[section][name] = value
    return build(Config, raw)


@pytest.mark.parametrize(
    "change",
    [
        {"train__micro_batch_size": 8},
        {"train__num_steps": 5000},
        {"train__checkpoint_interval": 7},
        {"train__validation_interval": 7},
        {"run__dir": "b"},
        {"deepspeed__zero_optimization": {"stage": 3}},
        {"data__corpora": [{"prefix": "moved/x"}]},
    ],
)
def test_these_may_change(change: dict[str, Any]) -> None:
    assert not list(config_problems(config(), config(**change)))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"train__seed": 1}, "train.seed"),
        ({"train__global_batch_size": 16}, "train.global_batch_size"),
        ({"train__sequence_length": 512}, "train.sequence_length"),
        ({"train__learning_rate": 2e-3}, "train.learning_rate"),
        ({"train__precision": "fp32"}, "train.precision"),
        ({"model__num_layers": 5}, "model.num_layers"),
        ({"model__window": 64}, "model.window"),
    ],
)
def test_these_are_refused_by_name(change: dict[str, Any], key: str) -> None:
    (problem,) = config_problems(config(), config(**change))
    assert problem.key == key
    assert "may not change" in problem.rule


def test_other_data_or_weights_are_refused() -> None:
    corpus = {"digest": "d", "tokens": 10, "weight": 1.0}
    meta = {"data": {"corpora": [corpus], "tokenizer": "t"}}
    assert not list(data_problems(meta, {"corpora": [dict(corpus)], "tokenizer": "t"}))
    for corpora in ([corpus | {"digest": "e"}], [corpus | {"weight": 2.0}], [corpus, corpus]):
        (problem,) = data_problems(meta, {"corpora": corpora, "tokenizer": "t"})
        assert problem.key == "data.corpora"
    (problem,) = data_problems(meta, {"corpora": [corpus], "tokenizer": "u"})
    assert problem.key == "data.tokenizer"


def test_every_name_in_the_list_is_a_setting() -> None:
    for name in RESUME_MAY_CHANGE:
        value: Any = config()
        for part in name.split("."):
            assert hasattr(value, part), name
            value = getattr(value, part)


@pytest.mark.parametrize(
    ("schedule", "step", "line"),
    [
        ("cosine", 1000, "step 1,000 from 0 to 0.0005: schedule cosine depends on it"),
        ("cosine", 500, "step 500 from 0.0005 to 0.000854: schedule cosine depends on it"),
        ("linear", 500, "step 500 from 0.0005 to 0.00075: schedule linear depends on it"),
        ("wsd", 950, "step 950 from 0.0005 to 0.001: schedule wsd depends on it"),
        ("wsd", 500, None),
        ("constant", 1000, None),
        ("inverse_sqrt", 1000, None),
    ],
)
def test_a_new_number_of_steps_says_how_it_moves_the_learning_rate(
    schedule: str, step: int, line: str | None
) -> None:
    old = config(train__schedule=schedule, train__num_steps=1000)
    new = config(train__schedule=schedule, train__num_steps=2000)
    said = schedule_change(old.train, new.train, step)
    assert schedule_change(old.train, old.train, step) is None
    if line is None:
        assert said is None
    else:
        start = "train.num_steps = 2,000 (was 1,000) changes the learning rate at "
        assert said == start + line
