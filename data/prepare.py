"""Prepare a corpus: python data/prepare.py RECIPE.yaml [key=value ...] [--overwrite]"""

import sys

from alibi_lm.cli.main import main

if __name__ == "__main__":
    main(["prepare", *sys.argv[1:]])
