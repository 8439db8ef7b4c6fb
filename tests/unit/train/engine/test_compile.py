"""torch.compile of blocks: the same results, one graph for all blocks, refusals."""

from __future__ import annotations

import shutil
import threading
import warnings
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters, warn_once_cache
from torch._inductor.config import cpp

from alibi_lm.config import Config
from alibi_lm.config_loading import build
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.layers import Block
from alibi_lm.train.engine.compile import check_compiler, compile_blocks
from alibi_lm.train.entry import quiet_libraries
from alibi_lm.utils.errors import ConfigError

TOKENS = torch.randint(97, (2, 65), generator=torch.Generator().manual_seed(0))


def decoder(dtype: torch.dtype, **model: Any) -> Decoder:
    shape = {"num_layers": 10, "hidden_size": 64, "num_heads": 4, "vocab_size": 97}
    return Decoder(ModelConfig(**{**shape, **model}), seed=0).to(dtype)


def step(model: Decoder, length: int = 64) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(TOKENS[:, :length], TOKENS[:, 1 : length + 1]).mean()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("dtype", "model"),
    [
        (torch.float32, {"architecture": "mpt", "num_kv_heads": 2}),
        (torch.bfloat16, {"architecture": "bloom"}),
        pytest.param(
            torch.float32, {"architecture": "bloom", "position": "rotary"}, marks=pytest.mark.slow
        ),
    ],
)
def test_compiled_blocks_compute_the_same(dtype: torch.dtype, model: dict[str, Any]) -> None:
    plain, compiled = decoder(dtype, **model), decoder(dtype, **model)
    names = list(compiled.state_dict())
    counters.clear()
    compile_blocks(compiled)
    assert list(compiled.state_dict()) == names
    calls = [0]

    def count(*_: object) -> None:
        calls[0] += 1

    for block in compiled.blocks:
        block.register_forward_pre_hook(count)
    close = 1e-5 if dtype == torch.float32 else 2e-2
    for length in (64, 48):
        (loss, gradients), (wanted, all_wanted) = step(compiled, length), step(plain, length)
        assert loss.item() == pytest.approx(wanted.item(), rel=close)
        assert gradients.keys() == all_wanted.keys()
        for name, gradient in gradients.items():
            error = (gradient - all_wanted[name]).float().norm() / all_wanted[name].float().norm()
            assert error < 2 * close, name
    # Between attention and what is around it there are few graphs, and all blocks share them.
    made = counters["stats"]["unique_graphs"]
    assert 0 < made <= 8
    step(compiled, 48)
    assert counters["stats"]["unique_graphs"] == made
    assert calls == [3 * 10]


def test_attention_stays_out_of_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(torch.float32, num_layers=2)
    compile_blocks(model)
    step(model)
    seen = []

    def fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object) -> torch.Tensor:
        seen.append(q.shape)
        return v

    monkeypatch.setattr("alibi_lm.model.layers.attention", fake)
    step(model)
    assert seen == [(2, 4, 64, 16)] * 2
    assert all(isinstance(block, Block) for block in model.blocks)


def test_a_run_is_not_told_of_cached_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setenv("DS_LOG_LEVEL", "warning")
    model = decoder(torch.float32, num_layers=1, position="rotary")
    compile_blocks(model)
    torch._dynamo.reset()
    warn_once_cache.clear()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        quiet_libraries()
        step(model)
    assert not [found for found in heard if "lru_cache" in str(found.message)]
    assert any("lru_cache" in said for said in warn_once_cache)


def test_no_compiler_is_said_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    raw: dict[str, Any] = {
        "run": {"dir": "unused"}, "model": {"vocab_size": 97},
        "data": {"corpora": [{"prefix": "unused"}]},
    }  # fmt: skip
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    # Another compiler than torch.compile's is of no use.
    monkeypatch.setattr(shutil, "which", lambda name: None if name == cpp.cxx[-1] else "/bin/c++")
    check_compiler(build(Config, raw))
    with pytest.raises(ConfigError, match=r"train\.compile = True: needs the C\+\+ compiler"):
        check_compiler(build(Config, raw | {"train": {"compile": True}}))
