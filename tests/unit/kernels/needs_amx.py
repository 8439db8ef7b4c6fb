"""The mark of tests of the compiled kernel."""

import pytest

from alibi_lm import kernels

needs_amx = pytest.mark.skipif(kernels.backend() is None, reason="this CPU has no AMX")
