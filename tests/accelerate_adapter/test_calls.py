"""What else a loop asks of an Accelerator, on four ranks: who reads what, metrics, states that are saved and loaded."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

PLAN = {"w1": "colwise", "w2": "rowwise"}
HSDP = {"hybrid_shard_degree": 2}
TENSOR = HSDP | {"tensor_parallel_degree": 2, "tensor_plan": PLAN}
WIDTH, NUM_SAMPLES = 8, 13  # 13 samples fill no last batch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.w2(torch.tanh(self.w1(x)))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(16))


def fresh(options, **arguments):
    from accelerate.state import AcceleratorState, GradientState

    from hyperpod_plugins.accelerate import HyperPodPlugin

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return HyperPodPlugin(**options).accelerator(**arguments)


def prepared(options, **arguments):
    accelerator = fresh(options, **arguments)
    torch.manual_seed(dist.get_rank())  # rank 0's values must win
    net = Net()
    head, rest = [net.w2.bias], [p for p in net.parameters() if p is not net.w2.bias]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": head, "lr": 0.1}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    return accelerator, *accelerator.prepare(net, optimizer, scheduler)


def train(accelerator, net, optimizer, scheduler, steps=2):
    for step in range(steps):
        torch.manual_seed(10 * step + accelerator.topology.data_rank(dist.get_rank()))
        with accelerator.accumulate(net):
            accelerator.backward(net(torch.randn(3, WIDTH)).pow(2).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def everything(net, optimizer, scheduler):
    values = {name: whole(p) for name, p in net.named_parameters()}
    for name, parameter in net.named_parameters():
        moments = optimizer.state.get(parameter, {})
        values |= {f"{name}:{key}": whole(value) for key, value in moments.items() if torch.is_tensor(value)}
    return values | {
        "lr": torch.tensor([group["lr"] for group in optimizer.param_groups]),
        "at": scheduler.state_dict(),
    }


def read(options):
    """Samples that each rank reads, and what all of them gather for a metric."""
    accelerator = fresh(options)
    data = torch.arange(NUM_SAMPLES)
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=2))
    batches, metrics, objects = [], [], []
    for batch in loader:
        batches += batch.tolist()
        metrics += accelerator.gather_for_metrics({"x": batch})["x"].tolist()
        objects += accelerator.gather_for_metrics([f"{each}" for each in batch.tolist()])
    shuffled = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=2, shuffle=True, drop_last=True))
    stream = accelerator.prepare(torch.utils.data.DataLoader(Stream(), batch_size=2))
    return {
        "place": accelerator.topology.data_rank(dist.get_rank()),
        "batches": batches,
        "metrics": metrics,
        "objects": objects,
        "shuffled": [each for batch in shuffled for each in batch.tolist()],
        "stream": [each for batch in stream for each in batch.tolist()],
        "sum": float(accelerator.reduce(torch.tensor(1.0))),
        "mean": float(accelerator.reduce(torch.tensor(float(dist.get_rank())), "mean")),
        "scalar": accelerator.gather(torch.tensor(7)).tolist(),
    }


def save_and_load(options, folder):
    """Train two steps, save, train two more; then the same from what was saved, in a model with other values."""
    first = prepared(options)
    train(*first)
    first[0].save_state(folder)
    at_saving = everything(*first[1:])
    train(*first)
    again = prepared(options)
    again[0].load_state(folder)
    loaded = everything(*again[1:])
    train(*again)
    whole_model = again[0].get_state_dict(again[1])
    return {
        "saved": at_saving,
        "loaded": loaded,
        "went on": everything(*first[1:]),
        "went on again": everything(*again[1:]),
        "whole": whole_model,
    }


def load_elsewhere(options, folder):
    accelerator = prepared(options)
    accelerator[0].load_state(folder)
    return everything(*accelerator[1:])


def use(folder):
    dist.init_process_group("hyperpod")
    found = {"hsdp": read(HSDP), "tensor": read(TENSOR)}
    for name, options in {
        "hsdp": HSDP,
        "tensor": TENSOR,
        "in one file": TENSOR | {"state_dict_type": "FULL_STATE_DICT"},
        "parameters on the host": HSDP | {"param_offload": True},
        "optimizer on the host": TENSOR | {"optimizer_offload": True},
    }.items():
        found[f"states, {name}"] = save_and_load(options, f"{folder}/{name}")
    found["states, elsewhere"] = load_elsewhere({}, f"{folder}/tensor")
    accelerator, net, optimizer, _ = prepared(HSDP | {"precision": "bf16-mixed"})
    kept, output = next(net.parameters()).dtype, net(torch.ones(2, WIDTH))
    inner = accelerator.unwrap_model(net, keep_fp32_wrapper=False)
    found["types"] = [str(each) for each in (output.dtype, kept, inner(torch.ones(2, WIDTH)).dtype)]
    assert accelerator.prepare(net, optimizer) == (net, optimizer)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    with torch.no_grad():
        net(torch.ones(2, WIDTH))
    assert {id(parameter) for parameter in net.parameters()} == held
    accelerator.clip_grad_value_(net.parameters(), 0.1)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return found


@pytest.fixture(scope="module")
def used(run_ranks, tmp_path_factory):
    return run_ranks(use, str(tmp_path_factory.mktemp("states")), world_size=4)


@pytest.mark.spawns
@pytest.mark.parametrize(("layout", "readers"), [("hsdp", 4), ("tensor", 2)])
def test_ranks_divide_samples_and_tensor_peers_share_them(used, layout, readers):
    for rank, results in enumerate(used):
        found = results[layout]
        assert found["place"] == rank * readers // 4
        step = 2 * readers
        mine = [i for i in range(NUM_SAMPLES) if i % step // 2 == found["place"]]
        assert found["batches"][: len(mine)] == mine
        assert found["metrics"] == list(range(NUM_SAMPLES))  # none twice, none that only filled up
        assert found["objects"] == [str(i) for i in range(NUM_SAMPLES)]
        assert (found["sum"], found["scalar"]) == (readers, [7] * readers)
    alone = {results[layout]["place"]: results[layout] for results in used}
    for key in ("shuffled", "stream"):
        assert all(results[layout][key] == alone[results[layout]["place"]][key] for results in used)
    assert sorted(x for each in alone.values() for x in each["stream"]) == list(range(16))
    together = [x for each in alone.values() for x in each["shuffled"]]
    assert len(together) == len(set(together)) == NUM_SAMPLES // (2 * readers) * 2 * readers


STATES = ["hsdp", "tensor", "in one file", "parameters on the host", "optimizer on the host"]


@pytest.mark.spawns
@pytest.mark.parametrize("case", STATES)
def test_a_loaded_state_goes_on_as_if_it_had_never_stopped(used, case):
    for results in used:
        found = results[f"states, {case}"]
        torch.testing.assert_close(found["loaded"], found["saved"], rtol=0, atol=0)
        torch.testing.assert_close(found["went on again"], found["went on"], rtol=0, atol=0)
        assert not torch.equal(found["went on"]["w1.weight"], found["saved"]["w1.weight"])
    for name, value in used[0][f"states, {case}"]["whole"].items():
        assert torch.equal(value, used[0][f"states, {case}"]["went on"][name])


@pytest.mark.spawns
def test_a_state_loads_into_another_layout(used):
    for results in used:
        found, saved = results["states, elsewhere"], results["states, tensor"]["saved"]
        torch.testing.assert_close(found, saved, rtol=0, atol=0)


@pytest.mark.spawns
def test_bfloat16_is_mixed_as_accelerate_mixes_it(used):
    assert [results["types"] for results in used] == [["torch.float32", "torch.float32", "torch.bfloat16"]] * 4


@pytest.mark.spawns
def test_a_state_loads_into_another_world(used, run_ranks, tmp_path):
    def both(folder):
        dist.init_process_group("hyperpod")
        made = prepared({})
        train(*made)
        made[0].save_state(folder)
        return everything(*made[1:])

    def one(folder):
        made = prepared({})
        made[0].load_state(folder)
        return everything(*made[1:])

    saved = run_ranks(both, str(tmp_path), world_size=2)[0]
    torch.testing.assert_close(run_ranks(one, str(tmp_path), world_size=1)[0], saved, rtol=0, atol=0)
    assert Path(tmp_path, "optimizer_0").is_dir()
