"""The DeepSpeed config of a run: our sections turned into its names, the user's block checked."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from alibi_lm.config import Config
from alibi_lm.config_loading import flatten
from alibi_lm.utils.errors import ConfigError, Problem
from alibi_lm.utils.settings import UnknownSetting, applicable, nearest

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

# DeepSpeed reads the keys it knows and silently ignores the rest, so we refuse the rest.
NUMBER = (int, float)
SCALARS: dict[str, tuple[type, ...]] = {
    "zero_allow_untested_optimizer": (bool,),
    "zero_force_ds_cpu_optimizer": (bool,),
    "prescale_gradients": (bool,),
    "gradient_predivide_factor": NUMBER,
    "disable_allgather": (bool,),
    "disable_python_gc": (bool,),
    "dump_state": (bool,),
    "wall_clock_breakdown": (bool,),
    "memory_breakdown": (bool,),
    "log_level": (str,),
}
SECTION_KEYS: dict[str, dict[str, tuple[type, ...]]] = {
    "comms_logger": dict.fromkeys(("enabled", "prof_all", "verbose", "debug"), (bool,))
    | {"prof_ops": (list,)},
    "csv_monitor": {"enabled": (bool,), "output_path": (str,), "job_name": (str,)},
    "flops_profiler": dict.fromkeys(("enabled", "detailed"), (bool,))
    | dict.fromkeys(("profile_step", "module_depth", "top_modules"), (int,))
    | {"recompute_fwd_factor": NUMBER, "output_file": (str, type(None))},
    "aio": dict.fromkeys(("block_size", "queue_depth", "intra_op_parallelism"), (int,))
    | dict.fromkeys(("single_submit", "overlap_events", "use_gds"), (bool,)),
}
# Keys that would break a guarantee of ours: the value they must keep, and what they would break.
_EXACT = "has not been shown to resume exactly"
_ROUNDED = "rounds what the ranks send each other, so that the losses are others"
_HALF_RULE = "keeps in 16 bits what is kept and saved in fp32"
_NOT_SAVED = "keeps states where no checkpoint finds them"
REQUIRED_VALUES: dict[str, tuple[Any, str]] = {
    "zero_optimization.round_robin_gradients": (False, _EXACT),
    "zero_optimization.zero_hpz_partition_size": (1, _EXACT),
    "zero_optimization.zenflow": (None, "delays updates, which changes the losses"),
    "zero_optimization.zero_quantized_weights": (False, _ROUNDED),
    "zero_optimization.zero_quantized_gradients": (False, _ROUNDED),
    "zero_optimization.zero_quantized_nontrainable_weights": (False, _ROUNDED),
    "zero_optimization.compute_grad_norm": (True, "takes away the gradient norm, which is logged"),
    "zero_optimization.legacy_stage1": (False, "is no longer a part of DeepSpeed"),
    "zero_optimization.stage3_module_granularity_threshold": (0, "fails in the backward pass"),
    "zero_optimization.module_granularity_threshold": (0, "fails in the backward pass"),
    "zero_optimization.offload_optimizer.super_offload": (False, _NOT_SAVED),
    "bf16.bf16_master_weights_and_grads": (False, _HALF_RULE),
    "bf16.bf16_optimizer_states": (False, _HALF_RULE),
    "fp16.fp16_master_weights_and_grads": (False, _HALF_RULE),
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
        ConfigError: the file is missing, is not a JSON mapping, or gives a key twice.
    """
    if not isinstance(config.deepspeed, str):
        return copy.deepcopy(config.deepspeed)
    path = Path(config.deepspeed)
    try:
        block = json.loads(
            path.read_text(encoding="utf-8"),
            object_pairs_hook=_mapping,
            parse_constant=_refuse_constant,
        )
        if not isinstance(block, dict):
            raise ValueError("is not a mapping")
    except FileNotFoundError:
        problem = Problem("deepspeed", config.deepspeed, "no such file", "check the path")
        raise ConfigError(problem) from None
    except (OSError, ValueError, RecursionError) as error:
        rule = " ".join(str(error).split())
        if isinstance(error, json.JSONDecodeError | OSError | UnicodeDecodeError):
            rule = f"is not JSON ({rule})"
        raise ConfigError(Problem("deepspeed", config.deepspeed, rule, "correct it")) from None
    return block


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"gives the key {twice!r} twice")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"holds {name}, which is not JSON")


DEFAULT_STAGE = 1
"""DeepSpeed's own default, 0, has no fp32 master weights in bf16."""


def zero_stage(block: dict[str, Any]) -> int:
    """The ZeRO stage that a valid block asks for; 1 where it does not say."""
    return int(block.get("zero_optimization", {}).get("stage", DEFAULT_STAGE))


