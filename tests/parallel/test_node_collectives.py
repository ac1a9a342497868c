"""Two nodes of two ranks: collectives of the shard axis in two stages, with the results of one."""

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from parallel.equal_training import train_alone, train_on_mesh
from parallel.test_expert_ranks import assert_close

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.parallel import Topology
from hyperpod_plugins.parallel.topology import check_nodes_are_alike

NUM_TRIALS = 15
OPTIONS = {
    "full": {},
    "recomputed, chunks": {"activation_checkpointing": True, "loss_chunks": 3},
    "contexts": {"context_parallel_degree": 2},
    "one node": {"hybrid_shard_degree": 2},
}


@pytest.mark.parametrize(
    ("sizes", "nodes"),
    [
        ({"world_size": 8, "shard_degree": 8, "ranks_per_node": 4}, 2),
        ({"world_size": 16, "shard_degree": 8, "ranks_per_node": 4}, 2),
        ({"world_size": 16, "shard_degree": 8, "tensor_degree": 2, "ranks_per_node": 8}, 2),
        ({"world_size": 8, "shard_degree": 4, "ranks_per_node": 4}, 1),  # each on one node
        ({"world_size": 8, "shard_degree": 8, "ranks_per_node": 8}, 1),
        ({"world_size": 8, "shard_degree": 8}, 1),  # nothing is known of nodes
        ({"world_size": 8, "shard_degree": 8, "ranks_per_node": 1}, 1),  # one rank on each node
        ({"world_size": 6, "shard_degree": 6, "ranks_per_node": 4}, 1),  # not whole nodes
        ({"world_size": 12, "shard_degree": 6, "ranks_per_node": 6}, 1),
        ({"world_size": 6, "shard_degree": 3, "tensor_degree": 2, "ranks_per_node": 3}, 1),
    ],
)
def test_nodes_over_which_a_shard_axis_is_spread(sizes, nodes):
    assert Topology(**sizes, node_collectives=True).nodes_per_shard_axis == nodes
    assert Topology(**sizes).nodes_per_shard_axis == 1


def test_nodes_with_other_numbers_of_ranks_are_refused():
    store = dist.HashStore()
    for _ in range(3):
        check_nodes_are_alike(store, 4)
    with pytest.raises(ConfigError, match="this node has 2 and another one '4'"):
        check_nodes_are_alike(store, 2)


def model():
    from parallel.equal_training import VOCABULARY
    from parallel.expert_models import SIZES
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | {"vocab_size": VOCABULARY})))


