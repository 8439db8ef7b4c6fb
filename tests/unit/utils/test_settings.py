"""Settings made in Python are checked as YAML's are, and suggestions point to the right key."""

from dataclasses import replace
from typing import Any

import pytest

from alibi_lm.config import Config
from alibi_lm.config_loading import build
from alibi_lm.evals.config import NeedleConfig, RetrievalConfig
from alibi_lm.evals.suite import read_suite
from alibi_lm.model.config import ModelConfig, ScalingConfig
from alibi_lm.train.config import TrainConfig
from alibi_lm.utils.errors import ConfigError
from alibi_lm.utils.settings import UnknownSetting, applicable, examine, nearest


def problems(section: Any, values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        section(**values)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("section", "values", "expected"),
    [
        (
            ModelConfig,
            {"position": "ALiBi"},
            "position = ALiBi: is not one of alibi, alibi_learned",
        ),
        (ModelConfig, {"position": "typo"}, "position = typo: is not one of alibi,"),
        (ModelConfig, {"architecture": "llama"}, "is not one of mpt, bloom; choose one of them"),
        (
            ModelConfig,
            {"num_heads": 3, "hidden_size": 64},
            "num_heads = 3: does not divide hidden_size = 64; change one of them",
        ),
        (ModelConfig, {"num_layers": 0}, "num_layers = 0: is not positive; give at least 1"),
        (ModelConfig, {"num_layers": "2"}, "num_layers = 2: is not a whole number"),
        (ModelConfig, {"tied_embeddings": 1}, "tied_embeddings = 1: is not true or false"),
        (
            ModelConfig,
            {"scaling": {"kind": "linear", "factor": 0.5}},
            "scaling.factor = 0.5: is less than 1",
        ),
        (ModelConfig, {"scaling": 3}, "scaling = 3: is not a section"),
        (ModelConfig, {"position": "learned"}, "max_positions: is needed by position: learned"),
        (
            ScalingConfig,
            {"kind": "yarn", "factor": 2.0},
            "original_length: is needed by kinds yarn",
        ),
        (TrainConfig, {"beta1": 1.0}, "beta1 = 1: is not below 1; give less than 1"),
        (TrainConfig, {"seed": -1}, "seed = -1: is negative; give 0 or more"),
        (TrainConfig, {"precision": "int8"}, "precision = int8: is not one of fp32, bf16, fp16"),
        (TrainConfig, {"heartbeat_timeout_seconds": 1.0}, "= 1: is less than 5; give at least 5"),
        (
            TrainConfig,
            {"warmup_steps": 30, "num_steps": 10},
            "warmup_steps = 30: exceeds num_steps = 10; lower it",
        ),
        (NeedleConfig, {"depths": []}, "depths = []: is empty"),
        (NeedleConfig, {"depths": [0.5, 0.5]}, "depths = [0.5, 0.5]: names 0.5 twice"),
        (NeedleConfig, {"lengths": [64, -1]}, "lengths.1 = -1: is not positive"),
        (NeedleConfig, {"num_distractors": 101}, "num_distractors = 101: is more than 100"),
        (RetrievalConfig, {"tasks": ["qa_1"]}, "tasks = qa_1: has no file; set qa_files"),
    ],
)
def test_a_section_made_in_python_is_checked(
    section: Any, values: dict[str, Any], expected: str
) -> None:
    (problem,) = problems(section, values)
    assert expected in problem


def test_python_and_yaml_report_the_same_words() -> None:
    values: dict[str, Any] = {"num_heads": 3, "hidden_size": 64, "position": "rope", "window": 0}
    in_python = problems(ModelConfig, values)
    assert len(in_python) == 3
    _, from_yaml = examine(Config, {"run": {"dir": "a"}, "model": values})
    assert [str(problem).replace("model.", "") for problem in from_yaml] == in_python
    assert "model.num_heads = 3: does not divide model.hidden_size = 64;" in str(from_yaml[-1])


def test_a_repeated_item_is_named_beside_a_wrong_one() -> None:
    assert problems(NeedleConfig, {"lengths": [0, 8, 8]}) == [
        "lengths.0 = 0: is not positive; give at least 1",
        "lengths = [0, 8, 8]: names 8 twice; name it once",
    ]
    assert problems(NeedleConfig, {"lengths": 3}) == ["lengths = 3: is not a list; write [a, b]"]


