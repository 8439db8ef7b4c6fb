"""One self-contained HTML page about a checkpoint, and its summary for the terminal."""

from __future__ import annotations

import math
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from alibi_lm.config_loading import flatten
from alibi_lm.evals.models.base import EvalModel, NativeModel
from alibi_lm.evals.report import html_pages, plots, sections
from alibi_lm.evals.report.tensorboard import write_scalars
from alibi_lm.evals.report.training_metrics import Metrics, read_metrics
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.layers import Block
from alibi_lm.model.position_scaling import head_slopes
from alibi_lm.utils.files import stored_object, write_text

if TYPE_CHECKING:
    from alibi_lm.checkpoint.step import Checkpoint

REPORT = "report.html"
EXPORT_FACTS = "alibi_lm_export.json"
FADED = 1000.0
"""The distance is listed at which a head's bias alone divides a key's weight by this."""

LONG_INPUTS = "bench_long.json"
"""Result of `alibi-lm bench long`."""


def write_report(eval_model: EvalModel) -> Path:
    """Write the report of what has been measured so far; return its path.

    What has not been measured is listed with its command. The same numbers go into the evals folder
    as TensorBoard scalars.

    Raises:
        CheckpointError: the run's log is damaged.
    """
    found = sections.measured(eval_model)
    metrics = None
    folder = eval_model.evals_folder
    pictures: dict[str, str] = {}
    if isinstance(eval_model, NativeModel):
        metrics = read_metrics(eval_model.checkpoint.run_folder, eval_model.step)
    if metrics is not None:
        pictures["loss"] = html_pages.picture(plots.loss_figure(metrics), folder / "loss.png")
    long_inputs = stored_object(folder / LONG_INPUTS)
    if long_inputs is not None and long_inputs["inputs"].get("step") != eval_model.digest:
        long_inputs = None
    if long_inputs is not None and long_inputs.get("curve"):
        figure = plots.curve_figure(long_inputs["curve"], long_inputs["training_length"])
        pictures["long_inputs"] = html_pages.picture(figure, folder / "long_inputs.png")
    page = html_pages.render(
        "alibi_lm.evals.report",
        REPORT,
        title=f"Report on {eval_model.title}",
        subtitle=eval_model.subtitle,
        trained_here=isinstance(eval_model, NativeModel),
        facts=facts(eval_model, metrics),
        pictures=pictures,
        sections=[sections.section_of(*part, eval_model) for part in found],
        long_inputs=long_inputs if "long_inputs" in pictures else None,
        slopes=slope_rows(eval_model),
        export=export_rows(eval_model),
        export_command=export_command(eval_model),
        meaning=sections.meaning(found, eval_model),
        versions=_versions(eval_model),
    )
    path = folder / REPORT
    write_text(path, page)
    write_scalars(eval_model)
    return path


def export_command(eval_model: EvalModel) -> str:
    """The command that exports a run."""
    return f"alibi-lm export {eval_model.argument}"


def facts(eval_model: EvalModel, metrics: Metrics | None) -> list[tuple[str, str]]:
    """Facts about the model and its training, as (label, value)."""
    if isinstance(eval_model, NativeModel):
        return run_facts(eval_model.checkpoint, metrics)
    rows = [
        ("Model folder", eval_model.argument),
        ("Parameters", f"{eval_model.num_parameters:,}"),
        ("Training length", f"{eval_model.training_length:,} tokens"),
    ]
    if eval_model.model_config is not None:
        rows.append(("Model", _shape(eval_model.model_config)))
    return rows + [(label.capitalize(), str(value)) for label, value in eval_model.settings.items()]


def _shape(model: ModelConfig) -> str:
    heads = f"{model.num_heads} heads"
    if model.kv_heads != model.num_heads:
        heads += f", {model.kv_heads} key/value heads"
    return f"{model.num_layers} layers, width {model.hidden_size:,}, {heads}"


