"""Commands and code of the README and docs run as they are printed, and so does the Slurm script.

They run in a folder with copies of the repository's scripts, recipe, suite and config, a command
that stands on several pages once. Only what they name is made smaller: the YAML copies by the
overrides of `SHRUNK`, and in the commands themselves the words of `REPLACED` (each must occur) and
the launcher's port. docs/python.md and docs/extending.md have tests of their own.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import REPOSITORY, environment, metrics, write_config
from ports import unused_port

from alibi_lm.checkpoint.step import open_checkpoint
from alibi_lm.config_loading import apply_overrides, load_yaml, to_yaml

OWN_TESTS = {"python", "extending", "configuration"}
"""Pages whose code is run elsewhere."""
PAGES = {"README": REPOSITORY / "README.md"} | {
    name: REPOSITORY / "docs" / f"{name}.md"
    for name in ("getting-started", "own-corpus", "run-configs", "parallelism", "many-nodes",
                 "checkpoints", "faults", "long-context", "evaluation", "hugging-face", "claims",
                 "performance", "architecture", "glossary")
}  # fmt: skip
"""In the order in which a reader would try them."""
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}

SHRUNK = {
    "data/demo.yaml": [
        "sources.0.max_documents=40",
        "sources.0.max_chars=20000",
        "sources.0.min_long_validation=2",
        "sources.0.long_chars=6000",
        "tokenizer.vocab_size=512",
        "tokenizer.max_bytes=300000",
    ],
    "configs/demo.yaml": [
        "model.num_layers=2",
        "model.hidden_size=32",
        "model.num_heads=4",
        "train.sequence_length=64",
        "train.num_steps=4",
        "train.micro_batch_size=2",
        "train.global_batch_size=4",
        "train.warmup_steps=1",
        "train.log_interval=1",
        "train.checkpoint_interval=2",
        "train.validation_interval=4",
        "train.validation_tokens=1024",
    ],
    "evals/demo.yaml": [
        "perplexity.lengths=[32,64,128]",
        "perplexity.max_tokens=1000",
        "needle.lengths=[256]",
        "needle.depths=[0.5]",
        "needle.num_trials=1",
        "attention_span.num_tokens=2100",
    ],
}
REPLACED = {
    "step_00000400": "step_00000004",
    "train.num_steps=50": "train.num_steps=2",
    "train.sequence_length=1024": "train.sequence_length=128",
}
NOT_RUN = re.compile(r"^<!-- not run in tests: (.+) -->\n```bash\n", re.MULTILINE)
REASONS = {
    "make sets up an environment of its own",
    "needs GPUs or prepared corpora",
    "needs several hosts",
    "needs 8 ranks",
    "downloads a model",
    "downloads llama.cpp",
    "lm_eval is not a dependency",
    "trains for hours",
    "takes minutes and a corpus of a million tokens",
    "takes minutes; x-transformers is not a dependency",
    "takes minutes, 12 GiB of memory and 27 GB of disk",
}
ELSEWHERE = "deepspeed --num_gpus 2 --module alibi_lm.train.entry configs/demo.yaml"
"""Run in a folder without the repository's scripts."""


def blocks(language: str) -> list[str]:
    """The pages' fenced blocks of a language, without those tagged as not run."""
    return [
        block
        for text in TEXTS.values()
        for block in re.findall(
            rf"^```{language}\n(.*?)^```",
            NOT_RUN.sub("```text\n", text),
            re.MULTILINE | re.DOTALL,
        )
    ]


def commands() -> list[str]:
    """The pages' commands, each once."""
    lines = "".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return list(dict.fromkeys(re.sub(r"\s+#.*", "", line).strip() for line in lines))


def smaller(code: str) -> str:
    for word, replacement in REPLACED.items():
        code = code.replace(word, replacement)
    return re.sub(r"^deepspeed ", f"deepspeed --master_port {unused_port()} ", code, flags=re.M)


