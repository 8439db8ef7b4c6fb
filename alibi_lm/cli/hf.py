"""The commands `export` and `import`: runs to and from Hugging Face folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from alibi_lm.cli.arguments import OVERRIDES, RUN

PARITY = click.option(
    "--parity",
    type=click.Choice(["logits", "blockwise", "weights"]),
    help="What the parity check compares: logits (the default if both models fit in memory), "
    "logits computed block by block (the default for larger models), or only the weights.",
)


@click.command()
@RUN
@click.argument("out", type=click.Path(path_type=Path), required=False)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="Precision of the exported weights.",
)
@click.option(
    "--format",
    "layout",
    type=click.Choice(["mpt", "bloom"]),
    help="Hugging Face class; by default the one that fits model.architecture.",
)
@click.option("--tokenizer/--no-tokenizer", default=True, help="Whether to write a tokenizer.")
@PARITY
@click.option(
    "--with-code",
    is_flag=True,
    help="Write our own modeling file beside the weights, for trust_remote_code: for windows and "
    "position schemes that no transformers class computes.",
)
@click.option("--push", metavar="REPO", help="Upload the folder to REPO on the Hub.")
@click.option(
    "--private/--public", default=None, help="Visibility of a REPO that is created.  [private]"
)
@click.option("--dry-run", is_flag=True, help="With --push: list what would be uploaded.")
def export(
    run: Path,
    out: Path | None,
    precision: str,
    layout: str | None,
    tokenizer: bool,
    parity: str | None,
    with_code: bool,
    push: str | None,
    private: bool | None,
    dry_run: bool,
) -> None:
    """Export RUN as a Hugging Face folder and check that its logits agree.

    OUT is by default RUN/hf/step_XXXXXXXX. --push needs a login (`hf auth login`, or HF_TOKEN).
    """
    from alibi_lm.hf.exporting.exporter import export as run_export
    from alibi_lm.hf.exporting.exporter import open_to_export
    from alibi_lm.hf.exporting.push import check_login, check_name
    from alibi_lm.hf.exporting.push import push as run_push
    from alibi_lm.utils.errors import ConfigError, Problem

    if push is not None:
        check_name(push)
        if not dry_run:
            check_login()
    elif dry_run or private is not None:
        option = "--dry-run" if dry_run else "--private" if private else "--public"
        raise ConfigError(Problem(option, None, "has no effect without --push", "add --push REPO"))
    step = open_to_export(run)
    folder = out or step.hf_folder
    run_export(step, folder, precision=precision, format=layout, tokenizer=tokenizer,
               parity=parity, with_code=with_code)  # fmt: skip
    if push is not None:
        run_push(folder, push, private=private is not False, dry_run=dry_run)


@click.command("import")
@click.argument("folder", type=click.Path(path_type=Path))
@RUN
@OVERRIDES
@click.option("--tokenizer/--no-tokenizer", default=True, help="Whether to import its tokenizer.")
@click.option("--allow-pickle", is_flag=True, help="Read pytorch_model.bin files (tensors only).")
@PARITY
def import_command(
    folder: Path,
    run: Path,
    overrides: Sequence[str],
    tokenizer: bool,
    allow_pickle: bool,
    parity: str | None,
) -> None:
    """Import the BLOOM or MPT model in FOLDER as RUN and check that its logits agree.

    RUN can be evaluated, exported, used for generation, and named in train.init_from.
    """
    from alibi_lm.hf.importing.importer import import_folder

    import_folder(folder, run, overrides=overrides, tokenizer=tokenizer,
                  allow_pickle=allow_pickle, parity=parity)  # fmt: skip