def run_facts(checkpoint: Checkpoint, metrics: Metrics | None) -> list[tuple[str, str]]:
    """What was trained and how, as (label, value)."""
    model, train, data = checkpoint.config.model, checkpoint.config.train, checkpoint.config.data
    window = f", window {model.window:,}" if model.window else ""
    rows = [
        ("Run folder", str(checkpoint.run_folder)),
        ("Step", f"{checkpoint.step:,} of {train.num_steps:,}"),
        ("Tokens", f"{checkpoint.meta['tokens']:,}"),
        ("Parameters", f"{NativeModel(checkpoint).num_parameters:,}"),
        ("Model", _shape(model)),
        ("Architecture and positions", f"{model.architecture}, {model.position}{window}"),
        ("Training length", f"{train.sequence_length:,} tokens"),
        ("Batch", f"{train.global_batch_size:,} samples a step"),
        ("Precision", train.precision),
        ("Learning rate", f"{train.learning_rate:g}, {train.schedule}"),
        ("Corpora", ", ".join(f"{c.prefix} (weight {c.weight:g})" for c in data.corpora)),
    ]
    if checkpoint.meta.get("layout"):
        layout = flatten(checkpoint.meta["layout"])
        words = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in layout.items())
        rows.append(("Ranks", words))
    if metrics is not None:
        last = metrics.points[-1]
        rows.append(("Last loss", f"{last.loss:.3f} at step {last.step:,}"))
        rows.append(("Training time", _duration(metrics.training_seconds)))
        rows.append(("Speed", f"{last.tokens_per_second:,.0f} tokens a second"))
    return rows


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def slope_rows(eval_model: EvalModel) -> list[dict[str, Any]]:
    """Slope and bias fade distance of each head, for models with linear biases; else none.

    Learned slopes differ from layer to layer, and are the weights' own.
    """
    model = eval_model.model_config
    if model is None or model.position not in ("alibi", "alibi_learned"):
        return []
    slopes = {str(head): slope for head, slope in enumerate(head_slopes(model) or ())}
    if model.position == "alibi_learned":
        slopes = {
            f"layer {layer}, head {head}": slope
            for layer, block in enumerate(eval_model.decoder().blocks)
            for head, slope in enumerate(cast(Block, block).attention.current_slopes() or ())
        }
    return [
        {
            "head": name,
            "slope": slope,
            "bias_fade_distance": math.log(FADED) / slope,
            "multiple": math.log(FADED) / slope / eval_model.training_length,
        }
        for name, slope in slopes.items()
    ]


def export_facts(eval_model: EvalModel) -> dict[str, Any] | None:
    """The manifest of the export in the default folder; None if this step has none there."""
    if not isinstance(eval_model, NativeModel):
        return None
    step = eval_model.checkpoint
    manifest = stored_object(step.hf_folder / EXPORT_FACTS)
    if manifest is None or manifest["checkpoint"].get("weights") != step.weights_digest():
        return None
    return {**manifest, "folder": str(step.hf_folder)}


def export_rows(eval_model: EvalModel) -> list[tuple[str, str]]:
    """The export's facts as (label, value)."""
    manifest = export_facts(eval_model)
    if manifest is None:
        return []
    parity, settings = manifest["parity"], manifest["settings"]
    rows = [
        ("Folder", manifest["folder"]),
        ("Format", f"{settings['format']}, {settings['precision']}"),
        ("Compared on", parity["tokens"]),
    ]
    rows += [
        (f"Largest logit difference, {row['length']:,} tokens",
         f"{row['max_difference']:.1e} (at most {parity['tolerance']:.0e} allowed)")
        for row in parity["logits"]
    ]  # fmt: skip
    rows.append(("Greedy tokens equal", str(parity["greedy_tokens_equal"])))
    if parity.get("tokenizer"):
        same = parity["tokenizer"]
        rows.append(("Tokenizer", f"{same['class']}: the same ids for {same['tokens_equal']:,} "
                     f"tokens of {same['documents_equal']:,} documents"))  # fmt: skip
    return rows


def _versions(eval_model: EvalModel) -> list[tuple[str, str]]:
    rows = []
    if isinstance(eval_model, NativeModel):
        trained = eval_model.checkpoint.meta["versions"].items()
        rows += [(f"{name} (training)", str(value)) for name, value in trained]
    rows += [(f"{name} (this report)", version(name)) for name in ("alibi_lm", "torch")]
    return rows


def summary_lines(eval_model: EvalModel) -> list[str]:
    """The report in a few terminal lines; what was not measured yet is listed with its command."""
    found = sections.measured(eval_model)
    which = "" if eval_model.step is None else f", step {eval_model.step:,}"
    lines = [
        f"{eval_model.argument}{which}: {eval_model.num_parameters:,} parameters, "
        f"training length {eval_model.training_length:,}",
        "",
        *sections.summary(found, eval_model),
    ]
    if isinstance(eval_model, NativeModel):
        lines += [*_export_lines(eval_model), ""]
    lines.append("What this does and does not show:")
    lines += [f"  - {line}" for line in sections.meaning(found, eval_model)]
    report = eval_model.evals_folder / REPORT
    written = (
        report if report.is_file() else f"not written yet: alibi-lm report {eval_model.argument}"
    )
    return [*lines, "", f"report: {written}"]


def _export_lines(eval_model: EvalModel) -> list[str]:
    manifest = export_facts(eval_model)
    if manifest is None:
        return [f"export: not made yet: {export_command(eval_model)}"]
    differences = ", ".join(
        f"{row['max_difference']:.1e} at {row['length']:,} tokens"
        for row in manifest["parity"]["logits"]
    )
    return [
        f"export: {manifest['folder']}",
        f"  largest logit difference to transformers {differences}; "
        f"{manifest['parity']['greedy_tokens_equal']} greedy tokens equal",
    ]
