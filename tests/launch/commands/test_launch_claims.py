"""A small claims suite through its command: trained, measured, decided and resumed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml
from launching import VOCAB_SIZE, alibi_lm, write_corpus

from alibi_lm.checkpoint.step import open_checkpoint


def suite(folder: Path) -> Path:
    corpus = write_corpus(folder / "corpus")
    raw: dict[str, Any] = {
        "results": str(folder / "results"),
        "work": str(folder / "runs"),
        "text": {
            "seeds": [0, 1],
            "lengths": [32, 64, 128],
            "max_tokens": 4000,
            "truncated_context_targets": 50,
            "base": {
                "data": {"corpora": [{"prefix": str(corpus)}], "validation": [str(corpus)]},
                "model": {"num_layers": 1, "hidden_size": 32, "num_heads": 4,
                          "vocab_size": VOCAB_SIZE},
                "train": {"sequence_length": 32, "num_steps": 3, "micro_batch_size": 2,
                          "global_batch_size": 2, "precision": "fp32", "peak_flops": 1e12},
            },
            "models": {"alibi": {}, "sinusoidal": {"model.position": "sinusoidal"}},
        },
    }  # fmt: skip
    path = folder / "claims.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return path


def claims(path: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    return alibi_lm("eval", "claims", path, *arguments, code=code)


def test_a_suite_is_trained_decided_and_resumed(tmp_path: Path) -> None:
    path = suite(tmp_path)
    # One seed first: what is there of a pair is shown, and nothing is concluded from it.
    first = claims(path, "text.seeds=[0]", "--jobs=2").stdout
    assert first.count("claims: trained") == 2
    verdicts_alone = [line.split("  ")[0] for line in first.splitlines() if "  " in line]
    assert verdicts_alone.count("confirmed") == 1  # of the shift: no seed changes it
    assert verdicts_alone.count("refuted") == 0
    digest = open_checkpoint(tmp_path / "runs" / "text" / "alibi" / "seed_0").digest
    done = claims(path, "--jobs=2").stdout
    assert "claims: 2 of 4 runs are trained already" in done
    assert done.count("claims: trained") == 2
    assert open_checkpoint(tmp_path / "runs" / "text" / "alibi" / "seed_0").digest == digest
    assert "claims: trained" not in claims(path, "--no-train").stdout

    found = json.loads((tmp_path / "results" / "claims.json").read_text())
    assert sorted(found["measurements"]) == ["text/alibi", "text/sinusoidal"]
    measured = found["measurements"]["text/alibi"]
    assert len(measured) == 2
    assert measured[0]["losses"] != measured[1]["losses"]  # other seeds, other weights
    assert set(measured[0]["losses"]) == {"32", "64", "128"}
    verdicts = {row["key"]: row for row in found["claims"]}
    assert verdicts["translation"]["verdict"] == "confirmed"
    assert verdicts["t5-slower"]["verdict"] == "not tested here"
    ratio = [
        measured[seed]["losses"]["128"] - measured[seed]["losses"]["32"] for seed in range(2)
    ]  # fmt: skip
    assert f"{2.718281828 ** (sum(ratio) / 2):.3f}" in verdicts["alibi-holds"]["text"]
    page = (tmp_path / "results" / "claims.html").read_text()
    assert "data:image/png;base64," in page
    assert "<script" not in page
    assert "http" not in page.replace("https://www.w3.org", "")
    assert (tmp_path / "results" / "perplexity.png").stat().st_size > 10_000
    assert (tmp_path / "results" / "claims.md").read_text().startswith("| Claim | Verdict |")

    # Other settings under the same folder are another experiment.
    refused = claims(path, "text.base.train.learning_rate=0.1", code=2)
    assert "train.learning_rate" in refused.stderr
    assert "Traceback" not in refused.stderr
    longer = claims(path, "text.base.train.num_steps=5", code=2)
    assert "train.num_steps" in longer.stderr
    shorter = claims(path, "text.base.train.num_steps=2", "--no-train", code=2)
    assert "train.num_steps" in shorter.stderr
    in_the_way = claims(path, f"results={path}", f"work={tmp_path / 'other'}", code=2)
    assert len(in_the_way.stderr.splitlines()) == 1
    assert not (tmp_path / "other").exists()

    # A damaged last checkpoint is trained again from an earlier one; with none, it is said.
    weights = next((tmp_path / "runs/text/alibi/seed_0").rglob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-9] + b"\x00" * 9)
    damaged = claims(path, code=2)
    assert "alibi seed 0 is trained again" in damaged.stdout + damaged.stderr
    assert "claims: trained" not in damaged.stdout
    assert "could not train text/alibi seed 0" in damaged.stdout + damaged.stderr
    assert "Traceback" not in damaged.stderr
    broken = claims(path, "text.models.alibi={model.positions: x}", "text.seeds=[-1]", code=2)
    assert "seed" in broken.stderr
