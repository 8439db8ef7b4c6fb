"""Finding and verifying the checkpoints of a run."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from alibi_lm.checkpoint.folder import (
    damage,
    read_meta,
    resolve_step,
    step_folders,
    verify,
    write_meta,
)
from alibi_lm.cli.main import main
from alibi_lm.train.checkpointing.save import remove_old
from alibi_lm.utils.errors import CheckpointError
from alibi_lm.utils.files import sha256


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


def test_a_hugging_face_folder_is_distinguished_from_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "hf/step_00000007"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is a Hugging Face folder.*alibi-lm import"):
        resolve_step(folder)
    with pytest.raises(CheckpointError, match="is for evals.*alibi-lm import"):
        resolve_step(Path("hf:bigscience/bloom-560m"))


def test_retention_never_deletes_the_newest_for_a_damaged_future(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8, 100):
        make(tmp_path, step)
    removed = remove_old(tmp_path, newest=8, keep_last=1, keep_every=4)
    assert [int(folder.name[5:]) for folder in removed] == [2, 6]
    assert [int(folder.name[5:]) for folder in step_folders(tmp_path)] == [4, 8, 100]


def test_retention_does_not_count_what_was_found_damaged(tmp_path: Path) -> None:
    for step in (2, 4, 5, 6):
        make(tmp_path, step)
    damaged = {"step_00000005"}
    removed = remove_old(tmp_path, newest=6, keep_last=2, keep_every=None, damaged=damaged)
    assert [int(folder.name[5:]) for folder in removed] == [2]


def signed(run: Path, step: int) -> Path:
    """A checkpoint of the current format, with what `checkpoint list` shows."""
    folder = make(run, step)
    meta = json.loads((folder / "meta.json").read_text())
    facts = {
        "tokens": 8 * step, "saved_at": "2026-01-01T00:00:00Z", "loss_scaler": {"cur_scale": 0.1},
        "layout": {"world_size": 2, "tp": 1, "zero_stage": 1},
    }  # fmt: skip
    write_meta(folder, meta | facts)
    return folder


def test_any_flipped_bit_or_missing_end_of_meta_is_found(tmp_path: Path) -> None:
    folder = signed(tmp_path, 1)
    path = folder / "meta.json"
    content = path.read_bytes()
    assert read_meta(folder)["format"] == 3
    assert verify(folder)["loss_scaler"] == {"cur_scale": 0.1}
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"meta\.json"):
            read_meta(folder)
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"meta\.json"):
            read_meta(folder)


@pytest.mark.parametrize("number", [1, 2])
def test_checkpoints_from_before_the_digest_stay_readable(number: int, tmp_path: Path) -> None:
    folder = make(tmp_path, 1)
    meta = json.loads((folder / "meta.json").read_text()) | {"format": number}
    (folder / "meta.json").write_text(json.dumps(meta))
    assert verify(folder) == meta


def said(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and output of `alibi-lm checkpoint ...`."""
    done = CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])
    return done.exit_code, done.output


def test_list_and_verify_name_everything_that_is_damaged(tmp_path: Path) -> None:
    folders = [signed(tmp_path, step) for step in (1, 2, 3, 4, 5)]
    latest = tmp_path / "checkpoints/latest"
    latest.write_text("step_00000005\n")
    assert said("verify", tmp_path) == (0, "".join(f"{f.name}  good\n" for f in folders))
    assert said("verify", folders[1]) == (0, "step_00000002  good\n")
    code, listed = said("list", tmp_path)
    assert code == 0
    assert [line.split()[0] for line in listed.splitlines()] == [f.name for f in folders]
    assert said("list", folders[1])[1].startswith("step_00000002  step 2  16 tokens")

    (folders[1] / "meta.json").unlink()
    (folders[2] / "meta.json").write_text("{}")
    (folders[3] / "config.yaml").unlink()
    (folders[3] / "shard_00000.safetensors").write_bytes(b"")
    latest.unlink()
    code, text = said("verify", tmp_path)
    assert code == 2
    assert "step_00000001  good" in text
    assert "step_00000005  good" in text
    for part in (
        f"{folders[1]}/meta.json: is missing",
        f"{folders[2]}/meta.json: is damaged",
        f"{folders[3]}/config.yaml: is missing",
        f"{folders[3]}/shard_00000.safetensors: has 0 of 100 bytes",
        f"{latest}: is missing",
    ):
        assert part in text, part
    code, text = said("list", tmp_path)
    assert code == 2
    assert "step_00000004  step 4" in text
    assert f"{folders[1]}/meta.json" in text
    assert f"{folders[2]}/meta.json" in text
    assert said("verify", folders[1])[0] == said("list", folders[2])[0] == 2
    assert said("verify", folders[0])[0] == 0


def test_a_file_that_cannot_be_read_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = signed(tmp_path, 1)

    def fail(path: Path, *_: object) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("alibi_lm.checkpoint.folder.sha256", fail)
    with pytest.raises(CheckpointError, match=r"config\.yaml: cannot be read \(Input/output"):
        verify(folder)


def test_a_newer_step_without_its_meta_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [signed(tmp_path, step) for step in (1, 2)]
    (folders[1] / "meta.json").unlink()
    assert resolve_step(tmp_path) == folders[0]
    assert f"{folders[1]}/meta.json is missing" in capsys.readouterr().err


def test_a_meta_of_another_step_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, 2)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"step": 1}))
    with pytest.raises(CheckpointError, match=r"meta\.json"):
        read_meta(folder)
