"""From every layout to every other: half the steps in one, the rest in another."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from launching import REPOSITORY, VOCAB_SIZE, finished, metrics, start_forked, write_config

pytestmark = pytest.mark.slow
SCRIPT = REPOSITORY / "tests" / "launch" / "helpers" / "several_runs.py"
HALF, WHOLE = 5, 10


@dataclass(frozen=True)
class Layout:
    ranks: int
    tp: int = 1
    pp: int = 1
    stage: int = 1

    def overrides(self) -> list[str]:
        return [
            f"parallel.tp={self.tp}",
            f"parallel.pp={self.pp}",
            f"deepspeed.zero_optimization.stage={self.stage}",
        ]


LAYOUTS = {
    "one process": Layout(1, stage=0),
    "dp2 ZeRO-1": Layout(2),
    "dp2 ZeRO-3": Layout(2, stage=3),
    "tp2": Layout(2, tp=2),
    "pp2": Layout(2, pp=2),
    "tp2 x pp2": Layout(4, tp=2, pp=2, stage=0),
    "dp2 x tp2 x pp2": Layout(8, tp=2, pp=2),
}
SHAPES: dict[str, dict[str, Any]] = {
    "mpt": {"num_kv_heads": 2},
    "bloom": {
        "architecture": "bloom",
        "tied_embeddings": False,
        "num_kv_heads": 1,
        "num_layers": 3,
    },
}
Steps = list[tuple[float, float]]


def write_configs(folder: Path) -> dict[str, Path]:
    """One config a shape; each job gives its own run.dir."""
    configs = {}
    for shape, model in SHAPES.items():
        (folder / shape).mkdir()
        path = write_config(folder / shape, checkpoint_interval=HALF, num_steps=WHOLE)
        raw = yaml.safe_load(path.read_text())
        raw["model"] |= {"hidden_size": 32, "vocab_size": VOCAB_SIZE + 1} | model
        raw["train"] |= {"learning_rate": 1e-3, "gradient_clipping": 0.5}
        path.write_text(yaml.safe_dump(raw))
        configs[shape] = path
    return configs


def run_all(folder: Path, layout: Layout, jobs: list[dict[str, Any]]) -> None:
    """One start of the layout's ranks for all jobs."""
    path = folder / f"jobs_{len(list(folder.glob('jobs_*')))}.json"
    path.write_text(json.dumps(jobs))
    finished(start_forked(SCRIPT, str(path), ranks=layout.ranks), seconds=3000)


def job(config: Path, layout: Layout, out: Path, steps: int, **more: Any) -> dict[str, Any]:
    overrides = [*layout.overrides(), f"run.dir={out}", f"train.num_steps={steps}"]
    return {"config": str(config), "overrides": overrides, "copy_from": None,
            "drop_moments": False} | more  # fmt: skip


def steps_of(run: Path) -> Steps:
    return [(line["loss"], line["grad_norm"]) for line in metrics(run)]


def furthest(found: Steps, expected: Steps) -> float:
    pairs = zip(found, expected, strict=True)
    return max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first half in every layout, and the whole on one process."""
    folder = tmp_path_factory.mktemp("matrix")
    configs = write_configs(folder)
    for name, layout in LAYOUTS.items():
        jobs = [
            job(config, layout, folder / f"half/{name}/{shape}", HALF)
            for shape, config in configs.items()
        ]
        if layout.ranks == 1:
            jobs += [
                job(config, layout, folder / f"whole/{shape}", WHOLE)
                for shape, config in configs.items()
            ]
        run_all(folder, layout, jobs)
    return folder


@pytest.mark.parametrize("target", LAYOUTS)
def test_every_other_layout_goes_on(target: str, folder: Path) -> None:
    layout = LAYOUTS[target]
    places = {
        (source, shape): folder / f"on/{target}/{source}/{shape}"
        for source in LAYOUTS
        for shape in SHAPES
    }
    jobs = [
        job(
            folder / shape / "config.yaml", layout, out, WHOLE,
            copy_from=str(folder / f"half/{source}/{shape}"),
        )
        for (source, shape), out in places.items()
    ]  # fmt: skip
    without = folder / f"on/{target}/without moments"
    jobs.append(jobs[0] | {
        "overrides": [*layout.overrides(), f"run.dir={without}", f"train.num_steps={WHOLE}"],
        "drop_moments": True,
    })  # fmt: skip
    run_all(folder, layout, jobs)
    for (source, shape), out in places.items():
        expected = steps_of(folder / f"whole/{shape}")
        assert expected[0][0] - expected[-1][0] > 0.05
        assert furthest(steps_of(out), expected) <= 1e-5, f"{source} -> {target}, {shape}"
    # Adam's moments are among what is carried over: dropping them shows.
    expected = steps_of(folder / "whole/mpt")
    assert furthest(steps_of(without)[: HALF + 1], expected[: HALF + 1]) <= 1e-5
    assert furthest(steps_of(without), expected) > 1e-3
