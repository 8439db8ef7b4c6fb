"""A schedule and a metric writer of a package outside the repository, chosen in YAML by name."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from alibi_lm.config import load_config
from alibi_lm.train import schedule
from alibi_lm.train.monitoring.writers import open_writers
from alibi_lm.train.schedule import learning_rate
from alibi_lm.utils import plugins
from alibi_lm.utils.errors import ConfigError

PACKAGE = """
def halves(config, step):
    return config.learning_rate / 2 ** (step - config.warmup_steps)


class Lines:
    def __init__(self, config, start_step):
        self.seen = [("start", start_step)]

    def hyperparameters(self, config):
        self.seen.append(("steps", config.train.num_steps))
"""
ENTRY_POINTS = """[alibi_lm.schedules]
halves = their_package:halves
[alibi_lm.metric_writers]
lines = their_package:Lines
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `pip install` puts into site-packages for a package of one file."""
    (tmp_path / "their_package.py").write_text(PACKAGE)
    metadata = tmp_path / "their_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their_package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    plugins.plugins.cache_clear()
    schedule._schedule.cache_clear()
    yield
    sys.modules.pop("their_package", None)
    plugins.plugins.cache_clear()
    schedule._schedule.cache_clear()


def config_file(tmp_path: Path, train: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"run: {{dir: {tmp_path / 'run'}}}\n"
        "data: {corpora: [{prefix: a}]}\n"
        f"train: {{warmup_steps: 2, learning_rate: 1.0, {train}}}\n"
    )
    return path


@pytest.mark.usefixtures("installed")
def test_a_schedule_of_another_package(tmp_path: Path) -> None:
    train = load_config(config_file(tmp_path, "schedule: halves")).train
    assert [learning_rate(train, step) for step in range(5)] == [0.5, 1.0, 1.0, 0.5, 0.25]


@pytest.mark.usefixtures("installed")
def test_a_metric_writer_of_another_package(tmp_path: Path) -> None:
    config = load_config(config_file(tmp_path, "metric_writers: [lines], num_steps: 7"))
    (writer,) = open_writers(config, 3)
    assert writer.seen == [("start", 3), ("steps", 7)]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("installed")
def test_a_misspelled_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.schedule = halve: .*; did you mean halves\?"):
        load_config(config_file(tmp_path, "schedule: halve"))
    with pytest.raises(ConfigError, match=r"metric_writers.0 = line: .*; did you mean lines\?"):
        load_config(config_file(tmp_path, "metric_writers: [line]"))


def test_without_the_package_the_name_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="install what adds it to alibi_lm.schedules"):
        load_config(config_file(tmp_path, "schedule: halves"))
