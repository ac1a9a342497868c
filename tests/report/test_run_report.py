"""The report of runs whose ledgers are made up, so that each figure is known; and of ledgers that are damaged."""

import copy
import json
import math
import random
from dataclasses import asdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report.synthetic_ledgers import BEGAN_S, SIGKILL, SyntheticRun, loss_of

from hyperpod_plugins.errors import ConfigError
from hyperpod_plugins.ledger import LEDGER_FORMAT, TimeCategory
from hyperpod_plugins.planning.estimate import poisson_interval
from hyperpod_plugins.report.make_report import LABELS, run_report
from hyperpod_plugins.report.measured_times import stage_times
from hyperpod_plugins.report.text import markdown

STAGES = ("at_s", "total_s", "detect_s", "assemble_s", "restore_s")


def assert_laws(report):
    """What holds for each report, whatever its ledgers are."""
    for rank in report.ranks:
        assert sum(rank.seconds.values()) == pytest.approx(rank.wall_s, rel=1e-3, abs=1e-5)
        assert all(value >= 0 for value in rank.seconds.values())
        assert set(rank.seconds) <= set(TimeCategory)
        assert sum(duration for _, duration, _ in rank.spans) == pytest.approx(rank.wall_s, rel=1e-3, abs=1e-5)
        until_s = -math.inf
        for begin_s, duration_s, _ in rank.spans:
            assert begin_s >= until_s - 1e-3
            until_s = begin_s + duration_s
        assert rank.processes
    assert set(LABELS) == set(TimeCategory)
    for each in report.categories:
        total_s = sum(rank.seconds.get(each.category, 0.0) for rank in report.ranks)
        assert each.seconds == pytest.approx(total_s, rel=1e-6, abs=1e-6)
    assert sum(each.share for each in report.categories) == pytest.approx(1.0) or not any(
        rank.wall_s for rank in report.ranks
    )
    assert 0 <= report.headline.goodput <= 1 + 1e-9
    assert report.headline.ettr <= 1 + 1e-9
    lengths = {len(each) for each in asdict(report.steps).values()}
    assert lengths == {report.headline.steps_committed}
    assert report.verdict.action in ("continue", "restart", "stop")
    json.dumps(asdict(report), allow_nan=False)
    assert markdown(report).startswith("# Run ")


def report_of(run, folder):
    """The report of a made-up run, of which all that is known is checked."""
    report = run_report(run.write(folder / "events"))
    assert_laws(report)
    assert not report.problems
    assert report.num_ranks == run.num_ranks
    assert report.is_complete == run.is_complete
    assert report.headline.wall_s == pytest.approx(run.wall_s, abs=1e-4)
    for rank, (found, wanted) in enumerate(zip(report.ranks, run.truth, strict=True)):
        assert found.rank == rank
        assert {name: value for name, value in found.seconds.items() if value > 1e-4} == pytest.approx(
            wanted, rel=1e-3, abs=1e-4
        ), rank
    assert len(report.incidents) == len(run.incidents)
    for found, wanted in zip(report.incidents, run.incidents, strict=True):
        for name in ("kind", "rank", "cause", "step", "steps_lost", "level"):
            assert getattr(found, name) == getattr(wanted, name), (name, found)
        for name in STAGES:
            assert getattr(found, name) == pytest.approx(getattr(wanted, name), abs=1e-4), (name, found)
        assert found.redone_s == pytest.approx(wanted.redone_s, abs=1e-4), found
    headline = report.headline
    assert headline.num_failures == run.num_failures
    assert headline.num_repairs == sum(each.level in ("retry", "replace", "snapshot") for each in report.incidents) - (
        headline.num_resizes
    )
    assert headline.num_restarts == sum(each.kind == "restart" for each in run.incidents)
    assert headline.num_resizes == sum(each.kind == "resize" for each in run.incidents)
    assert headline.steps_lost == run.steps_lost
    assert list(report.steps.step) == sorted(run.held)
    wall_s = sum(each.wall_s for each in report.ranks)
    step_s = sum(each.get("step", 0.0) for each in run.truth)
    assert headline.goodput == pytest.approx(step_s / wall_s, rel=1e-3)
    assert headline.failures_cost_s == pytest.approx(run.failures_cost_s, rel=1e-3, abs=1e-5)
    return report


# -- runs of all kinds ------------------------------------------------------------------------------------------------


def test_a_run_to_which_nothing_happens(tmp_path):
    report = report_of(SyntheticRun().steps(20).phase("evaluation", 2.0).finish(), tmp_path)
    headline = report.headline
    assert (headline.num_failures, headline.ettr, headline.steps_lost) == (0, 1.0, 0)
    assert (headline.mttr_s, headline.checkpoint_restart_cost_s) == (None, None)
    assert headline.mtbf_s.high is None
    assert headline.mtbf_s.low == pytest.approx(headline.wall_s / 3.6889, rel=1e-4)
    assert (report.run_id, report.hosts, report.began_at_s) == ("run", ["node-0", "node-1"], BEGAN_S)
    assert (report.verdict.action, report.stragglers, report.failing_nodes) == ("continue", [], [])
    assert [each.ending for rank in report.ranks for each in rank.processes] == ["finished"] * 4


