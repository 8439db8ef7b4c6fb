"""Needle in a haystack: can the model find a number stated at some depth of a long input?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.evals.base import Comparison, Eval, chosen_lengths, register
from alibi_lm.evals.config import NeedleConfig
from alibi_lm.evals.models.base import EvalModel
from alibi_lm.evals.models.scorer import PromptScores, Scorer
from alibi_lm.evals.parts import Parts
from alibi_lm.evals.retrieval import display
from alibi_lm.evals.retrieval.distance_bins import Bin, distance_bin
from alibi_lm.evals.retrieval.needle_prompts import NUM_CANDIDATES, NeedleTrial, PromptMaker, says
from alibi_lm.evals.retrieval.needle_verdict import needle_verdict
from alibi_lm.evals.retrieval.result import (
    NeedleBin,
    NeedleCell,
    NeedleResult,
    NeedleRow,
    NeedleScores,
)
from alibi_lm.evals.statistics import Share
from alibi_lm.tasks.statements import ANSWER, END, NUM_DIGITS, STATEMENT
from alibi_lm.utils.errors import ConfigError
from alibi_lm.utils.logging import console
from alibi_lm.utils.progress import Progress

PROTOCOL = (
    "A haystack of consecutive tokens from a random place of the corpus holds one line that states "
    f"a {NUM_DIGITS}-digit number for a key; the prompt ends with that line up to the number. "
    "Prompts are assembled from token ids: length = haystack + needle + question + reserved answer "
    "tokens, exactly. The needle's depth is its share of the haystack, walked back to the end of a "
    "line. Key and numbers occur nowhere else in the haystack. Ranking: the stated number is the "
    f"most likely of {NUM_CANDIDATES} numbers of equally many tokens (chance "
    f"{1 / NUM_CANDIDATES:.0%}). Generation: greedy decoding of the answer's tokens gives the "
    "number. Control: prompts as long, with more haystack in place of the needle. Every "
    "prompt has its own haystack, key and numbers, so that prompts of several cells can be counted "
    "together. Intervals: 95% Wilson."
)


@dataclass
class NeedleTally:
    """Right answers out of trials."""

    trials: int = 0
    ranked: int = 0
    generated: int = 0

    def add(self, ranked: bool, generated: bool) -> None:
        """Count one prompt."""
        self.trials += 1
        self.ranked += ranked
        self.generated += generated

    def __add__(self, other: NeedleTally) -> NeedleTally:
        return NeedleTally(
            self.trials + other.trials,
            self.ranked + other.ranked,
            self.generated + other.generated,
        )

    def scores(self) -> NeedleScores:
        """Both scores with intervals."""
        return NeedleScores(
            trials=self.trials,
            ranking=Share.of(self.ranked, self.trials),
            generation=Share.of(self.generated, self.trials),
        )


class Outcome(NamedTuple):
    """What came of one prompt."""

    depth: float | None
    """None: a control, for which the rest says nothing."""
    ranked: bool
    generated: bool
    distance: int = 0
    """Tokens from the needle to the end of the prompt."""
    at_line_end: bool = True
    walk: int = 0
    """Tokens between the asked place and the needle's."""


@dataclass
class Grid:
    """Counts of a whole grid."""

    training_length: int
    cells: dict[tuple[int, float], NeedleTally] = field(
        default_factory=lambda: defaultdict(NeedleTally)
    )
    controls: dict[int, NeedleTally] = field(default_factory=lambda: defaultdict(NeedleTally))
    bins: dict[Bin, NeedleTally] = field(default_factory=lambda: defaultdict(NeedleTally))
    """By the distance of the needle from the end of the prompt."""
    num_placed_exactly: int = 0
    """Needles put inside a line, because no line ended near."""
    largest_walk: int = 0
    """Most tokens between the asked place and the end of a line taken."""

    def add(self, length: int, outcome: Outcome) -> None:
        """Count one prompt."""
        scores = outcome.ranked, outcome.generated
        if outcome.depth is None:
            self.controls[length].add(*scores)
            return
        self.cells[length, outcome.depth].add(*scores)
        self.bins[distance_bin(outcome.distance, self.training_length)].add(*scores)
        self.num_placed_exactly += not outcome.at_line_end
        self.largest_walk = max(self.largest_walk, outcome.walk)


