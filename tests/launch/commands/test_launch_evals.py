"""Evals over several ranks, started by the real `deepspeed` CLI, against one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from launching import (
    REPOSITORY,
    command,
    error_lines,
    finished,
    start_by_deepspeed,
    start_forked,
    started,
)

from alibi_lm.cli.main import main
from alibi_lm.hf.exporting.exporter import export
from tests.unit.hf.small_step import LENGTH, LINES, add_tokenizer, add_validation, write_step

PERPLEXITY = [
    f"perplexity.lengths=[12,{LENGTH},300]",
    "perplexity.stride=12",
    "perplexity.fixed_targets=6",
    "perplexity.truncated_context_targets=33",
    "perplexity.batch_tokens=1300",
]
NEEDLE = [
    "needle.lengths=[180,360]",
    "needle.depths=[0.0,0.7]",
    "needle.num_trials=3",
    "needle.batch_tokens=400",
]
RETRIEVAL = [
    "retrieval.tasks=[passkey,mqar]",
    "retrieval.lengths=[700]",
    "retrieval.num_trials=2",
    "retrieval.sizes.passkey_num_distances=3",
    "retrieval.batch_tokens=800",
]
SEVERAL_EVALS = REPOSITORY / "tests" / "launch" / "helpers" / "several_evals.py"
SETTINGS = {"perplexity": PERPLEXITY, "needle": NEEDLE, "retrieval": RETRIEVAL}
LONG = [
    "perplexity.lengths=[300,2300]",
    "perplexity.truncated_context_targets=null",
    "retrieval.tasks=[passkey]",
    "retrieval.lengths=[8500]",
    "retrieval.num_trials=1",
    "retrieval.sizes.passkey_num_distances=2",
]
"""Inputs long enough to be pruned."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose vocabulary two ranks do not divide, and its export; three documents."""
    folder = tmp_path_factory.mktemp("evals")
    corpus = folder / "validation"
    step = write_step(
        folder / "run", {"architecture": "bloom", "num_heads": 4}, validation=[str(corpus)]
    )  # fmt: skip
    add_tokenizer(step, folder)
    texts = ["".join(LINES[(i * k) % 5] for i in range(1, 60 + k)) + f"x{k}" for k in (1, 2, 3)]
    add_validation(step, corpus, texts)
    add_validation(step, folder / "long", [text * 5 for text in texts])
    step.config.data.validation.pop()
    step.config.data.validation.pop()
    export(step, folder / "exported")
    return folder / "run"


