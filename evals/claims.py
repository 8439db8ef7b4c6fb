"""The claims about linear biases: python evals/claims.py SUITE [key=value ...]"""

import sys

from alibi_lm.cli.main import main

if __name__ == "__main__":
    main(["eval", "claims", *sys.argv[1:]])