def zero_config(block: dict[str, Any]) -> Any:
    """DeepSpeed's `DeepSpeedZeroConfig` of a valid block, its defaults filled in."""
    # Imported here: it takes seconds.
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    given = dict(block.get("zero_optimization", {}))
    return DeepSpeedZeroConfig(**given | {"stage": zero_stage(block)})


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
    for key in ("bf16", "fp16"):
        if (enabled := _at(block, f"{key}.enabled")) is not None:
            rule = "is set once, in our sections"
            yield Problem(f"deepspeed.{key}.enabled", enabled, rule, "use train.precision")
    passed_on = {key: value for key, value in block.items() if key in PASSTHROUGH_KEYS}
    auto = [name for name, value in flatten(passed_on, "deepspeed").items() if value == "auto"]
    for name in auto:
        if not name.endswith(".enabled"):
            rule = "is a placeholder of Hugging Face's Trainer, which DeepSpeed drops"
            yield Problem(name, "auto", rule, "give a value, or leave it out for the default")
    yield from _type_problems("deepspeed", block, SCALARS)
    for key, types in SECTION_KEYS.items():
        if isinstance(section := block.get(key, {}), dict):
            for name in section.keys() - types.keys():
                yield _unknown_key(f"deepspeed.{key}", str(name), types)
            yield from _type_problems(f"deepspeed.{key}", section, types)
    for key in (*SECTION_KEYS, *_MODELS):
        if not isinstance(block.get(key, {}), dict):
            yield Problem(f"deepspeed.{key}", block[key], "is not a mapping", "write key: value")
    if not auto:
        yield from _section_problems(block)


def _type_problems(
    prefix: str, values: dict[str, Any], types: dict[str, tuple[type, ...]]
) -> Iterator[Problem]:
    for key, kinds in types.items():
        if key in values and type(values[key]) not in kinds and values[key] != "auto":
            rule = f"is not {' or '.join(kind.__name__ for kind in kinds)}"
            yield Problem(f"{prefix}.{key}", values[key], rule, "see DeepSpeed's docs")


def _unknown_key(prefix: str, name: str, names: Iterable[str]) -> Problem:
    near = nearest(name, names)
    fix = f"did you mean {near}?" if near else f"keys here: {', '.join(names)}"
    return Problem(f"{prefix}.{name}", None, "unknown key", fix)


_MODELS = {
    "zero_optimization": ("zero.config", "DeepSpeedZeroConfig"),
    "bf16": ("precision_config", "DeepSpeedBF16Config"),
    "fp16": ("precision_config", "DeepSpeedFP16Config"),
}
"""DeepSpeed's pydantic models of the sections that have one."""


def _section_problems(block: dict[str, Any]) -> Iterator[Problem]:
    for key, (module, name) in _MODELS.items():
        section = block.get(key)
        if not isinstance(section, dict):
            continue
        # Imported here: DeepSpeed takes seconds to import, and only training needs it.
        model = getattr(import_module(f"deepspeed.runtime.{module}"), name)
        # As it will be read: some rules hold only for a section that is in force.
        filled = {"stage": DEFAULT_STAGE} if key == "zero_optimization" else {"enabled": True}
        try:
            parsed = model(**filled | section)
        except ValidationError as error:
            fields = model.model_fields
            names = [*fields, *(field.alias for field in fields.values() if field.alias)]
            for item in error.errors():
                path = ".".join(str(part) for part in ("deepspeed", key, *item["loc"]))
                if item["type"] == "extra_forbidden":
                    yield _unknown_key(path.rpartition(".")[0], str(item["loc"][-1]), names)
                    continue
                rule = item["msg"]
                if item["type"] == "enum":  # an alias of a member repeats its value
                    choices = re.split(r", | or ", item["ctx"]["expected"])
                    rule = f"is not one of {', '.join(dict.fromkeys(choices))}"
                value = item["input"] if item["loc"] else None
                yield Problem(path, value, rule, "see DeepSpeed's docs")
        else:
            yield from _converted(section, parsed, f"deepspeed.{key}")
    for path, (plain, rule) in REQUIRED_VALUES.items():
        value = _at(block, path)
        if value not in (None, plain):
            yield Problem(f"deepspeed.{path}", value, rule, "leave it out")
    for name in ("offload_optimizer", "offload_param"):
        path = f"zero_optimization.{name}.device"
        if _at(block, path) == "nvme":
            yield Problem(f"deepspeed.{path}", "nvme", _NOT_SAVED, "use cpu")


