"""Hugging Face classes that hold ALiBi models, by their `model_type`."""

from alibi_lm.hf.specs.bloom import BLOOM, BLOOM_IMPORT
from alibi_lm.hf.specs.mpt import MPT, MPT_IMPORT

EXPORT_SPECS = {"mpt": MPT, "bloom": BLOOM}
IMPORT_SPECS = {"bloom": BLOOM_IMPORT, "mpt": MPT_IMPORT}
