"""Who speaks when the data of a step is bad."""

from types import SimpleNamespace
from typing import Any

import pytest

from alibi_lm.config import Config
from alibi_lm.config_loading import build
from alibi_lm.parallel.mesh import Mesh, ParallelDim
from alibi_lm.train.loop import Loop
from alibi_lm.utils.errors import DataError, Problem
from alibi_lm.utils.logging import console


@pytest.mark.parametrize(
    ("tensor", "stage", "speaks"), [(0, 0, True), (1, 0, False), (0, 1, False), (1, 1, False)]
)
def test_of_the_ranks_that_share_bad_samples_one_says_so(
    tensor: int, stage: int, speaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "muted", True)
    raw = {"run": {"dir": "a"}, "data": {"corpora": [{"prefix": "x"}]}, "model": {"vocab_size": 9}}

    def bad(*where: int) -> Any:
        raise DataError(Problem("samples 0 to 1", None, "holds token id 9", "use another"))

    mesh = Mesh(tp=ParallelDim(tensor, 2), dp=ParallelDim(1, 2), pp=ParallelDim(stage, 2))
    engine: Any = SimpleNamespace(mesh=mesh, reads_data=True)
    inputs: Any = SimpleNamespace(micro_batches=bad)
    nothing: Any = None
    loop = Loop(engine, inputs, build(Config, raw), None, None, nothing, nothing)
    with pytest.raises(DataError):
        loop._batches(0)
    assert console.muted == (not speaks)
