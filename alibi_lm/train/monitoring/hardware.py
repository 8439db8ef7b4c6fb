"""What the machine can do: peak FLOP/s for MFU, memory in use, threads."""

from __future__ import annotations

import time

import torch

from alibi_lm.parallel.device import get_device
from alibi_lm.utils.memory import peak_resident_bytes

# Dense bf16/fp16 tensor-core peak by a part of the device's name, from the vendors' data sheets.
# The first match counts, so the more specific names come first.
GPU_PEAK_FLOPS = (
    ("GB300", 2.5e15),
    ("B300", 2.25e15),
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 150e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307e12),
    ("MI250X", 383e12),
)


def peak_flops(dtype: torch.dtype) -> tuple[float | None, str]:
    """Peak FLOP/s of one device and where the figure comes from.

    On a GPU from the table, None where it is not in it (or in fp32, whose peak depends on TF32);
    on CPU the best of a few timed matrix products, with this process's threads.
    """
    device = get_device()
    if device.type == "cpu":
        return _measured_flops(dtype), "matrix product timed at start"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    if dtype != torch.float32:
        for part, flops in GPU_PEAK_FLOPS:
            if part in name:
                return flops, f"table entry {part}"
    return None, f"no table entry for {name} in {dtype}"


def _measured_flops(dtype: torch.dtype, size: int = 1024, repetitions: int = 5) -> float:
    left = torch.randn(size, size).to(dtype)
    right = torch.randn(size, size).to(dtype)
    best = float("inf")
    left @ right  # the first product also sets up the kernel
    for _ in range(repetitions):
        start = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def memory_in_use() -> int:
    """Peak bytes: of the device's allocator, or on CPU of this process."""
    if get_device().type == "cuda":
        return torch.cuda.max_memory_allocated()
    return peak_resident_bytes()


def threads_per_rank(num_cores: int, ranks_on_host: int) -> int:
    """CPU threads of a rank, so that the ranks of a host share its cores."""
    return max(1, num_cores // max(1, ranks_on_host))
