"""lm-evaluation-harness on what `alibi-lm eval` takes: its model `alibi_lm`.

    python -m alibi_lm.evals.lm_eval run --model alibi_lm --model_args run=RUN --tasks ...

is the harness's own command line with that model known to it. It needs the extra `harness`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from alibi_lm.evals.models.base import Engine, EvalOptions
from alibi_lm.evals.models.resolve import resolve_model
from alibi_lm.utils.errors import ConfigError, DataError, Problem
from alibi_lm.utils.logging import console

FIRST_TOKENS = 16
"""Tokens generated before stop strings are first looked for; then twice as many, and so on."""

Pair = tuple[list[int], list[int]]
"""Context and continuation, in tokens."""


@register_model("alibi_lm")
class LmEvalModel(TemplateLM):
    """A run, a step folder or `hf:MODEL`. Input is never cut: what does not fit is refused.

    Attributes:
        max_length: tokens of a window of the rolling log-likelihood, whose windows are disjoint.
    """

    def __init__(
        self,
        run: str,
        precision: str = "fp32",
        max_length: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        engine: Engine | None = None,
        pruning_tolerance: float | None = None,
        max_gen_toks: int = 256,
        device: str | None = None,
    ) -> None:
        """Open `run` for the harness.

        Args:
            run: as `alibi-lm eval` takes it.
            precision: fp32 or bf16.
            max_length: by default the training length.
            batch_size: requests put through the model at once; `auto` is 16.
            max_batch_size: not used; the harness's command line gives it.
            engine: as `alibi-lm eval --engine`.
            pruning_tolerance: as `NativeScorer` takes it.
            max_gen_toks: tokens generated where a task does not say.
            device: as `get_device` takes it.

        Raises:
            UserError: as `resolve_model`; or there is no tokenizer.
        """
        super().__init__()
        eval_model = resolve_model(run, EvalOptions(engine=engine, device=device))
        found = eval_model.tokenizer()
        if found is None:
            fix = "name one that has a tokenizer"
            raise DataError(Problem(run, None, "has no tokenizer to read tasks with", fix))
        self._text = found
        self._scorer = eval_model.scorer(precision, pruning_tolerance)
        longest = eval_model.max_input_length
        self.max_length = int(max_length or min(eval_model.training_length, longest or 1 << 62))
        self.max_gen_toks = max_gen_toks
        self._batch_size = 16 if str(batch_size).startswith("auto") else int(batch_size)
        self._device = torch.device("cpu")
        self._name = run

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self._text.eos_id

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache."""
        return f"{Path(self._text.file).name}-{self._text.digest[:12]}"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids of a text; no special token is ever put in."""
        return self._text.encode(string)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the greedy one."""
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        # Continuations of one context and length are scored in one go, its keys computed once.
        shared: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            shared[tuple(context), len(continuation)].append(index)
        alike = [(context, size, members) for (context, size), members in shared.items() if size]
        bar = tqdm(total=len(requests), disable=disable_tqdm or None, desc="loglikelihood")
        for batch in self._batches(alike, lambda one: (len(one[0]), one[1], len(one[2]))):
            prompts = torch.tensor([context for context, _, _ in batch])
            continuations = torch.tensor(
                [[requests[i][2] for i in members] for _, _, members in batch]
            )
            answers = self._scorer.loglikelihood_and_generate(
                prompts, continuations, continuations.shape[2]
            )
            greedy = (answers.generated[:, None] == continuations).all(2)
            for row, (_, _, members) in enumerate(batch):
                for column, index in enumerate(members):
                    score = float(answers.loglikelihoods[row, column])
                    results[index] = (score, bool(greedy[row, column]))
                    bar.update()
        bar.close()
        for request, result in zip(requests, results, strict=True):
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], result)
        return results

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in disjoint windows of `max_length`."""
        windows: list[tuple[int, Pair]] = []
        for index, request in enumerate(requests):
            (text,) = request.args
            pieces = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, 1
            )
            windows += [(index, make_disjoint_window(piece)) for piece in pieces]
        sums = [0.0] * len(requests)
        bar = tqdm(total=len(windows), disable=disable_tqdm or None, desc="rolling")
        for batch in self._batches(windows, lambda one: (len(one[1][0]), len(one[1][1]))):
            tokens = torch.tensor([context + target for _, (context, target) in batch])
            losses = self._scorer.token_losses(tokens).double()
            for row, (index, (context, _)) in zip(losses, batch, strict=True):
                sums[index] -= float(row[len(context) - 1 :].sum())
                bar.update()
        bar.close()
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, greedily, up to a stop string.

        Raises:
            ConfigError: a task asks for sampling.
        """
        results = []
        for request in tqdm(requests, disable=disable_tqdm or None, desc="generate_until"):
            context, settings = request.args
            kwargs = normalize_gen_kwargs(settings, self.max_gen_toks)
            if kwargs.get("do_sample"):
                rule = "is asked for by a task, and this model answers greedily"
                raise ConfigError(Problem("do_sample", True, rule, "set do_sample: false"))
            until = kwargs.get("until") or []
            stops = [until] if isinstance(until, str) else list(until)
            text = self._continued(self.tok_encode(context), stops, int(kwargs["max_gen_toks"]))
            results.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        return results

    def _continued(self, prompt: list[int], stops: Sequence[str], limit: int) -> str:
        """The greedy continuation before the first end token or stop string."""
        prompt = prompt or [self.prefix_token_id]
        new: list[int] = []
        size = FIRST_TOKENS
        while True:
            new += self._scorer.generate(prompt + new, min(size, limit - len(new)))
            kept = list(takewhile(lambda token: token not in self._text.stop_ids, new))
            ended = len(kept) < len(new)
            text = self._text.decode(kept)
            stopped = any(stop and stop in text for stop in stops)
            if ended or stopped or len(new) >= limit:
                break
            size *= 2
        for stop in stops:
            text = text.split(stop)[0] if stop else text
        return text

    def _batches(
        self, items: Sequence[Any], key: Callable[[Any], tuple[int, ...]]
    ) -> Iterator[list[Any]]:
        """Items of equal `key`, `batch_size` at a time, the longest first."""
        groups: dict[tuple[int, ...], list[Any]] = defaultdict(list)
        for item in items:
            groups[key(item)].append(item)
        size = self._batch_size * self._scorer.dp_size
        for _, members in sorted(groups.items(), key=lambda group: group[0], reverse=True):
            for first in range(0, len(members), size):
                yield members[first : first + size]


def main() -> None:
    """The harness's command line."""
    from lm_eval.__main__ import cli_evaluate

    console.muted = True  # the harness prints
    cli_evaluate()


if __name__ == "__main__":
    main()
