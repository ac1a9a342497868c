"""Expert parallelism over real ranks with FSDP2, plainly and through each adapter, against one process."""

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from parallel.expert_models import GLOBAL_BATCH, make_model, samples, train, train_alone

LAYOUTS = {
    "shard 2, experts 2": (2, {"expert_parallel_degree": 2}),
    "hsdp 2x2, experts 2": (4, {"hybrid_shard_degree": 2, "expert_parallel_degree": 2}),
    "shard 4, experts 2": (4, {"expert_parallel_degree": 2}),
    "experts 4": (4, {"expert_parallel_degree": 4}),
    "experts 2, recomputed": (2, {"expert_parallel_degree": 2, "activation_checkpointing": True, "loss_chunks": 3}),
    "experts 2, selective": (2, {"expert_parallel_degree": 2, "activation_checkpointing": "selective"}),
    "experts 2, offload": (2, {"expert_parallel_degree": 2, "sm_activation_offloading": "auto"}),
    "context 2, experts 4": (4, {"context_parallel_degree": 2, "expert_parallel_degree": 4}),
    "context 2, experts 2": (4, {"context_parallel_degree": 2, "expert_parallel_degree": 2}),
}
MODELS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


def train_on_mesh(name, options, precision="32-true"):
    from hyperpod_plugins.parallel import ParallelConfig, build_data_group, build_mesh, clip_grad_norm_, parallelize

    config = ParallelConfig.of(options, precision=precision)
    topology = config.topology(dist.get_world_size())
    model = parallelize(make_model(name), build_mesh(topology, DEVICE), config)
    group, index = build_data_group(topology), topology.data_rank(dist.get_rank())
    share = GLOBAL_BATCH // topology.data_degree
    batches = [batch[index * share : (index + 1) * share] for batch in samples().split(GLOBAL_BATCH)]
    losses, *rest = train(model, model.parameters(), batches, clip_grad_norm_)
    for loss in losses:
        dist.all_reduce(loss, group=group)
    return [loss / group.size() for loss in losses], *rest


def train_all_on_mesh(layouts, models=MODELS):
    dist.init_process_group("hyperpod")
    found = {}
    for name, options in layouts.items():
        for model in models if len(options) < 2 or "hybrid_shard_degree" in options else models[:2]:
            found[model, name] = train_on_mesh(model, options)
    return found


def assert_close(found, wanted, what):
    (losses, norms, gradients, state), (wanted_losses, wanted_norms, wanted_gradients, wanted_state) = found, wanted
    assert abs(losses[0] - wanted_losses[0]) <= 5e-7 * wanted_losses[0], what
    for name, gradient in wanted_gradients.items():
        error = float((gradients[name] - gradient).norm() / gradient.norm())
        assert error <= 5e-7, (what, name, error)
    for values, expected in ((losses, wanted_losses), (norms, wanted_norms)):
        torch.testing.assert_close(torch.tensor(values), torch.tensor(expected), rtol=1e-5, atol=0)
    for name, value in wanted_state.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{what}: {n}: {m}")


@pytest.mark.spawns
@pytest.mark.parametrize("world_size", [2, 4])
def test_steps_on_ranks_equal_one_process(run_ranks, world_size):
    layouts = {name: options for name, (size, options) in LAYOUTS.items() if size == world_size}
    results = run_ranks(train_all_on_mesh, layouts, world_size=world_size, timeout_s=150)
    alone = {name: train_alone(name) for name in MODELS}
    for case, found in results[0].items():
        assert_close(found, alone[case[0]], case)