def test_the_figures_of_a_tiny_run_are_those_computed_by_hand(tmp_path):
    """Two ranks: set-up 2, ten steps of 1.25 with 1 of computing, one lost process, end 0.5. In all 21.25 s."""
    run = SyntheticRun(2, setup_s=2.0)
    run.steps(5, compute_s=1.0, data_s=0.25, other_s=0.0)
    run.kill(1, computing_s=0.5, detect_s=0.25, assemble_s=4.0, restore_s=1.5)
    run.steps(5, compute_s=1.0, data_s=0.25, other_s=0.0).finish(other_s=0.25, exit_s=0.25)
    headline = report_of(run, tmp_path).headline
    assert headline.wall_s == pytest.approx(2 + 10 * 1.25 + 6.25 + 0.5)
    assert headline.goodput == pytest.approx(10 / 21.25, abs=1e-5)
    assert headline.failures_cost_s == pytest.approx(6.25, abs=1e-5)
    assert headline.ettr == pytest.approx(1 - 6.25 / 19.25, abs=1e-5)
    assert headline.ideal_step_s == pytest.approx(1.25, abs=1e-5)
    assert headline.mtbf_s.value == pytest.approx(21.25)
    assert headline.mtbf_s.low == pytest.approx(21.25 / 5.5716, rel=1e-4)
    assert headline.mtbf_s.high == pytest.approx(21.25 / 0.025318, rel=1e-4)
    assert headline.mttr_s.value == pytest.approx(5.75)
    assert headline.mttr_s.low == pytest.approx(5.75 / 3.688879, rel=1e-5)  # exponential, of one repair
    assert headline.mttr_s.high == pytest.approx(5.75 / 0.0253178, rel=1e-5)
    # A restart: 2 of set-up, and the five steps again, as there is no checkpoint.
    assert headline.checkpoint_restart_cost_s == pytest.approx(2.0 + 5 * 1.25, abs=1e-4)
    assert "none" in headline.checkpoint_restart_assumes


def test_a_checkpoint_makes_a_restart_from_it_cheaper(tmp_path):
    run = SyntheticRun(2, setup_s=2.0).steps(5).phase("checkpoint_save", 1.0).steps(2, other_s=0.0).kill(0).finish()
    headline = report_of(run, tmp_path).headline
    assert headline.checkpoint_restart_cost_s == pytest.approx(2.0 + 2 * 1.125, abs=1e-4)
    assert "saved 1" in headline.checkpoint_restart_assumes


def test_restarts_from_checkpoints_load_one_each(tmp_path):
    """Three restarts with loads of 1, 2 and 3 s: each of the failures would have cost one load of 2 s, and not six."""
    run = SyntheticRun(2, setup_s=2.0)
    for load_s in (1.0, 2.0, 3.0):
        run.steps(2, other_s=0.0).phase("checkpoint_save", 1.0).restart(0, back_to=run.step_number, load_s=load_s)
    report = report_of(run.steps(2).finish(), tmp_path)
    assert report.headline.checkpoint_restart_cost_s == pytest.approx(3 * (2.0 + 2.0), abs=1e-4)
    assert [list(each.checkpoint_loads_s) for each in report.ranks] == [[1.0, 2.0, 3.0]] * 2
    assert stage_times(report)["checkpoint_restore_s"] == [1.0, 2.0, 3.0]


def test_what_a_restart_loads_is_a_cost_of_the_failure(tmp_path):
    """It was noticed for 1 s, away for 0.5 s, set up for 3 s and loaded for 8 s; half a second of work was lost."""
    run = SyntheticRun(2).steps(4).restart(0, back_to=4, load_s=8.0).step(other_s=0.0).finish()
    headline = report_of(run, tmp_path).headline
    assert headline.failures_cost_s == pytest.approx(0.5 + 1.0 + 0.5 + 3.0 + 8.0, abs=1e-4)
    assert headline.mttr_s.value == pytest.approx(12.5, abs=1e-4)
    assert headline.ettr == pytest.approx(1 - 13.0 / (headline.wall_s - 2.0), abs=1e-4)


def test_what_is_loaded_after_the_steps_is_no_cost_of_a_failure(tmp_path):
    """As by `trainer.test(ckpt_path="best")`, in a run whose processes were restarted before."""
    run = SyntheticRun(2).steps(2).restart(0, back_to=2).steps(2).phase("checkpoint_restore", 16.0).finish()
    report = report_of(run, tmp_path)
    assert report.ranks[0].seconds["checkpoint_restore"] == pytest.approx(16.0)
    assert report.ranks[0].checkpoint_loads_s == pytest.approx([1.0, 16.0])


def test_a_hundred_incidents_of_all_kinds(tmp_path):
    draw, run = random.Random(7), SyntheticRun(6)
    for number in range(100):
        run.steps(draw.randint(1, 4), compute_s=draw.randint(8, 128) / 64)
        match number % 5:
            case 0 | 1:
                ranks = draw.sample(range(6), draw.randint(1, 3))
                run.kill(*ranks, computing_s=draw.randint(1, 64) / 64, restore_s=draw.randint(1, 64) / 64)
            case 2:
                run.raise_in(draw.randrange(6), cause=f"ValueError: {number}")
            case 3:
                run.kill(draw.randrange(6), back_to=max(0, run.step_number - draw.randint(0, 3)), noticed_by=0)
            case 4:
                run.restart(draw.randrange(6), back_to=max(0, run.step_number - draw.randint(0, 5)))
    report = report_of(run.steps(3).finish(), tmp_path)
    assert len(report.incidents) == 100
    assert report.headline.steps_committed == run.step_number


