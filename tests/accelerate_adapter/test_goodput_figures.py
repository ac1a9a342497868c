"""`goodput_metrics` in a loop of Accelerate without a Session, and what its trackers get."""

import importlib.util
import os
import time
from pathlib import Path

import pytest
import torch
from report import tracked

NAMES = {"goodput", "ettr", "world_size", "generation", "seconds/setup", "seconds/step", "seconds/other"}


def train(trackers, folder, *, num_steps=6, micro_batches=1, sleep=None, evaluates=False, **options):
    """Train, log the figures after each step, and return them, with those at the end."""
    from accelerate.state import AcceleratorState, GradientState

    from hyperpod_plugins.accelerate import HyperPodPlugin
    from hyperpod_plugins.ledger import goodput_metrics

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    sleep, found = sleep or {}, []
    os.environ.update({"WANDB_DIR": str(folder), "WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    os.environ["MLFLOW_TRACKING_URI"] = f"file:{folder}/mlruns"
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    accelerator = HyperPodPlugin().accelerator(
        log_with=trackers, project_dir=folder, gradient_accumulation_steps=micro_batches, **options
    )
    if trackers:
        accelerator.init_trackers("run")
    net = torch.nn.Linear(4, 2)
    data = torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=1)
    net, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), data)
    for batch, _ in zip(data, range(num_steps * micro_batches), strict=False):
        with accelerator.accumulate(net):
            loss = net(batch).square().mean()
            time.sleep(sleep.get("step", 0))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(sleep.get("other", 0))
        if accelerator.sync_gradients:
            found.append(goodput_metrics())
            accelerator.log(found[-1], step=len(found))
    if evaluates:
        net.eval()
        with torch.no_grad():
            net(batch)
        time.sleep(sleep["evaluation"])
        net.train()
        net(batch)
        found.append(goodput_metrics())
    accelerator.end_training()
    return found, goodput_metrics()


@pytest.mark.spawns
@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16"}], ids=["float32", "bf16"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_each_part_of_a_loop_is_in_its_category(run_ranks, tmp_path, micro_batches, options):
    sleep = {"step": 0.05, "other": 0.02, "evaluation": 0.3}

    def body():
        from accelerate.tracking import GeneralTracker

        class Tracker(GeneralTracker):
            name, requires_logging_directory, tracker = "own", False, None

            def __init__(self):
                super().__init__()
                self.logged = {}

            def store_init_configuration(self, values):
                pass

            def log(self, values, step=None, **_):
                self.logged[step] = values

        tracker = Tracker()
        found, after = train([tracker], tmp_path, sleep=sleep, micro_batches=micro_batches, evaluates=True, **options)
        return found, after, tracker.logged

    for rank, (found, after, logged) in enumerate(run_ranks(body, world_size=2)):
        assert after == {}
        assert [*logged] == [1, 2, 3, 4, 5, 6] if rank == 0 else logged == {}
        assert all(found[step - 1] == values for step, values in logged.items())
        assert all(each.keys() >= NAMES and each["world_size"] == 2 for each in found)
        first, last, evaluated = found[0], found[5], found[6]
        num_batches = 5 * micro_batches
        for name in ("step", "other"):
            passed_s = last[f"seconds/{name}"] - first[f"seconds/{name}"]
            assert passed_s >= num_batches * sleep[name], (name, rank)
        steps_s = last["seconds/step"] - first["seconds/step"]
        assert 0.0 < last["goodput"] < 1
        assert steps_s + num_batches * sleep["other"] <= sum(last.values()) - sum(first.values())
        assert "seconds/evaluation" not in last
        assert evaluated["seconds/evaluation"] >= sleep["evaluation"]
        assert evaluated["seconds/step"] - last["seconds/step"] < sleep["evaluation"]


@pytest.mark.spawns
def test_without_trackers_nothing_is_booked(run_ranks, tmp_path):
    [(found, after)] = run_ranks(train, None, tmp_path, world_size=1)
    assert found == [{}] * 6
    assert after == {}


READERS = {
    "tensorboard": tracked.of_tensorboard,
    "mlflow": lambda folder: tracked.of_mlflow(f"file:{folder}/mlruns"),
    "wandb": lambda folder: tracked.of_wandb(folder, step_name="_step"),
}


@pytest.mark.spawns
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("tracker", READERS)
def test_the_figures_are_in_the_tracker(run_ranks, tmp_path, monkeypatch, tracker):
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    [(found, _)] = run_ranks(train, tracker, Path(tmp_path), world_size=1)
    read = READERS[tracker](tmp_path)
    for name in NAMES:
        assert [*read[name]] == [1, 2, 3, 4, 5, 6]
        wanted = [each[name] for each in found]
        assert [*read[name].values()] == pytest.approx(wanted, rel=1e-6), name
