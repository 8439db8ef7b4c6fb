"""One self-contained HTML page about a checkpoint, and its summary for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from alibi_lm.config_loading import flatten
from alibi_lm.evals import results
from alibi_lm.evals.generalization import result
from alibi_lm.evals.models.base import NativeSubject, Subject
from alibi_lm.evals.report import html_pages, plots
from alibi_lm.evals.report.tables import (
    horizon_lines,
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
"""A head's horizon is where its bias alone divides a key's weight by this."""

PROTOCOLS = ("sliding", "fixed_target", "null", "by_position", "by_distance", "num_distractors")
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
    "generalises": "good",
    "stops": "bad",
    "partly": "open",
    "not learned": "open",
}


def write_report(subject: Subject) -> Path:
    """Write the report of what has been measured so far, and its pictures; return its path.

    The same numbers go into the evals folder as TensorBoard scalars.

    A part that has not been made names the command that makes it.

    Raises:
        CheckpointError: the run's log is damaged.
    """
    metrics = None
    if isinstance(subject, NativeSubject):
        metrics = read_metrics(subject.checkpoint.run_folder, subject.step)
    perplexity = results.stored(subject, "perplexity")
    needle = results.stored(subject, "needle")
    retrieval = results.stored(subject, "retrieval")
    horizon = results.stored(subject, "horizon")
    pictures: dict[str, str] = {}
    if metrics is not None:
        pictures["loss"] = _picture(subject, "loss", plots.loss_figure(metrics))
    if perplexity is not None:
        pictures["perplexity"] = _picture(
            subject, "perplexity", plots.perplexity_figure(perplexity)
        )
    if needle is not None:
        pictures["needle"] = _picture(subject, "needle", plots.needle_figure(needle))
        if needle.get("by_distance"):
            figure = retrieval_plots.needle_distance_figure(needle)
            pictures["needle_distance"] = _picture(subject, "needle_distance", figure)
    if retrieval is not None:
        for name, figure in retrieval_plots.figures(retrieval).items():
            pictures[name] = _picture(subject, name, figure)
    problems = results.stored(subject, "generalisation")
    if problems is not None:
        figure = result.figure(problems)
        pictures["generalisation"] = _picture(subject, "generalisation", figure)
    if horizon is not None:
        pictures["horizon"] = _picture(subject, "horizon", plots.horizon_figure(horizon))
    long_inputs = results.stored(subject, "bench_long")
    if long_inputs is not None and long_inputs.get("curve"):
        figure = plots.curve_figure(long_inputs)
        pictures["long_inputs"] = _picture(subject, "long_inputs", figure)
    page = html_pages.render(
        "alibi_lm.evals.report",
        REPORT,
        title=f"Report on {subject.title}",
        subtitle=subject.subtitle,
        trained_here=isinstance(subject, NativeSubject),
        facts=facts(subject, metrics),
        pictures=pictures,
        perplexity=_with_tone(perplexity),
        needle=_with_tone(needle),
        retrieval=_with_tone(retrieval),
        effective=effective_words(retrieval["table"]) if retrieval and retrieval["table"] else "",
        horizon=_with_tone(horizon),
        problems=_with_tone(problems),
        long_inputs=long_inputs if "long_inputs" in pictures else None,
        slopes=slope_rows(subject),
        export=export_rows(subject),
        meaning=meaning(subject, perplexity, needle, retrieval),
        versions=_versions(subject),
        commands=commands(subject),
    )
    path = subject.evals_folder / REPORT
    write_text(path, page)
    write_scalars(subject)
    return path


def _picture(subject: Subject, name: str, figure: plots.Figure) -> str:
    """Write a figure beside the report and return it as base64."""
    return html_pages.picture(figure, subject.evals_folder / f"{name}.png")


def _with_tone(result: dict[str, Any] | None) -> dict[str, Any] | None:
    if result is None:
        return None
    verdict = {**result["verdict"], "tone": TONES[result["verdict"]["word"]]}
    toned = {**dict.fromkeys(PROTOCOLS), **result, "verdict": verdict}
    if result.get("null"):
        toned["null"] = _with_tone(result["null"])
    return toned


def commands(subject: Subject) -> dict[str, str]:
    """The command that makes each part."""
    name = subject.argument
    return {
        "perplexity": f"alibi-lm eval perplexity {name}",
        "needle": f"alibi-lm eval needle {name}",
        "retrieval": f"alibi-lm eval retrieval {name}",
        "horizon": f"alibi-lm eval horizon {name}",
        "export": f"alibi-lm export {name}",
        "report": f"alibi-lm report {name}",
    }


def facts(subject: Subject, metrics: Metrics | None) -> list[tuple[str, str]]:
    """What is judged and how it was trained, as (label, value)."""
    if isinstance(subject, NativeSubject):
        return run_facts(subject.checkpoint, metrics)
    rows = [
        ("Model folder", subject.argument),
        ("Parameters", f"{subject.num_parameters:,}"),
        ("Training length", f"{subject.training_length:,} tokens"),
    ]
    if subject.model is not None:
        rows.append(("Model", _shape(subject.model)))
    return rows + [(label.capitalize(), str(value)) for label, value in subject.settings.items()]


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
        ("Parameters", f"{NativeSubject(step).num_parameters:,}"),
        ("Model", _shape(model)),
        ("Shape and positions", f"{model.shape}, {model.position}{window}"),
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


def slope_rows(subject: Subject) -> list[dict[str, Any]]:
    """Slope and horizon of each head, for models with linear biases; else none.

    Learned slopes differ from layer to layer, and are the weights' own.
    """
    model = subject.model
    if model is None or model.position not in ("alibi", "alibi_learned"):
        return []
    slopes = {str(head): slope for head, slope in enumerate(head_slopes(model) or ())}
    if model.position == "alibi_learned":
        slopes = {
            f"layer {layer}, head {head}": slope
            for layer, block in enumerate(subject.decoder().blocks)
            for head, slope in enumerate(cast(Block, block).attention.current_slopes() or ())
        }
    return [
        {
            "head": name,
            "slope": slope,
            "horizon": math.log(FADED) / slope,
            "multiple": math.log(FADED) / slope / subject.training_length,
        }
        for name, slope in slopes.items()
    ]


def export_facts(subject: Subject) -> dict[str, Any] | None:
    """What the export to the default folder proved, or None where this step has none there."""
    if not isinstance(subject, NativeSubject):
        return None
    step = subject.checkpoint
    found = stored_object(step.hf_folder / EXPORT_FACTS)
    if found is None or found["checkpoint"].get("weights") != step.weights_digest():
        return None
    return {**found, "folder": str(step.hf_folder)}


def export_rows(subject: Subject) -> list[tuple[str, str]]:
    """The export's facts as (label, value)."""
    found = export_facts(subject)
    if found is None:
        return []
    proof, settings = found["proof"], found["settings"]
    rows = [
        ("Folder", found["folder"]),
        ("Format", f"{settings['format']}, {settings['dtype']}"),
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


def _versions(subject: Subject) -> list[tuple[str, str]]:
    rows = []
    if isinstance(subject, NativeSubject):
        trained = subject.checkpoint.meta["versions"].items()
        rows += [(f"{name} (training)", str(value)) for name, value in trained]
    rows += [
        (f"{name} (this report)", value)
        for name, value in results.run_facts(subject)["versions"].items()
    ]
    return rows


def meaning(
    subject: Subject,
    perplexity: Mapping[str, Any] | None,
    needle: Mapping[str, Any] | None,
    retrieval: Mapping[str, Any] | None,
) -> list[str]:
    """What the results show and what they do not, a sentence or two each."""
    lines = []
    if perplexity is not None:
        lines.append(f"{perplexity['verdict']['text']} {perplexity['verdict']['caveat']}")
        if null := perplexity.get("null"):
            lines.append(f"{null['verdict']['text']} {null['verdict']['caveat']}")
    else:
        lines.append("Perplexity past the training length has not been measured.")
    if needle is not None:
        lines.append(f"{needle['verdict']['text']} {needle['verdict']['caveat']}")
    if retrieval is not None:
        lines.append(f"{retrieval['verdict']['text']} {retrieval['verdict']['caveat']}")
    if needle is None and retrieval is None:
        lines.append("Retrieval has not been measured.")
    for name in ("generalisation", "horizon"):
        if found := results.stored(subject, name):
            lines.append(f"{found['verdict']['text']} {found['verdict']['caveat']}")
    lines.append(
        f"All numbers are of one model of {subject.num_parameters:,} parameters, one seed and the "
        "corpora named above. Larger models, other text or other seeds can behave differently; "
        "intervals cover the choice of documents and prompts, not the choice of seed."
    )
    return lines


def summary_lines(subject: Subject) -> list[str]:
    """The report in a few terminal lines; parts not made yet name their command."""
    perplexity, needle = results.stored(subject, "perplexity"), results.stored(subject, "needle")
    which = "" if subject.step is None else f", step {subject.step:,}"
    lines = [f"{subject.argument}{which}: {subject.num_parameters:,} parameters, "
             f"training length {subject.training_length:,}", ""]  # fmt: skip
    lines += perplexity_lines(perplexity) if perplexity else [
        f"perplexity: not measured yet: {commands(subject)['perplexity']}"
    ]  # fmt: skip
    lines.append("")
    lines += needle_lines(needle) if needle else [
        f"needle: not measured yet: {commands(subject)['needle']}"
    ]  # fmt: skip
    lines.append("")
    retrieval = results.stored(subject, "retrieval")
    lines += retrieval_lines(retrieval) if retrieval else [
        f"retrieval: not measured yet: {commands(subject)['retrieval']}"
    ]  # fmt: skip
    lines.append("")
    if subject.model is not None and subject.model.position == "alibi":
        horizon = results.stored(subject, "horizon")
        lines += horizon_lines(horizon) if horizon else [
            f"horizon: not measured yet: {commands(subject)['horizon']}"
        ]  # fmt: skip
        lines.append("")
    if isinstance(subject, NativeSubject):
        lines += _export_lines(subject)
    problems = results.stored(subject, "generalisation")
    if problems is not None:
        lines += ["", *result.lines(problems)]
    lines += ["", "What this does and does not show:"]
    lines += [f"  - {line}" for line in meaning(subject, perplexity, needle, retrieval)]
    report = subject.evals_folder / REPORT
    lines.append("")
    lines.append(f"report: {report}" if report.is_file() else
                 f"report: not written yet: {commands(subject)['report']}")  # fmt: skip
    return lines


def _export_lines(subject: Subject) -> list[str]:
    found = export_facts(subject)
    if found is None:
        return [f"export: not made yet: {commands(subject)['export']}"]
    differences = ", ".join(
        f"{row['max_difference']:.1e} at {row['length']:,} tokens"
        for row in found["proof"]["logits"]
    )
    return [
        f"export: {found['folder']}",
        f"  largest logit difference to transformers {differences}; "
        f"{found['proof']['greedy_tokens_equal']} greedy tokens equal",
    ]