def test_kills_that_follow_each_other_closely_are_told_apart(tmp_path):
    """A replacement is killed after its first step, again and again, and so is a neighbour."""
    run, quick = (
        SyntheticRun(3).step(),
        {"computing_s": 0.125, "detect_s": 0.125, "assemble_s": 0.25, "restore_s": 0.125},
    )
    for rank in (1, 1, 2, 1, 2, 2, 0):
        run.kill(rank, **quick).step(compute_s=0.125)
    run.raise_in(1, **quick).step().raise_in(1, **quick).kill(1, **quick).steps(2).finish()
    report_of(run, tmp_path)


def test_a_rank_that_raised_an_exception_and_is_killed_later_has_failed_twice(tmp_path):
    run = SyntheticRun(3).step().raise_in(1).step().kill(1, 2).step().finish()
    assert report_of(run, tmp_path).headline.num_failures == 3


def test_what_broke_is_the_cause_and_not_the_peer_that_noticed_it(tmp_path):
    report = report_of(SyntheticRun().steps(2).kill(2, noticed_by=0).steps(2).finish(), tmp_path)
    (incident,) = report.incidents
    assert (incident.rank, incident.cause, incident.host) == (2, SIGKILL, "node-1")


def test_a_return_to_a_snapshot_loses_the_steps_after_it(tmp_path):
    run = SyntheticRun().steps(10).kill(1, back_to=7).steps(1).kill(2, back_to=7).steps(4).finish()
    report = report_of(run, tmp_path)
    assert [each.steps_lost for each in report.incidents] == [3, 1]
    assert list(report.steps.step) == list(range(1, 12))


def test_sixty_four_ranks(tmp_path):
    run = SyntheticRun(64, ranks_per_host=8)
    for rank in (3, 63, 17):
        run.steps(10).kill(rank)
    run.steps(5).restart(40, back_to=30).steps(10).finish()
    assert len(report_of(run, tmp_path).hosts) == 8


def test_three_restarts_of_all(tmp_path):
    run = SyntheticRun().steps(5)
    for rank in (0, 3, 2):
        run.restart(rank, back_to=run.step_number - 3).steps(4)
    report = report_of(run.finish(), tmp_path)
    assert [each.steps_lost for each in report.incidents] == [3, 3, 3]
    assert {len(each.processes) for each in report.ranks} == {4}
    assert [each.restart for each in report.ranks[0].processes] == [0, 1, 2, 3]


def test_steps_that_were_not_reached_again_are_lost_too(tmp_path):
    """It goes back from step 10 to 4, comes to 6, goes back to 4 once more, and is cut off in step 6."""
    run = SyntheticRun().steps(10).restart(1, back_to=4).steps(2).restart(2, back_to=4).step().cut_off()
    report = report_of(run, tmp_path)
    assert list(report.steps.step) == [1, 2, 3, 4, 5]
    assert [each.steps_lost for each in report.incidents] == [6, 2]


def test_a_snapshot_s_lost_steps_are_not_lost_once_more_by_a_restart_after_it(tmp_path):
    run = SyntheticRun().steps(10).kill(1, back_to=6).steps(2).restart(0, back_to=8).steps(3).finish()
    assert [each.steps_lost for each in report_of(run, tmp_path).incidents] == [4, 0]


def test_a_job_that_was_launched_again_goes_on_in_the_same_files(tmp_path):
    run = SyntheticRun().steps(10).launch_again(back_to=8).steps(5).launch_again(back_to=13).steps(2).finish()
    report = report_of(run, tmp_path)
    assert {len(each.processes) for each in report.ranks} == {3}


def test_launches_in_containers_whose_processes_have_the_same_numbers(tmp_path):
    run = SyntheticRun(4, ranks_per_host=2).steps(10)
    first_pid = run.workers[0].pid
    run.pid = first_pid - 3  # those of two agents come first, as in the first launch
    run.launch_again(back_to=8).steps(3)
    assert run.workers[0].pid == first_pid
    run.kill(1).steps(2).finish()
    report = report_of(run, tmp_path)
    assert [each.host for each in report.incidents] == ["", "node-0"]


