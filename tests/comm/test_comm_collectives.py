"""Every collective gives, to the last bit, what plain gloo gives."""

import traceback

import pytest
import staged_gloo
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn

from hyperpod_plugins import comm

CASES = {}


def case(fn):
    CASES[fn.__name__] = fn
    return fn


def mine(*shape, dtype=torch.float32):
    """Numbers that differ between ranks and between calls of equal shape never."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(dist.get_rank() + 7))
    return (values * 10).to(dtype)


@case
def all_reduce(group):
    tensors = [mine(5, 3) for _ in range(5)]
    ops = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)
    for tensor, op in zip(tensors, ops, strict=True):
        dist.all_reduce(tensor, op, group=group)
    work = dist.all_reduce(tensors[0], group=group, async_op=True)
    work.wait()
    assert work.is_completed()
    return tensors


@case
def all_reduce_dtypes(group):
    tensors = [mine(6, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    return tensors


@case
def all_reduce_methods(group):
    a, b, c = mine(4), mine(4), mine(4)
    group.allreduce([a]).wait()
    group.allreduce(b).wait()
    group.allreduce([c], dist.ReduceOp.MAX).wait()
    return a, b, c


@case
def all_reduce_future(group):
    tensor = mine(4)
    future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    return future.then(lambda arrived: arrived.value()[0] + 1).wait(), tensor


@case
def all_reduce_coalesced(group):
    tensors = [mine(3), mine(2, 2)]
    with dist.distributed_c10d._coalescing_manager(group=group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    group.allreduce_coalesced(tensors).wait()
    return tensors


@case
def broadcast(group):
    tensor = mine(4)
    dist.broadcast(tensor, src=2, group=group)
    return tensor


@case
def reduce(group):
    tensor = mine(4)
    dist.reduce(tensor, dst=1, group=group)
    return tensor if dist.get_rank() == 1 else None


@case
def all_gather(group):
    outputs = [torch.empty(2, 3) for _ in range(4)]
    dist.all_gather(outputs, mine(2, 3), group=group)
    single, base = torch.empty(8, 3), torch.empty(8, 3)
    dist.all_gather_into_tensor(single, mine(2, 3), group=group)
    group._allgather_base(base, mine(2, 3)).wait()
    return outputs, single, base


@case
def all_gather_coalesced(group):
    outputs = [torch.empty(8), torch.empty(4, 3)]
    with dist.distributed_c10d._coalescing_manager(group=group):
        for output in outputs:
            dist.all_gather_into_tensor(output, mine(output.shape[0] // 4, *output.shape[1:]), group=group)
    old = [torch.empty(8)]
    group.allgather_into_tensor_coalesced(old, [mine(2)]).wait()
    lists = [[torch.empty(2)] for _ in range(4)]
    group.allgather_coalesced(lists, [mine(2)]).wait()
    return outputs, old, lists


def whole(*shape, **kwargs):
    """Whole numbers, whose sums do not depend on their order: ours is that of ranks, gloo's that of its ring."""
    return mine(*shape, **kwargs).round()


@case
def reduce_scatter(group):
    output, single, base = torch.empty(3), torch.empty(2), torch.empty(2)
    dist.reduce_scatter(output, list(whole(4, 3)), group=group)
    dist.reduce_scatter_tensor(single, whole(8), dist.ReduceOp.AVG, group=group)
    group._reduce_scatter_base(base, whole(8), dist.ReduceScatterOptions()).wait()
    group._reduce_scatter_base(base, whole(8)).wait()
    listed, wide = torch.empty(3), torch.empty(101, dtype=torch.bfloat16)
    group.reduce_scatter(listed, list(whole(4, 3)), dist.ReduceOp.MAX).wait()
    work = dist.reduce_scatter_tensor(wide, whole(404, dtype=torch.bfloat16), group=group, async_op=True)
    work.wait()
    work.wait()
    assert work.is_completed() or type(group) is dist.ProcessGroup  # gloo's own never says so
    return output, single, base, listed, wide


@case
def reduce_scatter_coalesced(group):
    outputs = [torch.empty(2), torch.empty(1, 3)]
    with dist.distributed_c10d._coalescing_manager(group=group):
        dist.reduce_scatter_tensor(outputs[0], whole(8), group=group)
        dist.reduce_scatter_tensor(outputs[1], whole(4, 3), group=group)
    old = [torch.empty(2)]
    group.reduce_scatter_tensor_coalesced(old, [whole(8)]).wait()
    return outputs, old


@case
def all_to_all(group):
    rank = dist.get_rank()
    even, uneven = torch.empty(8), torch.empty(4 * (rank + 1))
    dist.all_to_all_single(even, mine(8), group=group)
    dist.all_to_all_single(uneven, mine(10), [rank + 1] * 4, [1, 2, 3, 4], group=group)
    old = torch.empty(8)
    group.alltoall_base(old, mine(8), [], []).wait()
    return even, uneven, old


@case
def gather(group):
    outputs = [torch.empty(3) for _ in range(4)] if dist.get_rank() == 3 else None
    dist.gather(mine(3), outputs, dst=3, group=group)
    return outputs


@case
def scatter(group):
    output = torch.empty(3)
    dist.scatter(output, list(mine(4, 3)) if dist.get_rank() == 1 else None, src=1, group=group)
    return output


