"""Which device is computed on."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed import accelerator

from alibi_lm.parallel.device import get_device
from alibi_lm.utils.errors import ConfigError


def machine_with_gpus(monkeypatch: pytest.MonkeyPatch, current: str) -> None:
    """A machine with two GPUs, of which DeepSpeed has chosen `current`."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    chosen = SimpleNamespace(current_device_name=lambda: current)
    monkeypatch.setattr(accelerator, "get_accelerator", lambda: chosen)


def test_without_an_accelerator_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert get_device() == torch.device("cpu") == get_device("cpu")
    with pytest.raises(ConfigError, match="device = cuda: is not a device .* use one of cpu$"):
        get_device("cuda")


@pytest.mark.parametrize("current", ["cuda:1", "cpu"])  # cpu: with DS_ACCELERATOR=cpu
def test_deepspeed_chooses_among_accelerators(
    current: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_with_gpus(monkeypatch, current)
    assert get_device() == torch.device(current)


def test_a_named_device_counts_if_the_machine_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with_gpus(monkeypatch, "cuda:0")
    assert get_device("cpu") == torch.device("cpu")
    assert get_device("cuda:1") == torch.device("cuda:1")
    for wrong in ("cuda:2", "gpu", "mps", "", "meta"):
        with pytest.raises(ConfigError, match="use one of cpu, cuda, cuda:0, cuda:1$"):
            get_device(wrong)
