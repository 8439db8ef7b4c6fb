"""Prepared token files as a dataset of the `datasets` library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alibi_lm.data.indexed import TokenFile


def load_corpus(prefix: str | Path) -> Any:
    """The documents of prepared token files as a `datasets.Dataset`.

    Its only column, `input_ids`, holds a document's tokens with the end token, in the stored dtype.
    It is a view of the memory-mapped `.bin` file, read on use and without a copy. Continue with
    `to_iterable_dataset`, `with_format("torch")`, `map` or `to_parquet`.

    Args:
        prefix: path without the .bin and .idx endings, such as prepared/demo/stdlib_train.

    Raises:
        DataError: a file is missing, cut short, or not of this format.
    """
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable

    file = TokenFile(prefix)
    tokens = pyarrow.array(file.read(0, file.num_tokens))  # no copy of a native numeric array
    documents = pyarrow.LargeListArray.from_arrays(file.document_starts, tokens)
    table = InMemoryTable(pyarrow.table({"input_ids": documents}))
    # An explicit fingerprint: datasets would read the whole table to compute one.
    return Dataset(table, fingerprint=file.digest[:16])
