"""Start or resume a run: deepspeed launch/pretrain.py CONFIG.yaml [key=value ...]"""

import sys

from alibi_lm.train.entry import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
