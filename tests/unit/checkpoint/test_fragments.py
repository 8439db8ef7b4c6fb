"""Fragments cover every tensor exactly once, and any slice reads back."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from alibi_lm.checkpoint.fragments import FragmentReader, fragment_key
from alibi_lm.utils.errors import CheckpointError

SHAPES = {"a.weight": (5, 7), "b|odd.bias": (11,)}


def write(folder: Path, cuts: list[int]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Tensors cut at the same places, the pieces dealt out over two shards."""
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, tensor in tensors.items():
        numel = tensor.numel()
        edges = sorted({0, numel, *(cut % numel for cut in cuts)})
        for number, (low, high) in enumerate(zip(edges, edges[1:], strict=False)):
            flat = tensor.flatten()[low:high].clone()
            shards[number % 2][fragment_key(name, "param", low)] = flat
    names = []
    for number, shard in enumerate(shards):
        names.append(f"shard_{number:05d}.safetensors")
        save_file(shard, folder / names[-1])
    return {"parameters": {n: list(s) for n, s in SHAPES.items()}, "shards": names}, tensors


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 100), max_size=6), start=st.integers(0, 34), data=st.data())
def test_any_slice_of_any_cutting(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], start: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("fragments")
    meta, tensors = write(folder, cuts)
    with FragmentReader(folder, meta) as reader:
        for name, tensor in tensors.items():
            assert torch.equal(reader.tensor(name), tensor)
            low = start % tensor.numel()
            numel = data.draw(st.integers(0, tensor.numel() - low))
            expected = tensor.flatten()[low : low + numel]
            assert torch.equal(reader.read(name, "param", low, numel), expected)


@pytest.mark.parametrize("what", ["missing", "gap", "overlap"])
def test_tensors_that_are_not_covered_once_are_refused(what: str, tmp_path: Path) -> None:
    meta, _ = write(tmp_path, [3])
    if what == "missing":
        meta["parameters"]["c"] = [4]
    else:
        key = fragment_key("a.weight", "param", 4 if what == "gap" else 2)
        numel = math.prod(SHAPES["a.weight"]) - 3
        tensors = {
            fragment_key("a.weight", "param", 0): torch.zeros(3),
            key: torch.zeros(numel),
            fragment_key("b|odd.bias", "param", 0): torch.zeros(11),
        }
        save_file(tensors, tmp_path / "one.safetensors")
        meta["shards"] = ["one.safetensors"]
    with pytest.raises(CheckpointError, match=r"param has elements up to"):
        FragmentReader(tmp_path, meta)


def test_a_shard_that_is_not_one_is_named(tmp_path: Path) -> None:
    meta, _ = write(tmp_path, [])
    (tmp_path / meta["shards"][0]).write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="shard_00000.safetensors: cannot be read"):
        FragmentReader(tmp_path, meta)
