"""Exports and imports stream: one tensor, or one block, in memory at a time, in any layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from alibi_lm.checkpoint.convert import convert
from alibi_lm.checkpoint.folder import read_meta, write_meta
from alibi_lm.checkpoint.fragments import fragment_key
from alibi_lm.checkpoint.step import Checkpoint, open_checkpoint
from alibi_lm.hf.exporting.exporter import export
from alibi_lm.parallel.shard import StridedSlice
from alibi_lm.utils.files import sha256
from tests.unit.hf.small_step import write_step

MEASURE = """
import json, sys, threading
from pathlib import Path
from alibi_lm.checkpoint.step import open_checkpoint
from alibi_lm.hf.exporting.exporter import export
from alibi_lm.hf.importing.importer import import_folder
from alibi_lm.hf.parity import check
from alibi_lm.hf.parity.transformers_reference import transformers_class

check.IMPORT_LENGTH = 24  # at more tokens, the reference's scores are what memory holds

def anonymous():
    # Not the pages of mapped files, which the system takes back when it needs them.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

peak, done = 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())

transformers_class("MptForCausalLM")
first, out, parity = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
start = anonymous()
watcher = threading.Thread(target=watch)
watcher.start()
if sys.argv[4] == "export":
    export(open_checkpoint(first), out, parity=parity, shard_bytes=50_000_000)
else:
    import_folder(first, out, parity=parity)
done.set()
watcher.join()
print(json.dumps({"peak": peak - start}))
"""


def measured(first: Path, out: Path, parity: str, what: str) -> int:
    """Bytes of anonymous memory that it took at its peak, beyond what was there before."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(first), str(out), parity, what],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(json.loads(done.stdout.splitlines()[-1])["peak"])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured by /proc")
@pytest.mark.parametrize("architecture", ["mpt", "bloom"])
def test_memory_is_that_of_a_block(architecture: str, tmp_path: Path) -> None:
    model: dict[str, Any] = {"architecture": architecture, "num_heads": 8, "num_layers": 48,
                             "hidden_size": 384,
                             "initializer_range": 0.02}  # fmt: skip
    step = write_step(tmp_path / "run", model)
    num_bytes = 4 * sum(tensor.numel() for tensor in step.weights().values())
    peaks = {
        "export": measured(tmp_path / "run", tmp_path / "out", "blockwise", "export"),
        "weights": measured(tmp_path / "run", tmp_path / "bits", "weights", "export"),
        "import": measured(tmp_path / "out", tmp_path / "again", "blockwise", "import"),
    }
    print(f"{architecture}: {num_bytes / 2**20:.0f} MiB of weights,", {
        name: f"{peak / 2**20:.0f} MiB" for name, peak in peaks.items()})  # fmt: skip
    assert all(0 < peak < num_bytes / 4 for peak in peaks.values()), (peaks, num_bytes)


def split_by_columns(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """The same checkpoint as two tensor-parallel ranks would have written it."""
    meta = read_meta(checkpoint.folder)
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, tensor in checkpoint.weights().items():
        if tensor.dim() == 1:
            shards[1][fragment_key(name, "param", 0)] = tensor
            continue
        half = tensor.shape[1] // 2
        for rank, part in enumerate(tensor.split(half, 1)):
            where = StridedSlice(rank * half, part.numel(), half, tensor.shape[1])
            shards[rank][fragment_key(name, "param", where)] = part.flatten().clone()
    folder.mkdir(parents=True)
    for name, facts in meta["files"].items():
        if name not in meta["shards"]:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes((checkpoint.folder / name).read_bytes())
            assert facts["sha256"] == sha256(folder / name)
    meta["shards"] = ["shard_00000.safetensors", "shard_00001.safetensors"]
    for name, tensors in zip(meta["shards"], shards, strict=True):
        save_file(tensors, folder / name)
        path = folder / name
        meta["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    write_meta(folder, meta)
    return open_checkpoint(folder)


@pytest.mark.parametrize("kv_heads", [None, 4])
@pytest.mark.parametrize("architecture", ["mpt", "bloom"])
def test_a_checkpoint_in_any_layout_gives_the_same_folder(
    architecture: str, kv_heads: int | None, tmp_path: Path
) -> None:
    model = {"architecture": architecture, "num_heads": 12, "num_kv_heads": kv_heads}
    first = write_step(tmp_path / "a/run", model)
    place = "run/checkpoints/step_00000007"
    second = split_by_columns(first, tmp_path / "b" / place)
    (tmp_path / "c/run/checkpoints").mkdir(parents=True)
    third = open_checkpoint(convert(second.folder, tmp_path / "c" / place, num_shards=3))
    assert len({step.digest for step in (first, second, third)}) == 3
    folders = []
    for number, step in enumerate((first, second, third)):
        export(step, tmp_path / f"out_{number}", parity="blockwise" if number else "logits",
               shard_bytes=60_000)  # fmt: skip
        folders.append({
            path.name: path.read_bytes() for path in (tmp_path / f"out_{number}").iterdir()
        })  # fmt: skip
    assert folders[1] == folders[2]
    descriptions = {"README.md", "alibi_lm_export.json"}  # these describe the parity check
    whole, blockwise = ({k: v for k, v in f.items() if k not in descriptions} for f in folders[:2])
    assert whole == blockwise
    assert b"one block of\neach in memory" in folders[1]["README.md"]
    assert b"greedy tokens" in folders[0]["README.md"]


def test_the_card_says_that_only_the_weights_were_checked(tmp_path: Path) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 8})
    facts = export(step, tmp_path / "out", parity="weights")
    assert facts["parity"] == {"kind": "weights", "tensors_equal": 14, "logits": []}
    assert "logits were **not** compared" in (tmp_path / "out" / "README.md").read_text()
