"""Running evals, and the files of their results.

A model's folder of results holds, for an eval NAME, the main result NAME.json and, in NAME/, one
file for each other thing measured, named by the digest of its inputs. The main result is the one on
the model's own corpora, by its default engine, without another scaling of positions and at default
lengths, as far as there is such a one; of two that are alike in this, the newer one. While an eval
runs, NAME.partial.json holds its finished parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from alibi_lm import config_loading
from alibi_lm.data.indexed import TokenFile
from alibi_lm.evals.base import ConfigT, Eval, Json, ResultT
from alibi_lm.evals.models.base import EvalModel
from alibi_lm.evals.models.scorer import Scorer
from alibi_lm.evals.report import plots
from alibi_lm.parallel.errors import run_on_all_ranks, run_on_rank0
from alibi_lm.utils.errors import DataError
from alibi_lm.utils.files import stored_object, write_json
from alibi_lm.utils.logging import console


@dataclass(frozen=True)
class Stored(Generic[ResultT]):
    """A result and its file."""

    path: Path
    result: ResultT

    def differences(self, other: ResultT) -> str:
        """What was measured here and not by `other`, for example `lengths=[128, 1024]`."""
        here, there = self.result.inputs, other.inputs
        ours, theirs = config_loading.flatten(here), config_loading.flatten(there)
        words = [
            f"{key.removeprefix('settings.')}={value}"
            for key, value in ours.items()
            if value != theirs.get(key) and key not in ("corpora", "settings.corpus")
        ]
        if here["corpora"] != there["corpora"]:
            words.append("corpus " + ", ".join(file.prefix for file in self.result.corpus))
        return "; ".join(words)


def evaluate(
    each: Eval[ConfigT, ResultT], eval_model: EvalModel, config: ConfigT, *, force: bool = False
) -> ResultT:
    """Run an eval unless its result is stored, and show the result in the terminal.

    Raises:
        UserError: as `Eval.run`.
    """
    run_on_all_ranks(lambda: each.open_corpora(eval_model, config))
    done = run_on_rank0(lambda: None if force else finished(each, eval_model, config))
    if done is not None:
        console.info(
            f"{each.name}: done before with the same settings, {done.path} (--force runs it again)"
        )
        return done.result
    result = each.run(eval_model, config)
    path = store(each, eval_model, result)
    verdict = result.verdict
    for line in (*each.table(result), verdict.text, verdict.caveat):
        console.info(line)
    console.info(f"{each.name}: {path}")
    return result


def run_and_store(
    each: Eval[ConfigT, ResultT],
    eval_model: EvalModel,
    config: ConfigT,
    scorer: Scorer | None = None,
) -> ResultT:
    """Run an eval, whatever is stored, and store its result.

    Raises:
        UserError: as `Eval.run`.
    """
    result = each.run(eval_model, config, scorer)
    store(each, eval_model, result)
    return result


def store(each: Eval[Any, ResultT], eval_model: EvalModel, result: ResultT) -> Path:
    """Write a result and its pictures on rank 0; the path of the result, on every rank."""

    def write() -> Path:
        figures = each.figures(result)
        path = _make_way(each, eval_model, result, list(figures))
        write_json(path, result.to_json())
        for name, figure in figures.items():
            plots.save(figure, _picture(path, each.name, name))
        each.parts_path(eval_model).unlink(missing_ok=True)
        return path

    return run_on_rank0(write)


def _make_way(
    each: Eval[Any, ResultT], eval_model: EvalModel, result: ResultT, pictures: Sequence[str]
) -> Path:
    """Where a result goes; a main result that it replaces is moved to its own address."""
    main = main_path(each, eval_model)
    aside = _own_path(main, result.inputs)
    before = _raw(each, main)
    if before is not None and before["inputs"] != result.inputs:
        corpora, engine = _digests(lambda: eval_model.default_corpora), eval_model.default_engine
        same_weights = before["inputs"].get("step") == eval_model.digest
        if same_weights and _rank(result.inputs, corpora, engine) < _rank(
            before["inputs"], corpora, engine
        ):
            console.info(f"{each.name}: {main} stays the main result")
            return aside
        kept = _own_path(main, before["inputs"])
        kept.parent.mkdir(exist_ok=True)
        for name in pictures:
            if (picture := _picture(main, each.name, name)).exists():
                picture.replace(_picture(kept, each.name, name))
        main.replace(kept)
        console.info(f"{each.name}: the earlier result is kept as {kept}")
    aside.unlink(missing_ok=True)
    return main


def main_path(each: Eval[Any, Any], eval_model: EvalModel) -> Path:
    """The file of the main result."""
    return eval_model.evals_folder / f"{each.name}.json"


def _own_path(main: Path, inputs: Json) -> Path:
    """The address of a result that is not the main one."""
    return main.parent / main.stem / f"{config_loading.digest(inputs)[:12]}.json"


def _picture(path: Path, eval_name: str, name: str) -> Path:
    """The picture `name` of the result in `path`."""
    main = path.stem == eval_name
    return path.with_name(f"{name}.png" if main else f"{path.stem}_{name}.png")


def _rank(inputs: Json, corpora: Sequence[str] | None, engine: str | None) -> tuple[bool, ...]:
    """Larger for results that are more like what is asked for by default."""
    settings = inputs.get("settings", {})
    return (
        inputs.get("corpora") == corpora,
        inputs.get("engine") == engine,
        settings.get("scaling") is None,
        settings.get("lengths") is None,
    )


def _digests(prefixes: Callable[[], Sequence[str]]) -> list[str] | None:
    """Digests of token files; None where one cannot be found or read."""
    try:
        return [TokenFile(prefix).digest for prefix in prefixes()]
    except DataError:
        return None


def _raw(each: Eval[Any, Any], path: Path) -> Json | None:
    """The result of an eval in a file, of whatever model and version, or None."""
    found = stored_object(path)
    if found is None or found.get("eval") != each.name:
        return None
    return found if isinstance(found.get("inputs"), dict) else None


def _read(each: Eval[Any, ResultT], eval_model: EvalModel, path: Path) -> Stored[ResultT] | None:
    """The result in a file, if this version can read it and it is of the model's weights."""
    found = _raw(each, path)
    if found is None or found["inputs"].get("step") != eval_model.digest:
        return None
    try:
        return Stored(path, each.result.from_json(found))
    except (LookupError, TypeError, ValueError):
        return None


