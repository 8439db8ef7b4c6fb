"""Compiling the kernel's C++ once a machine, with the compiler that DeepSpeed's own kernels use.

The library lies where torch keeps compiled extensions, under a name made of everything that it
depends on, so a change of source, torch or compiler makes a new one and a shared home can serve
unlike hosts.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch.utils import cpp_extension

from alibi_lm.console import console

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-fopenmp", "-Wno-ignored-attributes",
         "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx512bf16",
         "-mfma")  # fmt: skip
COMPILE_SECONDS = 600.0


@cache
def unavailable() -> str | None:
    """Why this machine has no such kernel, or None once it is compiled and loaded.

    A machine that could have it and has no compiler is told so once.
    """
    if not _has_instructions():
        return "no AMX"
    try:
        torch.ops.load_library(str(_library()))
    except FileNotFoundError as error:
        reason = f"no C++ compiler ({error.filename})"
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or [f"exit code {error.returncode}"]
        reason = f"its C++ does not compile here ({last[0]})"
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"its library cannot be made or loaded ({error})"
    else:
        return None
    console.warn(f"attention: torch's slower kernel is used on this CPU: {reason}")
    return reason


def _has_instructions() -> bool:
    capabilities = torch.backends.cpu.get_cpu_capability()
    tiles = torch.cpu._is_amx_tile_supported() and torch.cpu._is_avx512_bf16_supported()
    return capabilities.startswith("AVX512") and bool(tiles)


def _library() -> Path:
    """The compiled library; made if it is not there, by one process while others wait."""
    compiler = cpp_extension.get_cxx_compiler()
    folder = Path(cpp_extension.get_default_build_root()) / "alibi_lm"
    path = folder / f"attention_{_fingerprint(compiler)}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{path.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(compiler, path)
    return path


def _fingerprint(compiler: str) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    parts = [torch.__version__, version, *_arguments()]
    parts += [file.read_text() for file in sorted(SOURCES.glob("*.[hc]*"))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _arguments() -> list[str]:
    includes = [*cpp_extension.include_paths("cpu"), sysconfig.get_paths()["include"]]
    abi = int(torch.compiled_with_cxx11_abi())
    # OpenMP is not linked: its functions are those of the copy that torch has loaded. A second one
    # would bring threads of its own, and both would spin on the same cores.
    return [*FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *(f"-isystem{path}" for path in includes),
            f"-L{cpp_extension.TORCH_LIB_PATH}"]  # fmt: skip


def _compile(compiler: str, path: Path) -> None:
    console.say("attention: compiling the kernel for this CPU, once")
    descriptor, name = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(descriptor)
    partial = Path(name)
    try:
        command = [compiler, *_arguments(), str(SOURCES / "attention.cpp"), "-o", name,
                   "-ltorch", "-ltorch_cpu", "-lc10"]  # fmt: skip
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