@case
def point_to_point(group):
    rank = dist.get_rank()
    output, any_source = torch.empty(3), torch.empty(3)
    if rank % 2 == 0:
        dist.send(mine(3), rank + 1, group=group)
        dist.send(mine(3), rank + 1, group=group, tag=5)
    else:
        dist.recv(output, rank - 1, group=group)
        assert dist.recv(any_source, group=group, tag=5) == rank - 1
    ring = torch.empty(3)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine(3), (rank + 1) % 4, group),
            dist.P2POp(dist.irecv, ring, (rank - 1) % 4, group),
        ]
    )
    for work in works:
        work.wait()
    return (output, any_source, ring) if rank % 2 else ring


@case
def barrier(group):
    dist.barrier(group)
    group.barrier(opts=dist.BarrierOptions()).wait()
    return dist.barrier(group, async_op=True).wait()


@case
def objects(group):
    rank = dist.get_rank()
    everybody = [None] * 4
    dist.all_gather_object(everybody, {"rank": rank, "text": "x" * rank}, group=group)
    gathered = [None] * 4 if rank == 2 else None
    dist.gather_object((rank,), gathered, dst=2, group=group)
    sent = [{"from": rank}, [rank]]
    dist.broadcast_object_list(sent, src=1, group=group)
    part = [None]
    dist.scatter_object_list(part, [10, 20, 30, 40] if rank == 0 else None, src=0, group=group)
    return everybody, gathered, sent, part


@case
def functional(group):
    tensor = whole(8)
    results = [
        funcol.all_reduce(tensor, "sum", group),
        funcol.all_reduce(tensor, "avg", group),
        funcol.all_gather_tensor(tensor, 0, group),
        funcol.reduce_scatter_tensor(tensor, "sum", 0, group),
        funcol.all_to_all_single(tensor, [2] * 4, [2] * 4, group),
        funcol.broadcast(tensor, 1, group),
        *funcol.all_reduce_coalesced([tensor, whole(2)], "sum", group),
        *funcol.all_gather_into_tensor_coalesced([tensor, whole(2)], group),
        *funcol.reduce_scatter_tensor_coalesced([tensor, whole(4, 2)], "sum", [0, 0], group),
    ]
    return [result + 0 for result in results]


@case
def functional_autograd(group):
    tensor = whole(8).requires_grad_()
    loss = (funcol.all_gather_tensor_autograd(tensor, 0, group) ** 2).sum()
    loss = loss + (funcol.reduce_scatter_tensor_autograd(tensor**2, "sum", 0, group) ** 2).sum()
    loss = loss + (funcol.all_to_all_single_autograd(tensor, [2] * 4, [2] * 4, group) ** 3).sum()
    loss = loss + (dist_nn.all_reduce(tensor.sin(), group=group) ** 2).sum()
    loss.backward()
    return loss.detach(), tensor.grad


def flat(value):
    if isinstance(value, list | tuple):
        return [part for item in value for part in flat(item)]
    return [value]


def compare_all(cases, is_same, is_staged=False):
    if is_staged:
        staged_gloo.install()
    dist.init_process_group("hyperpod")
    plain = dist.new_group(backend="gloo")
    made = dist.new_group(backend="hyperpod")
    outcomes = {}
    for name, fn in cases.items():
        try:
            gloo = flat(fn(plain))
            for group in (dist.group.WORLD, made):
                ours = flat(fn(group))
                assert len(ours) == len(gloo)
                for mine, theirs in zip(ours, gloo, strict=True):
                    assert is_same(mine, theirs), f"{mine} != {theirs}"
            outcomes[name] = "equal"
        except Exception:
            outcomes[name] = traceback.format_exc()
            break
    return outcomes


def bitwise(ours, gloo):
    if not isinstance(gloo, torch.Tensor):
        return type(ours) is type(gloo) and ours == gloo
    if ours.dtype != gloo.dtype or ours.shape != gloo.shape:
        return False
    return torch.equal(ours.flatten().view(torch.uint8), gloo.flatten().view(torch.uint8))


@pytest.fixture(scope="module", params=[False, True], ids=["gloo", "staged"])
def outcomes(run_ranks, request):
    return run_ranks(compare_all, CASES, bitwise, request.param, world_size=4, timeout_s=60)


@pytest.mark.spawns
@pytest.mark.parametrize("name", CASES)
def test_collective_equals_gloo(outcomes, name):
    for rank, outcome in enumerate(outcomes):
        assert outcome.get(name, "not reached") == "equal", f"rank {rank}:\n{outcome.get(name)}"


def compiled():
    """Compiled code finds a group by its name, and calls it from C++."""
    dist.init_process_group("hyperpod")

    def step(tensor, group):
        return funcol.all_reduce(tensor * 2, "sum", group) + funcol.all_gather_tensor(tensor, 0, group).sum()

    tensor = mine(8)
    for group in (dist.group.WORLD, dist.new_group(backend="hyperpod")):
        fast = torch.compile(lambda tensor, group=group: step(tensor, group), backend="aot_eager", fullgraph=True)
        assert torch.equal(fast(tensor), step(tensor, group))
    return comm.traffic()["world"].calls


@pytest.mark.spawns
def test_compiled_collectives_run_in_our_groups(run_ranks):
    assert run_ranks(compiled, world_size=2, timeout_s=60) == [{"all_reduce": 2, "all_gather": 2}] * 2
