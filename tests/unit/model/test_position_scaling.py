"""Scaled positions against transformers' own RoPE initializers and the formulas in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from alibi_lm.config_loading import build
from alibi_lm.model.attention.dispatch import attention
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.layers import Block
from alibi_lm.model.position_scaling import Rotation, head_slopes, rotation
from alibi_lm.model.positions import rotate
from alibi_lm.model.slopes import alibi_slopes, learned_slopes
from alibi_lm.parallel.mesh import ParallelDim
from alibi_lm.utils.errors import ConfigError

LENGTHS = (64, 512, 8192)


def model(**options: Any) -> ModelConfig:
    defaults = {"num_layers": 2, "hidden_size": 48, "num_heads": 6, "vocab_size": 97,
                "initializer_range": 0.3}  # fmt: skip
    return build(ModelConfig, defaults | options)


def scaled(kind: str, factor: float, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "factor": factor, **more}


def of_head(head_dim: int, scaling: dict[str, Any] | None) -> Rotation:
    config = model(hidden_size=head_dim, num_heads=1, position="rotary", scaling=scaling)
    return rotation(head_dim, config.scaling)


def llama(head_dim: int, rope: dict[str, Any], length: int = 512) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=length,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )  # fmt: skip


def close(ours: Rotation, config: LlamaConfig, kind: str, length: int | None = None) -> None:
    """Their frequencies are fp32, so that 1e-6 is a few of their last digits."""
    theirs, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), length)
    assert ours.frequencies == pytest.approx(theirs.double().tolist(), rel=1e-6)
    assert ours.magnitude == pytest.approx(magnitude, rel=1e-6)


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.5, 64.0])
@pytest.mark.parametrize("head_dim", [4, 32, 64, 128])
class TestRotaryEqualsTransformers:
    def test_position_interpolation(self, head_dim: int, factor: float) -> None:
        rope = {"rope_type": "linear", "factor": factor}
        close(of_head(head_dim, scaled("linear", factor)), llama(head_dim, rope), "linear")

    def test_ntk(self, head_dim: int, factor: float) -> None:
        """Their dynamic form has a base by the input's length; a fixed factor is one such length.

        With their factor 1 and inputs `factor` times as long, it is base s^(D/(D-2)).
        """
        rope = {"rope_type": "dynamic", "factor": 1.0}
        config = llama(head_dim, rope)
        close(of_head(head_dim, scaled("ntk", factor)), config, "dynamic", int(512 * factor))

    @pytest.mark.parametrize("length", LENGTHS)
    def test_yarn(self, head_dim: int, factor: float, length: int) -> None:
        rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
        ours = of_head(head_dim, scaled("yarn", factor, original_length=length))
        close(ours, llama(head_dim, rope), "yarn")

    @pytest.mark.parametrize("length", LENGTHS)
    def test_longrope(self, head_dim: int, factor: float, length: int) -> None:
        factors = [1.0 + 0.37 * pair * factor for pair in range(head_dim // 2)]
        rope = {"rope_type": "longrope", "factor": factor, "long_factor": factors,
                "short_factor": [1.0] * len(factors),
                "original_max_position_embeddings": length}  # fmt: skip
        ours = of_head(
            head_dim, scaled("longrope", factor, original_length=length, factors=factors)
        )
        close(ours, llama(head_dim, rope), "longrope", length + 1)


@pytest.mark.parametrize(
    ("ours", "rope"),
    [
        (scaled("linear", 4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            scaled("yarn", 4.0, original_length=128),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_the_turn_itself_equals_transformers(ours: dict[str, Any], rope: dict[str, Any]) -> None:
    theirs = LlamaRotaryEmbedding(llama(32, rope))
    q = torch.randn(2, 1, 9, 32, generator=torch.Generator().manual_seed(0))
    expected, _ = apply_rotary_pos_emb(q, q, *theirs(q, torch.arange(3, 12).unsqueeze(0)))
    how = of_head(32, ours)
    found = rotate(q, 3, how.frequencies, how.magnitude)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("start", [0, 1_000_000, 1_000_000_000])
@pytest.mark.parametrize("kind", [None, "linear", "ntk"])
def test_far_positions_are_as_exact_as_near_ones(kind: str | None, start: int) -> None:
    how = of_head(16, None if kind is None else scaled(kind, 8.0))
    x = torch.ones(1, 1, 3, 16, dtype=torch.float64)
    found = rotate(x, start, how.frequencies)[0, 0]
    for row in range(3):
        for pair, frequency in enumerate(how.frequencies):
            angle = (start + row) * frequency
            right = math.cos(angle) - math.sin(angle)
            assert found[row, pair].item() == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize("factor", [1.0, 2.0, 16.0, 512.0])
@pytest.mark.parametrize("position", ["alibi", "alibi_learned"])
@pytest.mark.parametrize("num_heads", [2, 4, 8, 16, 64])
def test_scaled_slopes_are_the_formulas(num_heads: int, position: str, factor: float) -> None:
    def slopes(kind: str) -> tuple[float, ...] | None:
        return head_slopes(model(hidden_size=2 * num_heads, num_heads=num_heads,
                                 position=position, scaling=scaled(kind, factor)))  # fmt: skip

    heads = range(1, num_heads + 1)
    interpolated = [2 ** (-8 * h / num_heads) / factor for h in heads]
    assert slopes("linear") == pytest.approx(interpolated, rel=1e-12)
    ntk = [1 / (2 ** (8 * h / num_heads) * factor ** ((h - 1) / (num_heads - 1))) for h in heads]
    assert slopes("ntk") == pytest.approx(ntk, rel=1e-12)


@pytest.mark.parametrize("num_heads", [6, 12, 112])
def test_ntk_with_a_head_count_that_is_no_power_of_two(num_heads: int) -> None:
    """The steepest stays, the flattest is divided by the factor, and the order is kept."""
    plain = alibi_slopes(num_heads)
    found = head_slopes(
        model(hidden_size=2 * num_heads, num_heads=num_heads, scaling=scaled("ntk", 8.0))
    )
    assert found is not None
    assert max(found) == pytest.approx(max(plain))
    assert min(found) == pytest.approx(min(plain) / 8)
    order = sorted(range(num_heads), key=lambda head: plain[head])
    assert sorted(range(num_heads), key=lambda head: found[head]) == order
    assert all(1 <= a / b <= 8 * (1 + 1e-12) for a, b in zip(plain, found, strict=True))


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"scaling": {"kind": "linear"}}, ["scaling.factor"]),
        ({"scaling": scaled("lineer", 2)}, ["scaling.kind"]),
        ({"scaling": scaled("linear", 0.5)}, ["scaling.factor"]),
        ({"scaling": scaled("yarn", 2, original_length=64)}, ["scaling.kind"]),
        ({"position": "t5", "scaling": scaled("linear", 2)}, ["scaling.kind"]),
        ({"position": "rotary", "scaling": scaled("yarn", 0)},
         ["scaling.factor", "scaling.original_length"]),
        ({"position": "rotary", "scaling": scaled("yarn", 2, original_length=1, factors=[1.0])},
         ["scaling.original_length", "scaling.factors"]),
        ({"position": "rotary", "scaling": scaled("longrope", 2, original_length=9, factors=[1])},
         ["scaling.factors"]),
        ({"position": "rotary",
          "scaling": scaled("longrope", 2, original_length=9, factors=[1, 1, 0, 1])},
         ["scaling.factors.2"]),
        ({"position": "rotary", "hidden_size": 12, "scaling": scaled("ntk", 2)},
         ["scaling.kind"]),
        ({"num_heads": 1, "scaling": scaled("ntk", 2)}, ["scaling.kind"]),
        ({"position": "rotary", "scaling": scaled("linear", 2, original_length=9)},
         ["scaling.original_length"]),
    ],
)  # fmt: skip
def test_all_violated_scaling_rules_are_reported_at_once(
    options: dict[str, Any], keys: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        model(**options)
    assert [problem.key for problem in error.value.problems] == keys


SCHEMES: list[dict[str, Any]] = [
    {"scaling": scaled("linear", 4.0)},
    {"position": "alibi_learned", "scaling": scaled("ntk", 4.0)},
    {"scaling": scaled("ntk", 4.0), "window": 9},
    {"position": "rotary", "scaling": scaled("linear", 4.0)},
    {"position": "rotary", "scaling": scaled("ntk", 4.0)},
    {"position": "rotary", "scaling": scaled("yarn", 4.0, original_length=16)},
    {"position": "rotary",
     "scaling": scaled("longrope", 4.0, original_length=16, factors=[1.0, 1.5, 2.0, 4.0])},
]  # fmt: skip


@pytest.mark.parametrize("options", SCHEMES)
def test_cached_decoding_is_scaled_alike(options: dict[str, Any]) -> None:
    decoder = Decoder(model(**options))
    tokens = torch.randint(0, 97, (2, 80), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = decoder(tokens)
        cache = decoder.new_cache()
        parts = [decoder(tokens[:, :30], cache=cache)]
        parts += [decoder(tokens[:, i : i + 1], cache=cache) for i in range(30, 80)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
    plain = Decoder(model(**options | {"scaling": None}))
    plain.load_state_dict(decoder.state_dict())
    with torch.no_grad():
        assert (plain(tokens) - whole).abs().max() > 0.05, "scaling has no effect"


def test_linear_scaling_of_rotary_is_every_position_divided() -> None:
    how, plain = of_head(16, scaled("linear", 4.0)), of_head(16, None)
    x = torch.randn(1, 1, 1, 16, dtype=torch.float64)
    four = rotate(x, 40, how.frequencies)
    torch.testing.assert_close(four, rotate(x, 10, plain.frequencies), rtol=1e-12, atol=1e-12)


class TestLearnedSlopes:
    def test_they_start_as_the_papers(self) -> None:
        learned = Decoder(model(position="alibi_learned"), seed=4)
        state = learned.state_dict()
        paper = Decoder(model(), seed=4)
        names = [name for name in state if name.endswith("log_slope_ratio")]
        assert [state.pop(name).tolist() for name in names] == [[0.0] * 6] * 2
        assert state.keys() == paper.state_dict().keys()
        tokens = torch.randint(0, 97, (2, 50))
        with torch.no_grad():
            assert torch.equal(learned(tokens), paper(tokens))
        torch.testing.assert_close(learned(tokens), paper(tokens), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("window", [None, 12])
    @pytest.mark.parametrize(("queries", "keys"), [(40, 40), (9, 40), (1300, 1300)])
    @pytest.mark.parametrize("kv_heads", [4, 2])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_their_gradient_is_that_of_dense_attention(
        self, dtype: torch.dtype, kv_heads: int, queries: int, keys: int, window: int | None
    ) -> None:
        generator = torch.Generator().manual_seed(2)
        q = torch.randn(2, 4, queries, 8, generator=generator).to(dtype).requires_grad_()
        k, v = torch.randn(2, 2, kv_heads, keys, 8, generator=generator).to(dtype)
        k, v = k.requires_grad_(), v.requires_grad_()
        grad = torch.randn(2, 4, queries, 8, generator=generator).to(dtype)
        ratio = torch.randn(4, generator=generator).requires_grad_()
        slopes = learned_slopes(alibi_slopes(4), ratio)
        output = attention(q, k, v, slopes=slopes, window=window)
        found = torch.autograd.grad(output, [ratio, q, k, v], grad)
        wide = [x.detach().double().requires_grad_() for x in (ratio, q, k, v)]
        m = torch.tensor(alibi_slopes(4), dtype=torch.float64) * wide[0].exp()
        distance = torch.arange(keys - queries, keys).unsqueeze(1) - torch.arange(keys)
        unseen = (distance < 0) | (distance >= (window or keys))
        dense = (-m.view(-1, 1, 1) * distance).masked_fill(unseen, -math.inf)
        all_keys, values = (x.repeat_interleave(4 // kv_heads, dim=1) for x in wide[2:])
        scores = wide[1] @ all_keys.transpose(2, 3) / math.sqrt(8) + dense
        expected = scores.softmax(-1) @ values
        right = torch.autograd.grad(expected, wide, grad.double())
        exact = dtype == torch.float32
        for ours, theirs in zip((output, *found), (expected, *right), strict=True):
            error = (ours.double() - theirs).norm() / theirs.norm()
            assert error < (1e-5 if exact else 1e-2)

    def test_the_fused_kernel_is_refused_where_the_gradient_is_wanted_and_used_where_not(
        self,
    ) -> None:
        q = torch.randn(1, 4, 300, 8)
        slopes = learned_slopes(alibi_slopes(4), torch.full((4,), 0.3, requires_grad=True))
        with pytest.raises(ValueError, match="sdpa_cpu does not support the gradient of slopes"):
            attention(q, q, q, slopes=slopes, kernel="sdpa_cpu")
        with torch.no_grad():
            fused = attention(q, q, q, slopes=slopes, kernel="sdpa_cpu")
        exact = attention(q, q, q, slopes=slopes)
        torch.testing.assert_close(fused, exact, rtol=1e-5, atol=1e-5)

    def test_16_bits_keep_far_biases(self) -> None:
        """The slope is rounded to 16 bits, the bias at a distance is not."""
        ratio = torch.tensor([0.1234, -0.4321], dtype=torch.bfloat16)
        slopes = learned_slopes((0.5, 2**-8), ratio)
        assert slopes.dtype == torch.float32
        expected = torch.tensor([0.5, 2**-8]) * ratio.float().exp()
        assert torch.equal(slopes, expected)

    def test_ranks_hold_their_heads(self) -> None:
        for rank in range(3):
            block = Decoder(model(position="alibi_learned"), None, ParallelDim(rank, 3)).blocks[0]
            assert isinstance(block, Block)
            shard = block.attention.log_slope_ratio.shard  # type: ignore[attr-defined]
            assert shard.shape == (6,)
            assert (shard.intervals[0].start, shard.intervals[0].length) == (2 * rank, 2)
            assert block.attention.exact_slopes == alibi_slopes(6)[2 * rank : 2 * rank + 2]

    def test_they_learn(self) -> None:
        decoder = Decoder(model(position="alibi_learned"))
        optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
        tokens: Tensor = torch.randint(0, 97, (2, 33), generator=torch.Generator().manual_seed(0))
        for _ in range(3):
            optimizer.zero_grad()
            decoder(tokens[:, :-1], tokens[:, 1:]).mean().backward()
            optimizer.step()
        for name, value in decoder.named_parameters():
            if name.endswith("log_slope_ratio"):
                assert (value.abs() > 1e-3).all()
