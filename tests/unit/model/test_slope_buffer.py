"""A head's slopes: a buffer that stays fp32 and right, and that no state dict holds."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from alibi_lm.model.attention import flash_attn, flex
from alibi_lm.model.attention.dispatch import AttentionRequest, choose_kernel
from alibi_lm.model.config import ModelConfig, ScalingConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.layers import MLP, Attention, Embedding
from alibi_lm.model.position_scaling import head_slopes, rotation
from alibi_lm.model.slopes import alibi_slopes
from alibi_lm.parallel.mesh import ParallelDim
from alibi_lm.utils.errors import ConfigError


def config(position: str = "alibi") -> ModelConfig:
    return ModelConfig(
        num_layers=1,
        hidden_size=48,
        num_heads=6,
        vocab_size=30,
        position=position,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("position", ["alibi", "alibi_learned"])
@pytest.mark.parametrize(
    "move",
    [
        lambda module: module.to(torch.bfloat16),
        lambda module: module.half(),
        lambda module: module.double(),
        lambda module: module.to("meta").to_empty(device="cpu"),
        lambda module: module.to_empty(device="cpu"),
        lambda module: module.bfloat16().float(),
        copy.deepcopy,
    ],
)
def test_the_buffer_keeps_fp32_and_its_values(
    position: str, move: Callable[[nn.Module], nn.Module]
) -> None:
    attention = move(Attention(config(position), ParallelDim(1, 3)))
    slopes = attention.slopes
    assert isinstance(slopes, Tensor)
    assert slopes.dtype == torch.float32
    assert torch.equal(slopes, torch.tensor(alibi_slopes(6)[2:4], dtype=torch.float32))
    assert attention.exact_slopes == alibi_slopes(6)[2:4]
    assert "slopes" in dict(attention.named_buffers())
    assert not any(name.endswith("slopes") for name in attention.state_dict())


def test_a_moved_module_moves_its_slopes() -> None:
    attention = Attention(config()).to("meta")
    assert attention.slopes is not None
    assert attention.slopes.device.type == "meta"
    assert Attention(config("rotary")).slopes is None


def test_old_state_dicts_load() -> None:
    decoder = Decoder(config())
    state = {name: value.clone() for name, value in decoder.state_dict().items()}
    assert set(state) == {name for name, _ in decoder.named_parameters()}
    decoder.load_state_dict(state, strict=True)


def test_an_installed_flash_attn_does_not_turn_pruning_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flex.importlib.util, "find_spec", lambda name: SimpleNamespace())
    for kernel in (flash_attn, flex):
        kernel.missing.cache_clear()
    q = SimpleNamespace(
        device=torch.device("cuda"), dtype=torch.bfloat16, shape=torch.Size((1, 8, 4096, 64))
    )
    slopes = alibi_slopes(8)
    try:
        dense = choose_kernel(q, q, q, AttentionRequest(slopes))  # type: ignore[arg-type]
        pruned = choose_kernel(q, q, q, AttentionRequest(slopes, epsilon=1e-6))  # type: ignore[arg-type]
    finally:
        for kernel in (flash_attn, flex):
            kernel.missing.cache_clear()
    assert (dense, pruned) == ("flash_attn", "flex")


@pytest.mark.parametrize("layer", [Embedding, Attention, MLP])
@pytest.mark.parametrize(("key", "value"), [("position", "ALiBi"), ("architecture", "llama")])
def test_layers_refuse_an_unknown_choice(layer: type[nn.Module], key: str, value: str) -> None:
    changed = config()
    setattr(changed, key, value)
    with pytest.raises(ConfigError, match=f"{key} = {value}: is not one of"):
        layer(changed)


def test_an_unknown_kind_of_scaling_is_refused() -> None:
    scaling = ScalingConfig("linear", 2.0)
    scaling.kind = "dynamic"  # type: ignore[assignment]
    changed = config()
    changed.scaling = scaling
    with pytest.raises(ConfigError, match="kind = dynamic"):
        head_slopes(changed)
    with pytest.raises(ConfigError, match="kind = dynamic"):
        rotation(16, scaling)
