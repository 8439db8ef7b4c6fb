"""The results of the retrieval tasks and of the needle grid."""

from __future__ import annotations

from dataclasses import dataclass

from alibi_lm.evals.base import Json, Result
from alibi_lm.evals.statistics import Share
from alibi_lm.tasks.config import TaskSizes


@dataclass(kw_only=True)
class Scores:
    """What came of some prompts of a task."""

    trials: int
    score: Share
    """By the task's metric, of the generated answer."""
    whole: Share
    """Prompts in whose answer everything was found."""
    ranking: Share | None
    """Prompts whose right candidate was the likeliest; None: no closed set."""


@dataclass(kw_only=True)
class TaskCell(Scores):
    """A task at a length."""

    task: str
    length: int
    real_length: tuple[int, int]
    """Of the shortest and the longest prompt."""
    near: Scores | None
    """Prompts whose facts all lie within the training length of the prompt's end."""
    far: Scores | None
    """Prompts with a needed fact farther back."""
    control: Scores
    """Prompts without the facts."""


@dataclass(kw_only=True)
class TaskBin(Scores):
    """A task at distances above `above`, up to `up_to` tokens."""

    task: str
    above: int
    up_to: int


@dataclass(kw_only=True)
class TaskInfo:
    """A task that was run."""

    name: str
    metric: str
    chance: float | None
    """Of ranking; None: no closed set."""
    ruler: bool
    published: bool
    """Whether its sizes and texts are the published ones."""


@dataclass(kw_only=True)
class LeftOut:
    """A task that has no prompt of a default length."""

    task: str
    length: int
    reason: str


@dataclass(kw_only=True)
class PasskeyRow(Scores):
    """The passkey at one length and distance."""

    length: int
    distance: int


@dataclass(kw_only=True)
class PasskeyKMax:
    """Position Interpolation's k_max at a length; None: no distance succeeds."""

    length: int
    k_max: int | None


@dataclass(kw_only=True)
class PasskeyTable:
    """The passkey by distance."""

    rows: list[PasskeyRow]
    success: float
    k_max: list[PasskeyKMax]


@dataclass(kw_only=True)
class RulerRow:
    """RULER's scores at a length, in percent; an average where every task has a score."""

    length: int
    scores: dict[str, float]
    average: float | None


@dataclass(kw_only=True)
class RulerTable:
    """RULER's table with its averages and the effective length."""

    columns: list[str]
    rows: list[RulerRow]
    average: float | None
    increasing: float | None
    """Average with weights 1, 2, 3, ... by length."""
    decreasing: float | None
    threshold: float
    effective_length: int | None
    longest: int | None


@dataclass(kw_only=True)
class TaskVerdict:
    """What one task shows."""

    task: str
    word: str
    text: str


@dataclass(kw_only=True)
class RetrievalResult(Result):
    """Retrieval tasks by length."""

    protocol: str
    num_trials: int
    seed: int
    precision: str
    model: Json
    seconds: float
    sizes: TaskSizes
    left_out: list[LeftOut]
    tasks: list[TaskInfo]
    lengths: list[int]
    cells: list[TaskCell]
    base: list[TaskCell]
    """Of each task the cell of its shortest length."""
    by_distance: list[TaskBin]
    passkey: PasskeyTable | None
    table: RulerTable | None
    verdicts: list[TaskVerdict]


@dataclass(kw_only=True)
class NeedleScores:
    """What came of some needle prompts."""

    trials: int
    ranking: Share
    generation: Share


@dataclass(kw_only=True)
class NeedleCell(NeedleScores):
    """A length and depth."""

    length: int
    depth: float


@dataclass(kw_only=True)
class NeedleRow(NeedleScores):
    """All depths of a length, and the prompts without a needle."""

    length: int
    control: NeedleScores


@dataclass(kw_only=True)
class NeedleBin(NeedleScores):
    """Needles more than `above` and up to `up_to` tokens before the prompt's end."""

    above: int
    up_to: int


@dataclass(kw_only=True)
class NeedleResult(Result):
    """Depth by length."""

    protocol: str
    lengths: list[int]
    depths: list[float]
    num_trials: int
    seed: int
    chance: float
    num_candidates: int
    num_distractors: int
    num_answer_tokens: int
    needle: str
    """An example."""
    question: str
    num_placed_exactly: int
    """Needles put inside a line, because no line ended near."""
    largest_walk: int
    """Most tokens between the asked place and the end of a line taken."""
    precision: str
    model: Json
    seconds: float
    cells: list[NeedleCell]
    by_length: list[NeedleRow]
    base: NeedleRow
    by_distance: list[NeedleBin]
