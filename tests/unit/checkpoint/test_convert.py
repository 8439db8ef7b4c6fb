"""Converted checkpoints: the same bits in another cutting, in little memory, or nothing at all."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import save_file

from alibi_lm.checkpoint import convert as module
from alibi_lm.checkpoint.convert import convert
from alibi_lm.checkpoint.folder import verify, write_meta
from alibi_lm.checkpoint.fragments import KINDS, FragmentReader, fragment_key
from alibi_lm.cli.main import main
from alibi_lm.parallel.shard import StridedSlice
from alibi_lm.utils.errors import CheckpointError
from alibi_lm.utils.files import sha256

SHAPES = {"embedding.weight": (50, 16), "block.weight": (24, 16), "norm.bias": (16,)}


def write_step(run: Path, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Path:
    """A checkpoint of two ranks, matrices split by columns, with moments and a tokenizer."""
    folder = run / "checkpoints/step_00000007"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer/tokenizer.model").write_bytes(b"any bytes")
    (folder / "config.yaml").write_text("run: {dir: a}\n", encoding="utf-8")
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    generator = torch.Generator().manual_seed(1)
    for name, shape in shapes.items():
        for kind in KINDS:
            tensor = torch.randn(shape, generator=generator)
            if tensor.dim() == 1:
                shards[0][fragment_key(name, kind, 0)] = tensor
                continue
            half = shape[1] // 2
            for rank, part in enumerate(tensor.split(half, 1)):
                where = StridedSlice(rank * half, part.numel(), half, shape[1])
                shards[rank][fragment_key(name, kind, where)] = part.flatten().clone()
    for rank, tensors in enumerate(shards):
        save_file(tensors, folder / f"shard_{rank:05d}.safetensors")
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    meta: dict[str, Any] = {
        "step": 7, "tokens": 70, "consumed_samples": 7, "optimizer_updates": 7,
        "parameters": {name: list(shape) for name, shape in shapes.items()},
        "layout": {"world_size": 2, "dp": 1, "tp": 2, "zero_stage": 0}, "saved_at": "some time",
        "shards": [f"shard_{rank:05d}.safetensors" for rank in range(2)], "files": files,
    }  # fmt: skip
    write_meta(folder, meta)
    return folder


def tensors_of(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    with FragmentReader(folder, verify(folder)) as reader:
        return {(n, kind): t for kind in reader.kinds for n, t in reader.tensors(kind)}


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("num_shards", [1, 3, 7])
def test_the_same_bits_in_as_many_files_as_asked_for(
    num_shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 13)
    folder, out = write_step(tmp_path / "run"), tmp_path / "out"
    before = files_of(tmp_path)
    done = CliRunner().invoke(
        main,
        ["checkpoint", "convert", str(folder.parents[1]), str(out), "--shards", str(num_shards)],
    )
    assert done.exit_code == 0, done.output
    assert files_of(tmp_path).items() >= before.items()
    old, new = verify(folder), verify(out)
    assert {key for key in old if old[key] != new[key]} == {"shards", "files"}
    assert (out / "tokenizer/tokenizer.model").read_bytes() == b"any bytes"
    first, second = tensors_of(folder), tensors_of(out)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    shards = sorted(out.glob("*.safetensors"))
    assert [path.name for path in shards] == new["shards"]
    sizes = []
    for path in shards:
        with safe_open(path, framework="pt") as file:
            keys = list(file.keys())
            sizes.append(sum(file.get_tensor(key).numel() for key in keys))
            assert all(":" not in key for key in keys)
    assert len(shards) == num_shards
    assert max(sizes) - min(sizes) <= 1
    assert not list(tmp_path.glob(".partial*"))


def test_weights_only(tmp_path: Path) -> None:
    folder, out = write_step(tmp_path / "run"), tmp_path / "step_00000007"
    convert(folder, out, num_shards=2, weights_only=True)
    whole = tensors_of(folder)
    assert {key: t.tolist() for key, t in tensors_of(out).items()} == {
        key: tensor.tolist() for key, tensor in whole.items() if key[1] == "param"
    }
    assert verify(out)["weights_only"] is True
    convert(out, tmp_path / "again")
    assert verify(tmp_path / "again")["weights_only"] is True


def test_what_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = write_step(tmp_path / "run")
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="there: is there already"):
        convert(folder, tmp_path / "there")
    with pytest.raises(CheckpointError, match="is the name of another step than 7"):
        convert(folder, tmp_path / "step_00000008")
    shard = folder / "shard_00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
    with pytest.raises(CheckpointError, match=r"shard_00001\.safetensors: does not match"):
        convert(folder, tmp_path / "out")
    shard.write_bytes(content)
    (folder / "meta.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"meta\.json: is damaged"):
        convert(folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "there"]


def test_a_write_that_goes_wrong_is_found_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_step(tmp_path / "run")
    write = module._write_shard

    def write_and_flip(reader: Any, parts: Any, path: Path) -> dict[str, Any]:
        facts = write(reader, parts, path)
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        return facts

    monkeypatch.setattr(module, "_write_shard", write_and_flip)
    with pytest.raises(CheckpointError, match=r"shard_00000\.safetensors: does not match"):
        convert(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_a_killed_conversion_left_does_not_hinder(tmp_path: Path) -> None:
    folder, out = write_step(tmp_path / "run"), tmp_path / "out"
    left = tmp_path / ".partial_out"
    (left / "tokenizer").mkdir(parents=True)
    (left / "stray.safetensors").write_bytes(b"x")
    convert(folder, out)
    verify(out)
    assert not (out / "stray.safetensors").exists()
    assert not left.exists()


MEASURE = """
import json, sys
from pathlib import Path
from alibi_lm.checkpoint import convert
from alibi_lm.checkpoint.fragments import FragmentReader

def anonymous():
    # Not the pages of mapped files, which the system takes back when it needs them.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

peak, calls, read = 0, 0, FragmentReader.read
def measured(*arguments):
    global peak, calls
    result = read(*arguments)
    peak, calls = max(peak, anonymous()), calls + 1
    return result

FragmentReader.read = measured
start = anonymous()
convert.convert(Path(sys.argv[1]), Path(sys.argv[2]), num_shards=int(sys.argv[3]))
end = anonymous()
print(json.dumps({"peak": max(peak, end) - start, "calls": calls}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured by /proc")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    shapes = {f"layer_{number}.weight": (2048, 1024) for number in range(4)}
    folder = write_step(tmp_path / "run", shapes)
    num_bytes = 4 * 3 * 4 * 2048 * 1024
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), str(tmp_path / "out"), "1"],
        capture_output=True,
        text=True,
        check=True,
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["calls"] * module._AT_ONCE * 4 == num_bytes
    # A quarter of the checkpoint, though it is written as one shard: not a tensor with its moments.
    assert 0 < measured["peak"] < num_bytes / 4, measured
    first, second = tensors_of(folder), tensors_of(tmp_path / "out")
    assert all(torch.equal(first[key], second[key]) for key in first)
