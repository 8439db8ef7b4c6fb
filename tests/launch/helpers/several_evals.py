"""Several evals, one after another, by the ranks of one start: JOBS.json [--local_rank N].

Each job is {"eval_model", "engine", "eval", "tp", "overrides", "out"}; with "stop_after", it is
interrupted once so many of its parts are finished.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from alibi_lm.cli.distributed import on_ranks
from alibi_lm.evals.config import SuiteConfig
from alibi_lm.evals.models.base import EvalOptions
from alibi_lm.evals.models.resolve import resolve_model
from alibi_lm.evals.models.sharded import EvalRanks
from alibi_lm.evals.parts import Part, Parts
from alibi_lm.evals.registry import EVALS
from alibi_lm.evals.results import evaluate
from alibi_lm.evals.suite import read_suite
from alibi_lm.parallel.mesh import make_mesh
from alibi_lm.utils.errors import UserInterrupt
from alibi_lm.utils.logging import console


@contextmanager
def interrupted_after(num_parts: int | None) -> Iterator[None]:
    run_part = Parts.run

    def run(parts: Parts, *arguments: Any) -> Part:
        if len(parts._parts) == num_parts:
            raise KeyboardInterrupt
        return run_part(parts, *arguments)

    try:
        with patch.object(Parts, "run", run):
            yield
    except UserInterrupt as interrupt:
        console.info(str(interrupt))


def main() -> None:
    jobs = next(argument for argument in sys.argv[1:] if argument.endswith(".json"))
    flag = [a.partition("=")[2] for a in sys.argv[1:] if a.startswith("--local_rank=")]

    def work(_: SuiteConfig, ranks: EvalRanks) -> None:
        for job in json.loads(Path(jobs).read_text()):
            mesh = make_mesh(job["tp"])
            shared = EvalRanks(ranks.rank, mesh.tp, mesh.dp)
            suite = read_suite(None, job["overrides"])
            choices = EvalOptions.of(suite, job["engine"], Path(job["out"]), shared)
            eval_model = resolve_model(job["eval_model"], choices)
            with interrupted_after(job.get("stop_after")):
                evaluate(EVALS[job["eval"]], eval_model, getattr(suite, job["eval"]))

    on_ranks(lambda: read_suite(None), work, int(flag[0]))


if __name__ == "__main__":
    main()
