"""Several evals, one after another, by the ranks of one start: JOBS.json [--local_rank N].

Each job is {"eval_model", "engine", "eval", "tp", "overrides", "out"}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from alibi_lm.cli.distributed import on_ranks
from alibi_lm.evals.config import SuiteConfig
from alibi_lm.evals.models.base import EvalOptions
from alibi_lm.evals.models.resolve import resolve_model
from alibi_lm.evals.models.sharded import EvalRanks
from alibi_lm.evals.registry import EVALS
from alibi_lm.evals.results import evaluate
from alibi_lm.evals.suite import read_suite
from alibi_lm.parallel.mesh import make_mesh


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
            evaluate(EVALS[job["eval"]], eval_model, getattr(suite, job["eval"]))

    on_ranks(lambda: read_suite(None), work, int(flag[0]))


if __name__ == "__main__":
    main()
