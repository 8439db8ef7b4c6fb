"""Prepare a recipe's folder: tokenizer, token files and manifest.

    OUTPUT/
      tokenizer/                     tokenizer.model or tokenizer.json
      NAME_train.bin, .idx           a Megatron pair for each source
      NAME_validation.bin, .idx
      NAME_validation.bytes.npy      int64, UTF-8 bytes of each validation document
      manifest.json                  written last; without it the folder is not prepared
      .partial/                      work in progress, removed at the end

All files are written to `.partial/` and moved at the end, so an older preparation stays intact
until the new one is complete.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from alibi_lm.config_loading import apply_overrides, build, load_yaml, to_dict
from alibi_lm.data.config import RecipeConfig
from alibi_lm.data.indexed import token_dtype
from alibi_lm.data.manifest import FORMAT, MANIFEST, different_keys, read_manifest, versions
from alibi_lm.data.preparation.documents import NOT_UTF8_FILE, WHOLE_FILE, DocumentReader
from alibi_lm.data.preparation.generated import document_generator
from alibi_lm.data.preparation.scan import ScanResult, TextSample, known_bytes, scan
from alibi_lm.data.preparation.sources import fingerprint
from alibi_lm.data.preparation.tokenization import TRAIN, VALIDATION, SourceTokenizer
from alibi_lm.data.preparation.tokenizer_training import train_tokenizer
from alibi_lm.data.preparation.workers import Encoder, Interrupted, Workers, available_cores
from alibi_lm.data.tokenizer import Tokenizer, load_tokenizer
from alibi_lm.utils.errors import DataError, Problem, UserError, UserInterrupt
from alibi_lm.utils.files import sha256, sync, write_json
from alibi_lm.utils.locking import exclusive_lock
from alibi_lm.utils.logging import console
from alibi_lm.utils.progress import Progress

RECORD_SECONDS = 2.0
"""Interval of progress records: how much work a kill can lose."""
_STAGED, _SCAN = "manifest.staged.json", "scan.json"


def load_recipe(path: str | Path, overrides: tuple[str, ...] | list[str] = ()) -> RecipeConfig:
    """Read a recipe's YAML, apply `key=value` overrides, and check everything.

    Raises:
        ConfigError: with every problem found.
    """
    return build(RecipeConfig, apply_overrides(load_yaml(path), overrides))


def prepare(
    recipe: RecipeConfig, overwrite: bool = False, record_seconds: float = RECORD_SECONDS
) -> Path:
    """Prepare a recipe's folder; resume an interrupted preparation; skip a finished one.

    Args:
        recipe: what to prepare.
        overwrite: replace a folder prepared from another recipe or other sources.
        record_seconds: interval of progress records.

    Returns:
        The path of manifest.json.

    Raises:
        DataError: the folder belongs to another recipe (the differing keys are listed), the sources
            changed, or a source or tokenizer cannot be used.
        Interrupted: the disk is full or a process was killed; finished work is kept.
        ConfigError: the tokenizer's vocabulary does not fit the documents.
    """
    output = Path(recipe.output)
    work = output / ".partial"
    _check_output(output)
    fingerprints = {source.name: fingerprint(source) for source in recipe.sources}
    with _interrupts_named(output), exclusive_lock(output, DataError):
        if _is_complete(output, recipe, fingerprints, overwrite):
            if _staged(work) == read_manifest(output / MANIFEST):
                shutil.rmtree(work)  # left by a process killed before this line
            console.info(f"prepare: {output} is already prepared")
            return output / MANIFEST
        _open_work(work, recipe, fingerprints, overwrite)
        if not (work / _STAGED).exists():
            with _discarded_on_bad_input(work):
                scanned, tokenizer = _scan_and_tokenizer(work, recipe)
                corpora = _tokenize(work, recipe, scanned, tokenizer, record_seconds)
                manifest = _manifest(work, recipe, fingerprints, tokenizer, corpora)
                write_json(work / _STAGED, manifest)
        _publish(work, output)
    return output / MANIFEST


def _check_output(output: Path) -> None:
    for path in (output, *output.parents):
        if path.exists() and not path.is_dir():
            raise DataError(Problem("output", str(output), f"{path} is a file", "name a folder"))


@contextmanager
def _interrupts_named(output: Path) -> Iterator[None]:
    """Report at Ctrl-C and at a full disk how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        work = output / ".partial"
        kept = "nothing is kept"
        if work.exists():
            kept = f"prepare keeps what is done in {work}; run the same command to resume"
        raise UserInterrupt(f"interrupted: {kept}") from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        rule = os.strerror(error.errno).lower()
        fix = "fix that and run the same command again: it resumes where it stopped"
        raise Interrupted(Problem(str(error.filename or output), None, rule, fix)) from None