def stored(each: Eval[Any, ResultT], eval_model: EvalModel) -> list[Stored[ResultT]]:
    """All stored results of the model's weights: the one to show first, then the others.

    Results on the corpora and by the engine that `eval_model` was opened with come first, then the
    main one, then newer ones.
    """
    main = main_path(each, eval_model)
    paths = [main, *(main.parent / main.stem).glob("*.json")]
    found = [entry for path in paths if (entry := _read(each, eval_model, path))]
    if len(found) < 2:
        return found
    corpora = _digests(lambda: eval_model.corpora)
    engine = eval_model.settings.get("engine")
    return sorted(
        found,
        key=lambda entry: (
            _rank(entry.result.inputs, corpora, engine),
            entry.path == main,
            entry.path.stat().st_mtime,
        ),
        reverse=True,
    )


def shown(each: Eval[Any, ResultT], eval_model: EvalModel) -> ResultT | None:
    """The result that a report shows, or None."""
    return next((entry.result for entry in stored(each, eval_model)), None)


def finished(
    each: Eval[ConfigT, ResultT], eval_model: EvalModel, config: ConfigT
) -> Stored[ResultT] | None:
    """The stored result of the same settings, corpora, weights and versions, or None."""
    found = stored(each, eval_model)
    if not found:
        return None
    inputs = each.inputs(eval_model, config, each.open_corpora(eval_model, config))
    return next((entry for entry in found if entry.result.inputs == inputs), None)
