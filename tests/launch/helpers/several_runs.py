"""Several runs, one after another, by the ranks of one start: JOBS.json [--local_rank N].

Each job is {"config": path, "overrides": [...], "copy_from": folder or null, "drop_moments": bool}.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from alibi_lm.config_loading import apply_overrides, load_yaml
from alibi_lm.parallel.process_group import join_process_group
from alibi_lm.train.engine.base import Engine
from alibi_lm.train.environment import launcher_environment
from alibi_lm.train.run import pretrain
from alibi_lm.utils.logging import console

load = Engine.load


def load_weights_only(engine: Engine, folder: Path, meta: dict[str, Any], **_: Any) -> None:
    load(engine, folder, meta, weights_only=True)


def main() -> None:
    jobs = next(argument for argument in sys.argv[1:] if argument.endswith(".json"))
    flag = [a.partition("=")[2] for a in sys.argv[1:] if a.startswith("--local_rank=")]
    os.environ.update(launcher_environment(os.environ, int(flag[0]) if flag else 0))
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    console.muted = rank != 0
    join_process_group(local_rank)
    for job in json.loads(Path(jobs).read_text()):
        if job["copy_from"] and rank == 0:
            run = apply_overrides(load_yaml(job["config"]), job["overrides"])["run"]["dir"]
            shutil.copytree(job["copy_from"], run)
        dist.barrier()
        Engine.load = load_weights_only if job["drop_moments"] else load  # type: ignore[assignment]
        assert pretrain(job["config"], job["overrides"], local_rank, os.environ["MASTER_ADDR"])
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
