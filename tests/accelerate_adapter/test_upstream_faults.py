"""The faults of Accelerate 1.15 that the adapter works around, each as small as it gets.

Each test says what Accelerate does, and passes while it does so. One that fails after an upgrade is good news: the
way around it in `hyperpod_plugins/accelerate` can go. docs/design/accelerate.md lists them.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytestmark = pytest.mark.spawns


def fsdp2_on_cpu():
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    net = nn.Linear(2, 2)
    net, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    dist.barrier()  # plain gloo may wait in vain for a peer that has left
    return type(net).__name__, accelerator.distributed_type.name


def fsdp2_without_the_word_cpu():
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    return accelerator.num_processes, accelerator.process_index


def test_fsdp2_on_cpu_is_ddp_or_nothing(run_ranks):
    assert run_ranks(fsdp2_on_cpu, world_size=2) == [("DistributedDataParallel", "MULTI_CPU")] * 2
    assert run_ranks(fsdp2_without_the_word_cpu, world_size=2) == [(1, 0)] * 2


def test_tensor_parallelism_imports_what_transformers_no_longer_has():
    import inspect

    from accelerate import Accelerator

    line = "from transformers.integrations.tensor_parallel import ReplicateParallel"
    assert line in inspect.getsource(Accelerator._prepare_tp)
    with pytest.raises(ImportError):
        exec(line)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(16))


def tensor_parallel():
    """Two data-parallel ranks x two tensor ranks; the state is made by the plugin, the rest is Accelerate's own."""
    from accelerate.data_loader import prepare_data_loader
    from accelerate.scheduler import AcceleratedScheduler

    from hyperpod_plugins.accelerate import HyperPodPlugin

    accelerator = HyperPodPlugin(hybrid_shard_degree=2, tensor_parallel_degree=2).accelerator()
    optimizer = accelerator.prepare_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda count: 1.0)
    scheduler = AcceleratedScheduler(schedule, optimizer)
    optimizer.step()
    scheduler.step()
    mesh = accelerator.torch_device_mesh
    stream = torch.utils.data.DataLoader(Stream(), batch_size=2)
    dispatched = prepare_data_loader(stream, accelerator.device, put_on_device=True, torch_device_mesh=mesh)
    return scheduler.scheduler.last_epoch, [x for batch in dispatched for x in batch.tolist()]


def test_under_tensor_parallelism_schedules_run_too_fast_and_streams_are_not_divided(run_ranks):
    for count, read in run_ranks(tensor_parallel, world_size=4):
        assert count == 4  # though two ranks read samples
        assert read == list(range(16))  # all of them, on every rank


def recomputed_dropout():
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac

    from hyperpod_plugins.accelerate import HyperPodPlugin
    from hyperpod_plugins.memory import recompute_blocks

    class Block(nn.Sequential):
        pass

    plugin = HyperPodPlugin(activation_checkpointing=True, block_classes=("Block",))
    accelerator = plugin.accelerator()

    def gradient(recompute):
        torch.manual_seed(0)
        net = nn.Sequential(Block(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1)))
        recompute(net)
        net(torch.ones(4, 64)).sum().backward()
        return next(net.parameters()).grad

    def by_accelerate(net):
        accelerator.state.fsdp_plugin.set_auto_wrap_policy(net)
        fsdp2_apply_ac(accelerator, net)

    kept = gradient(lambda net: None)
    ours = gradient(lambda net: recompute_blocks([net[0]]))
    return torch.equal(kept, ours), torch.equal(kept, gradient(by_accelerate))


def test_recomputation_drops_other_activations(run_ranks):
    assert run_ranks(recomputed_dropout, world_size=1) == [(True, False)]


def addresses():
    from hyperpod_plugins.accelerate import HyperPodPlugin

    accelerator = HyperPodPlugin().accelerator()
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return accelerator._get_named_parameters(net, drop_refs=True)


def test_parameters_without_memory_are_all_taken_for_one(run_ranks):
    (found,) = run_ranks(addresses, world_size=1)
    assert len(found) == 4
    assert set(found.values()) == {0}


def test_the_rendezvous_of_a_file_is_ignored(tmp_path):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: 'no'\nrdzv_backend: hyperpod\n")
    given = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    assert _validate_launch_command(given)[0].rdzv_backend == "static"


def test_options_of_fp8_are_written_by_other_names_than_they_are_read_by(tmp_path):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    file = tmp_path / "config.yaml"
    keys = "{backend: TE, amax_history_length: 16, amax_compute_algorithm: max}"  # as `accelerate config` writes them
    file.write_text(f"distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: fp8\nfp8_config: {keys}\n")
    given = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    found = _validate_launch_command(given)[0]
    assert (found.fp8_backend, found.fp8_amax_history_len, found.fp8_amax_compute_algo) == ("TE", 1024, "most_recent")
