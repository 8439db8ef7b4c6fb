"""The `deepspeed:` block: what is refused, and what DeepSpeed is given."""

import inspect
from pathlib import Path
from typing import Any

import deepspeed.runtime.config
import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from alibi_lm.config import Config
from alibi_lm.config_loading import build
from alibi_lm.train.engine.deepspeed_config import (
    MANAGED_KEYS,
    PASSTHROUGH_KEYS,
    accumulation_steps,
    batch_problems,
    block_problems,
    deepspeed_block,
    deepspeed_config,
    stage_problems,
)
from alibi_lm.utils.errors import ConfigError


def config(block: Any = None, **train: Any) -> Config:
    raw = {
        "run": {"dir": "runs/a"},
        "data": {"corpora": [{"prefix": "x"}]},
        "train": train,
        "deepspeed": block or {},
    }
    return build(Config, raw)


def text(block: dict[str, Any]) -> str:
    return " | ".join(str(problem) for problem in block_problems(block))


@pytest.mark.parametrize(
    ("block", "part"),
    [
        ({"zero_optimisation": {}}, "did you mean deepspeed.zero_optimization?"),
        ({"grad_clipping": 1.0}, "did you mean deepspeed.gradient_clipping?"),
        ({"train_batch_size": 8}, "use train.global_batch_size"),
        ({"bf16": {"enabled": True}}, "use train.precision"),
        ({"elasticity": {}}, "was removed from DeepSpeed"),
        ({"zero_optimization": {"stage": 5}}, "deepspeed.zero_optimization.stage"),
        ({"zero_optimization": {"reduce_bucket_sise": 1}}, "did you mean reduce_bucket_size?"),
        ({"zero_optimization": 2}, "is not a mapping"),
        ({"fp16": {"loss_scal": 1}}, "did you mean loss_scale?"),
        ({"flops_profiler": {"enabeld": True}}, "did you mean enabled?"),
        ({"comms_logger": 3}, "deepspeed.comms_logger = 3: is not a mapping"),
        ({"wall_clock_breakdown": "ja"}, "is not bool"),
        ({"gradient_predivide_factor": "x"}, "is not int or float"),
        ({"zero_optimization": None}, "is not a mapping"),
        ({"zero_optimization": {"stage": True}}, "stage = true: is read by DeepSpeed as 1"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "resume exactly"),
        ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "resume exactly"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "rounds what the ranks send"),
        ({"zero_optimization": {"compute_grad_norm": False}}, "gradient norm, which is logged"),
        ({"zero_optimization": {"legacy_stage1": True}}, "no longer a part of DeepSpeed"),
        ({"zero_optimization": {"zenflow": {}}}, "zenflow = {}: delays updates"),
        (
            {"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 1000}},
            "stage3_module_granularity_threshold = 1000: fails",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer.device = nvme: keeps states where no checkpoint",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
            "super_offload = True: keeps states",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "deepspeed.zero_optimization: Assertion failed, Partial offloading",
        ),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "is kept and saved in fp32"),
        ({"bf16": {"bf16_optimizer_states": True}}, "is kept and saved in fp32"),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "is kept and saved in fp32"),
        ({"fp16": {"loss_scale_window": 0}}, "loss_scale_window must be > 0"),
        ({"activation_checkpointing": {}}, "use train.activation_checkpointing"),
        ({"zero_optimization": {"stage": 7}}, "stage = 7: is not one of 0, 1, 2, 3;"),
        ({"zero_optimization": {"stage": "1"}}, 'stage = "1": is read by DeepSpeed as 1'),
        ({"zero_optimization": {"overlap_comm": "yes"}}, 'overlap_comm = "yes": is read by'),
        (
            {"zero_optimization": {"leaf_module": {"classes": "a"}}},
            'leaf_module.classes = "a": is read by DeepSpeed as ["a"]',
        ),
        ({"zero_optimization": {"cpu_offload": True}}, "is deprecated in DeepSpeed; use offload_o"),
        ({"fp16": {"loss_scale": "128"}}, 'deepspeed.fp16.loss_scale = "128": is read'),
        ({"aio": {"block_size": "1"}}, "deepspeed.aio.block_size = 1: is not int"),
        ({"comms_logger": {"prof_ops": "all"}}, "prof_ops = all: is not list"),
        (
            {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}},
            "deepspeed.zero_optimization.offload_optimizer.devise",
        ),
    ],
)
def test_a_mistake_in_the_block_is_named(block: dict[str, Any], part: str) -> None:
    assert part in text(block)


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "auto"}}},
            "zero_optimization.offload_optimizer.device",
        ),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "zero_optimization.reduce_bucket"),
        ({"fp16": {"loss_scale": "auto"}}, "fp16.loss_scale"),
        ({"aio": {"block_size": "auto"}}, "aio.block_size"),
        ({"prescale_gradients": "auto"}, "prescale_gradients"),
        ({"zero_optimization": "auto"}, "zero_optimization"),
    ],
)
def test_auto_is_refused_wherever_it_stands(block: dict[str, Any], key: str) -> None:
    assert f"deepspeed.{key}" in text(block)
    assert "= auto: is a placeholder of Hugging Face's Trainer, which DeepSpeed drops" in text(
        block
    )


def test_a_right_block_passes() -> None:
    block = {
        "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 5e8},
        "fp16": {"initial_scale_power": 12},
        "wall_clock_breakdown": True,
        "comms_logger": {"enabled": False},
    }
    assert text(block) == ""


