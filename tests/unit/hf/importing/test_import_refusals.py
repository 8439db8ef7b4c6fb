"""Folders that were tampered with, or hold another model, are refused in one line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from alibi_lm.cli.main import main
from alibi_lm.hf.exporting.exporter import export
from tests.unit.hf.reference_models import write_reference
from tests.unit.hf.small_step import write_step

NAME = "transformer.h.1.self_attention.query_key_value.weight"
INDEX = "model.safetensors.index.json"
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("references")
    write_reference(folder / "whole", "bloom")
    write_reference(folder / "sharded", "bloom", max_shard_size="200KB")
    write_reference(folder / "mpt", "mpt")
    export(write_step(folder / "own", {"num_heads": 12}), folder / "exported")
    return folder


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def changed(folder: Path) -> None:
        content = load_file(folder / "model.safetensors")
        change(content)
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})

    return changed


def config(**values: Any) -> Change:
    def changed(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        for key, value in values.items():
            if isinstance(value, dict):
                content[key] = content.get(key, {}) | value
            else:
                content[key] = value
        (folder / "config.json").write_text(json.dumps(content))

    return changed


def index(change: Callable[[dict[str, Any]], Any]) -> Change:
    def changed(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        change(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))

    return changed


def truncated(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[-1]
    os.truncate(path, path.stat().st_size - 100)


def a_lost_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[-1].unlink()


def linked_weights(folder: Path) -> None:
    shutil.move(folder / "model.safetensors", folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")


def linked_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/etc/hostname")


def a_pickle(folder: Path) -> None:
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def a_pickle_called_safetensors(folder: Path) -> None:
    torch.save({"a": torch.ones(2)}, folder / "model.safetensors")


def nothing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda content: content.update({name: tensor})


def rename(content: dict[str, torch.Tensor]) -> None:
    content[NAME.replace("query_key", "key_query")] = content.pop(NAME)


CASES: list[tuple[str, Change, str]] = [
    ("whole", tensors(lambda t: t.pop(NAME)), f"{NAME}: is missing"),
    ("whole", tensors(rename), "key_query_value.weight: is not a tensor of the class"),
    ("whole", tensors(put("transformer.wpe.weight", torch.ones(3))), "wpe.weight: is not a tensor"),
    ("whole", tensors(put(NAME, torch.ones(288, 95))), f"{NAME}: has shape [288, 95], not [288,"),
    ("whole", tensors(lambda t: t.update({NAME: t[NAME].double()})), f"{NAME}: has a dtype"),
    ("whole", tensors(lambda t: t[NAME].fill_(torch.nan)), "query_key_value.weight: has elements"),
    ("whole", truncated, "model.safetensors: is damaged"),
    ("whole", nothing, "holds neither model.safetensors"),
    ("whole", a_pickle, "holds only pickled weights"),
    ("whole", a_pickle_called_safetensors, "model.safetensors: is damaged or not a safetensors"),
    ("whole", linked_weights, "model.safetensors: is a link out of the folder"),
    ("whole", linked_config, "config.json: is a link out of the folder"),
    ("whole", config(n_head=10), "config.json: model.num_heads = 10: does not divide"),
    ("whole", config(num_attention_heads=16), "num_attention_heads = 16: contradicts n_head"),
    ("whole", config(n_layer=3), "transformer.h.2."),
    ("whole", config(n_layer=1), "transformer.h.1."),
    ("whole", config(n_layer=10**9), "blocks = 1000000000: is more than the 29 tensors"),
    ("whole", config(hidden_size=48), "has shape"),
    ("whole", config(hidden_size=12 * 2**40), "word_embeddings.weight: has shape [307, 96], not"),
    ("whole", config(vocab_size=2**60), "word_embeddings.weight: has shape [307, 96], not"),
    ("whole", config(quantization_config={"bits": 4}), "transformers cannot load it"),
    ("whole", config(vocab_size=308), "word_embeddings.weight: has shape [307, 96], not [308, 96]"),
    ("whole", config(vocab_size="many"), "config.json: BloomConfig cannot read it"),
    ("whole", config(tie_word_embeddings=False), "lm_head.weight: is missing"),
    ("whole", config(layer_norm_epsilon=1e-3), "layer_norm_epsilon = 0.001: is not 1e-05"),
    ("whole", config(apply_residual_connection_post_layernorm=True), "moves the residual"),
    ("whole", config(model_type="llama"), "model_type = llama: is not one of bloom, mpt"),
    ("whole", config(model_type="mpt"), "is missing"),
    ("mpt", config(attn_config={"alibi": False}), "attn_config.alibi = False"),
    ("mpt", config(attn_config={"alibi_bias_max": 16}), "attn_config.alibi_bias_max = 16"),
    ("mpt", config(attn_config={"clip_qkv": 6.0}), "attn_config.clip_qkv = 6.0"),
    ("mpt", config(attn_config={"softmax_scale": 0.5}), "attn_config.softmax_scale = 0.5"),
    ("mpt", config(attn_config={"qk_ln": True}), "attn_config.qk_ln = True"),
    ("mpt", config(logit_scale=0.5), "logit_scale = 0.5"),
    ("mpt", config(expansion_ratio=2), "expansion_ratio = 2"),
    ("mpt", config(n_heads=7), "config.json: model.num_heads = 7: does not divide"),
    ("exported", config(n_heads=8), "config.json: was changed after its export"),
    ("sharded", truncated, "safetensors: is damaged"),
    ("sharded", a_lost_shard, "safetensors: is missing"),
    ("sharded", index(lambda m: m.update({NAME: "../whole/model.safetensors"})), "is a path"),
    ("sharded", index(lambda m: m.update({NAME: "/etc/hostname.safetensors"})), "is a path"),
    ("sharded", index(lambda m: m.update({NAME: "config.json"})), "is not a .safetensors file"),
    ("sharded", index(lambda m: m.update({NAME: 3})), f"names no file for {NAME}"),
    ("sharded", index(lambda m: m.pop(NAME)), f"{NAME}: is in model-0"),
    ("sharded", index(lambda m: m.update({"more": m[NAME]})), "more: is not in model-0"),
    ("sharded", index(dict.clear), "has no weight_map"),
]


@pytest.mark.parametrize(("reference", "change", "message"), CASES, ids=[case[2] for case in CASES])
def test_refused_in_one_line_that_names_it(
    reference: str, change: Change, message: str, references: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "reference"
    shutil.copytree(references / reference, folder)
    change(folder)
    before = sorted(tmp_path.rglob("*"))
    done = CliRunner().invoke(main, ["import", str(folder), str(tmp_path / "deep" / "run")])
    assert done.exit_code == 2, done.output
    assert done.output.count("\n") == 1, done.output
    assert message in done.output
    assert sorted(tmp_path.rglob("*")) == before


def test_the_hubs_cache_is_read(references: Path, tmp_path: Path) -> None:
    """Its snapshots are links to the blobs beside them."""
    snapshot, blobs = tmp_path / "models--a--b/snapshots/123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in (references / "whole").iterdir():
        shutil.copyfile(path, blobs / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-{path.name}")
    done = CliRunner().invoke(main, ["import", str(snapshot), str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
