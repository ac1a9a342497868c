"""The ledger of a Session without `hyperpodrun`: written if HYPERPOD_EVENTS is set, one entry for each loop."""

import time

import pytest
import torch

from hyperpod_plugins.report import run_report

pytestmark = pytest.mark.spawns
NUM_STEPS, SLEEP_S = 5, 0.05


def train(num_loops=1, *, slow_rank=None, fails_at=None):
    """Return the figures that each body has seen, and those after the loops."""
    from hyperpod_plugins.ledger import goodput_metrics
    from hyperpod_plugins.session import Session

    session = Session(hybrid_shard_degree=1, global_batch_size=4)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model = session.parallelize(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.train(model, optimizer)
    data = torch.utils.data.DataLoader(torch.ones(40, 4), batch_size=1)
    found = []

    def loss(batch):
        time.sleep(SLEEP_S * (1 + 4 * (session.rank == slow_rank)))
        return model(batch).square().mean()

    for _ in range(num_loops):
        try:
            for step in session.steps(data, epochs=1, max_steps=NUM_STEPS):
                with step:
                    step.run(loss)
                if step.index == fails_at:
                    raise RuntimeError("of the program")
                found.append(goodput_metrics())
        except RuntimeError:
            pass
    return found, goodput_metrics()


@pytest.mark.parametrize("num_loops", [1, 2])
def test_a_loop_is_in_the_ledger(run_ranks, tmp_path, num_loops):
    environ = {"HYPERPOD_EVENTS": str(tmp_path / "run")}
    for found, after in run_ranks(train, num_loops, world_size=2, environ=environ):
        assert after == {}
        assert len(found) == num_loops * NUM_STEPS
        assert all(each["world_size"] == 2 and each["generation"] == 0 and each["ettr"] == 1.0 for each in found)
        assert found[-1]["seconds/step"] > num_loops * NUM_STEPS * 2 * SLEEP_S * 0.99
    report = run_report(tmp_path / "run")
    assert report.is_complete
    assert not report.problems
    assert not report.incidents
    assert [*report.steps.step] == [*range(1, NUM_STEPS + 1)] * num_loops
    assert [*report.steps.global_batch] == [4] * NUM_STEPS * num_loops
    assert [*report.steps.samples] == [4 * step for step in range(1, num_loops * NUM_STEPS + 1)]
    assert None not in report.steps.loss
    assert set(report.steps.world_size) == {2}
    assert report.headline.steps_lost == 0
    assert report.are_waits_measured
    for rank in report.ranks:
        assert len(rank.processes) == 1
        assert sum(rank.seconds.values()) == pytest.approx(rank.wall_s, rel=1e-3)
        assert rank.seconds["step"] + rank.seconds.get("straggler_wait", 0.0) > num_loops * NUM_STEPS * 2 * SLEEP_S
        assert rank.seconds["setup"] > 0


def test_a_slow_rank_is_named_although_nothing_recovers(run_ranks, tmp_path):
    run_ranks(train, 2, world_size=2, slow_rank=1, environ={"HYPERPOD_EVENTS": str(tmp_path / "run")})
    [straggler] = run_report(tmp_path / "run").stragglers
    assert straggler.rank == 1


def test_a_loop_that_the_program_leaves_ends_its_entry(run_ranks, tmp_path):
    environ = {"HYPERPOD_EVENTS": str(tmp_path / "run")}
    [(_, after)] = run_ranks(train, world_size=1, fails_at=2, environ=environ)
    assert after == {}
    assert [*run_report(tmp_path / "run").steps.step] == [1, 2, 3]


def test_without_a_folder_nothing_is_booked(run_ranks):
    [(found, _)] = run_ranks(train, world_size=1, environ={"HYPERPOD_EVENTS": ""})
    assert found == [{}] * NUM_STEPS
