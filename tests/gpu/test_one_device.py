"""What recovery does to a device, with one rank: on the CPU in the suite, and over nccl on a GPU with `make gpu`."""

import json
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from device import DEVICE, own_device, why_not_cuda
from harness import run_ranks

from hyperpod_plugins import comm
from hyperpod_plugins.comm import CommOptions, Reconfiguration, break_groups, join_world
from hyperpod_plugins.errors import DeviceHung, PeerLost
from hyperpod_plugins.recovery import watchdog
from hyperpod_plugins.recovery.rng import seed_micro_step
from hyperpod_plugins.report.run_files import read_run

pytestmark = [pytest.mark.spawns, pytest.mark.gpu]


def broken_and_rebuilt():
    """Three generations, each broken with a collective under way."""
    from hyperpod_plugins.comm.runtime import runtime  # not a copy that came with this function

    device = own_device(0)
    join_world(CommOptions(), rank=0, world_size=1, timeout_s=20.0)
    group, value, libraries, num_threads = dist.group.WORLD, torch.ones(1 << 20, device=device), [], []
    for generation in range(1, 4):
        dist.all_reduce(value)
        libraries.append(group.connected.group._get_backend(device).name())
        work = dist.all_reduce(value, async_op=True)
        break_groups("a test")
        runtime.finish_aborts()
        with pytest.raises(PeerLost):
            dist.all_reduce(value)
        del work
        store = dist.PrefixStore("meeting", dist.distributed_c10d._get_default_store())
        Reconfiguration(generation, store=store, timeout_s=20.0).run()
        dist.all_reduce(value)
        num_threads.append(len(os.listdir("/proc/self/task")))
    return float(value.sum()), libraries, num_threads


def test_groups_are_broken_aborted_and_built_again():
    [(total, libraries, num_threads)] = run_ranks(broken_and_rebuilt, world_size=1, timeout_s=120.0)
    assert total == 1 << 20
    assert libraries == ["nccl" if DEVICE == "cuda" else "gloo"] * 3
    assert num_threads[2] <= num_threads[1]


def keep_busy(device, seconds):
    """Queue work of about this length; returns whether it has been done."""
    if device.type == "cuda":
        done = torch.cuda.Event()
        torch.cuda._sleep(int(2e9 * seconds))  # cycles
        done.record()
        return done.query
    from hyperpod_plugins.comm.runtime import RECORDERS  # not a copy that came with this function

    until_s = time.monotonic() + seconds
    RECORDERS["cpu"] = lambda _: lambda: time.monotonic() > until_s
    return RECORDERS["cpu"](device)


def gated():
    device = own_device(0)
    is_done = keep_busy(device, 0.5)
    was_done = is_done()
    watchdog.synchronize_or_raise(device)
    outcomes = [was_done, is_done()]
    watchdog._DRAIN_LIMIT_S = 0.2
    is_done = keep_busy(device, 2.0)
    threading.Timer(0.1, comm.group_health.mark_broken, ["a test", lambda: None]).start()
    with pytest.raises(DeviceHung, match=f"queue of {device}"):
        watchdog.synchronize_or_raise(device)
    return [*outcomes, is_done()]


def test_a_commit_waits_for_the_device_and_gives_up_after_a_break():
    assert run_ranks(gated, world_size=1, timeout_s=60.0) == [[False, True, False]]


def committed(folder):
    """Steps whose losses the device has computed long after they were committed."""
    import hyperpod_plugins.ledger as module  # not a copy that came with this function

    device, losses = own_device(0), [0.5, 0.25, float("nan")]
    on_device = torch.tensor(losses, device=device)
    module.ledger.open(folder / "worker-0.jsonl", {"run_id": "", "worker_id": 0})
    is_done = keep_busy(device, 1.0)
    if device.type == "cpu":
        module.COPIERS["cpu"] = lambda value: (value.clone(), is_done)
    else:
        torch.empty((), pin_memory=True)  # the first one takes its time
        torch.cuda.set_sync_debug_mode("error")
    began_s = time.monotonic()
    for step, loss in enumerate(on_device.unbind(), 1):
        module.ledger.note_loss(loss)
        module.ledger.commit(step)
    took_s, was_done = time.monotonic() - began_s, is_done()
    while not is_done():
        time.sleep(0.01)
    module.ledger.close()
    return took_s, was_done


def test_a_commit_does_not_wait_for_the_loss_that_goes_into_the_ledger(tmp_path):
    [(took_s, was_done)] = run_ranks(committed, tmp_path, world_size=1, timeout_s=60.0)
    assert took_s < 0.5
    assert not was_done
    [process] = read_run(tmp_path).workers
    assert [span.step.loss for span in process.spans if span.step is not None] == [0.5, 0.25, None]


def drawn():
    device = own_device(0)
    torch.zeros(1, device=device)

    def draw(step, part):
        seed_micro_step(5, step, 0, 0, part)
        return torch.rand(4, device=device).tolist()

    places = [(step, part) for step in (0, 1) for part in ("step", "after")]
    return [draw(*place) for place in places], [draw(*place) for place in reversed(places)][::-1]


def test_random_streams_of_the_device_depend_on_the_step_alone():
    [(first, again)] = run_ranks(drawn, world_size=1, timeout_s=60.0)
    assert first == again
    assert len({tuple(each) for each in first}) == 4


def start_program(folder, *options):
    from recovery.faults import HYPERPODRUN, run_job  # it installs the transport of ranks that share a device

    return run_job("../gpu/program_forked.py", folder, num_ranks=1, args=options, launcher=HYPERPODRUN, timeout_s=120)


def test_a_forked_worker_uses_the_device(tmp_path):
    job = start_program(tmp_path, "--preload", "torch")
    assert job.code == 0, job.output[-6000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {"is_forked": True, "was_initialised": False, "device": DEVICE, "total": 8.0}


@pytest.mark.skipif(why_not_cuda() is not None, reason=str(why_not_cuda()))
def test_a_module_that_initialises_cuda_is_not_preloaded(tmp_path):
    (tmp_path / "takes_the_gpu.py").write_text("import torch\ntorch.zeros(1, device='cuda')\n")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    job = start_program(tmp_path, "--preload", "torch,takes_the_gpu")
    assert job.code != 0
    assert "Importing 'takes_the_gpu' initialised CUDA" in job.output
