"""Imported folders against the reference classes, back through the export, and trained further."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

from alibi_lm.checkpoint.step import open_checkpoint
from alibi_lm.cli.main import main
from alibi_lm.data.tokenizer import load_tokenizer
from alibi_lm.hf.exporting.exporter import export
from alibi_lm.hf.importing import importer
from alibi_lm.hf.importing.importer import import_folder
from alibi_lm.utils.errors import CheckpointError, ConfigError
from tests.unit.data.test_special_tokens import fast
from tests.unit.hf.reference_models import VOCAB_SIZE, write_reference
from tests.unit.hf.small_step import LINES, add_tokenizer, add_validation, write_step

READ_BY_THE_CLASS = {
    "bloom": ("vocab_size", "hidden_size", "n_layer", "n_head", "layer_norm_epsilon",
              "initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
              "apply_residual_connection_post_layernorm", "hidden_dropout", "attention_dropout",
              "pretraining_tp", "slow_but_exact", "tie_word_embeddings"),
    "mpt": ("d_model", "n_heads", "n_layers", "expansion_ratio", "max_seq_len", "vocab_size",
            "resid_pdrop", "layer_norm_epsilon", "emb_pdrop", "learned_pos_emb", "init_device",
            "logit_scale", "no_bias", "embedding_fraction", "norm_type", "use_cache",
            "initializer_range", "tie_word_embeddings", "pad_token_id", "bos_token_id",
            "eos_token_id"),
}  # fmt: skip


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype
        and torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8))
        for n in a
    )  # fmt: skip


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("heads", [12, 16])
@pytest.mark.parametrize("architecture", ["bloom", "mpt"])
def test_import_and_export_give_the_folder_back(
    architecture: str, heads: int, tied: bool, tmp_path: Path
) -> None:
    reference = write_reference(
        tmp_path / "reference", architecture, heads, tied, max_shard_size="100KB"
    )
    assert (tmp_path / "reference" / "model.safetensors.index.json").exists()
    run = tmp_path / "run"
    facts = import_folder(tmp_path / "reference", run, shard_bytes=150_000)
    assert facts["parity"]["greedy_tokens_equal"] == 64
    checkpoint = open_checkpoint(run)
    assert len(checkpoint.meta["shards"]) > 2
    tokens = torch.randint(VOCAB_SIZE, (2, 250), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        difference = (checkpoint.decoder()(tokens) - reference(tokens).logits).abs().max()
    assert float(difference) <= 1e-4

    checkpoint.config.train.sequence_length = 24
    export(checkpoint, tmp_path / "out")
    assert same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "reference"))
    before, after = (AutoConfig.from_pretrained(tmp_path / name) for name in ("reference", "out"))
    for name in READ_BY_THE_CLASS[architecture]:
        assert getattr(after, name) == getattr(before, name), name
    if architecture == "mpt":
        theirs, ours = (c.attn_config.to_dict() for c in (before, after))
        fields = type(before.attn_config).__annotations__
        assert {key: theirs[key] for key in fields} == {key: ours[key] for key in fields}


def test_half_precision_comes_back_as_it_was(tmp_path: Path) -> None:
    model = write_reference(tmp_path / "first", "bloom")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "reference")
    import_folder(tmp_path / "reference", tmp_path / "run")
    checkpoint = open_checkpoint(tmp_path / "run")
    checkpoint.config.train.sequence_length = 24
    export(checkpoint, tmp_path / "out", precision="bf16")
    assert same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "reference"))


def test_names_of_the_base_model_and_a_stored_copy_of_a_tied_matrix(tmp_path: Path) -> None:
    write_reference(tmp_path / "reference", "bloom")
    tensors = tensors_of(tmp_path / "reference")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    copy = tensors | {"lm_head.weight": tensors["transformer.word_embeddings.weight"].clone()}
    for name, content in (("bare", bare), ("copy", copy)):
        shutil.copytree(tmp_path / "reference", tmp_path / name)
        save_file(content, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        import_folder(tmp_path / name, tmp_path / f"run_{name}")
        weights = open_checkpoint(tmp_path / f"run_{name}").weights()
        assert torch.equal(weights["embedding.weight"],
                           tensors["transformer.word_embeddings.weight"])  # fmt: skip
    copy["lm_head.weight"][3, 4] += 1
    save_file(copy, tmp_path / "copy" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: differs from the embedding"):
        import_folder(tmp_path / "copy", tmp_path / "refused")


def test_pickled_weights_only_where_asked_for(tmp_path: Path) -> None:
    model = write_reference(tmp_path / "reference", "mpt")
    torch.save(model.state_dict(), tmp_path / "reference" / "pytorch_model.bin")
    (tmp_path / "reference" / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match="reference: holds only pickled weights.*--allow-pickle"
    ):
        import_folder(tmp_path / "reference", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    import_folder(tmp_path / "reference", tmp_path / "run", allow_pickle=True)
    torch.save({"transformer.wte.weight": Evil()}, tmp_path / "reference" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: .*holds more than tensors"):
        import_folder(tmp_path / "reference", tmp_path / "other", allow_pickle=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reference", "run"]


class Evil:
    """An object that a plain unpickler would call something for."""

    def __reduce__(self) -> Any:
        return (print, ("unpickled",))


def test_commands_work_on_an_imported_run(tmp_path: Path) -> None:
    """Import of our own export, with its tokenizer: evaluated, generated from, exported again."""
    native = write_step(tmp_path / "native", {"num_heads": 12, "num_kv_heads": 4})
    add_tokenizer(native, tmp_path)
    export(native, tmp_path / "reference")
    add_validation(native, tmp_path / "text", ["".join(LINES * 40)])
    run = tmp_path / "run"

    def alibi_lm(*arguments: str | Path) -> str:
        done = CliRunner().invoke(main, [*map(str, arguments)])
        assert done.exit_code == 0, done.output
        return done.output

    said = alibi_lm("import", tmp_path / "reference", run, "train.sequence_length=24",
                    f"data.validation=[{tmp_path / 'text'}]")  # fmt: skip
    assert "logits within" in said
    text = "def f(x):\n"
    ours, theirs = (alibi_lm("generate", path, "--prompt", text) for path in (native.folder, run))
    assert ours == theirs
    suite = tmp_path / "suite.yaml"
    suite.write_text("perplexity: {lengths: [24, 48], max_tokens: 96}\n")
    alibi_lm("eval", "perplexity", run, "--suite", suite)
    result = json.loads((run / "evals/step_00000000/perplexity.json").read_text())
    assert [row["length"] for row in result["rows"]] == [24, 48]
    alibi_lm("export", run, tmp_path / "again")
    assert same(tensors_of(tmp_path / "again"), tensors_of(tmp_path / "reference"))
    card = (tmp_path / "again" / "README.md").read_text()
    assert "imported from a folder of `MptForCausalLM`" in card
    text = load_tokenizer(run / "checkpoints/step_00000000/tokenizer").decode([70, 71, 72])
    assert text == load_tokenizer(tmp_path / "reference").decode([70, 71, 72])
    # Any change to a folder that was exported here is found, also one that the shapes fit.
    config = json.loads((tmp_path / "reference" / "config.json").read_text())
    (tmp_path / "reference" / "config.json").write_text(json.dumps(config | {"n_heads": 8}))
    with pytest.raises(CheckpointError, match=r"config\.json: was changed after its export"):
        import_folder(tmp_path / "reference", tmp_path / "other")


def test_settings_of_the_run_may_be_given_and_those_of_the_model_not(tmp_path: Path) -> None:
    write_reference(tmp_path / "reference", "mpt")
    for override in ("model.num_heads=8", "model.window=9", "run.dir=elsewhere"):
        with pytest.raises(ConfigError, match=override.partition("=")[0]):
            import_folder(tmp_path / "reference", tmp_path / "run", overrides=[override])
    import_folder(tmp_path / "reference", tmp_path / "run", overrides=["train.sequence_length=64"])
    assert open_checkpoint(tmp_path / "run").config.train.sequence_length == 64
    with pytest.raises(CheckpointError, match="run: already exists"):
        import_folder(tmp_path / "reference", tmp_path / "run")


@pytest.mark.parametrize("parity", ["logits", "blockwise", "weights"])
def test_a_wrong_import_spec_leaves_nothing(
    parity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    write_reference(tmp_path / "reference", "bloom")
    wrong = replace(importer.IMPORT_SPECS["bloom"], rows=lambda model, rows: rows)
    monkeypatch.setitem(importer.IMPORT_SPECS, "bloom", wrong)
    with pytest.raises(CheckpointError, match="differ"):
        import_folder(tmp_path / "reference", tmp_path / "deep" / "run", parity=parity)
    assert [path.name for path in tmp_path.iterdir()] == ["reference"]


def test_the_number_of_heads_is_believed_without_digests_and_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_reference(tmp_path / "foreign", "bloom", heads=4)
    import_folder(tmp_path / "foreign", tmp_path / "run")
    line = "4 heads, as config.json states; tensors do not show it"
    assert line in capsys.readouterr().out
    export(open_checkpoint(tmp_path / "run"), tmp_path / "exported")
    import_folder(tmp_path / "exported", tmp_path / "again")
    assert line not in capsys.readouterr().out


def test_the_declared_end_token_is_kept_by_import_and_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_reference(tmp_path / "reference", "mpt")
    fast(
        tmp_path / "reference",
        ["<|endoftext|>", "<|im_end|>"],
        eos_token="<|im_end|>",
        tokenizer_class="PreTrainedTokenizerFast",
    )
    path = tmp_path / "reference" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 0}))
    (tmp_path / "reference" / "generation_config.json").unlink(missing_ok=True)
    import_folder(tmp_path / "reference", tmp_path / "run")
    assert "eos_token_id = 0 is not the tokenizer's, 1" in capsys.readouterr().err
    checkpoint = open_checkpoint(tmp_path / "run")
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    assert tokenizer.stop_ids == (1,)
    export(checkpoint, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|im_end|>"
    assert config["eos_token_id"] == 1

    path.write_text(json.dumps(config | {"eos_token_id": [1, 0]}))
    import_folder(tmp_path / "reference", tmp_path / "both")
    assert open_checkpoint(tmp_path / "both").tokenizer().stop_ids == (1, 0)  # type: ignore[union-attr]
    export(open_checkpoint(tmp_path / "both"), tmp_path / "both_out")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "both_out" / name).read_text())["eos_token_id"] == [1, 0]
