"""Exports with our own modeling file, loaded the way a stranger would load them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from alibi_lm.hf.exporting import custom_code
from alibi_lm.hf.exporting import exporter as export_module
from alibi_lm.hf.exporting.exporter import export
from alibi_lm.model.inference.generation import generate
from alibi_lm.utils.errors import CheckpointError, ConfigError
from tests.unit.hf.small_step import LENGTH, add_tokenizer, write_step

REFERENCE = {"position": "alibi", "num_heads": 6}
MODELS: list[dict[str, Any]] = [
    {"position": "alibi", "window": 9, "num_heads": 12, "num_kv_heads": 4},
    {"position": "rotary", "architecture": "bloom"},
    {"position": "t5", "tied_embeddings": False, "window": 40},
    {"position": "sinusoidal", "architecture": "bloom", "tied_embeddings": False},
    {"position": "learned", "max_positions": 5 * LENGTH},
    {"position": "none", "num_kv_heads": 1},
    REFERENCE,
]


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies remote code into its cache; here into one of the test's own."""
    import transformers.dynamic_module_utils as module

    monkeypatch.setattr(module, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.mark.parametrize("model", MODELS, ids=lambda m: "-".join(str(v) for v in m.values()))
def test_the_same_logits_and_tokens(model: dict[str, Any], tmp_path: Path) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 8, **model})
    if model not in (REFERENCE, {"position": "none", "num_kv_heads": 1}):
        with pytest.raises(ConfigError, match="--with-code"):
            export(step, tmp_path / "out")
    facts = export(step, tmp_path / "out", with_code=True)
    assert [row["length"] for row in facts["parity"]["logits"]] == [LENGTH, 4 * LENGTH]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    decoder = step.decoder()
    tokens = torch.randint(307, (2, 4 * LENGTH), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        assert float((decoder(tokens) - loaded(tokens).logits).abs().max()) <= 1e-4
    found = loaded.generate(tokens[:, :9], max_new_tokens=32, do_sample=False)[:, 9:]
    assert found.tolist() == generate(decoder, tokens[:, :9], 32)
    assert "trust_remote_code=True" in (tmp_path / "out" / "README.md").read_text()


def test_nobody_is_asked_whether_our_own_file_may_be_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 8, "position": "rotary"})
    add_tokenizer(step, tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    facts = export(step, tmp_path / "out", with_code=True)
    assert facts["parity"]["tokenizer"]
    assert capsys.readouterr().out.count("\n") == 1
    card = (tmp_path / "out" / "README.md").read_text()
    assert '("PATH_OF_THIS_FOLDER", trust_remote_code=True)' in card, "for the tokenizer too"


def test_the_folder_needs_nothing_of_this_package(tmp_path: Path) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 8, "window": 9})
    export(step, tmp_path / "out", with_code=True)
    script = (
        "import sys, torch; sys.modules['alibi_lm'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "torch.save(model(torch.arange(40)[None]).logits.detach(), sys.argv[2])\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out"), str(tmp_path / "logits")],
        env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")},
        check=True,
    )
    with torch.no_grad():
        expected = step.decoder()(torch.arange(40)[None])
    assert float((torch.load(tmp_path / "logits") - expected).abs().max()) <= 1e-4


def test_a_wrong_config_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 8, "window": 9})
    right = custom_code.CUSTOM_CODE
    wrong = custom_code.ExportSpec("alibi_lm", "AlibiLmForCausalLM", right.tensors,
                        lambda *a: right.config(*a) | {"window": 8})  # fmt: skip
    monkeypatch.setattr(export_module, "CUSTOM_CODE", wrong)
    with pytest.raises(CheckpointError, match="out: logits differ by"):
        export(step, tmp_path / "out", with_code=True)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="format = mpt: names a transformers class"):
        export(step, tmp_path / "out", with_code=True, format="mpt")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"position": "alibi_learned"}, "model.position = alibi_learned: the modeling file has"),
        ({"scaling": {"kind": "linear", "factor": 2}}, "model.scaling.kind = linear: the model"),
    ],
)
def test_what_the_file_does_not_compute_is_refused(
    model: dict[str, Any], message: str, tmp_path: Path
) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 8, **model})
    with pytest.raises(ConfigError) as caught:
        export(step, tmp_path / "out", with_code=True)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_where_memory_is_short_bits_are_compared_and_the_card_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 8, "window": 9})
    with pytest.raises(ConfigError, match="parity = blockwise: needs a transformers class"):
        export(step, tmp_path / "out", with_code=True, parity="blockwise")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    facts = export(step, tmp_path / "out", with_code=True)
    assert facts["parity"]["kind"] == "weights"
    assert "logits are not" in capsys.readouterr().err
    assert "logits were **not** compared" in (tmp_path / "out" / "README.md").read_text()
    reference = write_step(tmp_path / "other", {"num_heads": 8})
    facts = export(reference, tmp_path / "reference")
    assert facts["parity"]["kind"] == "blockwise", "the default of the reference classes"
    assert (len(facts["parity"]["logits"]), facts["parity"]["greedy_tokens_equal"]) == (2, 4)
