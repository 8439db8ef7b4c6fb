"""What TensorBoard and Weights & Biases get."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from alibi_lm.config import Config
from alibi_lm.config_loading import build
from alibi_lm.train.engine.base import StepResult
from alibi_lm.train.monitoring.metrics import Metrics
from alibi_lm.train.monitoring.writers import check_writers, open_writers
from alibi_lm.utils.errors import ConfigError


def config(run: Path, **train: Any) -> Config:
    return build(Config, {
        "run": {"dir": str(run)},
        "data": {"corpora": [{"prefix": "x"}], "validation": ["y"]},
        "model": {"vocab_size": 9},
        "train": {"sequence_length": 64, "seed": 3, "validation_interval": 5, **train},
    })  # fmt: skip


def report(config: Config, first: int, last: int, start: int = 0) -> None:
    """Steps `first` to `last` of a run that resumes from step `start`."""
    metrics = Metrics(Path(config.run.dir), 10, start, open_writers(config, start))
    for step in range(first, last + 1):
        result = StepResult(5.0 - step / 10, grad_norm=1.0, learning_rate=1e-3, skipped=False)
        metrics.log(step, result, tokens=step * 512, tokens_per_step=512, flops_per_token=1e6,
                    peak_flops=1e12)  # fmt: skip
    metrics.validation(last, {64: 0.0})
    metrics.close()


def test_tensorboard_gets_curves_and_hyperparameters(tmp_path: Path) -> None:
    report(config(tmp_path), 1, 2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {
        "train/loss",
        "train/grad_norm",
        "train/lr",
        "speed/tokens_per_second",
        "speed/mfu",
        "memory/gib",
        "validation/loss_64",
        "validation/perplexity_64",
    }
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]
    assert events.Scalars("validation/perplexity_64")[0].value == 1.0
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    started = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    values = {key: value.number_value or value.string_value or value.bool_value
              for key, value in started.hparams.items()}  # fmt: skip
    assert values["train.seed"] == 3
    assert values["train.learning_rate"] == 1e-3
    assert values["model.architecture"] == "mpt"
    assert values["train.wandb"] == "None"


class StandIn(ModuleType):
    """The calls that the package `wandb` gets."""

    class Error(Exception):
        """As the package's."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.util.spec_from_loader("wandb", None)
        self.calls: list[tuple[str, Any]] = []
        self.fails = ""

    def Settings(self, **values: Any) -> dict[str, Any]:  # noqa: N802 (the package's own name)
        return values

    def init(self, **values: Any) -> Any:
        if self.fails:
            raise self.Error(self.fails)
        self.calls.append(("init", values))

        def called(name: str) -> Any:
            return lambda *values, **named: self.calls.append((name, values or named))

        config = SimpleNamespace(update=lambda values, **_: self.calls.append(("config", values)))
        return SimpleNamespace(url="https://wandb.example/run", offline=False, config=config,
                               log=called("log"), define_metric=called("axis"),
                               finish=lambda: self.calls.append(("finish", {})))  # fmt: skip


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_curves_and_hyperparameters_and_goes_on_after_a_stop(
    tmp_path: Path, package: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(tmp_path / "run", wandb={"project": "linear-biases", "group": "seeds"})
    check_writers(settings)
    report(settings, 1, 4)
    report(settings, 3, 5, start=2)
    starts = [values for name, values in package.calls if name == "init"]
    assert [(v["project"], v["group"], v["entity"], v["name"]) for v in starts] == (
        2 * [("linear-biases", "seeds", None, "run")]
    )
    assert starts[0]["id"] == starts[1]["id"] == json.loads(
        (tmp_path / "run" / "wandb.json").read_text())["id"]  # fmt: skip
    assert starts[1]["resume"] == "allow"
    given = [values for name, values in package.calls if name == "config"]
    assert given[0]["train.seed"] == 3
    points = [values[0] for name, values in package.calls if name == "log"]
    losses = [(point["step"], point["train/loss"]) for point in points if "train/loss" in point]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 3, 4, 5]
    assert losses[0][1] == pytest.approx(4.9)
    assert {"step": 4, "validation/loss_64": 0.0, "validation/perplexity_64": 1.0} in points
    assert [name for name, _ in package.calls].count("finish") == 2
    assert "wandb https://wandb.example/run" in capsys.readouterr().out


def test_without_wandb_in_the_config_it_is_not_called(tmp_path: Path, package: StandIn) -> None:
    report(config(tmp_path), 1, 1)
    assert package.calls == []
    assert not (tmp_path / "wandb.json").exists()


def test_a_server_that_cannot_be_reached_is_one_line(tmp_path: Path, package: StandIn) -> None:
    package.fails = "no API key\n configured"
    with pytest.raises(ConfigError, match="wandb cannot start .no API key configured.; log in"):
        open_writers(config(tmp_path, wandb={"project": "p"}), 0)


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alibi_lm.train.monitoring.writers.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_writers(config(tmp_path, wandb={"project": "p"}))
    assert str(caught.value) == (
        "train.wandb.project = p: needs the package wandb, which is not installed; "
        "pip install wandb, or leave train.wandb out"
    )
    check_writers(config(tmp_path))
    with pytest.raises(ConfigError, match="train.wandb.project = : is empty"):
        config(tmp_path, wandb={"project": " "})


def test_the_package_itself_writes_a_run_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the optional extra `wandb` is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = config(tmp_path / "run", wandb={"project": "linear-biases"})
    report(settings, 1, 4)
    report(settings, 3, 5, start=2)
    written = list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(written) == 2
    assert all(b"train/loss" in path.read_bytes() for path in written)
    identity = json.loads((tmp_path / "run" / "wandb.json").read_text())["id"]
    assert all(identity in path.name for path in written)
