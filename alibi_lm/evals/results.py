"""What all eval results share: corpora, names of the run and versions, storing and finding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from alibi_lm import config_loading
from alibi_lm.data.indexed import TokenFile
from alibi_lm.data.manifest import check_tokenizer
from alibi_lm.evals.config import (
    AttentionSpanConfig,
    GeneralizationConfig,
    NeedleConfig,
    PerplexityConfig,
    RetrievalConfig,
)
from alibi_lm.evals.models.base import EvalModel
from alibi_lm.evals.report import plots
from alibi_lm.parallel.errors import run_on_all_ranks, run_on_rank0
from alibi_lm.utils.errors import ConfigError, DataError, Problem
from alibi_lm.utils.files import stored_object, write_json
from alibi_lm.utils.logging import console

DEFAULT_MULTIPLES = (0.5, 1, 2, 4, 8, 16)

LengthSettings = PerplexityConfig | NeedleConfig | RetrievalConfig
Settings = LengthSettings | AttentionSpanConfig | GeneralizationConfig
SomeSettings = TypeVar(
    "SomeSettings",
    PerplexityConfig,
    NeedleConfig,
    RetrievalConfig,
    AttentionSpanConfig,
    GeneralizationConfig,
)


def default_lengths(training_length: int) -> list[int]:
    """1/2, 1, 2, 4, 8 and 16 times the training length."""
    return sorted({max(1, int(multiple * training_length)) for multiple in DEFAULT_MULTIPLES})


def chosen_lengths(eval_model: EvalModel, config: LengthSettings) -> list[int]:
    """The configured lengths or the default ones, ascending.

    Raises:
        ConfigError: a length is beyond the position table of a model with learned positions.
    """
    lengths = sorted(config.lengths or default_lengths(eval_model.training_length))
    largest = eval_model.max_input_length
    if largest is None:
        return lengths
    if config.lengths is None:
        return [length for length in lengths if length <= largest]
    problems = [
        Problem("lengths", length, f"the model has {largest} positions", "leave it out")
        for length in lengths
        if length > largest
    ]
    if problems:
        raise ConfigError(*problems)
    return lengths


def open_corpora(eval_model: EvalModel, config: Settings) -> list[TokenFile]:
    """The token files that an eval reads; none where its problems are made.

    Raises:
        DataError: there are none, one cannot be read, or it was made with another tokenizer.
    """
    if isinstance(config, GeneralizationConfig):
        return []
    prefixes = [config.corpus] if config.corpus else eval_model.corpora
    if not prefixes:
        rule = f"{eval_model.argument} names no validation corpus"
        fix = "set text=FILE, GLOB or FOLDER, or corpus=PREFIX, token files without .bin"
        raise DataError(Problem("data.validation", None, rule, fix))
    tokenizer = eval_model.tokenizer()
    if tokenizer is not None:
        for prefix in prefixes:
            check_tokenizer(prefix, tokenizer)
    return [TokenFile(prefix) for prefix in prefixes]


def corpus_facts(files: Sequence[TokenFile]) -> list[dict[str, Any]]:
    """Prefix, digest and counts of each corpus."""
    return [
        {
            "prefix": str(file.prefix),
            "digest": file.digest,
            "num_documents": int(file.num_documents),
            "num_tokens": int(file.num_tokens),
        }
        for file in files
    ]


def run_facts(eval_model: EvalModel) -> dict[str, Any]:
    """Run, step and versions, as every result names them."""
    return {
        "run": eval_model.argument,
        "step": eval_model.step,
        "training_length": eval_model.training_length,
        "versions": {name: version(name) for name in ("alibi_lm", "torch")},
    }


def inputs_of(
    eval_model: EvalModel, config: Settings, files: Sequence[TokenFile]
) -> dict[str, Any]:
    """Everything a result depends on; equal inputs give an equal result."""
    qa_files = config.qa_files if isinstance(config, RetrievalConfig) else []
    return {
        "settings": config_loading.to_dict(config),
        "corpora": [file.digest for file in files],
        **({"qa_files": [_digest(Path(path)) for path in qa_files]} if qa_files else {}),
        "step": eval_model.digest,
        "versions": run_facts(eval_model)["versions"],
        **eval_model.settings,
    }


def _digest(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        DataError: there is none.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        raise DataError(Problem(str(path), None, "no such file", "check the path")) from None


def result_path(eval_model: EvalModel, name: str) -> Path:
    """Where the result of eval `name` (perplexity, needle, retrieval or horizon) is stored."""
    return eval_model.evals_folder / f"{name}.json"


def store(
    eval_model: EvalModel,
    name: str,
    result: dict[str, Any],
    figures: Callable[[dict[str, Any]], Mapping[str, plots.Figure]] | None = None,
) -> Path:
    """Atomically write a result, and its pictures by name, on rank 0, and return the result's path.

    A result of other settings, or of another model in the same folder, is not lost: it and its
    pictures are kept under names with a hash of what it depends on.
    """

    def write() -> Path:
        pictures = {} if figures is None else figures(result)
        path = _write(eval_model, name, result, pictures)
        for key, figure in pictures.items():
            plots.save(figure, path.with_name(f"{key}.png"))
        return path

    return run_on_rank0(write)


def _write(
    eval_model: EvalModel, name: str, result: dict[str, Any], pictures: Iterable[str]
) -> Path:
    path = result_path(eval_model, name)
    before = _stored(path, name)
    if before is not None and before["inputs"] != result.get("inputs"):
        mark = config_loading.digest(before["inputs"])[:8]
        for key in pictures:
            picture = path.with_name(f"{key}.png")
            if picture.exists():
                picture.rename(picture.with_name(f"{key}_{mark}.png"))
        path.rename(path.with_name(f"{name}_{mark}.json"))
        same = before["inputs"].get("step") == eval_model.digest
        what = "other settings" if same else "other weights"
        console.info(f"{name}: the result of {what} is kept as {name}_{mark}.json")
    write_json(path, result)
    return path


def stored(eval_model: EvalModel, name: str) -> dict[str, Any] | None:
    """The stored result of eval `name` for this step's weights, whatever its settings, or None.

    A file that is not a result (cut short by something else than this program), or is of other
    weights under the same step number, counts as none.
    """
    result = _stored(result_path(eval_model, name), name)
    return result if result and result["inputs"].get("step") == eval_model.digest else None


def _stored(path: Path, name: str) -> dict[str, Any] | None:
    """The result of eval `name` in a file, whatever model it is of, or None."""
    result = stored_object(path)
    if result is None or result.get("eval") != name:
        return None
    return result if isinstance(result.get("inputs"), dict) else None


def announce_finished(eval_model: EvalModel, name: str) -> None:
    """Say that an eval needs not be run again."""
    path = result_path(eval_model, name)
    console.info(f"{name}: done before with the same settings, {path} (--force runs it again)")


def finished(eval_model: EvalModel, name: str, config: Settings) -> dict[str, Any] | None:
    """The stored result of eval `name` if it has the same settings, corpora, step and versions."""
    result = stored(eval_model, name)
    if result is None:
        return None
    same = result.get("inputs") == inputs_of(eval_model, config, open_corpora(eval_model, config))
    return result if same else None


def run_or_load(
    eval_model: EvalModel,
    name: str,
    config: SomeSettings,
    run: Callable[[EvalModel, SomeSettings], dict[str, Any]],
    table: Callable[[dict[str, Any]], Iterable[str]],
    *,
    force: bool,
) -> dict[str, Any]:
    """Run eval `name` unless it is done already, and say its result in the terminal."""
    run_on_all_ranks(lambda: open_corpora(eval_model, config))
    done = run_on_rank0(lambda: None if force else finished(eval_model, name, config))
    if done is not None:
        announce_finished(eval_model, name)
        return done
    result: dict[str, Any] = run(eval_model, config)
    verdict = result["verdict"]
    for line in (*table(result), verdict["text"], verdict["caveat"]):
        console.info(line)
    console.info(f"{name}: {result_path(eval_model, name)}")
    return result
