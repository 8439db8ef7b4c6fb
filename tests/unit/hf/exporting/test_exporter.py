"""Exported folders against the classes of `transformers`, loaded in the plainest way."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.bloom.modeling_bloom import BloomForCausalLM
from transformers.models.mpt.modeling_mpt import MptForCausalLM

from alibi_lm.data.tokenizer import load_tokenizer
from alibi_lm.hf.exporting import exporter as export_module
from alibi_lm.hf.exporting.exporter import EXPORT_MANIFEST, export
from alibi_lm.hf.parity import logits, transformers_reference
from alibi_lm.hf.specs import mpt
from alibi_lm.model.inference.generation import generate
from alibi_lm.utils.errors import CheckpointError, ConfigError
from alibi_lm.utils.files import write_json, write_text
from tests.unit.hf.small_step import LENGTH, LINES, add_tokenizer, add_validation, write_step


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(8, None), (12, None), (12, 4), (8, 1)],
    ids=["8", "12", "12_grouped", "8_multi_query"],
)  # fmt: skip
@pytest.mark.parametrize("architecture", ["mpt", "bloom"])
def test_stock_class_agrees(
    architecture: str, heads: int, kv_heads: int | None, tied: bool, tmp_path: Path
) -> None:
    model = {
        "architecture": architecture,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "tied_embeddings": tied,
    }
    step = write_step(tmp_path / "run", model)
    out = tmp_path / "out"
    facts = export(step, out)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert type(loaded) is {"mpt": MptForCausalLM, "bloom": BloomForCausalLM}[architecture]
    assert loaded.config.tie_word_embeddings is tied
    decoder = step.decoder()
    tokens = torch.randint(307, (2, 4 * LENGTH), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        for length in (LENGTH, 4 * LENGTH):
            difference = (decoder(tokens[:, :length]) - loaded(tokens[:, :length]).logits).abs()
            assert float(difference.max()) <= 1e-4
    assert [row["max_difference"] <= 1e-4 for row in facts["parity"]["logits"]] == [True, True]
    prompts = tokens[:, :9]
    ours = generate(decoder, prompts, 64)
    theirs = loaded.generate(prompts, max_new_tokens=64, do_sample=False)[:, 9:]
    assert theirs.tolist() == ours
    # The file holds what the class has, and no more.
    assert facts["num_parameters"] == decoder.num_parameters()
    if kv_heads is None:
        assert sum(p.numel() for p in loaded.parameters()) == decoder.num_parameters()


def test_folder_stands_alone_with_tokenizer_and_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 8})
    add_tokenizer(step, tmp_path)
    texts = ["".join(LINES * 9), "x\t\u2581\r\n </s> \U0001f600\n" * 4]
    add_validation(step, tmp_path / "code_validation", texts)
    write_json(step.evals_folder / "perplexity.json", {
        "eval": "perplexity", "protocol": "PROTOCOL",
        "rows": [{"length": 24, "multiple": 1.0, "perplexity": 9.5, "perplexity_interval": None},
                 {"length": 96, "multiple": 4.0, "perplexity": 9.25,
                  "perplexity_interval": [9.0, 9.5]}],
        "verdict": {"text": "It holds.", "caveat": "It shows little."},
    })  # fmt: skip
    score = {"rate": 0.5, "interval": [0.25, 0.75], "correct": 1}
    write_json(step.evals_folder / "needle.json", {
        "eval": "needle", "verdict": {"text": "It retrieves.", "caveat": "Narrowly."},
        "by_length": [{"length": 24, "trials": 2, "ranking": score, "generation": score,
                       "control": {"trials": 2, "ranking": score, "generation": score}}],
    })  # fmt: skip
    write_text(step.run_folder / "metrics.jsonl", '{"step": 7, "loss": 2.5}\n{"step": 8, "lo')
    out = tmp_path / "new" / "out"
    facts = export(step, out)
    assert names(out) == ["README.md", EXPORT_MANIFEST, "config.json", "generation_config.json",
                          "model.safetensors", "tokenizer.json", "tokenizer.model",
                          "tokenizer_config.json"]  # fmt: skip
    assert json.loads((out / EXPORT_MANIFEST).read_text()) == facts
    assert facts["parity"]["tokens"].startswith("validation text")
    assert facts["parity"]["tokenizer"]["documents_equal"] == 2
    assert {oct(path.stat().st_mode) for path in out.iterdir()} == {
        oct((out / EXPORT_MANIFEST).stat().st_mode)
    }
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.is_fast
    for text in texts:
        assert tokenizer(text)["input_ids"] == load_tokenizer(out).encode(text)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.architectures == ["MPTForCausalLM"]
    assert model.generation_config.eos_token_id == 1
    assert model.generation_config.pad_token_id == 3
    card = (out / "README.md").read_text()
    for part in ("library_name: transformers", "| 96 | 4 | 9.250 | 9.000 to 9.500 |",
                 "50% (25% to 75%)", "It shows little.", "2.5000 nats", "step 7"):  # fmt: skip
        assert part in card
    assert "license" not in card
    assert str(tmp_path) not in card.replace(str(tmp_path / "code_validation"), "")
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "MptForCausalLM" in said
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert export(step, out) == facts
    assert "already exported" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


@pytest.mark.parametrize(("precision", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_is_the_rounded_model(
    precision: str, kind: torch.dtype, tmp_path: Path
) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 8})
    export(step, tmp_path / "out", precision=precision)
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert stored.dtype is kind
    ours = step.weights()["blocks.1.mlp.up.weight"].to(kind)
    assert torch.equal(stored.transformer.blocks[1].ffn.up_proj.weight, ours)


def test_weights_beyond_fp16_are_named(tmp_path: Path) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 8, "initializer_range": 1e5})
    with pytest.raises(CheckpointError, match=r"embedding\.weight.*fp16.*bf16"):
        export(step, tmp_path / "out", precision="fp16")
    assert names(tmp_path) == ["run"]


def test_shards_have_an_index(tmp_path: Path) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 8})
    export(step, tmp_path / "whole")
    export(step, tmp_path / "sharded", shard_bytes=60_000)
    files = names(tmp_path / "sharded")
    assert "model.safetensors" not in files
    assert not [name for name in files if "partial" in name]
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [name for name in files if name.endswith(".safetensors")]
    assert len(shards) > 3
    whole, parts = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("whole", "sharded")
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert index["metadata"]["total_size"] == 4 * sum(
        tensor.numel() for name, tensor in parts.items() if name != "lm_head.weight"
    )


def test_inputs_far_beyond_training(tmp_path: Path) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 12, "num_layers": 1})
    facts = export(step, tmp_path / "out")
    assert facts["max_length"] >= 64 * LENGTH
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.randint(307, (1, 100 * LENGTH), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        difference = (step.decoder()(tokens)[:, -1] - loaded(tokens).logits[:, -1]).abs().max()
    assert float(difference) <= 1e-4


def swap_blocks(tensors: Callable[..., Any]) -> Callable[..., Any]:
    def swapped(model: Any, weights: Any) -> Any:
        other = {"blocks.0": "blocks.1", "blocks.1": "blocks.0"}
        names = {n: other.get(n[:8], n[:8]) + n[8:] for n in weights}
        return tensors(model, {names[n]: t for n, t in weights.items()})

    return swapped


def transpose_heads(tensors: Callable[..., Any]) -> Callable[..., Any]:
    def changed(model: Any, weights: Any) -> Any:
        for name, tensor in tensors(model, weights):
            yield name, tensor.flip(0) if name.endswith("1.attn.Wqkv.weight") else tensor

    return changed


def drop_last_norm(tensors: Callable[..., Any]) -> Callable[..., Any]:
    def changed(model: Any, weights: Any) -> Any:
        return (pair for pair in tensors(model, weights) if "norm_f" not in pair[0])

    return changed


def add_a_tensor(tensors: Callable[..., Any]) -> Callable[..., Any]:
    def changed(model: Any, weights: Any) -> Any:
        yield from tensors(model, weights)
        yield "transformer.wpe.weight", torch.zeros(3)

    return changed


def a_nan(tensors: Callable[..., Any]) -> Callable[..., Any]:
    def changed(model: Any, weights: Any) -> Any:
        for name, tensor in tensors(model, weights):
            yield name, tensor * math.nan if "norm_f" in name else tensor

    return changed


@pytest.mark.parametrize(
    "mistake", [swap_blocks, transpose_heads, drop_last_norm, add_a_tensor, a_nan]
)
def test_a_wrong_mapping_leaves_nothing(
    mistake: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 8})
    wrong = mpt.ExportSpec("mpt", "MptForCausalLM", mistake(mpt.MPT.tensors), mpt.MPT.config)
    monkeypatch.setitem(export_module.EXPORT_SPECS, "mpt", wrong)
    with pytest.raises(CheckpointError, match=r"deep/out: .*(differ|loads it with)") as caught:
        export(step, tmp_path / "deep" / "out")
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["run"]


@pytest.mark.parametrize(
    ("key", "value"), [("n_heads", 4), ("layer_norm_epsilon", 1e-3), ("tie_word_embeddings", False)]
)
def test_a_wrong_config_is_found(
    key: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 8})
    right = export_module.config_json
    monkeypatch.setattr(export_module, "config_json", lambda *a: {**right(*a), key: value})
    with pytest.raises(CheckpointError, match=r"out: .*(differ|loads it with)"):
        export(step, tmp_path / "out")
    assert names(tmp_path) == ["run"]


def test_a_wrong_tokenizer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 8})
    add_tokenizer(step, tmp_path)
    right = export_module.convert_tokenizer

    def wrong(tokenizer: Any, folder: Path) -> None:
        right(tokenizer, folder)
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"]["merges"] = content["model"]["merges"][::-1]
        content["normalizer"] = {"type": "NFC"}
        (folder / "tokenizer.json").write_text(json.dumps(content))

    monkeypatch.setattr(export_module, "convert_tokenizer", wrong)
    with pytest.raises(CheckpointError, match=r"out: token \d+ of a text differs"):
        export(step, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    facts = export(step, tmp_path / "out", tokenizer=False)
    assert "tokenizer" not in facts["parity"]
    assert not (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device"), RuntimeError("x")],
    ids=["interrupt", "no_space", "bug"],
)
def test_any_interruption_leaves_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 8})

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(export_module, "model_card", fail)
    expected = CheckpointError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as caught:
        export(step, tmp_path / "a" / "b" / "out")
    if isinstance(error, OSError):
        assert "no space left on the device" in str(caught.value)
    assert names(tmp_path) == ["run"]


def test_what_a_killed_export_left_is_taken_away(tmp_path: Path) -> None:
    import socket

    step = write_step(tmp_path / "run", {"num_heads": 8})
    left = tmp_path / f".out.{socket.gethostname()}-999999999.tmp"
    left.mkdir()
    (left / "model.safetensors").touch()
    other = tmp_path / ".out.elsewhere-999999999.tmp"
    other.mkdir()
    export(step, tmp_path / "out")
    assert names(tmp_path) == [other.name, "out", "run"]


@pytest.mark.parametrize(
    ("model", "format", "message"),
    [
        ({"position": "rotary"}, None, "model.position = rotary: MptForCausalLM adds linear"),
        (
            {"position": "alibi_learned"},
            None,
            "model.position = alibi_learned: MptForCausalLM has fixed slopes",
        ),
        (
            {"scaling": {"kind": "linear", "factor": 2}},
            None,
            "model.scaling.kind = linear: MptForCausalLM has no scaling of positions",
        ),
        ({"position": "none", "window": 9}, None, "model.window = 9: MptForCausalLM has no slid"),
        ({}, "bloom", "model.architecture = mpt: does not fit BloomForCausalLM"),
        (
            {"architecture": "bloom"},
            "mpt",
            "model.architecture = bloom: does not fit MptForCausalLM",
        ),
        ({}, "llama", "format = llama: is not one of mpt, bloom"),
    ],
)
def test_what_no_stock_class_holds_is_refused(
    model: dict[str, Any], format: str | None, message: str, tmp_path: Path
) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 8, **model})
    with pytest.raises(ConfigError) as caught:
        export(step, tmp_path / "out", format=format)
    assert message in str(caught.value)
    assert names(tmp_path) == ["run"]


def test_a_folder_of_the_user_is_never_touched(tmp_path: Path) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 8})
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is not an export"):
        export(step, out)
    assert names(out) == ["thesis.txt"]
    with pytest.raises(CheckpointError, match="exists and is not an export"):
        export(step, out / "thesis.txt")
    empty = tmp_path / "empty"
    empty.mkdir()
    export(step, empty)
    with pytest.raises(CheckpointError, match=r"holds another export.*settings.precision"):
        export(step, empty, precision="bf16")
    assert names(tmp_path) == ["empty", "out", "run"]


def test_an_export_that_lost_a_file_is_not_called_made(tmp_path: Path) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 8})
    facts = export(step, tmp_path / "out")
    assert export(step, tmp_path / "out") == facts
    weights = tmp_path / "out" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="was changed after its export; remove .*out, and"):
        export(step, tmp_path / "out")
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"safetensors: is missing; remove .*out, and"):
        export(step, tmp_path / "out")


@pytest.mark.parametrize("architecture", ["mpt", "bloom"])
def test_exact_comparison_is_exact(architecture: str, tmp_path: Path) -> None:
    """What decides where fp32 rounding exceeds the tolerance: far below it, at great lengths."""
    model = {"num_heads": 12, "architecture": architecture, "num_layers": 1}
    step = write_step(tmp_path / "run", model)
    export(step, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    decoder = step.decoder().double()
    tokens = torch.randint(307, (1, 1536), generator=torch.Generator().manual_seed(5))
    with torch.no_grad(), transformers_reference.bias_zero_at_newest_key(loaded.double()):
        found = logits.largest_difference(decoder, loaded, tokens, logits.STEP_TOKENS)
        assert found <= 1e-5
        loaded.base_model.get_input_embeddings().weight[:, 0] += 1e-2
        assert logits.largest_difference(decoder, loaded, tokens, logits.STEP_TOKENS) > 1e-4
