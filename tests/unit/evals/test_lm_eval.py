"""lm-evaluation-harness: the same scores on an export by its own class, and on the run by ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from alibi_lm.checkpoint.folder import write_meta
from alibi_lm.checkpoint.fragments import fragment_key
from alibi_lm.checkpoint.step import Checkpoint, open_checkpoint
from alibi_lm.hf.exporting.exporter import export
from alibi_lm.utils.errors import ConfigError
from alibi_lm.utils.files import sha256
from tests.unit.hf.small_step import LINES, add_tokenizer, write_step

pytest.importorskip("lm_eval", reason="needs the extra `harness` (lm_eval)")

from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from alibi_lm.evals.lm_eval import LmEvalModel  # noqa: E402

MAX_LENGTH = 160
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "writing": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {
            "until": ["(x):\n    p", "9"],
            "max_gen_toks": 40,
            "do_sample": False,
        },
        "metric_list": [{"metric": "exact_match"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Path, Path]:
    """A run, its export, and a folder of tasks with their local data."""
    folder = tmp_path_factory.mktemp("harness")
    step = write_step(folder / "run", {"architecture": "mpt", "num_heads": 12})
    add_tokenizer(step, folder)
    step = trained(step)
    export(step, folder / "exported")
    tasks = folder / "tasks"
    tasks.mkdir()
    rows = [
        {
            "question": "".join(LINES[(i * k) % 5] for k in range(1, 4 + i % 3)),
            "choices": ["    pass\n", "x + 1", "class B:\n", "9"][: 2 + i % 3],
            "answer": i % 2,
            "text": "".join(LINES[(i + k) % 5] for k in range(6 + 3 * i)),
        }
        for i in range(12)
    ]
    data = tasks / "data.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    for name, task in TASKS.items():
        whole = {"task": name, "dataset_path": "json", "test_split": "test",
                 "dataset_kwargs": {"data_files": {"test": str(data)}}, **task}  # fmt: skip
        (tasks / f"{name}.yaml").write_text(yaml.safe_dump(whole))
    return step, folder / "exported", tasks


def trained(checkpoint: Checkpoint) -> Checkpoint:
    """The step after a short training, so that what it writes is text.

    On bytes that are not UTF-8 the tokenizers differ: one reads each byte alone.
    """
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    generator = torch.Generator().manual_seed(0)
    order = torch.randint(0, 5, (400,), generator=generator).tolist()
    tokens = torch.tensor(tokenizer.encode("".join(LINES[i] for i in order)))
    decoder = checkpoint.decoder().train()
    optimizer = torch.optim.Adam(decoder.parameters(), lr=3e-3)
    for _ in range(80):
        starts = torch.randint(0, len(tokens) - 49, (8,), generator=generator)
        batch = torch.stack([tokens[start : start + 49] for start in starts])
        optimizer.zero_grad()
        decoder.losses(batch[:, :-1], batch[:, 1:]).mean().backward()
        optimizer.step()
    shard = checkpoint.folder / "shard_00000.safetensors"
    weights = decoder.state_dict().items()
    save_file({fragment_key(n, "param", 0): w.flatten().clone() for n, w in weights}, shard)
    facts = {"bytes": shard.stat().st_size, "sha256": sha256(shard)}
    write_meta(
        checkpoint.folder,
        {**checkpoint.meta, "files": {**checkpoint.meta["files"], shard.name: facts}},
    )
    return open_checkpoint(checkpoint.run_folder)


def scores(model: Any, tasks: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Every metric, and every response."""
    found = simple_evaluate(
        model=model,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found is not None
    metrics = {
        f"{name} {key}": value
        for name, row in found["results"].items()
        for key, value in row.items()
        if isinstance(value, float) and "stderr" not in key
    }
    responses = {name: [row["resps"] for row in rows] for name, rows in found["samples"].items()}
    return metrics, responses


def test_the_harness_gives_the_same_scores_on_the_export_and_on_the_run(
    made: tuple[Checkpoint, Path, Path],
) -> None:
    step, exported, tasks = made
    theirs = HFLM(
        pretrained=str(exported), max_length=MAX_LENGTH, dtype="float32", batch_size=4, device="cpu"
    )
    metrics, responses = scores(theirs, tasks)
    assert len(metrics) == 5
    for name in (str(step.run_folder), f"hf:{exported}"):
        ours = LmEvalModel(name, max_length=MAX_LENGTH, batch_size=4)
        found, answers = scores(ours, tasks)
        assert found == pytest.approx(metrics, rel=1e-5)
        assert answers["writing"] == responses["writing"]
        assert len({text for ((text,),) in answers["writing"]}) >= 2
        for row, wanted in zip(answers["choices"], responses["choices"], strict=True):
            for (value,), (reference,) in zip(row, wanted, strict=True):
                assert value[0] == pytest.approx(reference[0], rel=1e-4, abs=1e-4)
                assert value[1] == reference[1]


def test_sampling_is_refused_and_the_default_window_is_the_training_length(
    made: tuple[Checkpoint, Path, Path],
) -> None:
    step, _, _ = made
    model = LmEvalModel(str(step.run_folder))
    assert model.max_length == step.config.train.sequence_length

    class Request:
        args = ("def", {"until": ["\n"], "do_sample": True, "temperature": 1.0})

    with pytest.raises(ConfigError, match="do_sample = True: is asked for by a task"):
        model.generate_until([Request()])
