"""The DeepSpeed config of a run: our sections turned into its names, the user's block checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from alibi_lm.config import Config
from alibi_lm.config_loading import json_copy, nearest
from alibi_lm.utils.errors import ConfigError, Problem

# What both sides need is set once, in our sections. DeepSpeed's name: our key.
MANAGED_KEYS = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "gradient_clipping": "train.gradient_clipping",
    "optimizer": "train.learning_rate, train.beta1, train.beta2, train.weight_decay",
    "scheduler": "train.schedule and train.warmup_steps",
    "steps_per_print": "train.log_interval",
    "torch_autocast": "train.precision",
    "data_types": "train.precision",
    "communication_data_type": "train.precision",
    "checkpoint": "train.checkpoint_interval and train.keep_last",
    "tensor_parallel": "parallel.tp",
    "pipeline": "parallel.pp",
    "tensorboard": "the run folder's tensorboard/, which is always written",
    "wandb": "train.wandb.project",
    "managed_gradient_accumulation": "train.gradient_accumulation_steps",
    "data_efficiency": "data.corpora",
    "activation_checkpointing": "train.activation_checkpointing",
}

# DeepSpeed reads the keys it knows and ignores the rest without a word, so the rest is refused.
SCALARS: dict[str, tuple[type, ...]] = {
    "zero_allow_untested_optimizer": (bool,),
    "zero_force_ds_cpu_optimizer": (bool,),
    "prescale_gradients": (bool,),
    "gradient_predivide_factor": (int, float),
    "disable_allgather": (bool,),
    "disable_python_gc": (bool,),
    "dump_state": (bool,),
    "wall_clock_breakdown": (bool,),
    "memory_breakdown": (bool,),
    "log_level": (str,),
}
SECTION_KEYS: dict[str, tuple[str, ...]] = {
    "comms_logger": ("enabled", "prof_all", "prof_ops", "verbose", "debug"),
    "csv_monitor": ("enabled", "output_path", "job_name"),
    "flops_profiler": ("enabled", "recompute_fwd_factor", "profile_step", "module_depth",
                       "top_modules", "detailed", "output_file"),
    "aio": ("block_size", "queue_depth", "intra_op_parallelism", "single_submit",
            "overlap_events", "use_gds"),
}  # fmt: skip
# Keys that DeepSpeed takes and that would break what a run is promised: what they must be left at.
_EXACT = "has not been shown to resume exactly"
_ROUNDED = "rounds what the ranks send each other, so that the losses are others"
_HALF = "keeps in 16 bits what is kept and saved in fp32"
_NOT_SAVED = "keeps states where no checkpoint finds them"
REQUIRED_VALUES: dict[str, tuple[Any, str]] = {
    "zero_optimization.round_robin_gradients": (False, _EXACT),
    "zero_optimization.zero_hpz_partition_size": (1, _EXACT),
    "zero_optimization.zenflow": (None, "puts off updates, so that the losses are others"),
    "zero_optimization.zero_quantized_weights": (False, _ROUNDED),
    "zero_optimization.zero_quantized_gradients": (False, _ROUNDED),
    "zero_optimization.zero_quantized_nontrainable_weights": (False, _ROUNDED),
    "zero_optimization.compute_grad_norm": (True, "takes away the gradient norm, which is logged"),
    "zero_optimization.legacy_stage1": (False, "is no longer a part of DeepSpeed"),
    "zero_optimization.stage3_module_granularity_threshold": (0, "fails in the backward pass"),
    "zero_optimization.module_granularity_threshold": (0, "fails in the backward pass"),
    "zero_optimization.offload_optimizer.super_offload": (False, _NOT_SAVED),
    "bf16.bf16_master_weights_and_grads": (False, _HALF),
    "bf16.bf16_optimizer_states": (False, _HALF),
    "fp16.fp16_master_weights_and_grads": (False, _HALF),
}
PASSTHROUGH_KEYS = ("zero_optimization", "bf16", "fp16", *SCALARS, *SECTION_KEYS)

# Top-level keys of earlier DeepSpeed releases that 0.19 no longer has.
REMOVED = (
    "elasticity",
    "nebula",
    "amp",
    "sparse_attention",
    "curriculum_learning",
    "compression_training",
)


def deepspeed_block(config: Config) -> dict[str, Any]:
    """The user's `deepspeed:` block, read from its JSON file where it is a path.

    Raises:
        ConfigError: the file is missing or not a JSON mapping.
    """
    if not isinstance(config.deepspeed, str):
        return json_copy(config.deepspeed)
    path = Path(config.deepspeed)
    try:
        block = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problem = Problem("deepspeed", config.deepspeed, "no such file", "check the path")
        raise ConfigError(problem) from None
    except (OSError, ValueError) as error:
        rule = f"is not JSON ({' '.join(str(error).split())})"
        raise ConfigError(Problem("deepspeed", config.deepspeed, rule, "mend it")) from None
    if not isinstance(block, dict):
        raise ConfigError(Problem("deepspeed", config.deepspeed, "is not a mapping", "mend it"))
    return block


DEFAULT_STAGE = 1
"""DeepSpeed's own default, 0, has no fp32 master weights in bf16."""


