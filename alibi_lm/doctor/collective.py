"""The hosts' meeting: `python -m alibi_lm.doctor.collective RANK HOSTS ADDRESS PORT FOLDER TOKEN`.

One rank a host, over the backend that training uses.
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
from alibi_lm.doctor.report import Meeting, dump
from alibi_lm.parallel.device import get_device

NUM_BYTES = 32 << 20
REPEATS = 3
JOIN_SECONDS = 60


def seen(folder: Path | None, token: str) -> list[str]:
    """Host names whose markers lie in the folder."""
    if folder is None:
        return []
    # A listing makes network storage look again, where a cached answer may be old.
    names = [path.name for path in folder.iterdir()]
    start = f"{MARKER}{token}_"
    return sorted(name.removeprefix(start) for name in names if name.startswith(start))


def meet(rank: int, num_hosts: int, address: str, port: int, found: Meeting) -> None:
    """Join the other hosts, compare clocks, and time an all-reduce; fills in `found`."""
    accelerator = get_accelerator()
    accelerator.set_device(0)
    found.backend = accelerator.communication_backend_name()
    store = dist.TCPStore(
        address, port, num_hosts, rank == 0, timedelta(seconds=JOIN_SECONDS), use_libuv=True
    )
    dist.init_process_group(
        found.backend, store=store, rank=rank, world_size=num_hosts,
        timeout=timedelta(seconds=JOIN_SECONDS),
    )  # fmt: skip
    number = torch.tensor([rank + 1.0], device=get_device())
    dist.all_reduce(number)
    clocks = torch.zeros(num_hosts, dtype=torch.float64, device=get_device())
    dist.barrier()
    clocks[rank] = time.time()
    dist.all_reduce(clocks)
    found.clock = float(clocks[rank] - clocks[0])
    found.total = float(number)
    block = torch.zeros(NUM_BYTES // 4, device=get_device())
    dist.all_reduce(block)
    start = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(block)
    float(block[0])  # a GPU has done it only now
    seconds = (time.perf_counter() - start) / REPEATS
    found.bytes_per_second = 2 * (num_hosts - 1) / num_hosts * NUM_BYTES / seconds
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Say what this host finds, as one line of JSON."""
    rank, num_hosts, address, port, folder, token = arguments
    shared = Path(folder) if folder else None
    found = Meeting(seen(shared, token))
    try:
        meet(int(rank), int(num_hosts), address, int(port), found)
    except (dist.DistError, RuntimeError) as error:
        found.failure = " ".join(str(error).split())[:300]
    finally:
        if shared is not None:  # by now all have looked
            (shared / f"{MARKER}{token}_{socket.gethostname()}").unlink(missing_ok=True)
    sys.stdout.write(dump(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
