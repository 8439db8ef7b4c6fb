"""The AMX kernel's own bound of where a block of queries may start."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alibi_lm import kernels
from tests.unit.kernels.needs_amx import needs_amx
from tests.unit.model.pruning.training_cases import WIDTH, Case, cases, dropped_mass, plain

pytestmark = needs_amx


def backend() -> kernels.Backend:
    """The compiled CPU kernels, after `skip_without`."""
    registered = kernels.backend()
    assert registered is not None
    return registered


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([0.3, 1e-3, 1e-9]))
def test_nothing_breaks_the_amx_bound(case: Case, epsilon: float) -> None:
    case = case.to(torch.bfloat16)
    starts = backend().first_key_per_block(case.q[None], case.k[None], case.slopes, epsilon)[0]
    assert (starts >= 0).all()
    assert dropped_mass(case, starts, backend().block) <= epsilon


def test_amx_starts_read_less_with_steeper_slopes_and_everything_after_a_nan() -> None:
    case = plain(1000).to(torch.bfloat16)
    starts = backend().first_key_per_block(case.q[None], case.k[None], case.slopes, 1e-6)[0]
    assert (starts[:, -1].diff() <= 0).all()
    assert starts[1, -1] > 500
    assert starts[0, -1] > 800
    case.k[1, 300] = math.nan
    starts = backend().first_key_per_block(case.q[None], case.k[None], case.slopes, 1e-6)[0]
    assert (starts[1, 5:] == 0).all()
    assert (starts[0, 5:] > 0).any()


def test_an_amx_start_one_block_too_late_is_detected() -> None:
    """Distant keys that are all that the bound allows for: here it is tight."""
    length, slopes = 1536, (1 / 16,)
    case = Case(torch.ones(1, length, WIDTH), torch.zeros(1, length, WIDTH),
                torch.ones(1, length, WIDTH), torch.ones(1, length, WIDTH), slopes)  # fmt: skip
    case.k[:, :] = 5.0
    case.k[:, 700:] = 0.0
    case = case.to(torch.bfloat16)
    starts = backend().first_key_per_block(case.q[None], case.k[None], slopes, 1e-3)[0].long()
    assert dropped_mass(case, starts, backend().block) <= 1e-3
    late = torch.where(starts > 0, (starts + backend().block).clamp(max=length), starts)
    assert dropped_mass(case, late, backend().block) > 1e-3
