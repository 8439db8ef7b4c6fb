"""Layouts that a run cannot have are refused by name, all problems at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alibi_lm.config_loading import to_yaml
from alibi_lm.train.run import read_config
from alibi_lm.utils.errors import ConfigError


def read(
    folder: Path, num_ranks: int, parallel: dict[str, int], stage: int = 1, **model: Any
) -> None:
    raw = {
        "run": {"dir": "none"},
        "model": {"num_layers": 12, "num_heads": 12, "hidden_size": 48} | model,
        "data": {"corpora": [{"prefix": "none"}]},
        "train": {"micro_batch_size": 2, "global_batch_size": 8, "precision": "fp32"},
        "parallel": parallel,
        "deepspeed": {"zero_optimization": {"stage": stage}},
    }
    path = folder / "config.yaml"
    path.write_text(to_yaml(raw), encoding="utf-8")
    read_config(path, [], num_ranks)


@pytest.mark.parametrize(("tp", "kv_heads"), [(1, 12), (2, 12), (4, 12), (4, 2), (6, 1), (3, 6)])
def test_layouts_that_fit_are_taken(tp: int, kv_heads: int, tmp_path: Path) -> None:
    read(tmp_path, 4 * tp, {"tp": tp}, num_kv_heads=kv_heads)


@pytest.mark.parametrize(
    ("num_ranks", "tp", "kv_heads", "said"),
    [
        (8, 8, 12, ["parallel.tp = 8: does not divide model.num_heads = 12"]),
        (4, 4, 6, ["parallel.tp = 4: neither divides model.num_kv_heads = 6 nor is a multiple"]),
        (6, 4, 4, ["parallel = tp 4 x pp 1: does not divide 6 ranks"]),
        (12, 8, 12, ["does not divide model.num_heads", "does not divide 12 ranks"]),
        (15, 5, 12, ["does not divide model.num_heads", "is no multiple of train.micro_batch_size = 2 x 3"]),  # noqa: E501
        (4, 0, 12, ["parallel.tp = 0: is not positive"]),
    ],
)  # fmt: skip
def test_layouts_that_do_not_are_refused(
    num_ranks: int, tp: int, kv_heads: int, said: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, num_ranks, {"tp": tp}, num_kv_heads=kv_heads)
    for part in said:
        assert part in str(caught.value)


def test_a_pipeline_is_refused_along_with_the_rest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, 4, {"tp": 5, "pp": 13}, stage=2)
    for part in ("deepspeed.zero_optimization.stage = 2: ",
                 "parallel.pp = 13: exceeds model.num_layers = 12",
                 "parallel.tp = 5: does not divide model.num_heads = 12",
                 "parallel = tp 5 x pp 13: does not divide 4 ranks"):  # fmt: skip
        assert part in str(caught.value)


def test_a_section_s_own_mistake_does_not_hide_the_layout_s(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, 4, {"tp": 5, "pp": 13}, stage=2, initializer_range=-1.0)
    for part in ("model.initializer_range = -1: is not positive",
                 "deepspeed.zero_optimization.stage = 2: ",
                 "parallel.pp = 13: exceeds model.num_layers = 12",
                 "parallel.tp = 5: does not divide model.num_heads = 12",
                 "parallel = tp 5 x pp 13: does not divide 4 ranks"):  # fmt: skip
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [0, -2])
@pytest.mark.parametrize(
    "key",
    ["model.num_heads", "model.num_kv_heads", "model.num_layers", "model.hidden_size",
     "train.micro_batch_size", "train.global_batch_size", "train.gradient_accumulation_steps",
     "parallel.tp", "parallel.pp"],
)  # fmt: skip
def test_sizes_that_are_none_are_named_and_divide_nothing(
    key: str, value: int, tmp_path: Path
) -> None:
    section, name = key.split(".")
    raw: dict[str, dict[str, Any]] = {
        "run": {"dir": "none"}, "data": {"corpora": [{"prefix": "none"}]}, section: {name: value},
    }  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(raw), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{key} = {value}: is not positive"):
        read_config(path, [], 4)


def test_independent_mistakes_of_four_sections_are_named_in_one_round(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("run: {dir: none}\ndata: {corpora: [{prefix: none}]}\n", encoding="utf-8")
    command = (
        "train.precision=bfloat16 model.hidden_size=130 train.global_batch_size=17 parallel.tp=3"
    )
    for num_ranks in (1, 3):
        with pytest.raises(ConfigError) as caught:
            read_config(
                path, [*command.split(), "deepspeed={zero_optimization: {stage: 9}}"], num_ranks
            )
        for part in (
            "train.precision = bfloat16: is not one of fp32, bf16, fp16",
            "model.num_heads = 8: does not divide model.hidden_size = 130",
            "train.global_batch_size = 17: is no multiple of train.micro_batch_size = 4",
            "parallel.tp = 3: does not divide model.num_heads = 8",
            "deepspeed.zero_optimization.stage = 9: is not one of 0, 1, 2, 3;",
        ):
            assert part in str(caught.value)
        layout = "tp 3 x pp 1: does not divide 1 rank"
        assert (layout in str(caught.value)) == (num_ranks == 1)
