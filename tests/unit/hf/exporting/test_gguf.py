"""Exported folders in llama.cpp: what its converter reads, and the converted model itself.

The second half runs where `llama_cpp` and `gguf` can be imported and llama.cpp's
convert_hf_to_gguf.py is in the PATH: docs/hugging-face.md says how to get both.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from sentencepiece import SentencePieceProcessor
from transformers import AutoConfig

from alibi_lm.checkpoint.step import Checkpoint
from alibi_lm.data.tokenizer import load_tokenizer
from alibi_lm.hf.exporting.exporter import export
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.inference.generation import generate
from tests.unit.hf.exporting.llama_cpp_model import CONVERTER, convert, greedy, load, perplexities
from tests.unit.hf.exporting.test_export_tokenizer import NASTY, standard_library, train
from tests.unit.hf.small_step import add_tokenizer, write_step

LENGTH = 64
MPT_TENSORS = re.compile(
    r"transformer\.(wte|norm_f|blocks\.\d+\."
    r"(norm_1|attn\.Wqkv|attn\.out_proj|norm_2|ffn\.up_proj|ffn\.down_proj))\.weight"
)
real = pytest.mark.skipif(
    CONVERTER is None or find_spec("llama_cpp") is None or find_spec("gguf") is None,
    reason="needs llama_cpp, gguf and convert_hf_to_gguf.py in the PATH",
)


# ---- what the converter reads of a folder ------------------------------------------------------


def test_the_folder_is_what_the_converter_takes(tmp_path: Path) -> None:
    step = write_step(tmp_path / "run", {"num_heads": 12})
    add_tokenizer(step, tmp_path)
    out = tmp_path / "out"
    export(step, out, parity="weights", shard_bytes=60_000)
    # It reads the config by AutoConfig, and chooses by the first of architectures.
    config = AutoConfig.from_pretrained(out, trust_remote_code=False).to_dict()
    assert config["architectures"] == ["MPTForCausalLM"]
    sizes = {key: config[key] for key in ("n_layers", "d_model", "n_heads", "vocab_size")}
    assert sizes == {"n_layers": 2, "d_model": 48, "n_heads": 12, "vocab_size": 307}
    assert config["max_seq_len"] >= 64 * 24
    attention = config["attn_config"]
    assert (attention["alibi"], attention["alibi_bias_max"]) == (True, 8)
    assert attention["clip_qkv"] is None
    assert attention.get("kv_n_heads") is None
    # It writes epsilon 1e-5 and a feed-forward of 4 widths whatever the config says.
    assert config["layer_norm_epsilon"] == 1e-5
    assert config["expansion_ratio"] == 4
    # Weights: model*.safetensors that agree with their index, by names of its own table. A tied
    # output is taken from the embedding, so there is no lm_head.
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == sorted(set(index.values()))
    assert all(name.startswith("model") for name in files)
    stored: dict[str, str] = {}
    for file in files:
        with safe_open(out / file, "pt") as tensors:
            stored |= {name: file for name in tensors.keys()}  # noqa: SIM118
    assert stored == index
    assert all(map(MPT_TENSORS.fullmatch, stored))
    assert len(stored) == 2 + 6 * 2
    # Its sentencepiece path: tokenizer.model, whose pieces may not outnumber the vocabulary, no
    # file that changes pieces, and these ids.
    pieces = SentencePieceProcessor(model_file=str(out / "tokenizer.model"))
    assert pieces.get_piece_size() <= config["vocab_size"]
    assert not (out / "added_tokens.json").exists()
    assert "added_tokens_decoder" not in json.loads((out / "tokenizer_config.json").read_text())
    assert (pieces.unk_id(), pieces.eos_id(), pieces.pad_id()) == (0, 1, 3)
    # No bos is ever put in; the ids of config.json are written into the file.
    assert json.loads((out / "tokenizer_config.json").read_text())["add_bos_token"] is False
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 1, 3)


# ---- the converted model -------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[8, 12])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model that has learnt a little of the standard library; 12 heads have slopes of two
    schedules."""
    folder = tmp_path_factory.mktemp("trained")
    texts = standard_library(1_500_000)
    (folder / "source.model").write_bytes(train("bpe", "".join(texts[:20]).splitlines(True), 1000))
    tokenizer = load_tokenizer(folder / "source.model")
    tokens = torch.tensor([i for text in texts[:40] for i in [*tokenizer.encode(text), 1]])

    def learn(decoder: Decoder) -> None:
        optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3)
        draw = torch.Generator().manual_seed(0)
        for _ in range(300):
            starts = torch.randint(len(tokens) - LENGTH - 1, (16,), generator=draw)
            rows = torch.stack([tokens[s : s + LENGTH + 1] for s in starts])
            loss = decoder(rows[:, :-1], rows[:, 1:]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    step = write_step(folder / "run", {"num_heads": request.param, "hidden_size": 96,
                      "vocab_size": 1000, "initializer_range": 0.0625},
                      length=LENGTH, prepare=learn)  # fmt: skip
    (step.folder / "tokenizer").mkdir()
    (folder / "source.model").rename(step.folder / "tokenizer" / "tokenizer.model")
    export(step, folder / "out")
    return step


@real
def test_llama_cpp_gives_our_tokens_and_perplexity(trained: Checkpoint) -> None:
    """Its GELU is the tanh form, from a table in fp16, where MPT has the exact one."""
    out = trained.run_folder.parent / "out"
    done = convert(out)
    assert done.returncode == 0, done.stderr
    model = load(out, 4 * LENGTH)
    assert model.n_vocab() == 1000
    assert (model.token_eos(), model.metadata["tokenizer.ggml.padding_token_id"]) == (1, "3")
    assert float(model.metadata["mpt.attention.max_alibi_bias"]) == 8
    tokenizer, decoder = trained.tokenizer(), trained.decoder()
    assert tokenizer is not None
    texts = standard_library(1_900_000)[-12:]
    for text in [*texts, *(text for text in NASTY if "\u2581" not in text and "\0" not in text)]:
        ids = model.tokenize(text.encode(), add_bos=False, special=False)
        assert ids == tokenizer.encode(text), repr(text[:60])
    tokens = [i for text in texts for i in tokenizer.encode(text)]
    prompts = [tokens[500 * i : 500 * i + 24 + 8 * i] for i in range(15)]  # 24 to 136 tokens
    # The five least monotonous: a model this small repeats itself.
    ours = sorted(zip(prompts, generate(decoder, prompts, 64), strict=True),
                  key=lambda pair: len(set(pair[1])))[-5:]  # fmt: skip
    for prompt, continuation in ours:
        theirs = greedy(model, prompt, 64)
        assert len(set(continuation)) > 3
        equal = sum(a == b for a, b in zip(theirs, continuation, strict=True))
        assert equal >= 60, (len(prompt), equal)
    for length, windows in ((LENGTH, 40), (4 * LENGTH, 10)):
        theirs_perplexity, ours_perplexity = perplexities(model, decoder, tokens, length, windows)
        assert ours_perplexity < 200  # of 1,000: it has learnt something
        assert abs(theirs_perplexity / ours_perplexity - 1) < 0.01
    model.close()


@real
def test_what_the_converter_cannot_take_it_refuses(tmp_path: Path) -> None:
    """As the docs say: it knows no tokenizer of ours but a sentencepiece one in MPT's layout."""
    bloom = write_step(tmp_path / "bloom", {"num_heads": 8, "architecture": "bloom"})
    (tmp_path / "pieces").mkdir()
    add_tokenizer(bloom, tmp_path / "pieces")
    export(bloom, tmp_path / "bloom_out", parity="weights")
    done = convert(tmp_path / "bloom_out")
    assert done.returncode != 0
    assert "BPE pre-tokenizer was not recognized" in done.stderr
    without = write_step(tmp_path / "without", {"num_heads": 8})
    export(without, tmp_path / "without_out", parity="weights")
    done = convert(tmp_path / "without_out")
    assert done.returncode != 0
    assert "tokenizer.model" in done.stderr