@contextmanager
def _discarded_on_bad_input(work: Path) -> Iterator[None]:
    """Remove the work after bad input, which needs another recipe or other sources."""
    try:
        yield
    except Interrupted:
        raise
    except UserError:
        shutil.rmtree(work)
        with suppress(OSError):  # it holds an older preparation
            work.parent.rmdir()
        raise


def _is_complete(
    output: Path, recipe: RecipeConfig, fingerprints: dict[str, str], overwrite: bool
) -> bool:
    """Whether the folder already holds the result of the recipe.

    Raises:
        DataError: it holds something else, and `overwrite` is off.
    """
    manifest = read_manifest(output / MANIFEST) if not overwrite else _readable(output)
    if manifest is None:
        return False
    problems = list(different_keys(manifest["recipe"], recipe))
    if not problems:
        problems = _changed_sources(manifest, fingerprints, output)
    if problems:
        if overwrite:
            return False
        raise DataError(*problems)
    for name, entry in manifest["files"].items():
        path = output / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            console.info(f"prepare: {path} is missing or truncated, preparing again")
            return False
    return True


def _readable(output: Path) -> dict[str, Any] | None:
    try:
        return read_manifest(output / MANIFEST)
    except DataError:
        return None


def _changed_sources(
    manifest: dict[str, Any], fingerprints: dict[str, str], output: Path
) -> list[Problem]:
    rule = f"changed after {output} was prepared"
    fix = "name another output, or pass --overwrite"
    return [
        Problem(f"source {name}", None, rule, fix)
        for name, digest in fingerprints.items()
        if manifest["fingerprints"].get(name) != digest
    ]


def _open_work(
    work: Path, recipe: RecipeConfig, fingerprints: dict[str, str], overwrite: bool
) -> None:
    """Keep an interrupted preparation of this recipe; refuse or remove another recipe's.

    Raises:
        DataError: another recipe's is in progress, and `overwrite` is off.
    """
    started = work / "recipe.json"
    if started.exists():
        before = json.loads(started.read_text(encoding="utf-8"))
        problems = list(different_keys(before["recipe"], recipe))
        if problems and not overwrite and (work / _SCAN).exists():
            raise DataError(*problems)
        if not problems and before["fingerprints"] == fingerprints:
            console.info(f"prepare: resuming the interrupted preparation in {work}")
            return
        console.info(f"prepare: recipe or sources changed, starting {work.parent} over")
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True)
    write_json(started, {"recipe": to_dict(recipe), "fingerprints": fingerprints})


def _scan_and_tokenizer(work: Path, recipe: RecipeConfig) -> tuple[ScanResult, Tokenizer]:
    """Scan the sources and train the tokenizer, unless both are done."""
    scan_path, folder = work / _SCAN, work / "tokenizer"
    if scan_path.exists():
        content = json.loads(scan_path.read_text(encoding="utf-8"))
        return ScanResult.from_json(content), load_tokenizer(folder)
    config = recipe.tokenizer
    sample = None if config.path else TextSample(config.max_bytes, recipe.seed)
    given = load_tokenizer(config.path, config.eos) if config.path else None
    scanned = ScanResult()
    if sample is not None or any(source.min_long_validation for source in recipe.sources):
        scanned = scan(recipe, sample)
    if given is not None:
        tokenizer = load_tokenizer(given.save(folder))
    else:
        assert sample is not None
        texts = list(sample.texts(scanned.long_validation))
        size = sum(len(text) for text in texts) / 1e6
        console.info(
            f"prepare: training a {config.kind} tokenizer of {config.vocab_size:,} pieces on "
            f"{len(texts):,} documents, {size:.1f}M characters"
        )
        tokenizer = train_tokenizer(texts, config, folder / "tokenizer.model")
    write_json(scan_path, scanned.to_json())
    return scanned, tokenizer


