"""Needle in a haystack: python evals/needle.py RUN [--suite YAML] [key=value ...]"""

import sys

from alibi_lm.cli.main import main

if __name__ == "__main__":
    main(["eval", "needle", *sys.argv[1:]])