def evaluate_on_two_ranks(folder: Path, jobs: list[dict[str, Any]]) -> str:
    """Run the jobs one after another on two ranks; the output of rank 0."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    return finished(start_forked(SEVERAL_EVALS, str(path))).stdout


def alone(run: Path, name: str, out: Path, *settings: str) -> dict[str, Any]:
    """The result of one process."""
    asked = ["eval", name, str(run), *(settings or SETTINGS[name]), "--out", str(out)]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return found


def losses(result: dict[str, Any]) -> list[float]:
    """Every loss of a perplexity result, in every protocol."""
    rows = [*result["rows"], *result["sliding"]["rows"], *result["fixed_target"]["rows"]]
    rows += [*result["by_position"]["rows"], *result["truncated_context"]["rows"]]
    return [row["loss"] for row in rows] + [
        row["truncated_context_loss"] for row in result["truncated_context"]["rows"]
    ]


def test_two_ranks_score_as_one(run: Path, tmp_path: Path) -> None:
    corpus = f"corpus={run.parent / 'validation'}"
    exported = f"hf:{run.parent / 'exported'}"
    jobs: list[dict[str, Any]] = [
        {"eval_model": str(run), "engine": None, "tp": 2, "eval": "perplexity"},
        {"eval_model": str(run), "engine": None, "tp": 1, "eval": "perplexity"},
        {"eval_model": str(run), "engine": None, "tp": 2, "eval": "needle"},
        {"eval_model": str(run), "engine": None, "tp": 1, "eval": "needle"},
        {"eval_model": str(run), "engine": None, "tp": 1, "eval": "retrieval"},
        {"eval_model": exported, "engine": "native", "tp": 2, "eval": "perplexity"},
        {"eval_model": exported, "engine": "hf", "tp": 1, "eval": "needle"},
    ]
    for index, job in enumerate(jobs):
        job["out"] = str(tmp_path / f"job{index}")
        job["overrides"] = [*SETTINGS[str(job["eval"])], corpus]
    output = evaluate_on_two_ranks(tmp_path, jobs)
    single = {name: alone(run, name, tmp_path / "alone") for name in SETTINGS}
    assert len(losses(single["perplexity"])) > 15
    assert single["perplexity"]["num_documents"] == 3
    for job in jobs:
        name = str(job["eval"])
        found = json.loads((Path(str(job["out"])) / f"{name}.json").read_text())
        tp = job["tp"]
        assert found["model"]["ranks"] == {"data_parallel": 2 // int(str(tp)),
                                           "tensor_parallel": tp}  # fmt: skip
        if name != "perplexity":
            assert found["cells"] == single[name]["cells"], job
        else:
            assert losses(found) == pytest.approx(losses(single[name]), rel=1e-5), job
        assert (Path(str(job["out"])) / f"{name}.png").is_file()
        assert output.count(f"{name}: {job['out']}/{name}.json") == 1  # rank 0 alone speaks


def test_two_ranks_resume_with_the_next_part(run: Path, tmp_path: Path) -> None:
    """All ranks skip what rank 0 kept, and the result is the one of an uninterrupted run."""
    job = {"eval_model": str(run), "engine": None, "tp": 1, "eval": "perplexity",
           "overrides": [*PERPLEXITY, f"corpus={run.parent / 'validation'}"]}  # fmt: skip
    whole, again = str(tmp_path / "whole"), str(tmp_path / "again")
    jobs = [
        job | {"out": whole},
        job | {"out": again, "stop_after": 2},
        job | {"out": again, "stop_after": 7},
        job | {"out": again},
    ]
    output = evaluate_on_two_ranks(tmp_path, jobs)
    for count in (2, 7):
        kept = f"perplexity keeps {count} of 10 parts in {again}/perplexity.partial.json"
        assert output.count(f"interrupted: {kept}; run the same command to resume") == 1
        assert output.count(f"perplexity: resuming with {count} of 10 parts") == 1
    results = [json.loads((Path(out) / "perplexity.json").read_text()) for out in (whole, again)]
    for result in results:
        for part in (result, result["sliding"], result["fixed_target"]):
            del part["seconds"]
        del result["tokens_per_second"]
    assert results[0] == results[1]
    assert not (tmp_path / "again" / "perplexity.partial.json").exists()


def test_ranks_that_share_a_models_heads_prune(run: Path, tmp_path: Path) -> None:
    long = [*LONG, f"corpus={run.parent / 'long'}"]
    jobs = [
        {"eval_model": str(run), "engine": None, "tp": 2, "eval": name, "overrides": long,
         "out": str(tmp_path / name)}
        for name in ("perplexity", "retrieval")
    ]  # fmt: skip
    output = evaluate_on_two_ranks(tmp_path, jobs)
    found = {name: json.loads((tmp_path / name / f"{name}.json").read_text())
             for name in ("perplexity", "retrieval")}  # fmt: skip
    for name, result in found.items():
        assert result["model"]["pruning_tolerance"] == 1e-6
        assert f"{name}: " in output
        dense = alone(run, name, tmp_path / f"dense {name}", *long, f"{name}.pruning_tolerance=0")
        assert dense["model"]["pruning_tolerance"] == 0
        if name == "retrieval":
            assert result["cells"] == dense["cells"]
        else:
            wanted = [row["loss"] for row in dense["rows"]]
            assert [row["loss"] for row in result["rows"]] == pytest.approx(wanted, rel=1e-5)
    assert output.count("each head skips at most 1e-06 of its probability") == 2


def test_the_command_shares_a_model_that_no_rank_holds(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder without the repository's scripts, as `alibi-lm eval --help` says."""
    out = tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    arguments = ["perplexity", str(run), "parallel.tp=2", "--out", str(out), *PERPLEXITY]
    line = command(Path("alibi_lm"), "eval", *arguments)
    line.insert(line.index("alibi_lm"), "--module")
    done = finished(started(line))
    single = alone(run, "perplexity", tmp_path / "alone")
    found = json.loads((out / "perplexity.json").read_text())
    assert losses(found) == pytest.approx(losses(single), rel=1e-5)
    assert done.stdout.count("Uses context beyond") == 1
    again = CliRunner().invoke(main, ["eval", "perplexity", str(run), "--out", str(out),
                                      *PERPLEXITY])  # fmt: skip
    assert "done before with the same settings" in again.output  # whatever the ranks


@pytest.mark.parametrize(
    ("arguments", "ranks", "words"),
    [
        (["parallel.tp=3"], 3, "parallel.tp = 3: does not divide model.num_heads = 4"),
        (["parallel.tp=3"], 2, "parallel.tp = 3: does not divide the 2 ranks"),
        (["needle.lengths=[20]"], 2, "needle.lengths = 20: needle, question and answer need"),
    ],
)
@pytest.mark.slow
def test_a_mistake_is_one_line_and_nothing_is_written(
    run: Path, tmp_path: Path, arguments: list[str], ranks: int, words: str
) -> None:
    out = tmp_path / "out"
    program = REPOSITORY / "evals" / "evaluate.py"
    arguments = ["needle", str(run), *arguments, "--out", str(out)]
    done = finished(start_by_deepspeed(program, *arguments, ranks=ranks), code=2)
    (line,) = error_lines(done)
    assert words in line
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_one_process_cannot_share_a_model(run: Path) -> None:
    done = CliRunner().invoke(main, ["eval", "needle", str(run), "parallel.tp=2"])
    assert done.exit_code == 2
    assert "parallel.tp = 2: needs several ranks, and this is one process" in done.output
