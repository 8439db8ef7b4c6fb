"""The base class of evals, and what their results have in common.

A new eval is one file: a config dataclass, a result dataclass, and a subclass of `Eval` with
`@register` above it. docs/extending.md has a complete one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from matplotlib.figure import Figure

from alibi_lm import config_loading
from alibi_lm.checkpoint.config_paths import find_prefix
from alibi_lm.data.indexed import TokenFile
from alibi_lm.data.manifest import check_tokenizer
from alibi_lm.evals import json_values
from alibi_lm.evals.models.base import EvalModel
from alibi_lm.evals.models.scorer import Scorer
from alibi_lm.evals.parts import Parts
from alibi_lm.utils.errors import ConfigError, DataError, Problem

Json = dict[str, Any]
"""A JSON object of no fixed shape: settings, or what a scorer says about itself."""

GOOD = {"yes", "falls", "holds", "bounded", "generalizes"}
BAD = {"rises", "fails beyond", "stops"}
DEFAULT_MULTIPLES = (0.5, 1, 2, 4, 8, 16)


@dataclass
class Verdict:
    """What a result shows, no stronger than its intervals allow."""

    word: str
    text: str
    """One sentence."""
    caveat: str
    """What it does not show."""

    @property
    def tone(self) -> str:
        """good, bad or open: how the report colors it."""
        return "good" if self.word in GOOD else "bad" if self.word in BAD else "open"


@dataclass(kw_only=True)
class CorpusInfo:
    """A token file that an eval read."""

    prefix: str
    digest: str
    num_documents: int
    num_tokens: int


@dataclass(kw_only=True)
class Result:
    """What the results of all evals have. The JSON file of a result has its fields as keys."""

    eval: str
    run: str
    """The model as the command line named it."""
    step: int | None
    training_length: int
    versions: dict[str, str]
    verdict: Verdict
    corpus: list[CorpusInfo] = field(default_factory=list)
    inputs: Json = field(default_factory=dict)
    """Everything that the result depends on: equal inputs give an equal result."""

    def to_json(self) -> Json:
        """The result as its JSON file holds it."""
        return dict(json_values.encode(self))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read back what `to_json` gave.

        Raises:
            LookupError, TypeError, ValueError: `value` has another shape.
        """
        return json_values.decode(cls, value)


@dataclass(frozen=True)
class Cell:
    """A cell of a comparison's table."""

    text: str
    note: str = ""
    marked: bool = False


@dataclass(frozen=True)
class Comparison:
    """What an eval adds to the page that compares models."""

    figures: Mapping[str, Figure] = field(default_factory=dict)
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]] = ()
    note: str = ""


ConfigT = TypeVar("ConfigT")
ResultT = TypeVar("ResultT", bound=Result)


