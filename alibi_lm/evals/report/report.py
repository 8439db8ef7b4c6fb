"""One self-contained HTML page about a checkpoint, and its summary for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from alibi_lm.config_loading import flatten
from alibi_lm.evals import results
from alibi_lm.evals.generalization import result
from alibi_lm.evals.models.base import EvalModel, NativeModel
from alibi_lm.evals.report import html_pages, plots
from alibi_lm.evals.report.tables import (
    attention_span_lines,
    needle_lines,
    perplexity_lines,
    retrieval_lines,
)
from alibi_lm.evals.report.tensorboard import write_scalars
from alibi_lm.evals.report.training_metrics import Metrics, read_metrics
from alibi_lm.evals.retrieval import plots as retrieval_plots
from alibi_lm.evals.retrieval.table import effective_words
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.layers import Block
from alibi_lm.model.position_scaling import head_slopes
from alibi_lm.utils.files import stored_object, write_text

if TYPE_CHECKING:
    from alibi_lm.checkpoint.step import Step

REPORT = "report.html"
EXPORT_FACTS = "alibi_lm_export.json"
FADED = 1000.0
"""A head's attention_span is where its bias alone divides a key's weight by this."""

PROTOCOLS = (
    "sliding",
    "fixed_target",
    "truncated_context",
    "by_position",
    "by_distance",
    "num_distractors",
)
"""Parts of a result that are not in every one."""
TONES = {
    "yes": "good",
    "no": "open",
    "falls": "good",
    "holds": "good",
    "rises": "bad",
    "fails beyond": "bad",
    "does not retrieve": "open",
    "fades": "open",
    "cannot tell": "open",
    "bounded": "good",
    "not bounded": "open",
    "generalizes": "good",
    "stops": "bad",
    "partly": "open",
    "not learned": "open",
}


def write_report(eval_model: EvalModel) -> Path:
    """Write the report of what has been measured so far, and its pictures; return its path.

    The same numbers go into the evals folder as TensorBoard scalars.

    A part that has not been made names the command that makes it.

    Raises:
        CheckpointError: the run's log is damaged.
    """
    metrics = None
    if isinstance(eval_model, NativeModel):
        metrics = read_metrics(eval_model.checkpoint.run_folder, eval_model.step)
    perplexity = results.stored(eval_model, "perplexity")
    needle = results.stored(eval_model, "needle")
    retrieval = results.stored(eval_model, "retrieval")
    attention_span = results.stored(eval_model, "attention_span")
    pictures: dict[str, str] = {}
    if metrics is not None:
        pictures["loss"] = _picture(eval_model, "loss", plots.loss_figure(metrics))
    if perplexity is not None:
        pictures["perplexity"] = _picture(
            eval_model, "perplexity", plots.perplexity_figure(perplexity)
        )
    if needle is not None:
        pictures["needle"] = _picture(eval_model, "needle", plots.needle_figure(needle))
        if needle.get("by_distance"):
            figure = retrieval_plots.needle_distance_figure(needle)
            pictures["needle_distance"] = _picture(eval_model, "needle_distance", figure)
    if retrieval is not None:
        for name, figure in retrieval_plots.figures(retrieval).items():
            pictures[name] = _picture(eval_model, name, figure)
    problems = results.stored(eval_model, "generalization")
    if problems is not None:
        figure = result.figure(problems)
        pictures["generalization"] = _picture(eval_model, "generalization", figure)
    if attention_span is not None:
        pictures["attention_span"] = _picture(
            eval_model, "attention_span", plots.attention_span_figure(attention_span)
        )
    long_inputs = results.stored(eval_model, "bench_long")
    if long_inputs is not None and long_inputs.get("curve"):
        figure = plots.curve_figure(long_inputs)
        pictures["long_inputs"] = _picture(eval_model, "long_inputs", figure)
    page = html_pages.render(
        "alibi_lm.evals.report",
        REPORT,
        title=f"Report on {eval_model.title}",
        subtitle=eval_model.subtitle,
        trained_here=isinstance(eval_model, NativeModel),
        facts=facts(eval_model, metrics),
        pictures=pictures,
        perplexity=_with_tone(perplexity),
        needle=_with_tone(needle),
        retrieval=_with_tone(retrieval),
        effective=effective_words(retrieval["table"]) if retrieval and retrieval["table"] else "",
        attention_span=_with_tone(attention_span),
        problems=_with_tone(problems),
        long_inputs=long_inputs if "long_inputs" in pictures else None,
        slopes=slope_rows(eval_model),
        export=export_rows(eval_model),
        meaning=meaning(eval_model, perplexity, needle, retrieval),
        versions=_versions(eval_model),
        commands=commands(eval_model),
    )
    path = eval_model.evals_folder / REPORT
    write_text(path, page)
    write_scalars(eval_model)
    return path


def _picture(eval_model: EvalModel, name: str, figure: plots.Figure) -> str:
    """Write a figure beside the report and return it as base64."""
    return html_pages.picture(figure, eval_model.evals_folder / f"{name}.png")


def _with_tone(result: dict[str, Any] | None) -> dict[str, Any] | None:
    if result is None:
        return None
    verdict = {**result["verdict"], "tone": TONES[result["verdict"]["word"]]}
    toned = {**dict.fromkeys(PROTOCOLS), **result, "verdict": verdict}
    if result.get("truncated_context"):
        toned["truncated_context"] = _with_tone(result["truncated_context"])
    return toned


def commands(eval_model: EvalModel) -> dict[str, str]:
    """The command that makes each part."""
    name = eval_model.argument
    return {
        "perplexity": f"alibi-lm eval perplexity {name}",
        "needle": f"alibi-lm eval needle {name}",
        "retrieval": f"alibi-lm eval retrieval {name}",
        "attention_span": f"alibi-lm eval attention-span {name}",
        "export": f"alibi-lm export {name}",
        "report": f"alibi-lm report {name}",
    }


def facts(eval_model: EvalModel, metrics: Metrics | None) -> list[tuple[str, str]]:
    """What is judged and how it was trained, as (label, value)."""
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


def run_facts(step: Step, metrics: Metrics | None) -> list[tuple[str, str]]:
    """What was trained and how, as (label, value)."""
    model, train, data = step.config.model, step.config.train, step.config.data
    window = f", window {model.window:,}" if model.window else ""
    rows = [
        ("Run folder", str(step.run_folder)),
        ("Step", f"{step.step:,} of {train.num_steps:,}"),
        ("Tokens", f"{step.meta['tokens']:,}"),
        ("Parameters", f"{NativeModel(step).num_parameters:,}"),
        ("Model", _shape(model)),
        ("Architecture and positions", f"{model.architecture}, {model.position}{window}"),
        ("Training length", f"{train.sequence_length:,} tokens"),
        ("Batch", f"{train.global_batch_size:,} samples a step"),
        ("Precision", train.precision),
        ("Learning rate", f"{train.learning_rate:g}, {train.schedule}"),
        ("Corpora", ", ".join(f"{c.prefix} (weight {c.weight:g})" for c in data.corpora)),
    ]
    if step.meta.get("layout"):
        layout = flatten(step.meta["layout"])
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
    """Slope and attention_span of each head, for models with linear biases; else none.

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
            "attention_span": math.log(FADED) / slope,
            "multiple": math.log(FADED) / slope / eval_model.training_length,
        }
        for name, slope in slopes.items()
    ]


