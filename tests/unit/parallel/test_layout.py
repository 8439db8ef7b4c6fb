"""How ranks are numbered, and which layers a stage holds."""

from __future__ import annotations

import pytest

from alibi_lm.parallel.layout import Layout, RankCoordinate, stage_layers


def test_groups_have_neighbors_share_a_model() -> None:
    layout = Layout(dp=4, tp=2)
    assert layout.tensor_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.data_groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.pipeline_groups() == [[rank] for rank in range(8)]


def test_stages_lie_farthest_apart() -> None:
    layout = Layout(dp=2, tp=2, pp=2)
    assert layout.tensor_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.data_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.pipeline_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.describe() == "8 ranks (2 pipeline stages x 2 data-parallel x 2 tensor-parallel)"


@pytest.mark.parametrize("degrees", [(1, 1, 1), (3, 1, 1), (2, 3, 4), (1, 2, 3), (4, 1, 2)])
def test_groups_agree_with_places(degrees: tuple[int, int, int]) -> None:
    layout = Layout(*degrees)
    places = [layout.place(rank) for rank in range(layout.num_ranks)]
    assert len(set(places)) == layout.num_ranks
    for groups, same in (
        (layout.tensor_groups(), lambda p: (p.stage, p.data)),
        (layout.data_groups(), lambda p: (p.stage, p.tensor)),
        (layout.pipeline_groups(), lambda p: (p.data, p.tensor)),
    ):
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(layout.num_ranks))
        assert all(len({same(places[rank]) for rank in ranks}) == 1 for ranks in groups)
        assert len({same(places[ranks[0]]) for ranks in groups}) == len(groups)


def test_the_numbering_is_deepspeeds() -> None:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    layout, theirs = Layout(dp=2, tp=4, pp=3), PipeModelDataParallelTopology(3, 4, 2)
    for rank in range(layout.num_ranks):
        found = theirs.get_coord(rank)
        assert layout.place(rank) == RankCoordinate(found.pipe, found.data, found.model)


def test_stages_of_bloom_176b_are_those_of_the_published_run() -> None:
    """70 blocks over 12 stages: the embedding and the output layer count as one each."""
    stages = stage_layers(70, 12)
    assert [len(stage) for stage in stages] == [6] * 12


@pytest.mark.parametrize("num_layers", [1, 2, 3, 5, 8, 13])
def test_every_layer_is_on_one_stage_and_blocks_are_even(num_layers: int) -> None:
    for pp in range(1, num_layers + 1):
        stages = stage_layers(num_layers, pp)
        assert [layer for stage in stages for layer in stage] == list(range(num_layers + 2))
        blocks = [sum(1 <= layer <= num_layers for layer in stage) for stage in stages]
        assert min(blocks) >= 1
        assert max(blocks) - min(blocks) <= 1
        assert pp == 1 or blocks[-1] == min(blocks)
