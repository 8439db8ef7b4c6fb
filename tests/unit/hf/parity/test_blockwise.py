"""The comparison block by block: it computes what the whole models do, and finds what differs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from alibi_lm.checkpoint.step import open_checkpoint
from alibi_lm.hf.exporting import weights as module
from alibi_lm.hf.exporting.weights import StepWeights
from alibi_lm.hf.importing.importer import IMPORT_SPECS, import_folder
from alibi_lm.hf.parity import blockwise
from alibi_lm.hf.parity.blockwise import (
    _BlockwisePair,
    compare_greedy_blockwise,
    compare_logits_blockwise,
)
from alibi_lm.hf.parity.check import ModelPair
from alibi_lm.hf.parity.transformers_reference import CachedState, Mismatch
from alibi_lm.hf.weights_reader import WeightsReader
from alibi_lm.model.inference.kv_cache import LayerKVCache
from tests.unit.hf.reference_models import VOCAB_SIZE, write_reference

TOKENS = torch.randint(VOCAB_SIZE, (1, 280), generator=torch.Generator().manual_seed(5))


class Changed(StepWeights):
    """Weights of which one element, or one row of the embedding, is another."""

    name = "blocks.1.mlp.up.weight"

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        if name == self.name:
            tensor[5] += 0.1
        return tensor


@contextmanager
def opened(
    folder: Path, architecture: str, tied: bool, weights: type[StepWeights] = StepWeights
) -> Iterator[tuple[ModelPair, Any]]:
    """A folder of a reference class, the run made of it, and the whole reference model."""
    if not folder.exists():
        write_reference(folder, architecture, tied=tied)
        import_folder(folder, folder.parent / "run", parity="weights")
    step, import_spec = open_checkpoint(folder.parent / "run"), IMPORT_SPECS[architecture]
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with (
        WeightsReader(folder, import_spec.prefix) as source,
        step.reader() as reader,
        torch.no_grad(),
    ):
        model = step.config.model
        yield (
            ModelPair(folder, source, import_spec, reference.config, model, weights(reader)),
            reference,
        )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ["bloom", "mpt"])
def test_both_models_by_block_are_the_whole_models(
    architecture: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "_ROWS_BYTES", 4 * 96 * 50)  # the vocabulary in seven parts
    with opened(tmp_path / "reference", architecture, tied) as (pair, reference):
        expected = reference(TOKENS).logits
        for dtype, step_tokens, portion in ((torch.float32, 280, 4096), (torch.float32, 100, 128),
                                            (torch.float64, 64, 200)):  # fmt: skip
            monkeypatch.setattr(blockwise, "_CHUNK_TOKENS", portion)
            models = _BlockwisePair(pair.model, pair.weights, pair.reference(dtype))
            assert models.difference(TOKENS, step_tokens) <= 5e-5
        models = _BlockwisePair(pair.model, pair.weights, pair.reference(torch.float32))
        caches = [(LayerKVCache(), CachedState()) for _ in range(2)]
        for part in TOKENS[:, :270].split([200, 1, 1, 68], 1):
            ours, theirs = models.next_logits(part, caches)
        assert float((ours - expected[0, 269]).abs().max()) <= 5e-5
        assert float((theirs - expected[0, 269]).abs().max()) <= 5e-5
        lengths = [compare_logits_blockwise(pair.model, pair.weights, pair.reference, TOKENS[:, :n])
                   for n in (70, 280)]  # fmt: skip
        assert [row["length"] for row in lengths] == [70, 280]


@pytest.mark.parametrize("name", ["blocks.1.mlp.up.weight", "head.norm.weight"])
def test_a_changed_weight_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Changed, "name", name)
    with (
        opened(tmp_path / "reference", "mpt", True, Changed) as (pair, _),
        pytest.raises(Mismatch, match="logits differ by .* at 70 tokens"),
    ):
        compare_logits_blockwise(pair.model, pair.weights, pair.reference, TOKENS[:, :70])


@pytest.mark.parametrize("architecture", ["bloom", "mpt"])
def test_the_same_tokens_are_generated_by_block_and_whole(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "reference", architecture, False) as (pair, reference):
        prompt = TOKENS[:, :30]
        chosen: list[int] = []
        following = _BlockwisePair.next_logits

        def listening(self: Any, tokens: Tensor, caches: Any) -> tuple[Tensor, Tensor]:
            ours, theirs = following(self, tokens, caches)
            chosen.append(int(ours.argmax()))
            return ours, theirs

        monkeypatch.setattr(_BlockwisePair, "next_logits", listening)
        compare_greedy_blockwise(
            pair.model, pair.weights, pair.reference(torch.float32), prompt, num_tokens=6
        )
        whole = reference.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert chosen == whole[0, 30:].tolist()


def test_a_cache_that_goes_wrong_is_found_by_generating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "reference", "mpt", True) as (pair, _):
        append = LayerKVCache.append

        def forgetful(self: LayerKVCache, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = append(self, keys, values)
            return keys, values if values.shape[2] <= 30 else values.flip(2)

        monkeypatch.setattr(LayerKVCache, "append", forgetful)
        with pytest.raises(Mismatch, match="greedy token [2-8] differs"):
            compare_greedy_blockwise(pair.model, pair.weights, pair.reference(torch.float32),
                                    TOKENS[:, :30], num_tokens=8)  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_the_bars_end_where_they_said(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[list[int]] = []

    class Recorded:
        def __init__(self, title: str, total: int) -> None:
            bars.append([total, 0])

        def __enter__(self) -> Recorded:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def advance(self, num_bytes: int) -> None:
            bars[-1][1] += num_bytes

    monkeypatch.setattr(module, "Progress", Recorded)
    with opened(tmp_path / "reference", "bloom", tied) as (pair, _):
        bars.clear()
        compare_logits_blockwise(pair.model, pair.weights, pair.reference, TOKENS[:, :70])
        compare_greedy_blockwise(pair.model, pair.weights, pair.reference(torch.float32),
                                TOKENS[:, :30], num_tokens=3)  # fmt: skip
    assert len(bars) == 2
    assert all(done == total > 0 for total, done in bars)
