"""Kernels for GPUs: what can be checked without a GPU, and results on one where there is one."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from alibi_lm.bench.gpu_check import GpuCheck, exact_results, gpu_check
from alibi_lm.cli.main import main
from alibi_lm.model.attention import dispatch as table
from alibi_lm.model.attention import flash_attn, flex
from alibi_lm.model.attention.dispatch import KERNELS, AttentionRequest, attention, choose_kernel
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.pruning.bounds import first_key_per_block
from alibi_lm.model.slopes import alibi_slopes

WIDTH = 16
CASES = [
    # heads, key heads, queries, keys, window
    (8, 8, 300, 300, None),
    (12, 4, 130, 300, None),
    (6, 1, 256, 500, 70),
    (5, 5, 129, 129, 1),
]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
needs_flash_attn = pytest.mark.skipif(
    not (torch.cuda.is_available() and importlib.util.find_spec("flash_attn")),
    reason="no CUDA device with flash-attn",
)


def inputs(heads: int, kv_heads: int, queries: int, keys: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads * 1009 + keys)
    sizes = (heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries)
    return [torch.randn(2, h, n, WIDTH, generator=generator) for h, n in sizes]


def worst(found: list[Tensor], right: list[Tensor]) -> float:
    return max(
        float((a.double() - b).norm() / b.norm().clamp(min=1e-4))
        for a, b in zip(found, right, strict=True)
    )


def compared(
    case: tuple[Any, ...], found: list[Tensor], right: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """What can be compared: with a window of one key, scores have no gradient but rounding."""
    parts = (0, 3) if case[4] == 1 else range(4)
    return [found[n] for n in parts], [right[n] for n in parts]


@pytest.fixture
def flex_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses gradients on the CPU; its formula for them runs there all the same."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex, "MIN_PRUNED_QUERIES", 300)


def flex_results(case: tuple[Any, ...], epsilon: float = 0.0) -> tuple[list[Tensor], list[Tensor]]:
    heads, kv_heads, queries, keys, window = case
    parts, slopes = inputs(heads, kv_heads, queries, keys), alibi_slopes(heads)
    leaves = [x.clone().requires_grad_() for x in parts[:3]]
    output = flex.attention(leaves[0], leaves[1], leaves[2], slopes, window, epsilon)
    found = [output.detach(), *torch.autograd.grad(output, leaves, parts[3])]
    return found, exact_results(parts, slopes, window)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.usefixtures("flex_gradients")
class TestFlex:
    """The functions that FlexAttention is given, in torch's own formula on the CPU."""

    @pytest.mark.parametrize("case", CASES)
    def test_output_and_gradients(self, case: tuple[Any, ...]) -> None:
        found, right = flex_results(case)
        assert worst(*compared(case, found, right)) < 2e-5

    def test_pruning(self) -> None:
        found, right = flex_results((4, 2, 1000, 1000, None), 1e-9)
        assert worst(found, right) < 2e-5
        coarse, _ = flex_results((4, 2, 1000, 1000, None), 1e-2)
        assert not torch.equal(coarse[0], found[0])

    def test_without_bias(self) -> None:
        q, k, v, _ = inputs(4, 4, 200, 200)
        found = flex.attention(q, k, v, None, None)
        assert worst([found], exact_results([q, k, v, q], (0.0,) * 4, None)[:1]) < 2e-5

    @pytest.mark.parametrize("wrong", [alibi_slopes(16)[:8], (0.0,) * 8])
    def test_other_slopes_are_found_out(self, wrong: tuple[float, ...]) -> None:
        q, k, v, grad = inputs(8, 8, 300, 300)
        found = flex.attention(q, k, v, wrong, None)
        assert worst([found], exact_results([q, k, v, grad], alibi_slopes(8), None)[:1]) > 1e-2