def zero_stage(block: dict[str, Any]) -> int:
    """The ZeRO stage that a valid block asks for; 1 where it does not say."""
    return int(block.get("zero_optimization", {}).get("stage", DEFAULT_STAGE))


def block_problems(block: dict[str, Any]) -> Iterator[Problem]:
    """Every rule that the `deepspeed:` block breaks by itself."""
    for key in block:
        name = f"deepspeed.{key}"
        if key in MANAGED_KEYS:
            yield Problem(name, None, "is set once, in our sections", f"use {MANAGED_KEYS[key]}")
        elif key in REMOVED:
            yield Problem(name, None, "was removed from DeepSpeed", "take it out")
        elif key not in PASSTHROUGH_KEYS:
            near = nearest(key, [*PASSTHROUGH_KEYS, *MANAGED_KEYS])
            fix = f"did you mean deepspeed.{near}?" if near else "take it out"
            yield Problem(name, None, "is no key of DeepSpeed, which would ignore it", fix)
    for key, kinds in SCALARS.items():
        if key in block and type(block[key]) not in kinds:
            rule = f"is not {' or '.join(kind.__name__ for kind in kinds)}"
            yield Problem(f"deepspeed.{key}", block[key], rule, "see DeepSpeed's docs")
    for key, names in SECTION_KEYS.items():
        section = block.get(key, {})
        if not isinstance(section, dict):
            yield Problem(f"deepspeed.{key}", section, "is not a mapping", "write key: value")
            continue
        for name in section.keys() - set(names):
            near = nearest(str(name), names)
            fix = f"did you mean {near}?" if near else f"keys here: {', '.join(names)}"
            yield Problem(f"deepspeed.{key}.{name}", None, "unknown key", fix)
    for key in ("bf16", "fp16"):
        section = block.get(key, {})
        if isinstance(section, dict) and "enabled" in section:
            yield Problem(
                f"deepspeed.{key}.enabled",
                section["enabled"],
                "is set once, in our sections",
                "use train.precision",
            )
    yield from _section_problems(block)


def _section_problems(block: dict[str, Any]) -> Iterator[Problem]:
    # Imported here: DeepSpeed takes seconds to import, and only training needs it.
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
    }
    for key, model in models.items():
        if key not in block:
            continue
        section = block[key]
        if not isinstance(section, dict):
            yield Problem(f"deepspeed.{key}", section, "is not a mapping", "write key: value")
            continue
        names = [*model.model_fields, *(f.alias for f in model.model_fields.values() if f.alias)]
        # As it will be read: some rules hold only for a section that is in force.
        filled = {"stage": DEFAULT_STAGE} if key == "zero_optimization" else {"enabled": True}
        try:
            model(**filled | section)
        except ValidationError as error:
            for item in error.errors():
                path = ".".join(str(part) for part in (key, *item["loc"]))
                value = item["input"] if item["loc"] else None
                near = nearest(str(item["loc"][-1]), names) if item["loc"] else None
                unknown = item["type"] == "extra_forbidden"
                rule = "unknown key" if unknown else item["msg"]
                fix = f"did you mean {near}?" if unknown and near else "see DeepSpeed's docs"
                yield Problem(f"deepspeed.{path}", value, rule, fix)
    for path, (plain, rule) in REQUIRED_VALUES.items():
        value = _at(block, path)
        if value not in (None, plain):
            yield Problem(f"deepspeed.{path}", value, rule, "leave it out")
    zero = block.get("zero_optimization")
    if isinstance(zero, dict):
        yield from _zero_problems(zero)


def _zero_problems(zero: dict[str, Any]) -> Iterator[Problem]:
    if isinstance(zero.get("stage"), bool):
        yield Problem("deepspeed.zero_optimization.stage", zero["stage"], "is not a number",
                      "give 0 to 3")  # fmt: skip
    for name in ("offload_optimizer", "offload_param"):
        if _at(zero, f"{name}.device") == "nvme":
            yield Problem(f"deepspeed.zero_optimization.{name}.device", "nvme", _NOT_SAVED,
                          "use cpu")  # fmt: skip


