"""Finding and verifying the checkpoints of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from alibi_lm.checkpoint.folder import damage, read_meta, resolve_step, step_folders, verify
from alibi_lm.errors import CheckpointError
from alibi_lm.files import sha256
from alibi_lm.train.saving import remove_old


def make(run: Path, step: int) -> Path:
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "shard_00000.safetensors").write_bytes(bytes(range(100)))
    (folder / "config.yaml").write_text("run: {dir: a}\n")
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in folder.iterdir()
    }
    meta: dict[str, Any] = {"format": 1, "step": step, "files": files}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def test_the_newest_complete_step_counts(tmp_path: Path) -> None:
    for step in (5, 100, 20):
        make(tmp_path, step)
    (tmp_path / "checkpoints/step_00000200").mkdir()
    (tmp_path / "checkpoints/.partial_step_00000300").mkdir()
    assert [int(folder.name[5:]) for folder in step_folders(tmp_path)] == [5, 20, 100]
    newest = tmp_path / "checkpoints/step_00000100"
    assert resolve_step(tmp_path) == newest
    assert resolve_step(newest) == newest
    assert verify(newest)["step"] == 100


@pytest.mark.parametrize("how", ["shorter", "flipped", "gone"])
def test_every_kind_of_damage_is_named(how: str, tmp_path: Path) -> None:
    folder = make(tmp_path, 1)
    shard = folder / "shard_00000.safetensors"
    if how == "gone":
        shard.unlink()
    else:
        content = bytearray(shard.read_bytes())
        content[50] ^= 1
        shard.write_bytes(content[:60] if how == "shorter" else content)
    with pytest.raises(CheckpointError, match="shard_00000.safetensors"):
        verify(folder)
    meta = read_meta(folder)
    parts = [list(damage(folder, meta, part, 2)) for part in range(2)]
    assert sorted(len(part) for part in parts) == [0, 1]


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 99, "files": {}}', '{"format": 1}'])
def test_a_meta_that_cannot_be_used_is_refused(content: str, tmp_path: Path) -> None:
    folder = make(tmp_path, 1)
    (folder / "meta.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"meta\.json"):
        read_meta(folder)


def test_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        resolve_step(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve_step(tmp_path / "nowhere")
    partial = tmp_path / "checkpoints/step_00000007"
    partial.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        resolve_step(partial)


def test_retention_never_deletes_the_newest_for_a_damaged_future(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8, 100):
        make(tmp_path, step)
    removed = remove_old(tmp_path, newest=8, keep_last=1, keep_every=4)
    assert [int(folder.name[5:]) for folder in removed] == [2, 6]
    assert [int(folder.name[5:]) for folder in step_folders(tmp_path)] == [4, 8, 100]


def test_a_meta_of_another_step_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, 2)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"step": 1}))
    with pytest.raises(CheckpointError, match=r"meta\.json"):
        read_meta(folder)
