"""An eval by a launcher: deepspeed evals/evaluate.py EVAL RUN [--suite YAML] [key=value ...]"""

import sys

from alibi_lm.cli.main import main

if __name__ == "__main__":
    # The launcher puts --local_rank=N first: it is the eval's option.
    flags = [argument for argument in sys.argv[1:] if argument.startswith("--local_rank")]
    main(["eval", *(argument for argument in sys.argv[1:] if argument not in flags), *flags])