class Eval(ABC, Generic[ConfigT, ResultT]):
    """A measurement of a model.

    Attributes:
        name: section of the suite, name of the result's file and, with dashes, of the command.
        help: one sentence for the command line.
        title: heading in reports.
        config: dataclass of its settings; every field has a default.
        result: dataclass of its result.
        reads_corpus: whether it reads token files.
        template: HTML file beside the class's module that shows a result in the report; without
            one the report shows the verdict, the pictures and the table.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    title: ClassVar[str]
    config: type[ConfigT]
    result: type[ResultT]
    reads_corpus: ClassVar[bool] = True
    template: ClassVar[str | None] = None

    @abstractmethod
    def run(self, eval_model: EvalModel, config: ConfigT, scorer: Scorer | None = None) -> ResultT:
        """Measure a model.

        Args:
            eval_model: the model with its tokenizer, corpora and training length.
            config: the settings.
            scorer: evaluated in place of the model's own weights.

        Raises:
            UserError: the model, its corpora or the settings do not allow it.
        """

    def table(self, result: ResultT) -> Sequence[str]:
        """The result as lines for the terminal."""
        return ()

    def figures(self, result: ResultT) -> Mapping[str, Figure]:
        """The result's pictures by file name, without `.png`."""
        return {}

    def scalars(self, result: ResultT) -> Iterable[tuple[str, float]]:
        """TensorBoard tags and values."""
        return ()

    def verdicts(self, result: ResultT) -> Sequence[Verdict]:
        """Every verdict of a result, the main one first."""
        return [result.verdict]

    def report_values(self, result: ResultT) -> Mapping[str, Any]:
        """What the template needs besides `result`, `pictures` and `training_length`."""
        return {}

    def compare(self, results: Mapping[str, ResultT]) -> Comparison | None:
        """Several models' results side by side, by the models' names; None: verdicts suffice."""
        return None

    def comparable(self, first: ResultT, second: ResultT) -> bool:
        """Whether the numbers of two models' results may stand side by side."""
        return True

    def expected_of(self, eval_model: EvalModel) -> bool:
        """Whether a report without this eval should name its command."""
        return True

    def extra_inputs(self, config: ConfigT) -> Json:
        """Digests of files that the result depends on, besides corpora and weights."""
        return {}

    def inputs(self, eval_model: EvalModel, config: ConfigT, files: Sequence[TokenFile]) -> Json:
        """Everything that a result depends on."""
        return {
            "settings": config_loading.to_dict(config),
            "corpora": [file.digest for file in files],
            **self.extra_inputs(config),
            "step": eval_model.digest,
            "versions": _versions(),
            **eval_model.settings,
        }

    def parts_path(self, eval_model: EvalModel) -> Path:
        """Where the finished parts of an interrupted eval are kept."""
        return eval_model.evals_folder / f"{self.name}.partial.json"

    def parts(
        self,
        eval_model: EvalModel,
        config: ConfigT,
        files: Sequence[TokenFile],
        scorer: Scorer | None,
        total: int,
    ) -> Parts:
        """The eval's parts, to finish one after the other.

        Args:
            eval_model: the model.
            config: the settings.
            files: the corpora that are read.
            scorer: the model's own; None for another, whose parts are not kept.
            total: number of parts.
        """
        if scorer is None:
            return Parts(self.name, total)
        key = config_loading.digest(
            {"inputs": self.inputs(eval_model, config, files), "model": scorer.describe()}
        )
        return Parts(self.name, total, self.parts_path(eval_model), key)

    def common(
        self, eval_model: EvalModel, config: ConfigT, files: Sequence[TokenFile] = ()
    ) -> Json:
        """The fields of `Result`, but for the verdict, to build one from."""
        return {
            "eval": self.name,
            "run": eval_model.argument,
            "step": eval_model.step,
            "training_length": eval_model.training_length,
            "versions": _versions(),
            "corpus": [
                CorpusInfo(
                    prefix=str(file.prefix),
                    digest=file.digest,
                    num_documents=int(file.num_documents),
                    num_tokens=int(file.num_tokens),
                )
                for file in files
            ],
            "inputs": self.inputs(eval_model, config, files),
        }

    def open_corpora(self, eval_model: EvalModel, config: ConfigT) -> list[TokenFile]:
        """The token files that the eval reads, by `config.corpus` or the model's own.

        Raises:
            DataError: there are none, one cannot be read, or another tokenizer made it.
        """
        if not self.reads_corpus:
            return []
        corpus = getattr(config, "corpus", None)
        here, fix = [Path.cwd()], "check the prefix"
        prefixes = (
            [find_prefix(f"{self.name}.corpus", corpus, here, fix)]
            if corpus
            else eval_model.corpora
        )
        if not prefixes:
            rule = f"{eval_model.argument} names no validation corpus"
            fix = "set text=FILE, GLOB or FOLDER, or corpus=PREFIX, token files without .bin"
            raise DataError(Problem("data.validation", None, rule, fix))
        tokenizer = eval_model.tokenizer()
        if tokenizer is not None:
            for prefix in prefixes:
                check_tokenizer(prefix, tokenizer)
        return [TokenFile(prefix) for prefix in prefixes]


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("alibi_lm", "torch")}


EVALS: dict[str, Eval[Any, Any]] = {}
"""The registered evals by name; `alibi_lm.evals.registry` fills it."""

EvalClass = TypeVar("EvalClass", bound=type[Eval[Any, Any]])


def register(cls: EvalClass) -> EvalClass:
    """Make an eval known to the command line, suites, reports and comparisons.

    Raises:
        ConfigError: another eval has that name.
    """
    known = EVALS.get(cls.name)
    if known is not None and type(known).__qualname__ != cls.__qualname__:
        rule = f"is the name of two evals, {type(known).__qualname__} and {cls.__qualname__}"
        raise ConfigError(Problem(cls.name, None, rule, "rename one"))
    EVALS[cls.name] = cls()
    return cls


def default_lengths(training_length: int) -> list[int]:
    """1/2, 1, 2, 4, 8 and 16 times the training length."""
    return sorted({max(1, int(multiple * training_length)) for multiple in DEFAULT_MULTIPLES})


def chosen_lengths(eval_model: EvalModel, lengths: Sequence[int] | None) -> list[int]:
    """The configured lengths, or the default ones that the model can read, ascending.

    Raises:
        ConfigError: a configured length exceeds the positions of the model.
    """
    chosen = sorted(lengths or default_lengths(eval_model.training_length))
    limit = eval_model.max_input_length
    too_long = [length for length in chosen if limit is not None and length > limit]
    if too_long and lengths is not None:
        rule = f"exceeds the model's {limit} positions"
        raise ConfigError(*(Problem("lengths", n, rule, "leave it out") for n in too_long))
    return [length for length in chosen if length not in too_long]