def test_every_passed_on_key_is_one_that_deepspeed_reads() -> None:
    folder = Path(inspect.getfile(deepspeed.runtime.config)).parent.parent
    source = "\n".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    for key in (*PASSTHROUGH_KEYS, *MANAGED_KEYS):
        assert f'"{key}"' in source or f"'{key}'" in source, key


@pytest.mark.parametrize(
    ("micro", "accumulation", "total", "ranks", "right"),
    [
        (2, None, 8, 2, True),
        (2, 2, 8, 2, True),
        (2, 3, 8, 2, False),
        (3, None, 8, 2, False),
        (8, None, 8, 1, True),
        (8, None, 8, 2, False),
    ],
)
def test_the_batch_triple(
    micro: int, accumulation: int | None, total: int, ranks: int, right: bool
) -> None:
    made = config(
        micro_batch_size=micro, gradient_accumulation_steps=accumulation, global_batch_size=total
    )
    assert (not list(batch_problems(made, ranks))) == right
    if right:
        assert micro * ranks * accumulation_steps(made, ranks) == total


def test_a_given_accumulation_must_fit_exactly() -> None:
    train = {"micro_batch_size": 2, "gradient_accumulation_steps": 3, "global_batch_size": 8}
    (problem,) = batch_problems(config(**train), 1)
    assert "3 x 1 data-parallel ranks = 6; change one of them" in str(problem)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_reads_what_we_give_it(precision: str, stage: int) -> None:
    block = {"zero_optimization": {"stage": stage}}
    made = config(block, precision=precision, micro_batch_size=2, global_batch_size=8)
    read = DeepSpeedConfig(deepspeed_config(made, block, 1))
    assert (read.train_batch_size, read.gradient_accumulation_steps) == (8, 4)
    assert read.gradient_clipping == 1.0
    assert read.zero_config.stage == stage
    assert read.bfloat16_config.enabled == (precision == "bf16")
    assert read.float16_config.enabled == (precision == "fp16")
    assert read.grad_accum_dtype == "fp32"
    assert read.optimizer_params["betas"] == [0.9, 0.95]


def test_stage_0_in_16_bits_is_refused() -> None:
    zero = {"zero_optimization": {"stage": 0}}
    assert "use stage 1" in str(next(iter(stage_problems(config(precision="bf16"), zero))))
    assert not list(stage_problems(config(precision="fp32"), zero))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_blocks_are_not_compiled_with_stage_3(stage: int) -> None:
    zero = {"zero_optimization": {"stage": stage}}
    found = [str(problem) for problem in stage_problems(config(compile=True), zero)]
    assert ["train.compile = True: gains nothing under ZeRO stage 3" in said for said in found] == (
        [True] if stage == 3 else []
    )


@pytest.mark.parametrize(
    ("parallel", "block", "part"),
    [
        ({"pp": 2}, {"wall_clock_breakdown": True}, "deepspeed.wall_clock_breakdown = True: fails"),
        ({"pp": 2}, {"flops_profiler": {"enabled": True}}, "deepspeed.flops_profiler.enabled"),
        ({}, {"zero_optimization": {"stage": 3}, "prescale_gradients": True}, "ZeRO stage 3"),
        ({}, {"zero_optimization": {"stage": 3}, "gradient_predivide_factor": 2.0}, "ZeRO stage 3"),
    ],
)
def test_what_does_not_go_together_is_refused(
    parallel: dict[str, int], block: dict[str, Any], part: str
) -> None:
    assert list(block_problems(block)) == []
    taken = config(block)
    taken.parallel.pp = parallel.get("pp", 1)
    (problem,) = stage_problems(taken, block)
    assert part in str(problem)
    other = config(block | {"zero_optimization": {"stage": 1}})
    assert list(stage_problems(other, {**block, "zero_optimization": {"stage": 1}})) == []


@pytest.mark.parametrize("section", [None, {}, {"device": "none"}, {"device": "cpu"}])
def test_torchs_adam_runs_unless_states_are_offloaded(section: dict[str, Any] | None) -> None:
    block = {
        "zero_optimization": {"stage": 1} | ({"offload_optimizer": section} if section else {})
    }
    adamw = deepspeed_config(config(block), block, 2)["optimizer"]["params"]
    assert ("torch_adam" in adamw) == (section != {"device": "cpu"})


def test_the_stage_is_1_where_the_block_does_not_say() -> None:
    made = config({"zero_optimization": {"overlap_comm": False}}, precision="bf16")
    for block in ({}, {"zero_optimization": {"overlap_comm": False}}):
        assert not list(stage_problems(made, block))
        assert DeepSpeedConfig(deepspeed_config(made, block, 1)).zero_config.stage == 1


def test_the_block_may_be_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    assert deepspeed_block(config(str(path))) == {"zero_optimization": {"stage": 2}}
    path.write_text("[1]")
    for name, part in ((str(path), "is not a mapping"), ("no.json", "no such file")):
        with pytest.raises(ConfigError, match=part):
            deepspeed_block(config(name))
    path.write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        deepspeed_block(config(str(path)))
    for twice in (
        '{"zero_optimization": {"stage": 1}, "zero_optimization": {"stage": 0}}',
        '{"zero_optimization": {"stage": 1, "stage": 0}}',
    ):
        path.write_text(twice)
        with pytest.raises(ConfigError, match=r"gives the key '(zero_optimization|stage)' twice"):
            deepspeed_block(config(str(path)))
    for constant in ("NaN", "Infinity"):
        path.write_text(f'{{"zero_optimization": {{"reduce_bucket_size": {constant}}}}}')
        with pytest.raises(ConfigError, match=f"holds {constant}, which is not JSON"):
            deepspeed_block(config(str(path)))
