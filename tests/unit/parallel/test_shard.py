"""A rank's part of a whole tensor: which elements, and where checkpoints put them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from alibi_lm.checkpoint.fragments import FragmentReader, fragment_key
from alibi_lm.model.config import ModelConfig
from alibi_lm.model.decoder import Decoder
from alibi_lm.model.init import initial_value
from alibi_lm.parallel import shard as shard_module
from alibi_lm.parallel.mesh import ParallelDim
from alibi_lm.parallel.shard import Interval, Shard, StridedSlice, shard_of
from alibi_lm.utils.errors import CheckpointError


def elements(run: StridedSlice) -> list[int]:
    """The elements of a run, by its definition."""
    return [run.start + i // run.length * run.stride + i % run.length for i in range(run.numel)]


def rows(rank: int, size: int) -> Shard:
    """Two parts of 8 and 4 rows, and one row of padding."""
    parts = (Interval(8 // size * rank, 8 // size), Interval(8 + 4 // size * rank, 4 // size))
    return Shard((12, 5), 0, parts, 12 // size + 1)


def columns(rank: int, size: int) -> Shard:
    return Shard((5, 12), 1, (Interval(12 // size * rank, 12 // size),), 12 // size)


def padded(part: Tensor) -> Tensor:
    """Padding is not an element of the whole tensor: -1."""
    return torch.where(part == 0, -1, part - 1).flatten()


@given(
    kind=st.sampled_from([rows, columns]),
    size=st.sampled_from([1, 2, 4]),
    rank=st.integers(0, 3),
    low=st.integers(0, 70),
    high=st.integers(0, 70),
)
def test_runs_are_the_elements_that_are_taken(
    kind: type, size: int, rank: int, low: int, high: int
) -> None:
    shard: Shard = kind(rank % size, size)
    whole = torch.arange(60).view(shard.shape) + 1
    part = padded(shard.take(whole))
    low, high = sorted((low % len(part), high % len(part)))
    found = torch.full_like(part, -1)
    for start, run in shard.slices(low, high - low):
        found[start : start + run.numel] = torch.tensor(elements(run))
    assert found[low:high].tolist() == part[low:high].tolist()
    assert (found[:low] == -1).all()
    assert (found[high:] == -1).all()


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    cuts=st.lists(st.integers(1, 59), max_size=3),
    at_once=st.sampled_from([1, 13, 24, 1000]),
    data=st.data(),
)
def test_what_one_split_wrote_another_reads(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: tuple[int, int],
    cuts: list[int],
    at_once: int,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("split")
    tensors = {"rows": torch.randn(12, 5), "columns": torch.randn(5, 12)}
    kinds = {"rows": rows, "columns": columns}
    shard_file: dict[str, Tensor] = {}
    for name, whole in tensors.items():
        for rank in range(sizes[0]):
            shard = kinds[name](rank, sizes[0])
            flat = shard.take(whole).flatten()
            edges = sorted({0, len(flat), *(cut % len(flat) for cut in cuts)})
            for low, high in zip(edges, edges[1:], strict=False):
                for start, run in shard.slices(low, high - low):
                    stored = flat[start : start + run.numel].clone()
                    shard_file[fragment_key(name, "param", run)] = stored
    save_file(shard_file, folder / "shard_00000.safetensors")
    meta = {
        "parameters": {name: list(whole.shape) for name, whole in tensors.items()},
        "shards": ["shard_00000.safetensors"],
    }
    with pytest.MonkeyPatch.context() as patch, FragmentReader(folder, meta) as reader:
        patch.setattr(shard_module, "_READ_AT_ONCE", at_once)
        for name, whole in tensors.items():
            assert torch.equal(reader.tensor(name), whole)
            low = data.draw(st.integers(0, 59))
            numel = data.draw(st.integers(0, 60 - low))
            expected = whole.flatten()[low : low + numel]
            assert torch.equal(reader.read(name, "param", low, numel), expected)
            for rank in range(sizes[1]):
                shard = kinds[name](rank, sizes[1])
                flat = shard.take(whole).flatten()
                found = torch.zeros_like(flat)
                for start, run in shard.slices(0, len(flat)):
                    found[start : start + run.numel] = reader.read_slice(name, "param", run)
                assert torch.equal(found, flat)


@pytest.mark.parametrize("second", [(7, 15, 5, 12), (5, 34, 7, 12), (4, 35, 7, 12), (5, 21, 7, 12)])
def test_column_slices_that_do_not_cover_once_are_refused(
    second: tuple[int, int, int, int], tmp_path: Path
) -> None:
    first, other = StridedSlice(0, 25, 5, 12), StridedSlice(*second)
    keys = [fragment_key("a", "param", run) for run in (first, other)]
    assert keys[0] == "a|param|0:5:12"
    tensors = {key: torch.zeros(r.numel) for key, r in zip(keys, (first, other), strict=True)}
    save_file(tensors, tmp_path / "one.safetensors")
    meta = {"parameters": {"a": [5, 12]}, "shards": ["one.safetensors"]}
    with pytest.raises(CheckpointError, match="a: param has elements up to"):
        FragmentReader(tmp_path, meta)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("position", ["alibi", "alibi_learned", "t5", "learned"])
def test_the_ranks_slices_are_the_initial_model(position: str, size: int, kv_heads: int) -> None:
    """Every element of every whole parameter is held; what counts is held once, and as drawn."""
    config = ModelConfig(
        "bloom", 1, 32, 8, kv_heads, 13, position=position,  # type: ignore[arg-type]
        max_positions=9 if position == "learned" else None, tied_embeddings=False,
    )  # fmt: skip
    wholes = {name: tuple(p.shape) for name, p in Decoder(config).named_parameters()}
    counted = {name: torch.zeros(shape).flatten() for name, shape in wholes.items()}
    for rank in range(size):
        for name, parameter in Decoder(config, 3, ParallelDim(rank, size)).named_parameters():
            shard = shard_of(parameter) or Shard(
                tuple(parameter.shape), 0, (Interval(0, len(parameter)),), len(parameter), rank == 0
            )
            name = shard.canonical_name(name)
            assert shard.shape == wholes[name]
            whole = initial_value(config, name, shard.shape, 3)
            assert torch.equal(parameter, shard.take(whole))
            for _, run in shard.slices(0, parameter.numel()) if shard.is_primary_copy else ():
                counted[name][elements(run)] += 1
    for name, count in counted.items():
        assert (count == 1).all(), name
