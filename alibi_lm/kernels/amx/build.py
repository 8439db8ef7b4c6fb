"""Compiles the kernels' C++ once a machine, with the compiler that DeepSpeed's own kernels use.

The library is stored where torch keeps compiled extensions, under a name hashed from everything it
depends on: a change of source, torch or compiler makes a new one, and a shared home directory can
serve hosts that differ.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import struct
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch.utils import cpp_extension

from alibi_lm.utils.logging import console

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-Wno-ignored-attributes")
CPU_FEATURES = ("avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512bf16", "fma")
COMPILE_SECONDS = 600.0
_ELF = struct.Struct("<4s36xQ10xHH2x")
"""Header of ELF-64: the magic, and the offset, entry size and count of the section table."""


@cache
def unavailable_reason() -> str | None:
    """Why the library is not available on this machine, or None once it is compiled and loaded.

    Where the CPU has AMX and compiling or loading fails, a warning is logged once.
    """
    if not has_instructions():
        return "no AMX"
    compiler = cpp_extension.get_cxx_compiler()
    try:
        if shutil.which(compiler) is None:
            raise OSError(f"no C++ compiler {compiler}")
        torch.ops.load_library(str(_library(compiler)))
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or [f"exit code {error.returncode}"]
        reason = f"its C++ does not compile here ({last[0]})"
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"its library cannot be built or loaded ({error})"
    else:
        return None
    console.warning(f"attention: torch's slower kernel is used on this CPU: {reason}")
    return reason


def has_instructions() -> bool:
    """Whether this CPU has AMX and AVX-512 with bf16."""
    capabilities = torch.backends.cpu.get_cpu_capability()
    tiles = torch.cpu._is_amx_tile_supported() and torch.cpu._is_avx512_bf16_supported()
    return capabilities.startswith("AVX512") and bool(tiles)


def _library(compiler: str) -> Path:
    """The compiled library; if missing or truncated, one process compiles it while others wait."""
    # TORCH_EXTENSIONS_DIR, or a folder of this Python's in the user's cache.
    folder = Path(cpp_extension._get_build_directory("alibi_lm", verbose=False))
    path = folder / f"attention_{_fingerprint(compiler)}.so"
    if _is_complete(path):
        return path
    with (folder / f"{path.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_complete(path):
            _compile(compiler, path)
    return path


def _is_complete(path: Path) -> bool:
    """Whether the file extends to the end of its ELF section table, which comes last.

    A full disk or a crash can leave a truncated library, which would kill the process loading it.
    """
    if not path.exists():
        return False
    with path.open("rb") as file:
        header = file.read(_ELF.size)
    if len(header) < _ELF.size:
        return False
    magic, table, entry, count = _ELF.unpack(header)
    return magic == b"\x7fELF" and table + entry * count <= path.stat().st_size


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
    features = (f"-m{feature}" for feature in CPU_FEATURES)
    system = (f"-isystem{path}" for path in includes)
    return [*FLAGS, *features, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *system]


def _compile(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compiled, partial = f"{folder}/attention.o", f"{folder}/{path.name}"
        source = str(SOURCES / "attention.cpp")
        # Linked separately, without OpenMP, so that it uses the copy that torch has loaded. A
        # second one would bring threads that spin on the same cores.
        libraries = [f"-L{cpp_extension.TORCH_LIB_PATH}", "-ltorch", "-ltorch_cpu", "-lc10"]
        steps = [
            [compiler, *_arguments(), "-c", source, "-o", compiled],
            [compiler, "-shared", compiled, *libraries, "-o", partial],
        ]
        for step in steps:
            subprocess.run(
                step, capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS
            )
        with Path(partial).open("rb") as file:
            os.fsync(file.fileno())  # so that a crash soon after does not leave an empty file
        Path(partial).replace(path)