def usable_lengths(maker: PromptMaker, lengths: list[int], asked_for: bool) -> list[int]:
    """The lengths themselves; default ones without those that no prompt can have, with a warning.

    Raises:
        ConfigError: a length that was asked for, or every default one, cannot be used.
    """
    if asked_for:
        maker.check(lengths)
        return lengths
    usable = []
    for length in lengths:
        try:
            maker.check([length])
            usable.append(length)
        except ConfigError as error:
            console.warning(f"left out by default: {error}")
    if not usable:
        maker.check(lengths)
    return usable


def score_grid(
    scorer: Scorer,
    maker: PromptMaker,
    tokenizer: Tokenizer,
    lengths: Sequence[int],
    config: NeedleConfig,
    training_length: int,
    parts: Parts | None = None,
) -> tuple[Grid, float]:
    """Score every prompt and every control of the grid; each length is a part.

    Returns:
        The counts, and seconds.
    """
    parts, grid, seconds = parts or Parts(), Grid(training_length), 0.0
    per_length = config.num_trials * (len(config.depths) + 1)

    def outcomes(length: int) -> list[Outcome]:
        result: list[Outcome] = []
        for batch in _batches(maker, length, config, scorer.dp_size):
            tokens = torch.from_numpy(np.stack([prompt for _, _, prompt in batch]))
            candidates = _candidates([trial for trial, _, _ in batch])
            answers = scorer.loglikelihood_and_generate(tokens, candidates, maker.num_answer_tokens)
            result += _outcomes(tokenizer, batch, answers)
            progress.advance(length * len(batch))
        return result

    with Progress("needle", sum(lengths) * per_length, unit="tok") as progress:
        for length in lengths:
            part = parts.run(str(length), partial(outcomes, length), progress, length * per_length)
            seconds += part.seconds
            for outcome in part.value:
                grid.add(length, Outcome(*outcome))
    return grid, seconds


Prompt = tuple[NeedleTrial, float | None, np.ndarray]
"""A trial, the needle's depth (None: control) and the token ids."""