def run(arguments: list[str], folder: Path, **variables: str) -> str:
    """The output of a command that must succeed, with the installed commands in its PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        arguments,
        cwd=folder,
        env=environment() | {"PATH": path, "HF_HUB_OFFLINE": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}: exit {done.returncode}\n{done.stdout}"
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The repository's scripts and the demo's YAML, made smaller."""
    for name in ("launch", "data", "evals", "configs"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    for name, overrides in SHRUNK.items():
        small = apply_overrides(load_yaml(REPOSITORY / name), overrides)
        (tmp_path / name).write_text(to_yaml(small), encoding="utf-8")
    return tmp_path


def test_every_block_is_run_or_says_why_not() -> None:
    assert {reason for text in TEXTS.values() for reason in NOT_RUN.findall(text)} == REASONS
    for word in REPLACED:
        assert any(word in code for code in [*commands(), *blocks("python")]), word
    listed = {path.stem for path in (REPOSITORY / "docs").glob("*.md")}
    assert listed == TEXTS.keys() | OWN_TESTS
    assert not blocks("sh") + blocks("shell") + blocks("console"), "write bash"


def test_the_pages_commands_run_in_order(checkout: Path) -> None:
    script = "\n".join(smaller(command) for command in commands() if command != ELSEWHERE)
    output = run(["bash", "-euxo", "pipefail", "-c", script], checkout)
    prepared, demo = checkout / "prepared/demo", checkout / "runs/demo"
    for name in ("tokenizer/tokenizer.model", "stdlib_train.bin", "stdlib_validation.idx",
                 "manifest.json"):  # fmt: skip
        assert (prepared / name).is_file()
    for name in ("config.yaml", "ds_config.json", "train.log", "metrics.jsonl", "validation.jsonl",
                 "checkpoints/latest", "checkpoints/step_00000004/meta.json",
                 "checkpoints/step_00000004/shard_00001.safetensors",
                 "checkpoints/step_00000004/tokenizer/tokenizer.model",
                 "evals/step_00000004/perplexity.json", "evals/step_00000004/perplexity.png",
                 "evals/step_00000004/needle.json", "evals/step_00000004/needle.png",
                 "evals/step_00000004/attention_span.json",
                 "evals/step_00000004/attention_span.png",
                 "evals/step_00000004/report.html", "hf/step_00000004/config.json",
                 "hf/step_00000004/model.safetensors",
                 "hf/step_00000004/README.md"):  # fmt: skip
        assert (demo / name).is_file(), name
    assert (demo / "tensorboard").is_dir()
    assert "What this does and does not show:" in output
    assert "\ndef read(path):" in output
    assert re.search(r"^step_00000004  step 4 .*2 ranks, tp 1, pp 1, ZeRO 1", output, re.MULTILINE)
    assert re.search(r"^step_00000004  good", output, re.MULTILINE)
    longer = open_checkpoint(checkout / "runs/demo-1k")
    assert (longer.step, longer.config.train.sequence_length) == (2, 128)
    (snippet,) = set(blocks("python"))
    assert "def read(path):" in run([sys.executable, "-c", smaller(snippet)], checkout)
    own = checkout / "own"
    shutil.copytree(checkout / "configs", own / "configs")
    (own / "prepared").symlink_to(prepared.parent)
    assert ELSEWHERE in commands()
    run(["bash", "-c", smaller(ELSEWHERE)], own)
    assert open_checkpoint(own / "runs/demo").step == 4


SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames node-[1-2]" ] && printf 'node-1\\nnode-2\\n'
"""
SRUN = """#!/bin/bash
# Runs the task once for each of two hosts, here at the same time on this machine.
[ "$1" = --kill-on-bad-exit=1 ] || exit 9
shift
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
wait $first && wait $second
"""


def test_the_slurm_script_makes_one_run_of_all_hosts(tmp_path: Path, checkout: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    (checkout / ".venv").symlink_to(Path(sys.executable).parents[1])
    config = write_config(tmp_path, num_steps=2)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    variables = {
        "PATH": path,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_GPUS_ON_NODE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(unused_port()),
    }
    script = ["bash", "launch/slurm.sbatch", str(config), "train.checkpoint_interval=2"]
    output = run(script, checkout, **variables)
    assert "2 ranks, ZeRO stage 1" in output
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]
    assert open_checkpoint(tmp_path / "run").meta["layout"]["world_size"] == 2
    assert not list((checkout / "runs").glob(".hostfile*"))
