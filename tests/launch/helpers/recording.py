"""launch/pretrain.py, run as it is, with each rank's exit code written down.

A launcher tells the code of one rank at most. Usage: recording.py CODES_FOLDER/config.yaml ...; the
codes go beside the config, one file `exit_RANK` a rank.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn

_exit = os._exit


def _record(status: int) -> NoReturn:
    config = next(part for part in sys.argv[1:] if part.endswith("config.yaml"))
    Path(config).with_name(f"exit_{os.environ['RANK']}").write_text(str(status), encoding="utf-8")
    _exit(status)


if __name__ == "__main__":
    os._exit = _record
    script = Path(__file__).parents[3] / "launch" / "pretrain.py"
    runpy.run_path(str(script), run_name="__main__")
