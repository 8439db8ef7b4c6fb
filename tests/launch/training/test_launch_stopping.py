"""Asked to stop, four ranks (2 data-parallel x 2 tensor-parallel) save the same step and leave."""

import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from comparing import assert_same_states, curve, reaches
from launching import RECORDING, launch, launch_and, launcher_of, write_config

from alibi_lm.checkpoint.folder import verify
from alibi_lm.checkpoint.step import open_checkpoint
from alibi_lm.utils.errors import EXIT_STOPPED

RANKS = 4
LAYOUT = "parallel.tp=2"

# Who is asked and how; the exit code of the `deepspeed` command then.
WAYS = {
    "SIGTERM to a rank": EXIT_STOPPED,
    "SIGUSR1 to a rank": EXIT_STOPPED,
    "SIGTERM to the launcher": 1,
    "STOP": EXIT_STOPPED,
}


def ask(way: str, run: Path, chooser: random.Random) -> Callable[[list[int]], None]:
    """What asks a run to stop, given the process ids of its ranks."""

    def act(pids: list[int]) -> None:
        assert len(pids) == RANKS
        if way == "STOP":
            (run / "STOP").touch()
        elif way == "SIGTERM to the launcher":
            os.kill(launcher_of(pids), signal.SIGTERM)
        else:
            os.kill(chooser.choice(pids), getattr(signal, way.partition(" ")[0]))

    return act


def exit_codes(folder: Path) -> list[int]:
    """Every rank's exit code; the records are taken away."""
    codes = []
    for rank in range(RANKS):
        record = folder / f"exit_{rank}"
        codes.append(int(record.read_text()))
        record.unlink()
    return codes


def stop_by_each_way_in_turn(folder: Path, seed: int, forked: Sequence[str]) -> None:
    """One run, stopped in every way, each start going on from the last; some in forked ranks."""
    chooser = random.Random(seed)
    config, run = write_config(folder, num_steps=5000, checkpoint_interval=5000), folder / "run"
    done = 0
    for way in chooser.sample(list(WAYS), len(WAYS)):
        code, output = launch_and(
            config,
            LAYOUT,
            when=reaches(run, chooser.randint(2, 6)),
            then=ask(way, run, chooser),
            ranks=RANKS,
            program=RECORDING,
            forked=way in forked,
        )
        assert code == WAYS[way], output
        assert exit_codes(folder) == [EXIT_STOPPED] * RANKS, output
        assert output.count("stopped by") == 1, output
        checkpoint = open_checkpoint(run)
        assert verify(checkpoint.folder)["step"] == checkpoint.step == curve(run)[-1][0] > done
        assert f"after step {checkpoint.step:,};" in output
        assert (checkpoint.meta["layout"]["dp"], checkpoint.meta["layout"]["tp"]) == (2, 2)
        assert not (run / "STOP").exists()
        assert not list((run / "checkpoints").glob(".partial*"))
        done = checkpoint.step


@pytest.mark.parametrize(
    ("seed", "forked"),
    [
        (0, ["SIGTERM to a rank", "SIGUSR1 to a rank", "STOP"]),
        pytest.param(1, [], marks=pytest.mark.slow),
        pytest.param(2, [], marks=pytest.mark.slow),
    ],
)
def test_four_ranks_asked_in_any_way_save_together_and_go_on_in_the_same_bits(
    seed: int, forked: list[str], tmp_path: Path
) -> None:
    plain, stopped = tmp_path / "a", tmp_path / "b"
    for folder in (plain, stopped):
        folder.mkdir()
    stop_by_each_way_in_turn(stopped, seed, forked)
    last = f"train.num_steps={open_checkpoint(stopped / 'run').step}"
    launch(write_config(plain, checkpoint_interval=5000), LAYOUT, last, ranks=RANKS)
    assert curve(stopped / "run") == curve(plain / "run")
    assert_same_states(plain / "run", stopped / "run", tolerance=0)