def _at(block: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    for name in path.split("."):
        block = block.get(name) if isinstance(block, dict) else None
    return block


def stage_problems(config: Config, block: dict[str, Any]) -> Iterator[Problem]:
    """Whether a valid block goes with the precision, the pipeline and its own ZeRO stage."""
    stage, precision = zero_stage(block), config.train.precision
    if config.parallel.pp > 1 and stage > 1:
        yield Problem(
            "deepspeed.zero_optimization.stage",
            stage,
            f"splits gradients, which a pipeline (parallel.pp = {config.parallel.pp}) sums up "
            "over micro-batches",
            "use stage 0 or 1, or parallel.pp=1",
        )
    if stage == 0 and precision != "fp32":
        yield Problem(
            "deepspeed.zero_optimization.stage",
            0,
            f"keeps no fp32 gradients beside {precision} weights",
            "use stage 1 or higher, or train.precision=fp32",
        )
    if config.parallel.pp > 1:
        for key in ("wall_clock_breakdown", "flops_profiler.enabled"):
            if _at(block, key):
                rule = "fails in DeepSpeed's pipeline, whose timers start twice"
                yield Problem(f"deepspeed.{key}", True, rule, "leave it out, or parallel.pp=1")
    if stage == 3:
        if config.train.compile:
            rule = "leaves nothing to fuse with ZeRO stage 3, which stops at every layer"
            yield Problem("train.compile", True, rule, "leave it out, or use stage 1 or 2")
        for key, plain in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
            if block.get(key, plain) != plain:
                rule = "does not go with ZeRO stage 3"
                yield Problem(f"deepspeed.{key}", block[key], rule, "leave it out")


def batch_problems(config: Config, num_data_ranks: int) -> Iterator[Problem]:
    """Whether micro-batch, accumulation and ranks multiply to the global batch size."""
    train = config.train
    run_on_all_ranks = train.micro_batch_size * num_data_ranks
    accumulation = train.gradient_accumulation_steps
    if run_on_all_ranks < 1:
        return  # the section's own rules say so
    if accumulation is None:
        if train.global_batch_size % run_on_all_ranks:
            yield Problem(
                "train.global_batch_size",
                train.global_batch_size,
                f"is no multiple of train.micro_batch_size = {train.micro_batch_size} "
                f"x {num_data_ranks} data-parallel ranks",
                f"use for example {_round_up(train.global_batch_size, run_on_all_ranks)}",
            )
    elif run_on_all_ranks * accumulation != train.global_batch_size:
        yield Problem(
            "train.global_batch_size",
            train.global_batch_size,
            f"is not train.micro_batch_size = {train.micro_batch_size} x "
            f"train.gradient_accumulation_steps = {accumulation} x {num_data_ranks} "
            f"data-parallel ranks = {run_on_all_ranks * accumulation}",
            "change one of them, or leave the accumulation out",
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def accumulation_steps(config: Config, num_data_ranks: int) -> int:
    """Micro-batches of a step on each rank; the batch triple must have been checked."""
    return config.train.global_batch_size // (config.train.micro_batch_size * num_data_ranks)


def deepspeed_config(config: Config, block: dict[str, Any], num_data_ranks: int) -> dict[str, Any]:
    """The complete dict for `deepspeed.initialize`; everything must have been checked."""
    train = config.train
    adamw: dict[str, Any] = {
        "lr": train.learning_rate,
        "betas": [train.beta1, train.beta2],
        "eps": train.adam_epsilon,
        "weight_decay": train.weight_decay,
    }
    zero = block.get("zero_optimization", {})
    if (_at(zero, "offload_optimizer.device") or "none") == "none":
        # torch's own fused AdamW: DeepSpeed's would compile an extension at the first start.
        adamw |= {"torch_adam": True, "fused": True}
    result = block | {
        "train_batch_size": train.global_batch_size,
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps(config, num_data_ranks),
        # Without ZeRO the engine clips: see its `_clip_gradients`.
        "gradient_clipping": train.gradient_clipping if zero_stage(block) else 0.0,
        "optimizer": {"type": "AdamW", "params": adamw},
        "steps_per_print": 2**31,  # our own log line takes its place
        # Gradients are summed over micro-batches and over ranks in fp32.
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": zero | {"stage": zero_stage(block)},
    }
    if train.precision != "fp32":
        result[train.precision] = block.get(train.precision, {}) | {"enabled": True}
    return result
