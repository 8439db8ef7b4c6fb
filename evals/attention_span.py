"""How far each head reads: python evals/attention_span.py RUN [--suite YAML] [key=value ...]"""

import sys

from alibi_lm.cli.main import main

if __name__ == "__main__":
    main(["eval", "attention-span", *sys.argv[1:]])