@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
@pytest.mark.parametrize("window", [None, 1, 100, 200])
@pytest.mark.parametrize(("queries", "keys"), [(1000, 1000), (900, 1000), (896, 1024)])
def test_the_blocks_of_a_mask_are_those_that_are_seen(
    queries: int, keys: int, window: int | None, epsilon: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "MIN_PRUNED_QUERIES", 300)
    q, k, _, _ = inputs(4, 2, queries, keys)
    slopes = torch.tensor(alibi_slopes(4))
    mask = flex.block_mask(q, k, slopes, window, epsilon)
    size, offset = flex.BLOCK, keys - queries
    row, key = torch.arange(queries).unsqueeze(1), torch.arange(keys)
    seen = (key <= row + offset) & (row + offset - key < (window or keys))
    start = torch.zeros(1, 1, -(-queries // size), dtype=torch.int64)
    if epsilon:
        start = first_key_per_block(q, k, slopes, epsilon, size) // size * size
        assert (start > 0).any()
    seen = seen & (key >= start.repeat_interleave(size, dim=2)[:, :, :queries, None])
    padded = torch.zeros(*seen.shape[:2], start.shape[2] * size, -(-keys // size) * size)
    padded[:, :, :queries, :keys] = seen.float()
    blocks = padded.unflatten(3, (-1, size)).unflatten(2, (-1, size))
    share = blocks.mean(dim=(3, 5))
    assert torch.equal(mask.to_dense().bool(), share > 0)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    for place in torch.cartesian_prod(*(torch.arange(n) for n in share.shape[:3])).tolist():
        count = int(mask.full_kv_num_blocks[tuple(place)])
        whole = mask.full_kv_indices[tuple(place)][:count].tolist()
        last = place[2] == share.shape[2] - 1 and queries % size  # its rows are not all there
        if last:
            assert set(whole) <= set((share[tuple(place)] > 0).nonzero().flatten().tolist())
        else:
            assert whole == (share[tuple(place)] == 1).nonzero().flatten().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES[1:3], (4, 2, 1000, 1000, None)])
def test_the_compiled_kernel_reads_those_blocks(
    case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's C++ kernel, which has no backward pass, goes by the lists of blocks."""
    monkeypatch.setattr(flex, "MIN_PRUNED_QUERIES", 300)
    heads, kv_heads, queries, keys, window = case
    parts, slopes = inputs(heads, kv_heads, queries, keys), alibi_slopes(heads)
    compiled = torch.compile(torch_flex.flex_attention, dynamic=False)
    monkeypatch.setattr(flex, "flex_attention", compiled)
    with torch.no_grad():
        found = flex.attention(parts[0], parts[1], parts[2], slopes, window, 1e-9)
    assert worst([found], exact_results(parts, slopes, window)[:1]) < 2e-5


def documented_flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window_size: tuple[int, int],
    alibi_slopes: Tensor | None,
    deterministic: bool,
) -> Tensor:
    """flash_attn_func as its documentation has it, in float64.

    q [B, Tq, H, D], k and v [B, Tk, KV, D]; causal and window are aligned with the last key; the
    bias is -slope |i + Tk - Tq - j|, slopes fp32 (H,) or (B, H).
    """
    assert causal
    if alibi_slopes is not None:
        assert alibi_slopes.dtype == torch.float32
        assert alibi_slopes.shape == (q.shape[2],)
    queries, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2).double() for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k) / math.sqrt(q.shape[3])
    place = torch.arange(queries).unsqueeze(1) + keys - queries
    key = torch.arange(keys)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double().view(-1, 1, 1) * (place - key).abs()
    left, right = window_size
    unseen = key > place
    if left >= 0:
        unseen = unseen | (key < place - left)
    if right >= 0:
        unseen = unseen | (key > place + right)
    weights = scores.masked_fill(unseen, -math.inf).softmax(dim=-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).to(q.dtype)


class TestFlashAttn:
    """What we pass to flash-attn, against its documentation."""

    @pytest.fixture(autouse=True)
    def package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = SimpleNamespace(flash_attn_func=documented_flash_attn)
        monkeypatch.setitem(sys.modules, "flash_attn", fake)

    @pytest.mark.parametrize("case", CASES)
    def test_the_arguments_mean_our_attention(self, case: tuple[Any, ...]) -> None:
        heads, kv_heads, queries, keys, window = case
        parts, slopes = inputs(heads, kv_heads, queries, keys), alibi_slopes(heads)
        found = flash_attn.attention(parts[0], parts[1], parts[2], slopes, window)
        assert found.shape == parts[0].shape
        assert worst([found], exact_results(parts, slopes, window)[:1]) < 1e-6

    def test_without_bias(self) -> None:
        parts = inputs(4, 2, 100, 120)
        found = flash_attn.attention(parts[0], parts[1], parts[2], None, None)
        assert worst([found], exact_results(parts, (0.0,) * 4, None)[:1]) < 1e-6