def two_stages():
    """Training with each of the options, and what both stages make of given values."""
    from hyperpod_plugins.parallel import ParallelConfig, build_mesh, node_collectives
    from hyperpod_plugins.parallel.topology import node_groups

    dist.init_process_group("hyperpod")
    calls = dict.fromkeys(("gather", "reduce"), 0)
    gather, reduce = node_collectives.NodeAllGather.__call__, node_collectives.NodeReduceScatter.__call__

    def counted(name, call):
        def run(*args, **kwargs):
            calls[name] += 1
            return call(*args, **kwargs)

        return run

    mesh = build_mesh(ParallelConfig(node_collectives=True).topology(4, ranks_per_node=2), DEVICE)
    group, (within, across) = mesh.get_group("shard"), node_groups(mesh["shard"])
    assert [dist.get_process_group_ranks(each) for each in (within, across)] == [
        [rank for rank in range(4) if rank // 2 == dist.get_rank() // 2],
        [rank for rank in range(4) if rank % 2 == dist.get_rank() % 2],
    ]
    values = torch.randn(12, generator=torch.Generator().manual_seed(dist.get_rank()))
    results = []
    for scatter in (node_collectives.NodeReduceScatter(within, across), None):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            out = torch.empty(3)
            if scatter is None:
                dist.reduce_scatter_tensor(out, values.clone(), op=op, group=group)
            else:
                scatter(out, values.clone(), group, op)
            results.append(out)
    gathered = [torch.empty(48) for _ in range(2)]
    dist.all_gather_into_tensor(gathered[0], values, group=group)
    node_collectives.NodeAllGather(within, across)(gathered[1], values, group)
    node_collectives.NodeAllGather.__call__ = counted("gather", gather)
    node_collectives.NodeReduceScatter.__call__ = counted("reduce", reduce)
    trained = {}
    for name, options in OPTIONS.items():
        before = sum(calls.values())
        trained[name] = train_on_mesh(model(), {"node_collectives": True, **options})
        assert (sum(calls.values()) > before) is (name != "one node"), name
    return calls, results, gathered, trained


def chosen_by_time():
    """Calls of both stages, and the store's value, where two stages are made slow, and where one is."""
    import time

    from hyperpod_plugins.comm import group_health
    from hyperpod_plugins.comm.health import Phase
    from hyperpod_plugins.parallel import node_collectives

    dist.init_process_group("hyperpod")
    store, results = dist.group.WORLD.root_store, {}
    gather, flat = node_collectives.NodeAllGather.__call__, dist.all_gather_into_tensor
    calls = dict.fromkeys(("gather", "reduce"), 0)

    def run(*args, **kwargs):
        calls["gather"] += 1
        time.sleep(0.02 * (slow[turn] == "two"))
        return gather(*args, **kwargs)

    def run_flat(output, given, group=None, **kwargs):
        time.sleep(0.02 * (slow[turn] == "one" and given.dtype == torch.uint8 and dist.get_world_size(group) == 4))
        return flat(output, given, group=group, **kwargs)

    node_collectives.NodeAllGather.__call__ = run
    dist.all_gather_into_tensor = run_flat
    node_collectives.NodeReduceScatter.__call__ = lambda *_: calls.update(reduce=1)
    asked, is_faster = [], node_collectives._is_faster
    node_collectives._is_faster = lambda *args: asked.append(args) or is_faster(*args)
    slow = {"two": "two", "one": "one", "as before": "two"}
    for turn in slow:
        before = calls["gather"]
        trained = train_on_mesh(model(), {"node_collectives": "auto"})
        gather_of_units, units, _ = asked[-1]
        key = node_collectives._store_key(gather_of_units, node_collectives._part_bytes(units, 4), 4)
        results[turn] = (calls["gather"] - before, store.get(key), trained)
        if turn == "two":
            dist.barrier()
            if dist.get_rank() == 0:
                store.delete_key(key)  # so that it is measured once more
            dist.barrier()
    group_health.phase, before = Phase.DETACHED, group_health.phase  # as in a replacement
    results["replacement"] = is_faster(*asked[-1])
    group_health.phase = before
    return calls, results


@pytest.mark.spawns
def test_gathers_have_two_stages_where_these_are_faster(run_ranks):
    found = run_ranks(chosen_by_time, world_size=4, nodes=2)
    for calls, results in found:
        assert calls["reduce"] == 0
        (measured, told, plain), (used, told_of_two, staged) = results["two"], results["one"]
        assert (told, told_of_two, results["replacement"]) == (b"one stage", b"two stages", True)
        assert measured == NUM_TRIALS < used
        assert results["as before"][:2] == (used - NUM_TRIALS, b"two stages")  # a model of equal size measures nothing
        for one, other in zip(plain, staged, strict=True):  # the same bits
            values = (
                zip(one.values(), other.values(), strict=True)
                if isinstance(one, dict)
                else zip(one, other, strict=True)
            )
            assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in values)


@pytest.mark.spawns
def test_two_stages_equal_one(run_ranks):
    alone = train_alone(model())
    for calls, results, gathered, trained in run_ranks(two_stages, world_size=4, nodes=2):
        assert min(calls.values()) > 10
        assert torch.equal(*gathered)
        for one, other in zip(results[:3], results[3:], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        for name, found in trained.items():
            assert_close(found, alone, name)
