"""The device that a process computes on, decided in one place.

Training, evals, generation and the Python interface ask `get_device`. DeepSpeed makes the choice,
because training runs on it, so `DS_ACCELERATOR=cpu` holds for all of them.
"""

from __future__ import annotations

import torch

from alibi_lm.utils.errors import ConfigError, Problem


def get_device(name: str | None = None) -> torch.device:
    """The device called `name`, else the current accelerator, else the CPU.

    Args:
        name: as torch writes it, for example `cpu`, `cuda` or `cuda:1`.

    Raises:
        ConfigError: this machine has no such device.
    """
    if name is not None:
        return _named(name)
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    # Imported here: DeepSpeed takes seconds, and without an accelerator its answer is the CPU.
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def _named(name: str) -> torch.device:
    available = ["cpu"]
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        numbers = range(torch.accelerator.device_count())
        available += [accelerator.type, *(f"{accelerator.type}:{number}" for number in numbers)]
    if name not in available:
        fix = f"use one of {', '.join(available)}"
        raise ConfigError(Problem("device", name, "is not a device of this machine", fix))
    return torch.device(name)
