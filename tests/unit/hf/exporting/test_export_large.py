"""Exports of models that memory does not hold: peak memory, parity check included."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.hf.large_step import ShardLayout, watched, write_large_step

GIB = 2**30


def big_vocabulary(hidden_size: int, num_layers: int, vocab_size: int) -> dict[str, Any]:
    """BLOOM's proportions: a fifth of the weights is in the embedding, one tensor."""
    return {"architecture": "bloom", "hidden_size": hidden_size, "num_layers": num_layers,
            "num_heads": hidden_size // 80, "vocab_size": vocab_size}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured by /proc")
@pytest.mark.parametrize(
    ("model", "layout", "moments", "parity"),
    [
        (big_vocabulary(960, 20, 60_000), "tp", True, ["--parity", "blockwise"]),
        (big_vocabulary(2560, 34, 250_880), "zero3", False, []),
    ],
    ids=["1GiB", "12GiB"],
)
def test_a_large_export_takes_a_quarter_of_the_model_at_most(
    model: dict[str, Any],
    layout: ShardLayout,
    moments: bool,
    parity: list[str],
    tmp_path: Path,
) -> None:
    """The larger model, 12.4 GiB in fp32, is more than half of a machine of 24 GiB."""
    wanted = 8 * 12 * model["num_layers"] * model["hidden_size"] ** 2  # checkpoint and export
    wanted += 8 * model["vocab_size"] * model["hidden_size"]
    if shutil.disk_usage(tmp_path).free < 1.1 * wanted + 2 * GIB:
        pytest.skip(f"needs {(1.1 * wanted + 2 * GIB) / GIB:.0f} GiB of disk")
    num_bytes = write_large_step(tmp_path / "run", model, 128, layout, moments=moments)
    start = watched(["--version"], tmp_path).peak_bytes
    try:
        seen = watched(["export", str(tmp_path / "run"), str(tmp_path / "out"), *parity], tmp_path)
        facts = json.loads((tmp_path / "out" / "alibi_lm_export.json").read_text())
    finally:
        shutil.rmtree(tmp_path / "run")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    print(f"{num_bytes / GIB:.2f} GiB of weights, peak {seen.peak_bytes / GIB:.2f} GiB, "
          f"{seen.seconds:.0f} s\n{seen.output}{seen.errors}")  # fmt: skip
    assert facts["parity"]["kind"] == "blockwise"
    assert len(facts["parity"]["logits"]) == 2
    assert 0 < start < seen.peak_bytes < num_bytes / 4 + 2 * GIB
