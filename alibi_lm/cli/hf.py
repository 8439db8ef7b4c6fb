"""Between runs and Hugging Face folders: export and import."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from alibi_lm.cli.arguments import OVERRIDES, RUN

PARITY = click.option(
    "--parity",
    type=click.Choice(["logits", "blockwise", "weights"]),
    help="What is compared: logits of both models whole (the default where memory holds them) or "
    "block by block (the default for larger ones), or only the bits of the weights.",
)


@click.command()
@RUN
@click.argument("out", type=click.Path(path_type=Path), required=False)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="Precision of the exported weights.",
)
@click.option(
    "--format",
    "layout",
    type=click.Choice(["mpt", "bloom"]),
    help="Hugging Face class; by default the one that the model's shape fits.",
)
@click.option("--tokenizer/--no-tokenizer", default=True, help="Whether to write a tokenizer.")
@PARITY
@click.option(
    "--with-code",
    is_flag=True,
    help="Write our own modeling file beside the weights, for trust_remote_code: for windows and "
    "position schemes that no stock class computes.",
)
@click.option("--push", metavar="REPO", help="Upload the proven folder to the hub's REPO.")
@click.option("--private/--public", default=None, help="Who sees a REPO made now.  [private]")
@click.option("--dry-run", is_flag=True, help="With --push: list what would be uploaded.")
def export(
    run: Path,
    out: Path | None,
    dtype: str,
    layout: str | None,
    tokenizer: bool,
    parity: str | None,
    with_code: bool,
    push: str | None,
    private: bool | None,
    dry_run: bool,
) -> None:
    """Write RUN as a Hugging Face folder, reload it, and compare its logits.

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
        raise ConfigError(Problem(option, None, "says how to push", "give --push REPO too"))
    step = open_to_export(run)
    folder = out or step.hf_folder
    run_export(step, folder, dtype=dtype, format=layout, tokenizer=tokenizer,
               parity=parity, with_code=with_code)  # fmt: skip
    if push is not None:
        run_push(folder, push, private=private is not False, dry_run=dry_run)


@click.command("import")
@click.argument("folder", type=click.Path(path_type=Path))
@RUN
@OVERRIDES
@click.option("--tokenizer/--no-tokenizer", default=True, help="Whether to take its tokenizer.")
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
    """Make RUN of the BLOOM or MPT model in FOLDER, and compare its logits.

    RUN can be judged, exported, generated from, and given to train.init_from.
    """
    from alibi_lm.hf.importing.importer import import_folder

    import_folder(folder, run, overrides=overrides, tokenizer=tokenizer,
                  allow_pickle=allow_pickle, parity=parity)  # fmt: skip
