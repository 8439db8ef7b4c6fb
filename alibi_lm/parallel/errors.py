"""How an error of one rank becomes the error of every rank.

A rank that raised alone would leave the others waiting in their next collective. So work that can
fail for a reason the user can fix is run through one of these functions by every rank: the ranks
exchange their errors, and if there is one, all raise it, marked `raised_on_all_ranks`. What happens
to it then is said in `utils.exit`. An error that is not exchanged is the watchdog's business in
training (`train.fault_tolerance.watchdog`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from alibi_lm.parallel.process_group import gather
from alibi_lm.utils.errors import CheckpointError, Problem, UserError, path_error

T = TypeVar("T")


def run_on_all_ranks(action: Callable[[], T], where: Path | None = None) -> T:
    """Run `action` on every rank and return its result; if it fails on any, all raise that error.

    Args:
        action: this rank's part.
        where: names the file of an error such as a full disk where the system does not.

    Raises:
        UserError: the first rank's error, by rank order.
    """
    result, error = _attempt(action, where)
    raise_on_all_ranks(error)
    return result


def run_on_rank0(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only, and return its (picklable) result on every rank.

    Raises:
        UserError: rank 0's error, on every rank.
    """
    is_rank0 = not dist.is_initialized() or dist.get_rank() == 0
    outcome: list[Any] = [_attempt(action, None) if is_rank0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    result, error = outcome[0]
    _raise_first([error])
    return result


def gather_results(action: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Run `action` on every rank of a group, and return all (picklable) results in rank order.

    Raises:
        UserError: the first rank's error, by rank order.
    """
    outcomes = gather(_attempt(action, None), group)
    _raise_first([error for _, error in outcomes])
    return [result for result, _ in outcomes]


def raise_on_all_ranks(error: UserError | None) -> None:
    """Exchange this rank's error, or None, and raise the first one on every rank.

    Raises:
        UserError: the first rank's error, by rank order, where there is one.
    """
    _raise_first(gather(error))


def raise_if_different(what: str, value: Any) -> None:
    """Raise on every rank unless all ranks hold the same value.

    Raises:
        CheckpointError: naming the ranks that differ from rank 0.
    """
    values = gather(value)
    different = [number for number, other in enumerate(values) if other != values[0]]
    if different:
        rule = f"differs between rank 0 and ranks {different}"
        fix = "start every rank with the same files"
        _raise_first([CheckpointError(Problem(what, None, rule, fix))])


def disk_error(failure: OSError, where: Path | None) -> UserError:
    """The error to show for one of the file system; re-raises it if the user cannot fix it."""
    failure.filename = failure.filename or where
    error = path_error(failure)
    if error is None:
        raise failure
    return error


def _attempt(action: Callable[[], Any], where: Path | None) -> tuple[Any, UserError | None]:
    try:
        return action(), None
    except UserError as failure:
        return None, failure
    except OSError as failure:
        return None, disk_error(failure, where)


def _raise_first(errors: list[UserError | None]) -> None:
    for error in errors:
        if error is not None:
            error.raised_on_all_ranks = True
            raise error