def _tokenize(
    work: Path,
    recipe: RecipeConfig,
    scanned: ScanResult,
    tokenizer: Tokenizer,
    record_seconds: float,
) -> dict[str, Any]:
    num_workers = recipe.num_workers or available_cores()
    # Tokenizers trained here are lossless by construction.
    lossy = recipe.tokenizer.path is not None
    encoder = Encoder(tokenizer, token_dtype(tokenizer.vocab_size), count_lossy=lossy)
    corpora = {}
    with Workers(encoder, num_workers) as workers:
        for source in recipe.sources:
            reader = DocumentReader(
                source,
                generate=document_generator(recipe, source, tokenizer, scanned.long_validation),
            )
            task = SourceTokenizer(work, reader, scanned.long_validation, record_seconds)
            total = known_bytes(source, scanned)
            with Progress(f"tokenizing {source.name}", total, task.bytes_done) as progress:
                result = task.run(workers, progress)
            corpora[source.name] = result
            train, validation = result[TRAIN], result[VALIDATION]
            console.info(
                f"prepare: {source.name}: {progress.summary()} with {num_workers} processes; "
                f"{train['tokens']:,} training tokens in {train['documents']:,} documents, "
                f"{validation['tokens']:,} validation tokens in {validation['documents']:,}"
            )
            _warn(source.name, result)
    return corpora


def _warn(name: str, result: dict[str, Any]) -> None:
    if skipped := result["skipped"]:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
        console.info(f"prepare: {name}: left out {reasons}")
        if NOT_UTF8_FILE in skipped:
            names = [n for n in result["not_utf8_names"] if n.endswith(WHOLE_FILE)]
            console.warning(f"{name}: skipped whole files: {', '.join(names)[:400]}")
    if result["lossy_documents"]:
        console.warning(
            f"{name}: {result['lossy_documents']:,} documents do not decode to themselves with "
            "this tokenizer"
        )
    if not result[VALIDATION]["documents"]:
        console.warning(f"{name}: no document was chosen for validation")


def _manifest(
    work: Path,
    recipe: RecipeConfig,
    fingerprints: dict[str, str],
    tokenizer: Tokenizer,
    corpora: dict[str, Any],
) -> dict[str, Any]:
    names = sorted(f"tokenizer/{path.name}" for path in (work / "tokenizer").iterdir())
    for name in corpora:
        for split in (TRAIN, VALIDATION):
            names += [f"{name}_{split}.bin", f"{name}_{split}.idx"]
        names.append(f"{name}_{VALIDATION}.bytes.npy")
    files = {
        name: {"bytes": (work / name).stat().st_size, "sha256": sha256(work / name)}
        for name in names
    }
    for name, corpus in corpora.items():
        for split in (TRAIN, VALIDATION):
            corpus[split]["sha256"] = {
                ending: files[f"{name}_{split}.{ending}"]["sha256"] for ending in ("bin", "idx")
            }
    return {
        "format": FORMAT,
        "recipe": to_dict(recipe),
        "fingerprints": fingerprints,
        "tokenizer": {
            "kind": tokenizer.kind,
            "digest": tokenizer.digest,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
        },
        "corpora": corpora,
        "files": files,
        "versions": versions(),
    }


def _staged(work: Path) -> dict[str, Any] | None:
    """The manifest of work that is complete but not yet moved."""
    path = work / _STAGED
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _publish(work: Path, output: Path) -> None:
    """Move the finished files into place; safe to repeat after a kill."""
    manifest = _staged(work)
    assert manifest is not None
    old = _readable(output) or {}
    for name in old.get("files", {}).keys() - manifest["files"].keys():
        (output / name).unlink(missing_ok=True)
    (output / MANIFEST).unlink(missing_ok=True)
    sync(output)
    for name in manifest["files"]:
        if (work / name).exists():  # else an earlier, killed call moved it
            (output / name).parent.mkdir(exist_ok=True)
            os.replace(work / name, output / name)
    sync(output)
    write_json(output / MANIFEST, manifest)
    shutil.rmtree(work)