def export_facts(eval_model: EvalModel) -> dict[str, Any] | None:
    """What the export to the default folder proved, or None where this step has none there."""
    if not isinstance(eval_model, NativeModel):
        return None
    step = eval_model.checkpoint
    found = stored_object(step.hf_folder / EXPORT_FACTS)
    if found is None or found["checkpoint"].get("weights") != step.weights_digest():
        return None
    return {**found, "folder": str(step.hf_folder)}


def export_rows(eval_model: EvalModel) -> list[tuple[str, str]]:
    """The export's facts as (label, value)."""
    found = export_facts(eval_model)
    if found is None:
        return []
    proof, settings = found["parity"], found["settings"]
    rows = [
        ("Folder", found["folder"]),
        ("Format", f"{settings['format']}, {settings['precision']}"),
        ("Compared on", proof["tokens"]),
    ]
    rows += [
        (f"Largest logit difference, {row['length']:,} tokens",
         f"{row['max_difference']:.1e} (at most {proof['tolerance']:.0e} allowed)")
        for row in proof["logits"]
    ]  # fmt: skip
    rows.append(("Greedy tokens equal", str(proof["greedy_tokens_equal"])))
    if proof.get("tokenizer"):
        same = proof["tokenizer"]
        rows.append(("Tokenizer", f"{same['class']}: the same ids for {same['tokens_equal']:,} "
                     f"tokens of {same['documents_equal']:,} documents"))  # fmt: skip
    return rows


