"""One process of an all-reduce between hosts, over the backend that training uses.

`python -m alibi_lm.doctor.collective RANK PROCESSES DEVICE ADDRESS PORT FOLDER TOKEN`
"""

from __future__ import annotations

import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from alibi_lm.doctor.probe import MARKER
from alibi_lm.doctor.report import CollectiveReport, dump
from alibi_lm.parallel.device import get_device

NUM_BYTES = 32 << 20
REPEATS = 3
JOIN_TIMEOUT = timedelta(seconds=60)


def seen(folder: Path | None, token: str) -> list[str]:
    """Names of the hosts whose marker files are in the folder."""
    if folder is None:
        return []
    # Listing the folder makes network storage look again; single lookups may be cached.
    names = [path.name for path in folder.iterdir()]
    start = f"{MARKER}{token}_"
    return sorted(name.removeprefix(start) for name in names if name.startswith(start))


def measure(
    rank: int, device_index: int, address: str, port: int, report: CollectiveReport
) -> None:
    """Join the other processes, compare clocks, and time an all-reduce; fills in the report."""
    size = report.num_processes
    accelerator = get_accelerator()
    accelerator.set_device(device_index)
    report.backend = accelerator.communication_backend_name()
    store = dist.TCPStore(address, port, size, rank == 0, JOIN_TIMEOUT, use_libuv=True)
    dist.init_process_group(
        report.backend, store=store, rank=rank, world_size=size, timeout=JOIN_TIMEOUT
    )
    number = torch.tensor([rank + 1.0], device=get_device())
    dist.all_reduce(number)
    clocks = torch.zeros(size, dtype=torch.float64, device=get_device())
    dist.barrier()
    clocks[rank] = time.time()
    dist.all_reduce(clocks)
    report.clock = float(clocks[rank] - clocks[0])
    report.total = float(number)
    block = torch.zeros(NUM_BYTES // 4, device=get_device())
    dist.all_reduce(block)
    start = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(block)
    float(block[0])  # waits for a GPU
    seconds = (time.perf_counter() - start) / REPEATS
    report.bytes_per_second = 2 * (size - 1) / size * NUM_BYTES / seconds
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Print this process's report as one line of JSON."""
    rank, size, device_index, address, port, folder, token = arguments
    shared = Path(folder) if folder else None
    report = CollectiveReport(seen(shared, token), num_processes=int(size))
    try:
        measure(int(rank), int(device_index), address, int(port), report)
    except (dist.DistError, RuntimeError) as error:
        report.failure = " ".join(str(error).split())[:300]
    finally:
        if shared is not None:  # every process has looked by now
            (shared / f"{MARKER}{token}_{socket.gethostname()}").unlink(missing_ok=True)
    sys.stdout.write(dump(report) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