def test_values_are_kept_and_copies_are_checked() -> None:
    scaling = ScalingConfig("linear", 2)
    config = ModelConfig(hidden_size=64, num_heads=4, scaling=scaling)
    assert config.scaling is scaling
    assert isinstance(scaling.factor, float)
    with pytest.raises(ConfigError, match="num_heads = 5: does not divide hidden_size = 64"):
        replace(config, num_heads=5)
    config.num_heads = 5
    (problem,) = config.problems("model.")
    assert problem.key == "model.num_heads"


def test_a_rule_is_left_out_where_a_setting_that_it_reads_is_wrong() -> None:
    config, found = examine(
        Config, {"run": {"dir": "a"}, "model": {"num_heads": "x", "hidden_size": 130}}
    )
    assert [problem.key for problem in found] == ["model.num_heads"]
    assert config.model.hidden_size == 130
    with pytest.raises(UnknownSetting):
        _ = config.model.num_heads
    assert list(applicable(problem for problem in found if config.model.head_dim)) == []


@pytest.mark.parametrize(
    ("raw", "fix"),
    [
        ({"model": {"activation": "swiglu"}}, "keys here: architecture, num_layers,"),
        ({"train": {"lr": 1}}, "did you mean train.learning_rate?"),
        ({"train": {"batch_size": 1}}, "did you mean train.global_batch_size?"),
        ({"train": {"steps": 1}}, "did you mean train.num_steps?"),
        ({"model": {"n_layer": 1}}, "did you mean model.num_layers?"),
        ({"model": {"d_model": 1}}, "did you mean model.hidden_size?"),
        ({"model": {"heads": 1}}, "did you mean model.num_heads?"),
        ({"lr": 1}, "did you mean train.learning_rate?"),
        ({"train": {"dir": "x"}}, "did you mean run.dir?"),
        ({"model": {"num_head": 4}}, "did you mean model.num_heads?"),
        ({"train": {"silence_seconds": 9}}, "did you mean train.heartbeat_timeout_seconds?"),
        ({"train": {"epsilon": 1}}, "did you mean train.adam_epsilon?"),
        ({"train": {"attention_epsilon": 1}}, "did you mean train.pruning_tolerance?"),
        ({"model": {"shape": "mpt"}}, "did you mean model.architecture?"),
        ({"train": {"foo": 1}}, "no key here resembles it"),
        ({"data": {"corpora": [{"prefix": "x", "wieght": 1}]}}, "mean data.corpora.0.weight?"),
    ],
)
def test_an_unknown_key_s_suggestion_is_right_or_absent(raw: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Config, {"run": {"dir": "a"}} | raw)
    (problem,) = caught.value.problems
    assert fix in str(problem)


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("horizon.num_tokens=9", "did you mean attention_span?"),
        ("needle.epsilon=0", "did you mean needle.pruning_tolerance?"),
        ("perplexity.null_reach=9", "did you mean perplexity.truncated_context_length?"),
        ("generalisation.seed=1", "did you mean generalization?"),
    ],
)
def test_a_renamed_key_of_a_suite_leads_to_the_new_one(override: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_suite(None, [override])
    (problem,) = caught.value.problems
    assert fix in str(problem)


def test_a_key_outside_any_section_is_meant_for_the_eval_that_runs() -> None:
    with pytest.raises(
        ConfigError, match=r"lengths: unknown key; did you mean perplexity.lengths\?"
    ):
        read_suite(None, ["lengths=[128]"], "perplexity")
    with pytest.raises(ConfigError, match=r"perplexity.lengths, needle.lengths, .* or "):
        read_suite(None, ["lengths=[128]"])


@pytest.mark.parametrize(
    ("word", "expected"),
    [("precison", "precision"), ("activation", None), ("lengths", None), ("position", "position")],
)
def test_nearest_finds_misspellings_only(word: str, expected: str | None) -> None:
    assert nearest(word, ["position", "precision", "training_length"]) == expected
