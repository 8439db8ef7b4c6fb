"""Attention against the paper's formula in float64, forward and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from alibi_lm.model.attention import eager, sdpa_cpu
from alibi_lm.model.attention.dispatch import attention
from alibi_lm.model.slopes import alibi_slopes

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
DTYPES = [torch.float32, torch.bfloat16]
HEAD_COUNTS = [*range(1, 17), 40, 112]
LENGTHS = [1, 2, 127, 128, 129, 1024, 1025, 4096]

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Case:
    """One attention problem. The last `num_queries` of `num_keys` positions ask."""

    heads: int
    kv_heads: int
    num_queries: int
    num_keys: int
    dtype: torch.dtype
    width: int = 16
    batch: int = 1
    window: int | None = None

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v as views of one product, and the gradient of the output."""
        generator = torch.Generator().manual_seed(
            self.heads * 1_000_003 + self.num_keys * 101 + self.num_queries
        )
        total = self.heads + 2 * self.kv_heads
        shape = (self.batch, self.num_keys, total * self.width)
        joint = torch.randn(*shape, generator=generator).to(self.dtype)
        widths = [n * self.width for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (
            part.unflatten(-1, (-1, self.width)).transpose(1, 2)
            for part in joint.split(widths, dim=-1)
        )
        q = q[:, :, self.num_keys - self.num_queries :]
        grad = torch.randn(*q.shape, generator=generator).to(self.dtype)
        return q, k, v, grad


def reference(case: Case, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and gradients of q, k, v in float64, head by head, by the paper's formula."""
    slopes = alibi_slopes(case.heads)
    group = case.heads // case.kv_heads
    i = torch.arange(case.num_keys - case.num_queries, case.num_keys).unsqueeze(1)
    j = torch.arange(case.num_keys)
    unseen = j > i
    if case.window is not None:
        unseen = unseen | (j <= i - case.window)
    q, k, v = (x.detach().double().contiguous() for x in (q, k, v))
    output, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    for head, slope in enumerate(slopes):
        own = [q[:, head], k[:, head // group], v[:, head // group]]
        own = [x.clone().requires_grad_() for x in own]
        scores = own[0] @ own[1].transpose(1, 2) / math.sqrt(case.width) - slope * (i - j)
        mixed = scores.masked_fill(unseen, -math.inf).softmax(dim=-1) @ own[2]
        gradients = torch.autograd.grad(mixed, own, grad[:, head].double())
        output[:, head] = mixed.detach()
        dq[:, head] = gradients[0]
        dk[:, head // group] += gradients[1]
        dv[:, head // group] += gradients[2]
    return [output, dq, dk, dv]


def errors(case: Case, function: AttentionFunction) -> list[float]:
    """||ours - reference|| / ||reference|| of the output and the gradients of q, k and v."""
    q, k, v, grad = case.inputs()
    expected = reference(case, q, k, v, grad)
    with torch.no_grad():
        plain = function(q, k, v)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    output = function(*leaves)
    assert output.dtype == case.dtype
    got = [output, *torch.autograd.grad(output, leaves, grad), plain]
    # One key alone has no gradient of its score: what is left is measured against grad.
    floor = grad.double().norm().item() * 1e-4
    return [
        (ours.double() - right).norm().item() / max(right.norm().item(), floor)
        for ours, right in zip(got, [*expected, expected[0]], strict=True)
    ]


def check(case: Case, function: AttentionFunction | None = None) -> None:
    """The function, or attention itself: by the kernel that it chooses and by torch's fused one."""
    slopes = alibi_slopes(case.heads)
    kernels = (None, "sdpa_cpu") if case.window is None and function is None else (None,)
    for kernel in kernels:

        def ours(q: Tensor, k: Tensor, v: Tensor, kernel: str | None = kernel) -> Tensor:
            return attention(q, k, v, slopes=slopes, window=case.window, kernel=kernel)

        if kernel is None or case.dtype == torch.bfloat16:
            found = errors(case, function or ours)
            assert max(found) <= TOLERANCE[case.dtype], f"{kernel}, {case}: {found}"


def kv_choices(heads: int) -> list[int]:
    """Multi-head, one kind of grouped, and multi-query."""
    middle = [kv for kv in range(2, heads) if heads % kv == 0]
    return sorted({heads, 1, *middle[:1]})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEAD_COUNTS)
def test_every_head_count(heads: int, dtype: torch.dtype) -> None:
    for kv_heads in kv_choices(heads):
        check(Case(heads, kv_heads, 129, 129, dtype, batch=2))
        check(Case(heads, kv_heads, 2, 130, dtype))
    check(Case(heads, kv_choices(heads)[-1], 1025, 1025, dtype, width=8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("length", [length for length in LENGTHS if length < 4096])
def test_every_length(length: int, kv_heads: int, dtype: torch.dtype) -> None:
    check(Case(8, kv_heads, length, length, dtype, width=32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_length_4096(kv_heads: int, dtype: torch.dtype) -> None:
    check(Case(2, kv_heads, 4096, 4096, dtype))


def test_length_4096_with_a_steep_head() -> None:
    check(Case(5, 5, 4096, 4096, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_queries", [1, 4])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_few_rows_of_65536(kv_heads: int, num_queries: int, dtype: torch.dtype) -> None:
    check(Case(4, kv_heads, num_queries, 65_536, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(1, 2), (1, 1025), (5, 133), (127, 128), (1030, 1300)]
)
def test_cached_queries(num_queries: int, num_keys: int, kv_heads: int, dtype: torch.dtype) -> None:
    check(Case(6, kv_heads, num_queries, num_keys, dtype, batch=2))


@pytest.mark.parametrize("width", [1, 7, 20, 64, 80, 128, 256])
def test_head_widths(width: int) -> None:
    check(Case(3, 3, 130, 130, torch.float32, width=width))
    check(Case(3, 3, 200, 300, torch.bfloat16, width=width))


def test_fp16() -> None:
    check(Case(8, 2, 129, 129, torch.float16))
    check(Case(8, 8, 1100, 1300, torch.float16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 2, 64, 300])
def test_windows(window: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    check(Case(6, 2, 200, 200, dtype, window=window))
    check(Case(6, 6, 5, 200, dtype, window=window))
    monkeypatch.setattr(eager, "MAX_SCORES", 1)
    check(Case(6, 3, 100, 200, dtype, window=window))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_kernel(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    slopes = alibi_slopes(6)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, slopes=slopes, kernel="eager")

    for chunk_scores in (eager.MAX_SCORES, 1):
        monkeypatch.setattr(eager, "MAX_SCORES", chunk_scores)
        check(Case(6, 2, 129, 129, dtype, batch=2), ours)
        check(Case(6, 1, 100, 300, dtype), ours)


@pytest.mark.parametrize("query_chunk", [1, 2, 100])
def test_the_query_chunk_changes_nothing(query_chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa_cpu, "QUERY_CHUNK", query_chunk)
    monkeypatch.setattr(sdpa_cpu, "FEW_ROWS", 0)
    check(Case(8, 2, 201, 201, torch.float32))
    check(Case(8, 4, 201, 230, torch.float32))


class TestTheCheckCanFail:
    """What public code gets wrong is caught by the check above."""

    CASES = [Case(8, 8, 1024, 1024, dtype) for dtype in DTYPES]

    @pytest.mark.parametrize("case", CASES)
    def test_no_bias(self, case: Case) -> None:
        with pytest.raises(AssertionError):
            check(case, lambda q, k, v: attention(q, k, v, slopes=None))

    @pytest.mark.parametrize("case", CASES)
    def test_slopes_of_another_head_count(self, case: Case) -> None:
        wrong = alibi_slopes(16)[:8]
        with pytest.raises(AssertionError):
            check(case, lambda q, k, v: attention(q, k, v, slopes=wrong))

    def test_bias_before_the_scale(self) -> None:
        wrong = tuple(slope / math.sqrt(16) for slope in alibi_slopes(8))
        with pytest.raises(AssertionError):
            check(self.CASES[0], lambda q, k, v: attention(q, k, v, slopes=wrong))

    def test_sixteen_bit_bias(self) -> None:
        bias = sdpa_cpu.key_bias(alibi_slopes(8), 1024, torch.bfloat16)
        assert bias is not None
        rounded = bias.to(torch.bfloat16)

        def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=rounded, is_causal=True)

        def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=True)

        check(self.CASES[1], right)
        with pytest.raises(AssertionError):
            check(self.CASES[1], wrong)

    def test_one_zero_of_the_bias_for_a_long_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sdpa_cpu, "QUERY_CHUNK", 4096)
        with pytest.raises(AssertionError):
            check(Case(5, 5, 4096, 4096, torch.float32))

    def test_cached_query_aligned_with_the_first_key(self) -> None:
        def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        with pytest.raises(AssertionError):
            check(Case(8, 8, 5, 64, torch.float32), wrong)


@pytest.fixture(params=["sdpa_cpu", "eager"])
def kernel(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_changes_no_bit(kernel: str, dtype: torch.dtype) -> None:
    q, k, v, grad = Case(8, 2, 1100, 1200, dtype).inputs()
    slopes = alibi_slopes(8)

    def run() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        output = attention(*leaves, slopes=slopes, kernel=kernel)
        return [output, *torch.autograd.grad(output, leaves, grad)]

    plain = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_autocast_does_harm_the_public_function() -> None:
    """So that the test above means something: torch's function loses the fp32 bias there."""
    q, k, v, _ = Case(8, 8, 1024, 1024, torch.bfloat16).inputs()
    bias = sdpa_cpu.key_bias(alibi_slopes(8), 1024, torch.bfloat16)
    plain = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=True)
    assert (plain - cast).norm() / plain.norm() > 1e-2


def test_a_bias_made_in_inference_mode_serves_training() -> None:
    slopes = tuple(slope * 0.999 for slope in alibi_slopes(4))
    q, k, v, _ = Case(4, 4, 300, 300, torch.float32).inputs()
    with torch.inference_mode():
        attention(q, k, v, slopes=slopes)
    leaf = q.detach().requires_grad_()
    attention(leaf, k, v, slopes=slopes).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_any_memory_layout() -> None:
    q, k, v, grad = Case(4, 2, 1100, 1100, torch.float32).inputs()
    slopes = alibi_slopes(4)
    results = []
    for odd in (False, True):
        leaves = []
        for x in (q, k, v):
            laid = x.transpose(2, 3).contiguous().transpose(2, 3) if odd else x.contiguous()
            leaves.append(laid.detach().requires_grad_())
        output = attention(*leaves, slopes=slopes)
        upstream = grad.transpose(2, 3).contiguous().transpose(2, 3) if odd else grad
        results.append([output, *torch.autograd.grad(output, leaves, upstream)])
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(plain, other, rtol=1e-6, atol=1e-6)


def test_an_expanded_gradient() -> None:
    q, k, v, _ = Case(4, 4, 200, 200, torch.float32).inputs()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    output = attention(*leaves, slopes=alibi_slopes(4))
    summed = torch.autograd.grad(output.sum(), leaves, retain_graph=True)
    given = torch.autograd.grad(output, leaves, torch.ones_like(output))
    assert all(torch.equal(a, b) for a, b in zip(summed, given, strict=True))


@pytest.mark.parametrize("shape", [(0, 4, 8, 16), (2, 4, 0, 16)])
def test_nothing_in_nothing_out(shape: tuple[int, ...]) -> None:
    q = torch.empty(shape)
    assert attention(q, q, q, slopes=alibi_slopes(4)).shape == shape


def test_a_bias_by_distance_gets_its_gradient() -> None:
    """Against dense attention in float64; columns past the last are its last."""
    q, k, v, grad = Case(4, 2, 40, 50, torch.float32).inputs()
    bias = torch.randn(4, 17, generator=torch.Generator().manual_seed(1)).requires_grad_()
    output = attention(q, k, v, slopes=None, bias=bias)
    found = torch.autograd.grad(output, bias, grad)[0]
    wide = bias.detach().double().requires_grad_()
    distance = torch.arange(10, 50).unsqueeze(1) - torch.arange(50)
    dense = wide[:, distance.clamp(0, 16)].masked_fill(distance < 0, -math.inf)
    keys, values = (x.double().repeat_interleave(2, dim=1) for x in (k, v))
    scores = q.double() @ keys.transpose(2, 3) / 4.0 + dense
    expected = scores.softmax(dim=-1) @ values
    right = torch.autograd.grad(expected, wide, grad.double())[0]
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("heads", HEAD_COUNTS)
def test_the_full_matrix(heads: int, length: int, dtype: torch.dtype) -> None:
    for kv_heads in kv_choices(heads):
        check(Case(heads, kv_heads, length, length, dtype, width=8))
        check(Case(heads, kv_heads, max(1, length // 3), length, dtype, width=8))