def _converted(section: dict[str, Any], parsed: BaseModel, path: str) -> Iterator[Problem]:
    """Values that DeepSpeed reads as other ones, such as "1" as 1 or true as 1."""
    fields = type(parsed).model_fields
    names = {field.alias: name for name, field in fields.items()}
    for key, given in section.items():
        name = names.get(key, key)
        extra = fields[name].json_schema_extra
        if isinstance(extra, dict) and extra.get("deprecated"):
            fix = f"use {extra['new_param']}" if "new_param" in extra else "take it out"
            yield Problem(f"{path}.{key}", given, "is deprecated in DeepSpeed", fix)
            continue
        value = getattr(parsed, name)
        if isinstance(value, BaseModel) and isinstance(given, dict):
            yield from _converted(given, value, f"{path}.{key}")
        elif given is None or isinstance(value, Path):
            continue
        elif value != given or isinstance(value, bool) != isinstance(given, bool):
            rule = f"is read by DeepSpeed as {json.dumps(value, default=str)}"
            shown = json.dumps(given, default=str)
            yield Problem(f"{path}.{key}", shown, rule, "write that, or leave it out")


def _at(block: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    for name in path.split("."):
        block = block.get(name) if isinstance(block, dict) else None
    return block


def stage_problems(config: Config, block: dict[str, Any]) -> Iterator[Problem]:
    """Whether a valid block goes with the precision, the pipeline and its own ZeRO stage."""
    yield from applicable(_pipeline_problems(config, block))
    yield from applicable(_precision_problems(config, block))
    yield from applicable(_stage_3_problems(config, block))


_STAGE = "deepspeed.zero_optimization.stage"


def _pipeline_problems(config: Config, block: dict[str, Any]) -> Iterator[Problem]:
    if config.parallel.pp == 1:
        return
    if (stage := zero_stage(block)) > 1:
        rule = (
            f"splits gradients, which a pipeline (parallel.pp = {config.parallel.pp}) sums over "
            "micro-batches"
        )
        yield Problem(_STAGE, stage, rule, "use stage 0 or 1, or parallel.pp=1")
    for key in ("wall_clock_breakdown", "flops_profiler.enabled"):
        if _at(block, key):
            rule = "fails in DeepSpeed's pipeline, whose timers start twice"
            yield Problem(f"deepspeed.{key}", True, rule, "leave it out, or parallel.pp=1")


def _precision_problems(config: Config, block: dict[str, Any]) -> Iterator[Problem]:
    if zero_stage(block) == 0 and config.train.precision != "fp32":
        rule = f"keeps no fp32 gradients beside {config.train.precision} weights"
        yield Problem(_STAGE, 0, rule, "use stage 1 or higher, or train.precision=fp32")


def _stage_3_problems(config: Config, block: dict[str, Any]) -> Iterator[Problem]:
    if zero_stage(block) != 3:
        return
    for key, plain in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        if block.get(key, plain) != plain:
            rule = "does not go with ZeRO stage 3"
            yield Problem(f"deepspeed.{key}", block[key], rule, "leave it out")
    if config.train.compile:
        rule = "gains nothing under ZeRO stage 3, which breaks the graph at every layer"
        yield Problem("train.compile", True, rule, "leave it out, or use stage 1 or 2")


def batch_problems(config: Config, num_ranks: int) -> Iterator[Problem]:
    """Whether micro-batch, accumulation and ranks multiply to the global batch size."""
    train = config.train
    micro, accumulation = train.micro_batch_size, train.gradient_accumulation_steps
    factors = f"train.micro_batch_size = {micro}"
    if accumulation is not None:
        factors += f" x train.gradient_accumulation_steps = {accumulation}"
    data_ranks = _data_ranks(config, num_ranks)
    if data_ranks is not None:
        factors += f" x {data_ranks} data-parallel ranks"
    product = micro * (accumulation or 1) * (data_ranks or 1)
    if accumulation and data_ranks and train.global_batch_size != product:
        rule = f"is not {factors} = {product}"
        fix = "change one of them, or leave the accumulation out"
        yield Problem("train.global_batch_size", train.global_batch_size, rule, fix)
    elif train.global_batch_size % product:
        rule = f"is no multiple of {factors}"
        fix = f"use for example {_round_up(train.global_batch_size, product)}"
        yield Problem("train.global_batch_size", train.global_batch_size, rule, fix)


def _data_ranks(config: Config, num_ranks: int) -> int | None:
    """Data-parallel ranks; None where the layout itself is wrong."""
    try:
        data_ranks, rest = divmod(num_ranks, config.parallel.tp * config.parallel.pp)
    except UnknownSetting:
        return None
    return None if rest else data_ranks


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
