"""Problems longer than trained: python evals/generalisation.py RUN [--suite YAML] [key=value]"""

import sys

from alibi_lm.cli.main import main

if __name__ == "__main__":
    main(["eval", "generalisation", *sys.argv[1:]])
