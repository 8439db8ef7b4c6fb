"""The decoder against transformers' own classes, and what it promises of itself."""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM

from alibi_lm.model.config import Architecture, ModelConfig, Position
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.flops import flops_per_token, num_parameters
from alibi_lm.model.init import initial_value
from alibi_lm.model.layers import Block, Embedding, Head, layers
from alibi_lm.utils.errors import ConfigError

LENGTH = 32
POSITIONS: list[Position] = [
    "alibi", "alibi_learned", "sinusoidal", "learned", "rotary", "t5", "none"
]  # fmt: skip


def small(**options: Any) -> ModelConfig:
    defaults: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 48,
        "num_heads": 6,
        "vocab_size": 97,
        "initializer_range": 0.2,
    }
    if options.get("position") == "learned":
        defaults["max_positions"] = 512
    return ModelConfig(**(defaults | options))


def some_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(seed))


def disturb(decoder: nn.Module) -> None:
    """Give norms and biases values of their own, so that a mix-up shows."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)


def as_mpt(decoder: Decoder) -> nn.Module:
    config = decoder.config
    theirs = MptForCausalLM(
        MptConfig(
            d_model=config.hidden_size,
            n_heads=config.num_heads,
            n_layers=config.num_layers,
            vocab_size=config.vocab_size,
            max_seq_len=8 * LENGTH,
            tie_word_embeddings=config.tied_embeddings,
        )
    )
    names = {
        "attention_norm.weight": "norm_1.weight",
        "attention.qkv.weight": "attn.Wqkv.weight",
        "attention.output.weight": "attn.out_proj.weight",
        "mlp_norm.weight": "norm_2.weight",
        "mlp.up.weight": "ffn.up_proj.weight",
        "mlp.down.weight": "ffn.down_proj.weight",
    }
    ours = decoder.state_dict()
    state = {"transformer.wte.weight": ours["embedding.weight"]}
    state["transformer.norm_f.weight"] = ours["head.norm.weight"]
    state["lm_head.weight"] = ours.get("head.weight", ours["embedding.weight"])
    for index, (our, their) in itertools.product(range(config.num_layers), names.items()):
        state[f"transformer.blocks.{index}.{their}"] = ours[f"blocks.{index}.{our}"]
    theirs.load_state_dict(state)
    return cast(nn.Module, theirs.eval())


def as_bloom(decoder: Decoder) -> nn.Module:
    config = decoder.config
    theirs = BloomForCausalLM(
        BloomConfig(
            hidden_size=config.hidden_size,
            n_head=config.num_heads,
            n_layer=config.num_layers,
            vocab_size=config.vocab_size,
            tie_word_embeddings=config.tied_embeddings,
        )
    )
    names = {
        "attention_norm": "input_layernorm",
        "attention.qkv": "self_attention.query_key_value",
        "attention.output": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }
    ours = decoder.state_dict()
    state = {
        "transformer.word_embeddings.weight": ours["embedding.weight"],
        "lm_head.weight": ours.get("head.weight", ours["embedding.weight"]),
    }
    for kind in ("weight", "bias"):
        state[f"transformer.word_embeddings_layernorm.{kind}"] = ours[f"embedding.norm.{kind}"]
        state[f"transformer.ln_f.{kind}"] = ours[f"head.norm.{kind}"]
        for index, (our, their) in itertools.product(range(config.num_layers), names.items()):
            value = ours[f"blocks.{index}.{our}.{kind}"]
            if our == "attention.qkv":
                # BLOOM's rows go by head, then q, k, v.
                apart = value.unflatten(0, (3, config.num_heads, config.head_dim))
                value = apart.transpose(0, 1).flatten(0, 2)
            state[f"transformer.h.{index}.{their}.{kind}"] = value
    theirs.load_state_dict(state)
    return cast(nn.Module, theirs.eval())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_heads", [8, 12])
@pytest.mark.parametrize("architecture", ["mpt", "bloom"])
def test_logits_equal_those_of_transformers(
    architecture: Architecture, num_heads: int, tied: bool
) -> None:
    decoder = Decoder(
        small(architecture=architecture, hidden_size=96, num_heads=num_heads, tied_embeddings=tied),
        seed=3,
    )
    disturb(decoder)
    theirs = as_mpt(decoder) if architecture == "mpt" else as_bloom(decoder)
    for length in (LENGTH, 4 * LENGTH):
        tokens = some_tokens(2, length)
        with torch.no_grad():
            ours, right = decoder(tokens), theirs(tokens).logits
        assert right.std() > 0.5
        assert (ours - right).abs().max() <= 1e-4


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_grouped_heads_are_heads_repeated(kv_heads: int) -> None:
    grouped = Decoder(small(num_kv_heads=kv_heads))
    full = Decoder(small())
    state = grouped.state_dict()
    for index in range(2):
        name = f"blocks.{index}.attention.qkv.weight"
        q, k, v = state[name].split([48, 8 * kv_heads, 8 * kv_heads])
        k, v = (
            x.unflatten(0, (kv_heads, 8)).repeat_interleave(6 // kv_heads, 0).flatten(0, 1)
            for x in (k, v)
        )
        state[name] = torch.cat([q, k, v])
    full.load_state_dict(state)
    tokens = some_tokens(2, 40)
    torch.testing.assert_close(grouped(tokens), full(tokens), rtol=1e-5, atol=1e-5)


def test_state_holds_the_canonical_names_only() -> None:
    block = [
        "attention_norm",
        "attention.qkv",
        "attention.output",
        "mlp_norm",
        "mlp.up",
        "mlp.down",
    ]
    names = ["embedding.weight", *(f"blocks.{i}.{n}.weight" for i in range(2) for n in block)]
    assert list(Decoder(small()).state_dict()) == [*names, "head.norm.weight"]
    untied = Decoder(small(tied_embeddings=False)).state_dict()
    assert set(untied) == {*names, "head.norm.weight", "head.weight"}
    bloom = set(Decoder(small(architecture="bloom")).state_dict())
    everywhere = {*names, "embedding.norm.weight", "head.norm.weight"}
    biases = {name.replace("weight", "bias") for name in everywhere - {"embedding.weight"}}
    assert bloom == everywhere | biases
    learned = set(Decoder(small(position="learned")).state_dict())
    assert learned == {*names, "head.norm.weight", "embedding.position"}
    t5 = set(Decoder(small(position="t5")).state_dict())
    assert t5 - {*names, "head.norm.weight"} == {
        f"blocks.{i}.attention.relative_bias" for i in range(2)
    }
    assert Decoder(small(num_kv_heads=2)).state_dict()["blocks.0.attention.qkv.weight"].shape == (
        48 + 2 * 2 * 8,
        48,
    )


def test_layers_make_the_same_model() -> None:
    config = small(tied_embeddings=False)
    decoder = Decoder(config)
    made = [make() for make in layers(config)]
    assert [type(layer) for layer in made] == [Embedding, Block, Block, Head]
    whole = [decoder.embedding, *decoder.blocks, decoder.head]
    hidden = tokens = some_tokens(2, 10)
    for layer, ours in zip(made, whole, strict=True):
        layer.load_state_dict(ours.state_dict())
        hidden = layer(hidden)
    assert torch.equal(hidden, decoder(tokens))


class TestInitialWeights:
    def test_they_depend_on_seed_and_name_alone(self) -> None:
        config = small(architecture="bloom")
        torch.manual_seed(1)
        first = Decoder(config, seed=5).state_dict()
        torch.manual_seed(2)
        second = Decoder(config, seed=5).state_dict()
        other = Decoder(config, seed=6).state_dict()
        for name, value in first.items():
            assert torch.equal(value, second[name])
            assert torch.equal(value, initial_value(config, name, value.shape, 5))
            assert torch.equal(value, other[name]) == (value.ndim == 1)
        assert not torch.equal(first["blocks.0.mlp.up.weight"], first["blocks.1.mlp.up.weight"])

    def test_the_global_generator_is_left_alone(self) -> None:
        torch.manual_seed(0)
        before = torch.get_rng_state()
        Decoder(small())
        assert torch.equal(before, torch.get_rng_state())

    def test_their_spread(self) -> None:
        config = small(architecture="bloom", hidden_size=192, num_layers=8, initializer_range=0.02)
        for name, value in Decoder(config).state_dict().items():
            if name.endswith("norm.weight"):
                assert (value == 1).all()
            elif name.endswith("bias"):
                assert (value == 0).all()
            else:
                residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
                expected = 0.02 / math.sqrt(16) if residual else 0.02
                assert value.std().item() == pytest.approx(expected, rel=0.05)
                assert abs(value.mean().item()) < 5 * expected / math.sqrt(value.numel())

    def test_they_can_be_left_unset(self) -> None:
        with torch.device("meta"):
            decoder = Decoder(small(), seed=None)
            assert all(parameter.is_meta for parameter in decoder.parameters())
            Decoder(small(), seed=1)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("architecture", ["mpt", "bloom"])
def test_the_future_does_not_show(architecture: Architecture, position: Position) -> None:
    decoder = Decoder(small(architecture=architecture, position=position))
    tokens = some_tokens(2, 40)
    changed = tokens.clone()
    changed[:, 25:] = (changed[:, 25:] + 1) % 97
    ours, others = decoder(tokens), decoder(changed)
    torch.testing.assert_close(ours[:, :25], others[:, :25], rtol=1e-5, atol=1e-5)
    assert (ours[:, 25:] - others[:, 25:]).abs().max() > 0.1


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("position", POSITIONS)
def test_losses_are_the_cross_entropy(position: Position, checkpointing: bool) -> None:
    decoder = Decoder(small(position=position, architecture="bloom"))
    decoder.activation_checkpointing = checkpointing
    tokens, targets = some_tokens(3, 20), some_tokens(3, 20, seed=1)
    losses = decoder(tokens, targets)
    assert losses.shape == targets.shape
    assert losses.dtype == torch.float32
    logits = decoder(tokens)
    expected = nn.functional.cross_entropy(logits.mT, targets, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    parameters = list(decoder.parameters())
    ours = torch.autograd.grad(losses.mean(), parameters)
    right = torch.autograd.grad(expected.mean(), parameters)
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_autocast_and_bf16_keep_the_bias() -> None:
    """Far past any 16-bit grid of positions, 16-bit arithmetic scores like fp32."""
    decoder = Decoder(small(hidden_size=64, num_heads=8, initializer_range=0.1))
    tokens = some_tokens(1, 4097)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        exact = decoder(inputs, targets)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast_losses = decoder(inputs, targets)
            cast_logits = decoder(inputs[:, :300])
        half = decoder.bfloat16()(inputs, targets)
    assert cast_logits.dtype == torch.bfloat16
    spread = exact.std()
    assert spread > 0.3
    for losses in (cast_losses, half):
        assert losses.dtype == torch.float32
        near, far = ((losses - exact)[0, part].std() for part in (slice(512), slice(3584, None)))
        assert near < 0.03 * spread
        assert far < 0.03 * spread


def test_a_cache_where_targets_belong_is_refused() -> None:
    decoder = Decoder(small())
    with pytest.raises(TypeError, match="cache="):
        decoder(some_tokens(1, 3), decoder.new_cache())


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"vocab_size": None}, "model.vocab_size"),
        ({"num_heads": 5}, "^num_heads = 5"),
        ({"num_kv_heads": 4}, "^num_kv_heads = 4"),
        ({"window": 0}, "^window = 0"),
        ({"position": "learned", "max_positions": None}, "^max_positions: "),
        ({"position": "rotary", "hidden_size": 18}, "^position = rotary"),
    ],
)
def test_bad_configs_are_refused_by_name(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        Decoder(small(**options))


class TestCosts:
    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("position", POSITIONS)
    @pytest.mark.parametrize("architecture", ["mpt", "bloom"])
    def test_parameters_are_counted(
        self, architecture: Architecture, position: Position, tied: bool
    ) -> None:
        for kv_heads in (None, 2, 1):
            config = small(
                architecture=architecture,
                position=position,
                tied_embeddings=tied,
                num_kv_heads=kv_heads,
            )
            assert num_parameters(config) == Decoder(config, None).num_parameters()

    def test_bloom_176b(self) -> None:
        """The published count of BLOOM-176B."""
        config = ModelConfig(
            architecture="bloom",
            num_layers=70,
            hidden_size=14336,
            num_heads=112,
            vocab_size=250_880,
        )
        assert num_parameters(config) == 176_247_271_424

    def test_flops_count_every_product(self) -> None:
        """Against torch's own counter, at a length where attention is dense (no cut for causal)."""
        from torch.utils.flop_counter import FlopCounterMode

        config = small(position="t5", tied_embeddings=False)
        decoder = Decoder(config)
        tokens = some_tokens(2, 64)
        with FlopCounterMode(display=False) as counter:
            decoder(tokens).float().sum().backward()
        assert counter.get_total_flops() == flops_per_token(config, 64) * tokens.numel()

    def test_a_window_bounds_the_attention_term(self) -> None:
        narrow = small(window=16)
        assert flops_per_token(narrow, 4096) == flops_per_token(small(), 16)
