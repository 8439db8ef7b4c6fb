"""Problems longer than trained: python evals/generalization.py RUN [--suite YAML] [key=value]"""

import sys

from alibi_lm.cli.main import main

if __name__ == "__main__":
    main(["eval", "generalization", *sys.argv[1:]])
