"""RULER, passkey and recall: python evals/retrieval.py RUN [--suite YAML] [key=value ...]"""

import sys

from alibi_lm.cli.main import main

if __name__ == "__main__":
    main(["eval", "retrieval", *sys.argv[1:]])
