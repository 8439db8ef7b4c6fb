"""alibi_lm: distributed pretraining of language models with Attention with Linear Biases."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alibi_lm.data.hf_dataset import load_corpus
    from alibi_lm.loaded_run import Run, load_run
    from alibi_lm.model.config import ModelConfig
    from alibi_lm.model.decoder import Decoder

__version__ = "0.1.0"
__all__ = ["Decoder", "ModelConfig", "Run", "load_corpus", "load_run"]

_MODULES = {
    "Decoder": "alibi_lm.model.decoder",
    "ModelConfig": "alibi_lm.model.config",
    "Run": "alibi_lm.loaded_run",
    "load_corpus": "alibi_lm.data.hf_dataset",
    "load_run": "alibi_lm.loaded_run",
}


def __getattr__(name: str) -> Any:
    """Import a name of the Python interface on first use: torch takes seconds."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """The names of the Python interface, imported or not."""
    return sorted({*globals(), *__all__})