class TestChoice:
    """The table, asked about tensors of a GPU that is not there."""

    @staticmethod
    def chosen(
        monkeypatch: pytest.MonkeyPatch, lacking: tuple[str, ...], **options: Any
    ) -> str | None:
        for name in ("flash_attn", "flex"):
            row = KERNELS[name]
            reason = "this machine" if name in lacking else None
            fields = {**vars(row), "missing": lambda device, reason=reason: reason}
            monkeypatch.setitem(KERNELS, name, table.AttentionKernel(**fields))
        shape = options.pop("shape", (1, 8, 4096, 64))
        q = torch.empty(shape, dtype=options.pop("dtype", torch.bfloat16), device="meta")
        # A stand-in: a meta tensor that says it is on a GPU.
        like = SimpleNamespace(device=torch.device("cuda"), dtype=q.dtype, shape=q.shape)
        request = AttentionRequest(
            **{"slopes": alibi_slopes(8), "window": None, "bias": None, **options}
        )
        some: Any = like
        return choose_kernel(some, some, some, request)

    @pytest.mark.parametrize(
        ("lacking", "options", "kernel"),
        [
            ((), {}, "flash_attn"),
            ((), {"window": 100}, "flash_attn"),
            ((), {"dtype": torch.float32}, "flex"),
            (("flash_attn",), {}, "flex"),
            (("flash_attn",), {"window": 100}, "flex"),
            (("flash_attn", "flex"), {}, "eager"),
            (("flash_attn",), {"shape": (1, 8, 1, 64)}, "eager"),
            ((), {"shape": (1, 8, 1, 64)}, "flash_attn"),
            ((), {"shape": (1, 8, 4096, 512)}, "eager"),
            ((), {"dtype": torch.float64}, "eager"),
            ((), {"bias": torch.zeros(8, 4)}, "eager"),
            ((), {"slopes": torch.zeros(8, requires_grad=True)}, "eager"),
            ((), {"slopes": torch.zeros(8)}, "flash_attn"),
            # A kernel that prunes so many queries goes before one that cannot.
            ((), {"epsilon": 1e-6}, "flex"),
            ((), {"epsilon": 1e-6, "window": 100}, "flex"),
            ((), {"epsilon": 1e-6, "slopes": None}, "flash_attn"),
            ((), {"epsilon": 1e-6, "shape": (1, 8, 4095, 64)}, "flash_attn"),
            (("flex",), {"epsilon": 1e-6}, "flash_attn"),
        ],
    )
    def test_on_a_gpu(
        self,
        lacking: tuple[str, ...],
        options: dict[str, Any],
        kernel: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        assert self.chosen(monkeypatch, lacking, **options) == kernel

    @pytest.mark.parametrize("kernel", ["flash_attn", "flex"])
    def test_never_on_the_cpu(self, kernel: str) -> None:
        q = torch.zeros(1, 4, 200, 16, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="device cpu"):
            attention(q, q, q, slopes=alibi_slopes(4), kernel=kernel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@needs_flash_attn
def test_flash_attn_on_a_gpu(dtype: torch.dtype) -> None:
    on_a_gpu("flash_attn", dtype, 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@needs_cuda
def test_flex_on_a_gpu(dtype: torch.dtype) -> None:
    on_a_gpu("flex", dtype, 2e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@needs_cuda
def test_exact_on_a_gpu(dtype: torch.dtype) -> None:
    on_a_gpu("eager", dtype, 2e-5 if dtype == torch.float32 else 1e-2)


def on_a_gpu(kernel: str, dtype: torch.dtype, tolerance: float) -> None:
    for case in CASES:
        heads, kv_heads, queries, keys, window = case
        parts = [x.to("cuda", dtype) for x in inputs(heads, kv_heads, queries, keys)]
        leaves = [x.clone().requires_grad_() for x in parts[:3]]
        slopes = alibi_slopes(heads)
        output = attention(*leaves, slopes=slopes, window=window, kernel=kernel)
        found = [output.detach(), *torch.autograd.grad(output, leaves, parts[3])]
        right = exact_results(parts, slopes, window)
        assert worst(*compared(case, found, right)) < tolerance


def test_the_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its body on the CPU, at small sizes: a kernel that is wrong is found and named."""
    settings = GpuCheck(
        device="cpu", dtypes=(torch.float32, torch.bfloat16), lengths=((128, 128), (40, 100)),
        heads=((4, 4), (6, 2)), windows=(None, 30), width=16, timed=(128,), timed_heads=4,
        repeats=2, batch=(1, 64),
        model=ModelConfig(num_layers=1, hidden_size=32, num_heads=4, vocab_size=50),
    )  # fmt: skip
    path = tmp_path / "check.json"
    pruning = {**vars(KERNELS["sdpa_cpu"]), "pruning_min_queries": 100}  # it says so, at least
    monkeypatch.setitem(KERNELS, "sdpa_cpu", table.AttentionKernel(**pruning))
    result = gpu_check(settings, path)
    assert json.loads(path.read_text()) == result
    assert result["failed"] == []
    kernels = [row["kernel"] for row in result["correct"]]
    # sdpa_cpu has no windows.
    assert (kernels.count("sdpa_cpu"), kernels.count("eager")) == (8, 16)
    assert [row["kernel"] for row in result["pruning"]] == ["sdpa_cpu"] * 2
    assert result["kernels"]["flex"] == result["kernels"]["flash_attn"] == "device cpu"
    assert set(result["timed"][0]["forward_backward"]) == {
        "sdpa", "sdpa_cpu", "sdpa_cpu without bias", "sdpa_cpu pruning",
        "eager", "eager without bias",
    }  # fmt: skip
    assert result["training"]["alibi"]["tokens_a_second"] > 0
    run = KERNELS["eager"].run
    wrong = {**vars(KERNELS["eager"]), "run": lambda *parts: 1.1 * run(*parts)}
    monkeypatch.setitem(KERNELS, "eager", table.AttentionKernel(**wrong))
    failed = gpu_check(settings, path)["failed"]
    assert {row["kernel"] for row in failed} == {"eager"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device")
@pytest.mark.parametrize("arguments", [["bench", "--gpu-check"], ["bench", "gpu-check"]])
def test_without_a_gpu_the_command_says_so(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, arguments)
    assert not list(tmp_path.iterdir())
    assert result.exit_code == 2
    assert "no CUDA device" in result.output
    assert len(result.output.strip().splitlines()) == 1