def _batches(
    maker: PromptMaker, length: int, config: NeedleConfig, dp_size: int
) -> Iterator[list[Prompt]]:
    size = dp_size * max(1, config.batch_tokens // length)
    batch: list[Prompt] = []
    for index in range(config.num_trials * len(config.depths)):
        which = index % len(config.depths)
        depth = config.depths[which]
        trial = maker.trial(length, index)
        batch.append((trial, depth, trial.prompt(depth)))
        if which == 0:
            batch.append((trial, None, trial.control()))
        while len(batch) >= size:
            yield batch[:size]
            batch = batch[size:]
    if batch:
        yield batch


def _candidates(trials: Sequence[NeedleTrial]) -> torch.Tensor:
    """`[B, K, A]` token ids."""
    return torch.tensor([[answer.tokens for answer in trial.candidates] for trial in trials])


def _outcomes(
    tokenizer: Tokenizer, batch: Sequence[Prompt], answers: PromptScores
) -> Iterator[Outcome]:
    # Candidates are in random order, so a model that rates all alike is right at chance.
    best = answers.loglikelihoods.argmax(1).tolist()
    for (trial, depth, _), choice, new in zip(batch, best, answers.generated.tolist(), strict=True):
        ranked = choice == trial.truth
        generated = says(tokenizer.decode(new), trial.answer.number)
        if depth is None:
            yield Outcome(None, ranked, generated)
            continue
        position, at_line_end = trial.place(depth)
        walk = round(depth * trial.haystack_budget) - position
        yield Outcome(depth, ranked, generated, trial.distance(depth), at_line_end, walk)


@register
class Needle(Eval[NeedleConfig, NeedleResult]):
    """The needle grid: retrieval of one line, with depth as a factor."""

    name = "needle"
    help = "Needle in a haystack, depth by length."
    title = "Needle in a haystack"
    config = NeedleConfig
    result = NeedleResult
    template = "needle.html"

    def run(
        self, eval_model: EvalModel, config: NeedleConfig, scorer: Scorer | None = None
    ) -> NeedleResult:
        """Run the grid on a model.

        Raises:
            DataError: no corpus, no tokenizer, or one that cannot write numbers.
            ConfigError: a length too short for a needle, or longer than every corpus.
        """
        tokenizer = eval_model.require_tokenizer("needles")
        files = self.open_corpora(eval_model, config)
        maker = PromptMaker(tokenizer, files, config.seed, config.num_distractors)
        chosen = chosen_lengths(eval_model, config.lengths)
        lengths = usable_lengths(maker, chosen, config.lengths is not None)
        own = None
        if scorer is None:
            scorer = own = eval_model.scorer(
                config.precision, config.pruning_tolerance, config.scaling
            )
        training_length = eval_model.training_length
        with self.parts(eval_model, config, files, own, len(lengths)) as parts:
            grid, seconds = score_grid(
                scorer, maker, tokenizer, lengths, config, training_length, parts
            )
        question = STATEMENT.format(key=(example := maker.trial(lengths[0], 0)).key)
        cells = [
            NeedleCell(length=length, depth=depth, **vars(grid.cells[length, depth].scores()))
            for length in lengths
            for depth in config.depths
        ]
        rows = _by_length(grid, lengths, config.depths)
        chance = 1 / NUM_CANDIDATES
        return NeedleResult(
            **self.common(eval_model, config, files),
            protocol=PROTOCOL,
            lengths=lengths,
            depths=list(config.depths),
            num_trials=config.num_trials,
            seed=config.seed,
            chance=chance,
            num_candidates=NUM_CANDIDATES,
            num_distractors=config.num_distractors,
            num_answer_tokens=maker.num_answer_tokens,
            needle=question + ANSWER.format(number=example.answer.number) + END,
            question=question,
            num_placed_exactly=grid.num_placed_exactly,
            largest_walk=grid.largest_walk,
            precision=config.precision,
            model=scorer.describe(),
            seconds=round(seconds, 3),
            cells=cells,
            by_length=rows,
            base=rows[0],
            by_distance=[
                NeedleBin(above=low, up_to=high, **vars(tally.scores()))
                for (low, high), tally in sorted(grid.bins.items())
            ],
            verdict=needle_verdict(rows, cells, training_length, chance),
        )

    def table(self, result: NeedleResult) -> list[str]:
        """The best and the worst cell, and scores by distance."""
        return display.needle_table(result)

    def figures(self, result: NeedleResult) -> dict[str, Figure]:
        """Depth by length, and scores by distance."""
        return display.needle_figures(result)

    def scalars(self, result: NeedleResult) -> Iterator[tuple[str, float]]:
        """Both scores by length."""
        for row in result.by_length:
            yield f"eval_needle_ranking/{row.length}", row.ranking.rate
            yield f"eval_needle_generation/{row.length}", row.generation.rate

    def compare(self, results: Mapping[str, NeedleResult]) -> Comparison:
        """Needles found by ranking at each length."""
        return display.compare_needles(results)


def _by_length(grid: Grid, lengths: Sequence[int], depths: Sequence[float]) -> list[NeedleRow]:
    """All depths of a length together, with its control (the closed-book rate)."""
    return [
        NeedleRow(
            length=length,
            control=grid.controls[length].scores(),
            **vars(sum((grid.cells[length, depth] for depth in depths), NeedleTally()).scores()),
        )
        for length in lengths
    ]