def test_a_failure_that_only_new_processes_report_was_noticed_before_they_started(tmp_path):
    """Its process was killed at 20 s; the new one started at 20.5 s, and says that it stopped for that at 22 s."""
    details = {"cause": "killed", "kind": "process", "worker_id": 0, "incarnation": 0, "step": 1, "generation": 1}
    stages = {"noticed_s": 2.0, "assembled_s": 0.25, "restored_s": 0.125}
    event = {"name": "recovery.snapshot", "at_s": BEGAN_S + 20.0, "duration_s": 2.375, "details": details | stages}
    for incarnation, began_s in enumerate((BEGAN_S, BEGAN_S + 20.5)):
        identity = {"worker_id": 0, "incarnation": incarnation, "restart": 0, "run_id": "run", "host": "node-0"}
        lines = [
            {"kind": "process", "format": 1, "at_s": began_s, "pid": 10 + incarnation} | identity,
            {"kind": "step", "at_s": began_s + 5.0, "seconds": {"step": 5.0}, "waited_s": 0.0, "step": 1 + incarnation},
            *([{"kind": "event"} | event] if incarnation else []),
        ]
        (tmp_path / f"worker-0-0.{incarnation}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (incident,) = run_report(tmp_path).incidents
    assert (incident.detect_s, incident.assemble_s, incident.restore_s) == (0.5, 1.75, 0.125)


def test_waiting_for_nodes_is_no_assembling(tmp_path):
    run = SyntheticRun().steps(3).kill(2, assemble_s=64.0, capacity_s=32.0).steps(3).finish()
    report = report_of(run, tmp_path)
    assert report.ranks[2].seconds["capacity_wait"] == pytest.approx(32.0)


def test_a_job_that_grows(tmp_path):
    run = SyntheticRun(2).steps(4).grow().steps(2).kill(2).steps(2).grow().steps(3).finish()
    report = run_report(run.write(tmp_path / "events"))
    assert_laws(report)
    assert [each.kind for each in report.incidents] == ["resize", "failure", "resize"]
    for found, wanted in zip(report.ranks, run.truth, strict=True):
        assert found.seconds == pytest.approx(wanted, abs=1e-3)
    assert list(report.steps.world_size) == [2] * 4 + [3] * 4 + [4] * 3
    assert (report.headline.num_failures, report.headline.num_resizes) == (1, 2)


def test_a_failure_costs_the_job_what_the_ranks_lose_that_are_there_then(tmp_path):
    """Two ranks lose 0.5 + 0.25 + 4 + 1 s each; that another one joins later does not make it less."""
    run = SyntheticRun(2).steps(4).kill(1).steps(4).grow().steps(4).finish()
    report = run_report(run.write(tmp_path / "events"))
    assert_laws(report)
    assert report.num_ranks == 3
    assert report.headline.failures_cost_s == pytest.approx(5.75, abs=1e-3)
    assert report.incidents[0].redone_s == pytest.approx(0.5, abs=1e-3)


def test_a_run_that_is_cut_off_in_the_middle_of_a_step(tmp_path):
    report = report_of(SyntheticRun().steps(4).kill(3).steps(3).cut_off(), tmp_path)
    assert report.verdict.action == "restart"
    assert {each.processes[-1].ending for each in report.ranks} == {""}


def test_a_run_that_is_cut_off_before_its_first_line(tmp_path):
    """Only the lines with which its processes begin are there."""
    run = SyntheticRun(2)
    for writer in run.files:
        del writer.lines[1:]
    report = run_report(run.write(tmp_path))
    assert_laws(report)
    assert (report.headline.wall_s, report.headline.steps_committed, report.is_complete) == (0.0, 0, False)


def test_one_of_the_processes_has_written_nothing_but_its_first_line(tmp_path):
    run = SyntheticRun(2).steps(3).kill(0).steps(2).finish()
    for writer in run.files:
        if writer.name.startswith("worker-0"):
            del writer.lines[1:]
    report = run_report(run.write(tmp_path))
    assert_laws(report)
    assert report.headline.steps_committed == 5
    assert report.ranks[1].seconds == pytest.approx(run.truth[1], abs=1e-3)


def test_the_end_of_a_run_that_nothing_repairs_is_an_incident(tmp_path):
    report = report_of(SyntheticRun().steps(4).raise_in(1).steps(1).fail(2).cut_off(computing_s=0.0), tmp_path)
    assert (report.incidents[-1].level, report.incidents[-1].step) == ("none", 5)


# -- steps ------------------------------------------------------------------------------------------------------------


def test_the_series_of_steps_has_the_losses_and_the_samples_of_those_that_count(tmp_path):
    run = SyntheticRun(2).steps(3).kill(0, back_to=1).steps(4, loss=False).step().finish()
    series = report_of(run, tmp_path).steps
    assert series.loss == [
        pytest.approx((loss_of(0, 1) + loss_of(1, 1)) / 2),
        None,
        None,
        None,
        None,
        pytest.approx(0.5 + 1 / 6),
    ]
    assert series.global_batch == [8] * 6
    assert series.samples == [8, 16, 24, 32, 40, 48]
    assert series.world_size == [2] * 6
    assert series.duration_s == pytest.approx([1.0] * 6, abs=1e-5)
    assert list(series.at_s) == sorted(series.at_s)
    assert all(0 <= each <= 1 for each in series.goodput)


def test_goodput_over_time_is_that_of_the_last_thirty_seconds(tmp_path):
    """Steps of 1 s, of which 0.75 count; then 100 s of evaluation, which end before the last five steps."""
    run = SyntheticRun(2).steps(60, compute_s=0.75, data_s=0.25, other_s=0.0)
    run.phase("evaluation", 100.0).steps(5, compute_s=0.75, data_s=0.25, other_s=0.0).finish()
    found = report_of(run, tmp_path).steps.goodput
    assert found[59] == pytest.approx(0.75, abs=0.01)
    assert found[60] == pytest.approx(0.75 / 101, abs=1e-3)
    assert found[64] == pytest.approx(5 * 0.75 / 105, abs=1e-3)


@pytest.mark.parametrize(("last_s", "kept"), [(1.5, 20), (1.53125, 19), (30.0, 19)])
def test_an_ideal_step_leaves_out_what_is_beyond_three_deviations(tmp_path, last_s, kept):
    """The median is 1.125, and that of the deviations 0.125: a step of more than 1.5 s is an outlier."""
    durations = [1.0] * 6 + [1.125] * 8 + [1.25] * 5 + [last_s]
    run = SyntheticRun(2)
    for duration_s in durations:
        run.step(compute_s=duration_s - 0.125, data_s=0.125, other_s=0.0)
    found = report_of(run.finish(), tmp_path).headline.ideal_step_s
    assert found == pytest.approx(sum(durations[:kept]) / kept, abs=1e-5)


# -- statistics -------------------------------------------------------------------------------------------------------

CHI_SQUARE = {  # 2.5 % quantile with 2n degrees of freedom, 97.5 % quantile with 2n + 2, from tables
    0: (0.0, 7.3778),
    1: (0.050636, 11.1433),
    2: (0.48442, 14.4494),
    5: (3.24697, 23.3367),
    10: (9.59078, 36.7807),
    15: (16.7908, 49.4804),
}


@pytest.mark.parametrize("count", CHI_SQUARE)
def test_the_interval_of_a_count_is_garwood_s(count):
    low, high = CHI_SQUARE[count]
    assert poisson_interval(count) == pytest.approx((low / 2, high / 2), rel=1e-4)


def test_time_between_failures_has_the_interval_of_their_number(tmp_path):
    run = SyntheticRun(4)
    for rank in (0, 1, 2, 3, 0):
        run.steps(3).kill(rank)
    found = report_of(run.steps(3).finish(), tmp_path).headline
    assert found.mtbf_s.value == pytest.approx(found.wall_s / 5)
    assert found.mtbf_s.low == pytest.approx(found.wall_s / (23.3367 / 2), rel=1e-4)
    assert found.mtbf_s.high == pytest.approx(found.wall_s / (3.24697 / 2), rel=1e-4)


def test_time_to_repair_has_student_s_interval(tmp_path):
    """Repairs of 5, 6 and 10 s: mean 7, deviation 2.6458, 4.303 times that by the root of 3."""
    run = SyntheticRun(4)
    for restore_s in (0.75, 1.75, 5.75):
        run.steps(2).kill(1, detect_s=0.25, assemble_s=4.0, restore_s=restore_s)
    found = report_of(run.steps(2).finish(), tmp_path).headline.mttr_s
    assert found.value == pytest.approx(7.0)
    assert found.low == pytest.approx(7 - 4.303 * 2.64575 / math.sqrt(3), rel=1e-3)
    assert found.high == pytest.approx(7 + 4.303 * 2.64575 / math.sqrt(3), rel=1e-3)


# -- stragglers and nodes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "shown"), [("step", "compute"), ("data_wait", "data_wait"), ("other", "other")])
def test_a_straggler_is_found_with_its_phase_and_what_it_costs(tmp_path, phase, shown):
    """Rank 2 is late by 0.5 s in twelve of twenty steps; another one, by 0.25 s, would be the next slowest then."""
    run = SyntheticRun(4)
    for number in range(20):
        late = {2: 0.5, number % 2: 0.25} if number < 12 else {}
        run.step(late=late, phase=phase)
    report = report_of(run.finish(), tmp_path)
    (found,) = report.stragglers
    assert (found.rank, found.host, found.phase, found.num_steps) == (2, "node-1", shown, 12)
    assert found.held_back_s == pytest.approx(12 * 0.25, abs=1e-4)
    assert found.without_it_s == pytest.approx(report.headline.wall_s - 3.0, abs=1e-3)
    assert report.ranks[3].waited_s == pytest.approx(12 * 0.5, abs=1e-4)
    assert report.ranks[2].waited_s == 0.0


def test_ranks_that_are_late_at_random_are_no_stragglers(tmp_path):
    draw, run = random.Random(3), SyntheticRun(8)
    for _ in range(300):
        run.step(late={rank: draw.randint(0, 40) / 64 for rank in range(8)})
    assert report_of(run.finish(), tmp_path).stragglers == []


@pytest.mark.slow_single
def test_a_straggler_of_thousands_of_steps(tmp_path):
    run = SyntheticRun(2)
    for number in range(4000):
        run.step(late={int(number % 4 == 0): 0.5}, compute_s=0.5)
    report = report_of(run.finish(), tmp_path)
    assert [(each.rank, each.num_steps) for each in report.stragglers] == [(0, 3000)]


def test_a_node_that_fails_more_often_than_chance_explains(tmp_path):
    run = SyntheticRun(16, ranks_per_host=2)
    for rank in (4, 5, 4, 0, 5, 4):
        run.steps(2).kill(rank)
    (found,) = report_of(run.steps(2).finish(), tmp_path).failing_nodes
    assert (found.host, found.num_failures) == ("node-2", 5)
    tail = sum(math.comb(6, hits) / 8**hits * (7 / 8) ** (6 - hits) for hits in (5, 6))
    assert found.probability == pytest.approx(8 * tail)


def test_a_node_that_has_all_restart_fails_as_well(tmp_path):
    run = SyntheticRun(16, ranks_per_host=2)
    for _ in range(4):
        run.steps(2).restart(7, back_to=run.step_number)
    (found,) = report_of(run.steps(2).finish(), tmp_path).failing_nodes
    assert (found.host, found.num_failures) == ("node-3", 4)


def test_a_failure_belongs_to_the_node_on_which_its_process_was(tmp_path):
    """After a restart the same worker runs on another node."""
    run = SyntheticRun(4, ranks_per_host=2).steps(2).kill(1).steps(2)
    run.hosts = ["node-1", "node-1", "node-0", "node-0"]
    run.launch_again(back_to=4).steps(2).kill(1).steps(2).finish()
    report = report_of(run, tmp_path)
    assert [each.host for each in report.incidents] == ["node-0", "", "node-1"]


def test_failures_that_are_spread_over_the_nodes_name_none(tmp_path):
    run = SyntheticRun(8, ranks_per_host=2)
    for rank in range(8):
        run.steps(2).kill(rank)
    assert report_of(run.steps(2).finish(), tmp_path).failing_nodes == []


# -- whether to start it again ----------------------------------------------------------------------------------------


def test_the_same_failure_twice_with_no_step_between_says_stop(tmp_path):
    run = SyntheticRun().steps(5).raise_in(1, cause="ValueError: bad").raise_in(1, cause="ValueError: bad").cut_off()
    verdict = report_of(run, tmp_path).verdict
    assert verdict.action == "stop"
    assert "step 5" in verdict.why
    assert "ValueError: bad" in verdict.why


def test_a_failure_at_the_same_step_after_a_restart_from_a_checkpoint_says_stop(tmp_path):
    """It comes to step 7 and fails there, twice; the steps since the checkpoint were made again, but no new one."""
    failure = {"code": 1, "cause": "exit code 1 (ValueError: bad)"}
    run = SyntheticRun().steps(7).restart(2, back_to=4, **failure).steps(3).fail(2, **failure)
    assert report_of(run, tmp_path).verdict.action == "stop"


@pytest.mark.parametrize("name", ["another cause", "another rank", "a step between", "a new step after a restart"])
def test_another_failure_says_restart(tmp_path, name):
    run = SyntheticRun().steps(5)
    match name:
        case "another cause":
            run.raise_in(1, cause="ValueError: a").raise_in(1, cause="ValueError: b")
        case "another rank":
            run.raise_in(1).raise_in(2)
        case "a step between":
            run.raise_in(1).step().raise_in(1)
        case _:
            run.restart(1, back_to=4).steps(3).restart(1, back_to=4).step()
    assert report_of(run.cut_off(), tmp_path).verdict.action == "restart"


# -- damage -----------------------------------------------------------------------------------------------------------


def written(run, folder):
    run.write(folder)
    return sorted(folder.glob("worker-*.jsonl"))


def busy():
    """A run with all that may be in a ledger."""
    run = SyntheticRun(3).steps(3).kill(1).step().raise_in(2).steps(2, late={1: 0.5}).phase("checkpoint_save", 1.0)
    run.kill(0, back_to=4, noticed_by=2).steps(2).restart(1, back_to=4).steps(2)
    return run.grow().steps(2).launch_again(back_to=6).steps(2).finish()


def test_a_last_line_that_is_torn_is_no_damage(tmp_path):
    run = SyntheticRun().steps(5).kill(1).steps(2).cut_off()
    for path in written(run, tmp_path):
        with path.open("a") as file:
            file.write('{"kind":"step","at_s":17000')
    report = run_report(tmp_path)
    assert_laws(report)
    assert report.problems == []
    assert report.headline.steps_committed == 7


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"\x00\x00\x00\x00\xff\xfe", "not JSON"),
        (b"\x80\x81 garbage {", "not JSON"),
        (b"[1, 2]", "not JSON objects"),
        (b"[" * 100_000, "not JSON"),
        (b'{"kind":"time","at_s":NaN,"seconds":{}}', "not JSON"),
        (b'{"kind":"time","at_s":"later","seconds":{}}', "missing or impossible"),
        (b'{"kind":"time","at_s":1e999,"seconds":{}}', "missing or impossible"),
        (b'{"kind":"time","at_s":-5,"seconds":{}}', "missing or impossible"),
        (b'{"kind":"time","at_s":1700000001,"seconds":{"step":-1}}', "missing or impossible"),
        (b'{"kind":"time","at_s":1700000001,"seconds":{"step":1e308,"other":1e308}}', "missing or impossible"),
        (b'{"kind":"time","at_s":1700000001,"seconds":[]}', "missing or impossible"),
        (b'{"kind":"time","at_s":1700000001}', "missing or impossible"),
        (b'{"kind":"step","at_s":1700000001,"seconds":{},"step":true,"waited_s":0}', "missing or impossible"),
        (b'{"kind":"step","at_s":1700000001,"seconds":{},"step":1' + b"0" * 400 + b',"waited_s":0}', "impossible"),
        (b'{"kind":"world","at_s":1700000001,"rank":0,"world_size":null,"generation":0}', "missing or impossible"),
        (b'{"kind":"entry","at_s":1700000001,"entry":1' + b"0" * 5000 + b"}", "not JSON"),
        (b'{"at_s":1700000001}', "missing or impossible"),
        (b'{"kind":"time","at_s":1700000001,"seconds":{},"more":"' + b"x" * 3_000_000 + b'"}', "too long"),
    ],
)
def test_a_damaged_line_is_told_and_changes_nothing(tmp_path, line, told):
    run = busy()
    report_of(run, tmp_path / "whole")
    wanted = run_report(tmp_path / "whole" / "events")
    path = written(run, tmp_path / "damaged")[0]
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(len(lines) // 2, line + b"\n")
    path.write_bytes(b"".join(lines))
    report = run_report(tmp_path / "damaged")
    assert_laws(report)
    (problem,) = report.problems
    assert path.name in problem
    assert told in problem
    assert "1 line " in problem
    assert asdict(report) | {"problems": []} == asdict(wanted) | {"problems": []}


def test_what_a_later_version_says_more_is_no_problem(tmp_path):
    run = busy()
    for writer in run.files:
        for line in list(writer.lines):
            line["more"] = {"of": ["a", "later", "version"]}
        writer.lines.insert(2, {"kind": "weather", "at_s": BEGAN_S, "is": "fine"})
    report_of(run, tmp_path)


def test_a_category_of_a_later_version_is_everything_else(tmp_path):
    run = SyntheticRun(2).steps(2).phase("meditation", 3.0).finish()
    report = run_report(run.write(tmp_path))
    assert_laws(report)
    assert report.ranks[0].seconds["other"] == pytest.approx(3.0 + 0.75 + 2 * 0.0625, abs=1e-4)


def test_a_ledger_of_a_later_format_is_left_out_and_told(tmp_path):
    run = SyntheticRun(2).steps(3).finish()
    run.workers[1].lines[0]["format"] = LEDGER_FORMAT + 1
    report = run_report(run.write(tmp_path / "one"))
    assert_laws(report)
    assert report.num_ranks == 1
    assert any("later version" in each for each in report.problems)
    run.workers[0].lines[0]["format"] = LEDGER_FORMAT + 1
    with pytest.raises(ConfigError, match="later version"):
        run_report(run.write(tmp_path / "all"))


def test_lines_of_a_process_whose_first_one_is_damaged_are_not_those_of_the_one_before(tmp_path):
    run = SyntheticRun(2).steps(3).launch_again(back_to=3).steps(3).finish()
    second = run.workers[1]
    del second.lines[0]["pid"]
    report = run_report(run.write(tmp_path))
    assert_laws(report)
    assert len(report.ranks[1].processes) == 1
    assert any("unknown process" in each for each in report.problems)


def test_a_clock_that_was_set_back_does_not_change_the_sum(tmp_path):
    run = SyntheticRun(2).steps(6).finish()
    for line in run.workers[0].lines[8:]:
        line["at_s"] -= 3600.0
    report = run_report(run.write(tmp_path))
    assert_laws(report)
    assert report.headline.steps_committed == 6


def test_a_replacement_on_a_machine_whose_clock_is_behind(tmp_path):
    run = SyntheticRun(2).steps(6).kill(1).steps(6).finish()
    for line in run.workers[1].lines:
        line["at_s"] -= 8.0
    report = run_report(run.write(tmp_path))
    assert_laws(report)
    assert report.headline.steps_committed == 12
    assert (report.headline.steps_lost, report.headline.num_restarts) == (0, 0)
    assert [each.incarnation for each in report.ranks[1].processes] == [0, 1]


def test_events_with_impossible_details(tmp_path):
    run = SyntheticRun(2).steps(2).kill(1).steps(2).finish()
    huge = 10**400
    for details in (
        {},
        {"generation": True, "step": True},
        {"generation": huge, "step": huge},
        {"generation": 7, "step": "x", "noticed_s": huge, "assembled_s": 1e300, "restored_s": -1e300, "cause": [1]},
        {"generation": 8, "step": 1e300, "steps_lost": huge, "worker_id": huge, "receivers": {"a": 1}, "kind": []},
    ):
        event = {"kind": "event", "at_s": BEGAN_S + 9, "name": "recovery.replace", "duration_s": 1e308}
        run.workers[0].lines.insert(-1, event | {"details": details})
    run.workers[0].lines.insert(-1, event | {"duration_s": -3.0, "details": {"generation": 9}})
    run.workers[0].lines.insert(-1, event | {"duration_s": 1.0, "details": None})
    report = run_report(run.write(tmp_path))
    assert_laws(report)
    assert report.headline.steps_committed == 4


@pytest.mark.parametrize("name", ["no folder", "an empty folder", "no worker", "only garbage", "a folder as ledger"])
def test_nothing_to_read_is_an_error_that_says_what_to_do(tmp_path, name):
    folder = tmp_path / "events"
    if name != "no folder":
        folder.mkdir()
    if name == "no worker":
        SyntheticRun(1).steps(1).write(folder)
        for path in folder.glob("worker-*"):
            path.unlink()
    if name == "only garbage":
        (folder / "worker-0-0.0.jsonl").write_bytes(random.Random(0).randbytes(5000))
    if name == "a folder as ledger":
        (folder / "worker-0-0.0.jsonl").mkdir()
    with pytest.raises(ConfigError, match="HYPERPOD_EVENTS"):
        run_report(folder)


def test_a_ledger_that_cannot_be_read_is_told(tmp_path):
    written(SyntheticRun(2).steps(3).finish(), tmp_path)
    (tmp_path / "worker-7-0.0.jsonl").mkdir()
    report = run_report(tmp_path)
    assert_laws(report)
    assert any("worker-7-0.0.jsonl cannot be read" in each for each in report.problems)


def test_without_the_agents_ledgers_repairs_are_known_from_the_workers(tmp_path):
    run = SyntheticRun().steps(4).kill(1).step().raise_in(2).steps(2).finish()
    run.files = [each for each in run.files if each.name.startswith("worker")]
    report = run_report(run.write(tmp_path))
    assert_laws(report)
    assert [(each.rank, each.cause) for each in report.incidents] == [(1, SIGKILL), (2, "ValueError: x")]
    assert (report.headline.num_failures, report.is_complete) == (2, True)


WHOLE = busy()
NUMBERS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**6), 10**6),
    st.sampled_from([10**400, -1, 0, 1e-320, 5e-324, 1e308, -1e308, 1e11, 1.7e9, BEGAN_S + 30.0, math.inf, -math.inf]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from([*TimeCategory, "x"]), st.floats(0, 1e12), max_size=3),
)
MODEST = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def read_damaged(folder):
    """Read what may be damaged: a report that holds the laws, or an error that is understood."""
    try:
        report = run_report(folder)
    except ConfigError as error:
        told = str(error)
    else:
        told = "HYPERPOD_EVENTS"
        assert_laws(report)
    assert "HYPERPOD_EVENTS" in told


