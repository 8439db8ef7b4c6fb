"""What claims measure, against plain torch and models that are known by construction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from alibi_lm.experiments.claims.config import GroupConfig
from alibi_lm.experiments.claims.measure import measure_recall, measure_text, shift_differences
from alibi_lm.model.config import ModelConfig, Position
from alibi_lm.model.decoder import Decoder
from tests.unit.evals.evals_fakes import VOCAB_SIZE, WordTokenizer, fake_step, write_documents

TRAINED = 32
LENGTHS = [16, 32, 64, 128]


def decoder(position: Position, **changes: Any) -> Decoder:
    config = ModelConfig(
        num_layers=2, hidden_size=32, num_heads=4, vocab_size=VOCAB_SIZE, position=position,
        initializer_range=0.3, **changes,
    )  # fmt: skip
    return Decoder(config, seed=1).eval()


class Step:
    """What measuring uses of a checkpoint."""

    def __init__(self, folder: Path, position: Position) -> None:
        corpus = folder / "corpus"
        rng = np.random.default_rng(0)
        self.documents = [rng.integers(2, VOCAB_SIZE, size=n) for n in (140, 200, 129, 90)]
        write_documents(corpus, [document.tolist() for document in self.documents])
        fake = fake_step(folder, [corpus], length=TRAINED)
        self.run_folder, self.config = folder, fake.config
        self.meta: dict[str, Any] = {}
        self.config.model = decoder(position).config
        self._tokenizer = WordTokenizer()

    def decoder(
        self, dtype: torch.dtype = torch.float32, model: Any = None, **_: Any
    ) -> Decoder:  # fmt: skip
        return Decoder(model or self.config.model, seed=1).to(dtype).eval()

    def tokenizer(self) -> Any:
        return self._tokenizer


def plain_loss(model: Decoder, documents: list[np.ndarray], length: int) -> float:
    """Mean loss in non-overlapping windows, by a loop over whole logits."""
    total, count = 0.0, 0
    for document in documents:
        tokens = torch.from_numpy(document.astype(np.int64))
        for start in range(0, len(tokens) - 1, length):
            window = tokens[start : start + length + 1]
            logits = model(window[None, :-1])[0].double()
            total += float(F.cross_entropy(logits, window[1:], reduction="sum"))
            count += len(window) - 1
    return total / count


@torch.no_grad()
@pytest.mark.parametrize("position", ["alibi", "sinusoidal"])
def test_losses_equal_plain_torch(tmp_path: Path, position: Position) -> None:
    step = Step(tmp_path, position)
    found = measure_text(step, GroupConfig(lengths=LENGTHS, truncated_context_targets=10_000))  # type: ignore[arg-type]
    long = step.documents[:3]  # the last has no more tokens than the longest length
    assert found["num_documents"] == 3
    assert found["num_targets"] == sum(len(document) - 1 for document in long)
    model = decoder(position)
    for length in LENGTHS:
        expected = plain_loss(model, long, length)
        assert found["losses"][str(length)] == pytest.approx(expected, rel=1e-5)
    assert ("windowed" in found) == (position == "alibi")
    if position == "alibi":
        hard = decoder(position, window=TRAINED)
        for length in (64, 128):
            expected = plain_loss(hard, long, length)
            assert found["windowed"][str(length)] == pytest.approx(expected, rel=1e-5)
            assert abs(found["windowed"][str(length)] - found["losses"][str(length)]) > 1e-4
    assert found["loss_gap"][str(TRAINED)] == 0.0
    assert found["loss_gap"]["128"] != 0.0


@torch.no_grad()
def test_the_loss_gap_is_the_loss_less_that_of_the_cut_input(tmp_path: Path) -> None:
    step = Step(tmp_path, "alibi")
    found = measure_text(step, GroupConfig(lengths=[32, 128], truncated_context_targets=10_000))  # type: ignore[arg-type]
    model, differences = decoder("alibi"), []
    for document in step.documents[:3]:
        tokens = torch.from_numpy(document.astype(np.int64))
        for target in range(1, len(tokens)):
            context = (target - 1) % 128 + 1
            pair = []
            for size in (context, min(context, TRAINED)):
                logits = model(tokens[None, target - size : target])[0, -1].double()
                pair.append(float(F.cross_entropy(logits, tokens[target])))
            differences.append(pair[0] - pair[1])
    assert found["loss_gap"]["128"] == pytest.approx(np.mean(differences), abs=1e-5)


@pytest.mark.parametrize(
    ("position", "moves"), [("alibi", False), ("none", False), ("t5", False), ("sinusoidal", True)]
)
def test_only_absolute_positions_move_with_a_document(position: Position, moves: bool) -> None:
    document = np.random.default_rng(3).integers(2, VOCAB_SIZE, size=80)
    found = shift_differences(decoder(position), document, TRAINED)
    assert set(found) == {1, 128, 1000}
    assert all((value > 1e-3) == moves for value in found.values())


def test_rotary_moves_only_by_rounding() -> None:
    document = np.random.default_rng(3).integers(2, VOCAB_SIZE, size=80)
    found = shift_differences(decoder("rotary"), document, TRAINED)
    assert max(found.values()) < 1e-3


def test_recall_counts_every_prompt_at_every_length(tmp_path: Path) -> None:
    step = Step(tmp_path, "alibi")
    settings = GroupConfig(lengths=[160, 320], num_trials=2)
    variants = measure_recall(step, settings)["variants"]  # type: ignore[arg-type]
    assert list(variants) == ["plain", "linear", "ntk"]
    for cells in variants.values():
        for length in settings.lengths:
            own = [cell for cell in cells if cell["length"] == length]
            assert sum(cell["trials"] for cell in own) == 2 * 5
            assert all(0 <= cell["ranking"] <= cell["trials"] for cell in own)
            assert max(cell["distance"] for cell in own) <= 2 * length
