"""Prepare a corpus: python data/prepare.py RECIPE.yaml [key=value ...] [--overwrite]."""

from __future__ import annotations

import sys

from alibi_lm.console import console
from alibi_lm.data.prepare import load_recipe, prepare
from alibi_lm.errors import UserError


def main() -> int:
    """Prepare the recipe named on the command line; 2 where the user has something to mend."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--overwrite"]
    if not arguments or {"-h", "--help"} & set(arguments):
        console.say(__doc__ or "")
        return 0 if arguments else 2
    try:
        prepare(load_recipe(arguments[0], arguments[1:]), overwrite="--overwrite" in sys.argv)
    except UserError as error:
        for problem in error.problems:
            console.error(str(problem))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
