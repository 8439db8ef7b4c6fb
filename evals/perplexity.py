"""Perplexity by window length: python evals/perplexity.py RUN [--suite YAML] [key=value ...]"""

import sys

from alibi_lm.cli.main import main

if __name__ == "__main__":
    main(["eval", "perplexity", *sys.argv[1:]])
