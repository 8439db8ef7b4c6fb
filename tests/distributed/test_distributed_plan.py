"""What ranks send and hold is what the plan says: counted at the collectives of real training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from started_ranks import needs_fp16, run_ranks

from alibi_lm.config_loading import to_yaml

SCRIPT = Path(__file__).with_name("plan_variants.py")
CONFIG = {
    "run": {"dir": "none"},
    "data": {"corpora": [{"prefix": "none"}]},
    # Large enough that sums of a few numbers do not count; a vocabulary that divides by nothing.
    "model": {"num_layers": 3, "hidden_size": 64, "num_heads": 4, "vocab_size": 203},
    "train": {
        "sequence_length": 32,
        "num_steps": 8,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "precision": "fp32",
        "schedule": "constant",
    },
    "deepspeed": {"zero_optimization": {"reduce_bucket_size": 100_000}},
}
STAGE = "deepspeed.zero_optimization.stage="
ZERO_3 = "deepspeed.zero_optimization.stage3_"
ONCE = "train.global_batch_size=4"
BF16 = "train.precision=bf16"
AGAIN = "train.activation_checkpointing=true"
UNTIED = "model.tied_embeddings=false"
# Nothing gathered ahead, nothing kept that is used again, nothing small kept whole.
TEXTBOOK = [
    f"{ZERO_3}{key}=0"
    for key in ("prefetch_bucket_size", "max_reuse_distance", "param_persistence_threshold")
]
SOME = [f"{ZERO_3}prefetch_bucket_size=20000", f"{ZERO_3}max_reuse_distance=60000",
        f"{ZERO_3}param_persistence_threshold=100"]  # fmt: skip
MQA_BLOOM = ["model.architecture=bloom", "model.num_kv_heads=1"]

# Ranks: what they train in one start. Accumulation is 2 over dp2, and 4 over tp2, without ONCE.
CASES: dict[int, dict[str, list[str]]] = {
    2: {
        "dp2 ZeRO-0": [STAGE + "0"],
        "dp2 ZeRO-1": [STAGE + "1", UNTIED],
        "dp2 ZeRO-1 bf16": [STAGE + "1", BF16],
        "dp2 ZeRO-2": [STAGE + "2"],
        "dp2 ZeRO-3": [STAGE + "3", BF16],
        "dp2 ZeRO-3 textbook": [STAGE + "3", *TEXTBOOK, UNTIED, ONCE],
        "dp2 ZeRO-3 recomputed": [STAGE + "3", *TEXTBOOK, AGAIN],
        "dp2 ZeRO-3 some kept": [STAGE + "3", *SOME, "model.architecture=bloom", ONCE],
        "tp2": ["parallel.tp=2", STAGE + "0"],
        "pp2": ["parallel.pp=2", STAGE + "1"],
        "pp2 recomputed": [
            "parallel.pp=2",
            STAGE + "1",
            AGAIN,
            BF16,
            UNTIED,
            "model.architecture=bloom",
        ],
        "tp2 recomputed": ["parallel.tp=2", STAGE + "1", AGAIN, BF16, *MQA_BLOOM],
    },
    4: {
        "dp2 tp2 ZeRO-1": ["parallel.tp=2", STAGE + "1", BF16, UNTIED],
        "tp2 pp2": ["parallel.tp=2", "parallel.pp=2", STAGE + "1", BF16],
        "dp2 pp2": ["parallel.pp=2", STAGE + "1"],
        "dp2 tp2 ZeRO-3": ["parallel.tp=2", STAGE + "3", *TEXTBOOK, AGAIN, ONCE],
    },
}
MORE: dict[int, dict[str, list[str]]] = {
    3: {
        "pp3": ["parallel.pp=3", STAGE + "1"],
        "pp3 untied": ["parallel.pp=3", STAGE + "0", UNTIED, "train.global_batch_size=2"],
    },
    2: {
        "dp2 ZeRO-1 bf16, immediate": [STAGE + "1", BF16, "deepspeed.bf16.immediate_grad_update=1"],
        "dp2 ZeRO-1 reduced": [
            STAGE + "1",
            "deepspeed.zero_optimization.use_multi_rank_bucket_allreduce=false",
        ],
        "dp2 ZeRO-2 bf16": [STAGE + "2", BF16, "deepspeed.zero_optimization.overlap_comm=true"],
        "dp2 ZeRO-3 some kept, recomputed": [STAGE + "3", *SOME, AGAIN, UNTIED],
        "dp2 ZeRO-3 sinusoidal": [STAGE + "3", *TEXTBOOK, "model.position=sinusoidal"],
        "dp2 ZeRO-3 t5": [STAGE + "3", *SOME, "model.position=t5"],
        "pp2 ZeRO-0": ["parallel.pp=2", STAGE + "0"],
        "tp2 untied": ["parallel.tp=2", STAGE + "1", UNTIED, "model.num_kv_heads=2"],
    },
    4: {
        "dp4 ZeRO-1": [STAGE + "1", BF16, "model.vocab_size=205"],
        "dp4 ZeRO-3": [STAGE + "3", *TEXTBOOK, "model.vocab_size=205"],
        "tp2 pp2 recomputed": ["parallel.tp=2", "parallel.pp=2", STAGE + "0", AGAIN, *MQA_BLOOM],
        "dp2 pp2 bf16": ["parallel.pp=2", STAGE + "1", BF16],
        "tp4 gqa": ["parallel.tp=4", STAGE + "1", "model.num_kv_heads=2"],
        "dp2 tp2 ZeRO-2": ["parallel.tp=2", STAGE + "2", AGAIN],
    },
}
FP16 = {
    "dp2 ZeRO-1 fp16": [STAGE + "1", "train.precision=fp16"],
    "pp2 fp16": ["parallel.pp=2", STAGE + "1", "train.precision=fp16"],
}
KINDS = ("tensor", "pipeline", "pipeline_gathers", "tied", "gradients", "weights")


def train(folder: Path, num_ranks: int, cases: dict[str, list[str]]) -> dict[str, Any]:
    """Start the ranks and wait for them; what they found."""
    (folder / "config.yaml").write_text(to_yaml(CONFIG))
    (folder / "cases.json").write_text(json.dumps(cases))
    found = run_ranks(SCRIPT, folder, num_ranks)
    assert found.keys() == cases.keys()
    return found


@pytest.mark.parametrize("num_ranks", CASES)
def test_ranks_send_and_hold_what_is_planned(num_ranks: int, tmp_path: Path) -> None:
    compare(train(tmp_path, num_ranks, CASES[num_ranks]))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", MORE)
def test_more_ranks_send_and_hold_what_is_planned(num_ranks: int, tmp_path: Path) -> None:
    compare(train(tmp_path, num_ranks, MORE[num_ranks]))


@pytest.mark.slow
@needs_fp16
def test_ranks_in_fp16_send_and_hold_what_is_planned(tmp_path: Path) -> None:
    compare(train(tmp_path, 2, FP16))


def compare(results: dict[str, list[dict[str, Any]]]) -> None:
    for name, ranks in results.items():
        for rank, found in enumerate(ranks):
            where = f"{name}, rank {rank}"
            for kind in KINDS:
                sent, planned = found["sent"].get(kind, 0), found["planned"][kind]
                # Norms, losses and flags are sent over the same groups; 200 bytes are theirs.
                assert sent == pytest.approx(planned, rel=0.05, abs=200), f"{where}: {kind}"
            assert found["sent"].get("other", 0) <= 200, where
            planned, held = found["planned_states"], found["held"]
            assert held["num_parameters"] == found["planned_parameters"], where
            for key in ("weights", "master", "moments", "buffers"):
                assert held[key] == planned[key], f"{where}: {key}"
            least, most = found["gradients_at_least"], planned["gradients"]
            assert least <= held["gradients"] <= most, where
        total = sum(found["held"]["checkpoint"] for found in ranks)
        assert total == ranks[0]["planned_checkpoint"], name