@pytest.mark.slow_single
@MODEST
@given(data=st.data())
def test_any_fields_of_any_lines_may_have_any_value(tmp_path_factory, data):
    run = copy.deepcopy(WHOLE)
    lines = [line for writer in run.files for line in writer.lines]
    for _ in range(data.draw(st.integers(1, 6))):
        fields = data.draw(st.sampled_from(lines))
        inner = [each for each in fields.values() if isinstance(each, dict)]
        if inner and data.draw(st.booleans()):
            fields = inner[0]
        if not fields:
            continue
        name = data.draw(st.sampled_from(sorted(fields)))
        if data.draw(st.booleans()):
            fields[name] = data.draw(NUMBERS)
        else:
            del fields[name]
    read_damaged(run.write(tmp_path_factory.mktemp("fields")))


@pytest.mark.slow_single
@MODEST
@given(data=st.data())
def test_lines_may_be_lost_doubled_or_in_another_order(tmp_path_factory, data):
    run = copy.deepcopy(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        writer = data.draw(st.sampled_from(run.files))
        first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(writer.lines))] * 2)))
        match data.draw(st.sampled_from(["lost", "doubled", "turned", "elsewhere"])):
            case "lost":
                del writer.lines[first:last]
            case "doubled":
                writer.lines[first:first] = writer.lines[first:last]
            case "turned":
                writer.lines[first:last] = writer.lines[first:last][::-1]
            case _:
                other = data.draw(st.sampled_from(run.files))
                other.lines[len(other.lines) // 2 : 0] = writer.lines[first:last]
    read_damaged(run.write(tmp_path_factory.mktemp("lines")))


@pytest.mark.slow_single
@MODEST
@given(data=st.data())
def test_any_bytes_may_be_others(tmp_path_factory, data):
    folder = WHOLE.write(tmp_path_factory.mktemp("bytes"))
    for _ in range(data.draw(st.integers(1, 5))):
        path = data.draw(st.sampled_from(sorted(folder.iterdir())))
        raw = bytearray(path.read_bytes())
        first = data.draw(st.integers(0, len(raw)))
        length = data.draw(st.sampled_from([1, 1, 5, 40, 1000]))
        raw[first : first + length] = data.draw(st.one_of(st.binary(max_size=40), st.just(b"\0" * length)))
        path.write_bytes(raw)
    read_damaged(folder)


def test_a_node_that_was_told_to_leave_has_not_failed_and_the_run_is_complete(tmp_path):
    """Its agent has ended the worker; the others have finished."""

    def exited(worker_id, code, *, is_requested=False):
        line = {"kind": "exit", "at_s": 1010.0, "worker_id": worker_id, "incarnation": 0, "pid": 10 + worker_id}
        return line | {"code": code, "cause": "some cause", "is_requested": is_requested}

    def process(**fields):
        return {"kind": "process", "format": 1, "at_s": 1000.0, "host": "node", "run_id": "job", **fields}

    def report(*exits):
        for worker_id in range(2):
            step = {"kind": "step", "at_s": 1005.0, "seconds": {"setup": 1.0, "step": 4.0}, "waited_s": 0.0, "step": 1}
            lines = [process(pid=10 + worker_id, worker_id=worker_id, incarnation=0, restart=0), step]
            (tmp_path / f"worker-{worker_id}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        lines = [process(pid=5), *exits]
        (tmp_path / "agent.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run_report(tmp_path)

    left = report(exited(0, 0), exited(1, -15, is_requested=True))
    assert left.is_complete
    assert left.headline.num_failures == 0
    assert not left.incidents
    interrupted = report(exited(0, -15, is_requested=True), exited(1, -15, is_requested=True))
    assert not interrupted.is_complete
    assert not report(exited(0, 0), exited(1, -9)).is_complete
