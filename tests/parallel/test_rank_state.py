"""State of single ranks in a checkpoint: written for each rank where ranks differ, and found again by its owner."""

import io

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

from hyperpod_plugins.errors import CheckpointDamaged, CheckpointMismatch
from hyperpod_plugins.parallel import CheckpointWriter, Topology, load_checkpoint
from hyperpod_plugins.parallel.checkpoint.rank_state import (
    RankStateSelector,
    complete_layout,
    load_rank_state,
    saved_ranks,
)


def save(folder):
    dist.init_process_group("gloo")
    rank, model, writer, found = dist.get_rank(), nn.Linear(2, 2), CheckpointWriter(), []
    same = {"best": torch.ones(3), "name": "".join(["lo", "ss"] if rank else ["loss"])}
    for name, state, in_background in (("same", same, False), ("other", {**same, "rank": rank}, True)):
        path = folder / name
        writer.save(path, model=model, extra={"step": 1}, rank_state={rank: state}, background=in_background).wait()
        assert load_checkpoint(path, model=model) == {"step": 1}
        found.append([load_rank_state(path, each, weights_only=True)["rank"] for each in saved_ranks(path)])
    writer.close()
    return found


@pytest.mark.spawns
def test_states_are_written_for_each_rank_where_they_differ(tmp_path):
    assert run_ranks(save, tmp_path, world_size=2) == [[[], [0, 1]]] * 2


def choose(saved, here, rank, ranks, sharded=("ema",), *, is_training=True):
    world, shard, tensor, *expert = here
    topology = Topology(world_size=world, shard_degree=shard, tensor_degree=tensor, expert_degree=(*expert, 1)[0])
    return RankStateSelector(rank=rank, topology=topology, saved_layout=saved, is_training=is_training).choose(
        ranks, sharded
    )


def test_a_rank_takes_its_own_state_or_that_of_a_replica():
    assert choose((4, 2, 1), (4, 2, 1), 3, range(4)) == 3
    assert choose((4, 2, 1), (4, 2, 1), 3, (0, 1)) == 1  # a rank was lost when the checkpoint was written
    assert choose((4, 2, 1), (2, 2, 1), 1, range(4)) == 1
    assert choose((4, 2, 1), (8, 2, 1), 6, range(4)) == 0
    assert choose((4, 2, 1, 1), (4, 2, 1), 3, range(4)) == 3
    assert choose((4, 4, 1, 2), (8, 4, 1, 2), 6, range(4)) == 2
    assert choose((4, 2, 1), (4, 4, 1), 3, range(4), sharded=()) is None
    assert choose((4, 2, 1), (4, 4, 1), 3, range(4), is_training=False) is None


@pytest.mark.parametrize("here", [(4, 4, 1), (4, 1, 2), (2, 1, 1), (4, 2, 1, 2)])
def test_parts_of_shards_mean_nothing_to_other_degrees(here):
    words = "shard degree 2, tensor degree 1 and expert degree 1"
    with pytest.raises(CheckpointMismatch, match=rf"ema .* 4 ranks with {words}"):
        choose((4, 2, 1), here, 0, range(4))
    assert choose((4, 2, 1), here, 0, range(4), is_training=False) is None


@pytest.mark.parametrize("saved", [(), (4, 2), (4, 2, 0), (4, 2, "1"), (4, 2, True), (4, 2, 1, 0), (4, 2, 1, 1, 1)])
def test_a_layout_that_this_package_has_not_written_is_refused(saved):
    with pytest.raises(CheckpointDamaged, match="world size, shard degree, tensor degree and expert degree"):
        choose(saved, (4, 2, 1), 0, range(4))


def test_what_has_not_the_name_or_the_form_of_a_ranks_state_is_not_taken_for_one(tmp_path):
    writer, model = CheckpointWriter(), nn.Linear(2, 2)
    strange = {"rank.x": torch.ones(1), "rank.-1": torch.ones(1), "rank.01": torch.ones(1)}
    buffer = io.BytesIO()
    torch.save([1], buffer)
    content = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    writer.save(tmp_path / "saved", model=model, beside={**strange, "rank.3": content})
    assert saved_ranks(tmp_path / "saved") == (3,)
    with pytest.raises(CheckpointDamaged, match="holds a list, not a dict"):
        load_rank_state(tmp_path / "saved", 3, weights_only=True)


def test_a_layout_that_was_read_may_be_anything():
    assert complete_layout([4, 2, 1]) == complete_layout((4, 2, 1, 1)) == (4, 2, 1, 1)
    for damaged in (None, 4, "421", {"world": 4}):
        assert complete_layout(damaged) == ()
