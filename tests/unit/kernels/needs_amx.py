"""The mark of tests of the compiled kernel."""

import pytest

from alibi_lm.kernels.amx import build

needs_amx = pytest.mark.skipif(not build._has_instructions(), reason="this CPU has no AMX")
