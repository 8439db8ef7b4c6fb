"""Checks of one host on its own: `python -m alibi_lm.doctor.probe REQUEST`."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from alibi_lm import __version__
from alibi_lm.doctor.report import HostReport, ProbeRequest, dump
from alibi_lm.utils.errors import UserError

PACKAGES = ("torch", "deepspeed", "numpy", "safetensors")
BYTES_PER_PARAMETER = 12
"""Of a checkpoint: weights and Adam's two moments, in fp32."""
MARKER = ".alibi_lm_doctor_"


def probe(request: ProbeRequest) -> HostReport:
    """Check this host, and leave a marker file in the run folder for the other hosts to see."""
    report = HostReport(
        hostname=socket.gethostname(),
        address=_address(),
        python=f"{platform.python_version()} {sys.executable}",
        versions={"alibi_lm": f"{__version__} ({_source_digest()[:8]})"}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        gpus=_gpus(),
    )
    if request.config is not None:
        _read_run(request, report)
    return report


def _address() -> str | None:
    try:
        shown = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return next(iter(shown.stdout.split()), None)


def _gpus() -> list[str]:
    """Names of the GPUs of DeepSpeed's accelerator; none if that is the CPU."""
    import torch
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        return []
    return [torch.cuda.get_device_name(i) for i in range(get_accelerator().device_count())]


def _source_digest() -> str:
    """Digest of the library's own files: copies with one version number can differ."""
    state = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        state.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return state.hexdigest()


def _read_run(request: ProbeRequest, report: HostReport) -> None:
    """Config, data, run folder and disk, read as training reads them."""
    # Imported here: a host without a config need not load the training code.
    from alibi_lm.config_loading import digest
    from alibi_lm.model.flops import num_parameters
    from alibi_lm.train.data import open_training_data
    from alibi_lm.train.run import read_config

    assert request.config is not None
    try:
        config, _ = read_config(request.config, request.overrides, request.num_ranks)
        report.config = digest(config)
        _check_disk(Path(config.run.dir), request.token, report)
        manifest = json.dumps(open_training_data(config).facts(), sort_keys=True)
        report.data = hashlib.sha256(manifest.encode()).hexdigest()
    except UserError as error:
        report.problems.extend(str(problem) for problem in error.problems)
        return
    # One more than is kept: the next is written before the oldest is deleted.
    checkpoints = config.train.keep_last + 1
    report.needed_bytes = checkpoints * BYTES_PER_PARAMETER * num_parameters(config.model)


def _check_disk(run: Path, token: str, report: HostReport) -> None:
    folder = run.absolute()
    while not folder.is_dir():
        folder = folder.parent
    report.run_folder = str(folder)
    report.free_bytes = shutil.disk_usage(folder).free
    marker = folder / f"{MARKER}{token}_{report.hostname}"
    try:
        marker.write_text(report.hostname, encoding="utf-8")
    except OSError as error:
        report.problems.append(
            f"run.dir = {run}: cannot be written to ({error.strerror}); "
            "name a folder on storage that all hosts share and may write to"
        )


if __name__ == "__main__":
    sys.stdout.write(dump(probe(ProbeRequest(**json.loads(sys.argv[1])))) + "\n")
