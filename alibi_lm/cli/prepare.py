"""`alibi-lm prepare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from alibi_lm.cli.arguments import OVERRIDES


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@OVERRIDES
@click.option("--overwrite", is_flag=True, help="Replace the output of a different recipe.")
def prepare(recipe: Path, overrides: Sequence[str], overwrite: bool) -> None:
    """Turn the corpora of RECIPE (YAML) into a tokenizer and token files."""
    from alibi_lm.data.preparation.prepare import load_recipe
    from alibi_lm.data.preparation.prepare import prepare as run_prepare

    run_prepare(load_recipe(recipe, list(overrides)), overwrite=overwrite)
