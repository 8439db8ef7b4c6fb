"""Start or resume a run: deepspeed launch/pretrain.py CONFIG.yaml [key=value ...]"""

import sys

from alibi_lm.train.entry import run

if __name__ == "__main__":
    run(sys.argv[1:])
