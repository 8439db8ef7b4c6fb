"""Special tokens: what the tokenizer's folder declares, and ids that depend on the text alone."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from alibi_lm.config_loading import build
from alibi_lm.data.config import RecipeConfig
from alibi_lm.data.indexed import TokenFile
from alibi_lm.data.preparation.prepare import prepare
from alibi_lm.data.tokenizer import load_tokenizer
from alibi_lm.utils.errors import ConfigError, DataError
from tests.unit.data.test_tokenizer import foreign_model

TEXT = "<s>\nold price 5\n</s>\nnew price 7 for you\n"


def fast(folder: Path, special: list[str], ordinary: str | None = None, **config: Any) -> Fast:
    """A byte-level BPE tokenizer; `ordinary` is learned as a piece of the text."""
    tokenizer = Fast(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [ordinary or TEXT] * 50,
        trainers.BpeTrainer(vocab_size=280, special_tokens=special, show_progress=False,
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def test_a_declared_token_decides_and_an_ordinary_piece_never_does(tmp_path: Path) -> None:
    fast(tmp_path, ["<|endoftext|>"], ordinary="</s>", eos_token="<|endoftext|>")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.stop_ids) == (0, (0,))
    assert len(tokenizer.encode("</s>")) == 1, "the piece is learned"
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).eos_id == 0, "the special name, not the ordinary one"
    fast(tmp_path / "none", ["<|EOT|>"], ordinary="</s>")
    with pytest.raises(DataError, match="declares no end-of-sequence token.*tokenizer.eos"):
        load_tokenizer(tmp_path / "none")
    fast(tmp_path / "wrong", ["<|EOT|>"], ordinary="</s>", eos_token="</s>")
    with pytest.raises(DataError, match=r"eos_token = </s>: is ordinary text"):
        load_tokenizer(tmp_path / "wrong")
    fast(tmp_path / "absent", ["<|EOT|>"], eos_token="<|gone|>")
    with pytest.raises(DataError, match=r"eos_token = <\|gone\|>: is not in the vocabulary"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_declared_roles_survive_saving_and_pickling(tmp_path: Path, name: str) -> None:
    special = ["<|endoftext|>", "<|im_end|>", "<s>", "<|pad|>", "<unk>"]
    fast(tmp_path, special)
    plain = load_tokenizer(tmp_path)
    assert (plain.eos_id, plain.bos_id, plain.pad_id, plain.unk_id) == (0, 2, None, 4)
    plain.save(tmp_path / "plain")
    assert [path.name for path in (tmp_path / "plain").iterdir()] == ["tokenizer.json"]
    declared = {"eos_token": {"content": "<|im_end|>"}, "pad_token": "<|pad|>", "bos_token": None}
    (tmp_path / name).write_text(json.dumps(declared))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.save(tmp_path / "saved")
    copies = [load_tokenizer(tmp_path / "saved"), pickle.loads(pickle.dumps(tokenizer))]
    for copy in (tokenizer, *copies):
        assert (copy.eos_id, copy.bos_id, copy.pad_id, copy.unk_id) == (1, None, 3, 4)
        assert copy.stop_ids == (1, 0)
        assert copy.digest == tokenizer.digest != plain.digest
        assert copy.encode("a<|im_end|>b")[1:-1] != [1], "text that spells it is text"
    chosen = load_tokenizer(tmp_path, eos="<|endoftext|>")
    assert (chosen.eos_id, chosen.stop_ids) == (0, (0,))


def test_generation_config_declares_where_nothing_else_does(tmp_path: Path) -> None:
    fast(tmp_path, ["<|EOT|>", "<|im_end|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 0]}))
    assert load_tokenizer(tmp_path).stop_ids == (1, 0)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ["x"]}))
    with pytest.raises(DataError, match="eos_token_id = 'x': is not a token id"):
        load_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match=r"generation_config\.json: cannot be read"):
        load_tokenizer(tmp_path)


def test_sentencepiece_declarations(tmp_path: Path) -> None:
    path = foreign_model(tmp_path, control_symbols=["<|end|>"], user_defined_symbols=["<|text|>"])
    usual = load_tokenizer(path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    declared = load_tokenizer(path)
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert declared.eos_id == model.piece_to_id("<|end|>") != usual.eos_id
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|text|>"}))
    with pytest.raises(DataError, match="is ordinary text"):
        load_tokenizer(path)


def test_ids_depend_on_the_text_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = fast(tmp_path / "plain", ["<|endoftext|>"])
    expected = load_tokenizer(tmp_path / "plain").encode(TEXT * 9)
    tokenizer.model.dropout = 0.5
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4, pad_id=0, pad_token="<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    (tmp_path / "odd").mkdir()
    tokenizer.save(str(tmp_path / "odd" / "tokenizer.json"))
    capsys.readouterr()
    odd = load_tokenizer(tmp_path / "odd")
    assert "odd/tokenizer.json: BPE dropout 0.5 is switched off for encoding" in (
        capsys.readouterr().err
    )
    for _ in range(5):
        assert odd.encode(TEXT * 9) == expected
        assert pickle.loads(pickle.dumps(odd)).encode(TEXT * 9) == expected


def test_the_recipe_chooses_the_end_of_its_documents(tmp_path: Path) -> None:
    fast(tmp_path / "tok", ["<|endoftext|>", "<|EOT|>"])
    (tmp_path / "text").mkdir()
    for index in range(20):
        (tmp_path / "text" / f"{index}.txt").write_text(f"{index} {TEXT}")
    raw = {
        "output": str(tmp_path / "out"),
        "sources": [{"name": "a", "path": str(tmp_path / "text")}],
        "tokenizer": {"path": str(tmp_path / "tok"), "eos": "<|EOT|>"},
        "num_workers": 1,
    }
    prepare(build(RecipeConfig, raw))
    file = TokenFile(tmp_path / "out" / "a_train")
    assert {int(file.document(i)[-1]) for i in range(file.num_documents)} == {1}
    assert load_tokenizer(tmp_path / "out" / "tokenizer").eos_id == 1
    files = json.loads((tmp_path / "out" / "manifest.json").read_text())["files"]
    assert {"tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"} <= files.keys()
    del raw["tokenizer"]["path"]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="tokenizer.eos = <|EOT|>: names a token of an existing"):
        build(RecipeConfig, raw)