def _versions(eval_model: EvalModel) -> list[tuple[str, str]]:
    rows = []
    if isinstance(eval_model, NativeModel):
        trained = eval_model.checkpoint.meta["versions"].items()
        rows += [(f"{name} (training)", str(value)) for name, value in trained]
    rows += [
        (f"{name} (this report)", value)
        for name, value in results.run_facts(eval_model)["versions"].items()
    ]
    return rows


def meaning(
    eval_model: EvalModel,
    perplexity: Mapping[str, Any] | None,
    needle: Mapping[str, Any] | None,
    retrieval: Mapping[str, Any] | None,
) -> list[str]:
    """What the results show and what they do not, a sentence or two each."""
    lines = []
    if perplexity is not None:
        lines.append(f"{perplexity['verdict']['text']} {perplexity['verdict']['caveat']}")
        if null := perplexity.get("truncated_context"):
            lines.append(f"{null['verdict']['text']} {null['verdict']['caveat']}")
    else:
        lines.append("Perplexity past the training length has not been measured.")
    if needle is not None:
        lines.append(f"{needle['verdict']['text']} {needle['verdict']['caveat']}")
    if retrieval is not None:
        lines.append(f"{retrieval['verdict']['text']} {retrieval['verdict']['caveat']}")
    if needle is None and retrieval is None:
        lines.append("Retrieval has not been measured.")
    for name in ("generalization", "attention_span"):
        if found := results.stored(eval_model, name):
            lines.append(f"{found['verdict']['text']} {found['verdict']['caveat']}")
    lines.append(
        f"All numbers are of one model of {eval_model.num_parameters:,} parameters, one seed and "
        "the corpora named above. Larger models, other text or other seeds can behave differently; "
        "intervals cover the choice of documents and prompts, not the choice of seed."
    )
    return lines


def summary_lines(eval_model: EvalModel) -> list[str]:
    """The report in a few terminal lines; parts not made yet name their command."""
    perplexity, needle = (
        results.stored(eval_model, "perplexity"),
        results.stored(eval_model, "needle"),
    )
    which = "" if eval_model.step is None else f", step {eval_model.step:,}"
    lines = [f"{eval_model.argument}{which}: {eval_model.num_parameters:,} parameters, "
             f"training length {eval_model.training_length:,}", ""]  # fmt: skip
    lines += perplexity_lines(perplexity) if perplexity else [
        f"perplexity: not measured yet: {commands(eval_model)['perplexity']}"
    ]  # fmt: skip
    lines.append("")
    lines += needle_lines(needle) if needle else [
        f"needle: not measured yet: {commands(eval_model)['needle']}"
    ]  # fmt: skip
    lines.append("")
    retrieval = results.stored(eval_model, "retrieval")
    lines += retrieval_lines(retrieval) if retrieval else [
        f"retrieval: not measured yet: {commands(eval_model)['retrieval']}"
    ]  # fmt: skip
    lines.append("")
    if eval_model.model_config is not None and eval_model.model_config.position == "alibi":
        attention_span = results.stored(eval_model, "attention_span")
        lines += attention_span_lines(attention_span) if attention_span else [
            f"attention_span: not measured yet: {commands(eval_model)['attention_span']}"
        ]  # fmt: skip
        lines.append("")
    if isinstance(eval_model, NativeModel):
        lines += _export_lines(eval_model)
    problems = results.stored(eval_model, "generalization")
    if problems is not None:
        lines += ["", *result.lines(problems)]
    lines += ["", "What this does and does not show:"]
    lines += [f"  - {line}" for line in meaning(eval_model, perplexity, needle, retrieval)]
    report = eval_model.evals_folder / REPORT
    lines.append("")
    lines.append(f"report: {report}" if report.is_file() else
                 f"report: not written yet: {commands(eval_model)['report']}")  # fmt: skip
    return lines


def _export_lines(eval_model: EvalModel) -> list[str]:
    found = export_facts(eval_model)
    if found is None:
        return [f"export: not made yet: {commands(eval_model)['export']}"]
    differences = ", ".join(
        f"{row['max_difference']:.1e} at {row['length']:,} tokens"
        for row in found["parity"]["logits"]
    )
    return [
        f"export: {found['folder']}",
        f"  largest logit difference to transformers {differences}; "
        f"{found['parity']['greedy_tokens_equal']} greedy tokens equal",
    ]
