"""Plans, and `hyperpod plan`: figures, tables, JSON, files, and input that is refused."""

import argparse
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hyperpod_plugins.cli import main
from hyperpod_plugins.planning.closed_forms import DAY_S, daly_interval_s
from hyperpod_plugins.planning.failures import WeibullFailures
from hyperpod_plugins.planning.plan import make_plan, spares_for
from hyperpod_plugins.planning.plan_command import add_plan_arguments
from hyperpod_plugins.planning.plan_model import plan_of_model
from hyperpod_plugins.planning.published_figures import published_figures
from hyperpod_plugins.planning.scenario import RECOVERY_POLICIES, Scenario, StageTimes
from hyperpod_plugins.planning.simulation import simulate

SCENARIO = Scenario(
    num_nodes=256,
    failures_per_node_hour=5e-4,
    work_s=30 * DAY_S,
    num_replicas=8,
    num_spares=4,
    price_per_accelerator_hour=2.0,
)
JOB = ["--nodes", "64", "--failures-per-node-day", "0.012", "--days", "10", "--replicas", "4", "--runs", "20"]


def printed(capsys, *arguments, code=0):
    assert main(["plan", *arguments]) == code
    return capsys.readouterr().out


def test_the_preset_prints_every_figure_beside_the_sources(capsys):
    text = printed(capsys, "--preset", "seeds")
    rows = [line for line in text.splitlines() if line.endswith((" yes", " NO"))]
    assert len(rows) == len(published_figures())
    assert not [line for line in rows if line.endswith("NO")]
    for wanted in ("4.88 h", "0.0588 %/h", "0.0161 %/h", "132 days", "-32 %", "25.6 M$", "-84 %"):
        assert any(line.count(wanted) == 2 for line in rows), wanted
    rows = json.loads(printed(capsys, "--preset", "seeds", "--json"))
    assert all(row["agrees"] and row["computed"] == row["stated"] for row in rows)


def test_a_plan_orders_the_policies_as_they_should_be():
    plan = make_plan(SCENARIO, num_runs=50)
    means = {each.policy.name: each.runs.time_ratio.mean for each in plan.policies}
    assert list(means) == [policy.name for policy in RECOVERY_POLICIES]
    ordered = (
        "checkpoint restart", "snapshots", "checkpointless", "restart + spares", "restart + standby", "elastic",
        "spares", "standby",
    )  # fmt: skip
    assert sorted(means, key=means.__getitem__, reverse=True) == list(ordered)
    for each in plan.policies:
        price = each.runs.price
        num_nodes = 260 if each.policy.name.endswith(("spares", "standby")) else 256
        assert price.mean == pytest.approx(each.runs.wall_s.mean() / 3600 * num_nodes * 8 * 2)
        assert price.low < price.mean < price.high


def test_the_table_has_a_line_for_each_policy_and_says_where_formulas_do_not_hold():
    lines = make_plan(SCENARIO, num_runs=50).lines()
    for policy in RECOVERY_POLICIES:
        assert any(line.startswith(policy.name) and "(+- " in line for line in lines)
    lines = make_plan(SCENARIO, num_runs=50, failures=WeibullFailures(shape=0.5, starts_new=True)).lines()
    noted = [line for line in lines if "does not hold here: failures are not exponential" in line]
    assert noted[0].startswith("checkpoint restart: the closed form (")


def test_policies_are_compared_with_a_restart_of_equal_capacity():
    plan = make_plan(SCENARIO, num_runs=20)
    means = {each.policy.name: each.runs.time_ratio.mean for each in plan.policies}
    rows = {each["policy"]: each for each in plan.as_dict()["policies"]}
    for name, restart in {
        "snapshots": "checkpoint restart", "checkpointless": "checkpoint restart", "elastic": "checkpoint restart",
        "spares": "restart + spares", "standby": "restart + standby",
    }.items():  # fmt: skip
        assert rows[name]["against"] == restart
        assert rows[name]["nodes"] == rows[restart]["nodes"]
        change = means[name] / means[restart] - 1
        assert rows[name]["against_restart"] == pytest.approx(change)
        assert any(line.startswith(name) and f" {100 * change:+.1f} % " in line for line in plan.lines())
    assert rows["restart + spares"]["against_restart"] is None
    assert rows["standby"]["against_restart"] > means["standby"] / means["checkpoint restart"] - 1


def test_policies_that_do_not_suit_the_job_say_why():
    plan = make_plan(replace(SCENARIO, num_replicas=1, num_spares=0), num_runs=5)
    assert [each.policy.name for each in plan.policies] == ["checkpoint restart", "snapshots"]
    assert dict(plan.refused) == {
        "restart + spares": "needs at least 1 spare node",
        "restart + standby": "needs at least 1 spare node",
        "checkpointless": "needs at least 2 replicas",
        "elastic": "needs at least 2 replicas",
        "spares": "needs at least 2 replicas",
        "standby": "needs at least 2 replicas",
    }
    assert "elastic: needs at least 2 replicas" in plan.lines()


def test_a_job_that_makes_no_progress_is_told_so(capsys):
    job = ["--nodes", "512", "--failures-per-node-day", "0.5", "--days", "0.5", "--runs", "3", "--equal-nodes"]
    restart = json.loads(printed(capsys, *job, "--node-loss-fraction", "1", "--json"))["policies"][0]
    assert (restart["policy"], restart["time_ratio"]["mean"]) == ("checkpoint restart", None)
    text = printed(capsys, *job, "--node-loss-fraction", "1", "--price", "1")
    assert "checkpoint restart: some runs take more than 10 times their work, and were given up" in text
    assert "> 5" in text


def test_runs_that_were_given_up_are_told_also_where_the_closed_form_has_no_end():
    stages = StageTimes(checkpoint_save_s=600.0, startup_s=6000.0)
    scenario = Scenario(num_nodes=64, failures_per_node_hour=0.5, work_s=DAY_S, stages=stages)
    plan = make_plan(scenario, num_runs=3)
    [endless] = [each for each in plan.policies if each.policy.name == "snapshots"]
    assert (endless.runs.time_ratio.mean, endless.forecast.time_ratio) == (math.inf, math.inf)
    assert "snapshots: some runs take more than 10 times their work, and were given up" in plan.lines()


@pytest.mark.parametrize("save_s", [30.0, 300.0])
def test_the_best_interval_is_the_best_of_the_simulation_too(save_s):
    scenario = replace(SCENARIO, stages=StageTimes(checkpoint_save_s=save_s), node_loss_fraction=0.0)
    best_s = daly_interval_s(save_s, scenario.mtbf_s)
    best, short, long = (
        simulate(scenario, RECOVERY_POLICIES[0], num_runs=100, checkpoint_interval_s=factor * best_s).time_ratio
        for factor in (1, 0.5, 2)
    )
    assert best.high < short.low
    assert best.high < long.low


def test_spares_are_as_many_as_needed():
    number = spares_for(SCENARIO)
    waits = [
        simulate(replace(SCENARIO, num_spares=each), RECOVERY_POLICIES[-1], num_runs=100).spent_s["waiting"].mean()
        for each in (max(1, number - 1), number)
    ]
    assert waits[1] < waits[0]
    assert spares_for(replace(SCENARIO, node_loss_fraction=0.0)) == 1


@pytest.mark.parametrize(
    ("num_nodes", "repair_s", "number"),
    [(2, 20_000.0, None), (64, 20_000.0, 21), (4, 36_000.0, None), (4, 40_000.0, None), (64, 2400.0, 6)],
)
def test_no_more_replicas_are_recommended_than_there_are_nodes(num_nodes, repair_s, number):
    stages = StageTimes(repair_s=repair_s)
    scenario = Scenario(num_nodes=num_nodes, failures_per_node_hour=0.14, work_s=DAY_S, stages=stages)
    plan = make_plan(scenario, num_runs=2)
    assert plan.as_dict()["sizes"]["replicas"] == number
    told = "none suffices" if number is None else f"{number} "
    assert any(line.split(maxsplit=1)[1].startswith(told) for line in plan.lines() if line.startswith("replicas "))


@pytest.mark.parametrize("stages", [StageTimes(), StageTimes(detect_s=6000.0), StageTimes(repair_s=36_000.0)])
def test_spares_are_the_fewest_with_which_1_percent_of_lost_nodes_find_none(stages):
    """Nodes are away from their failure until they are repaired, so that a Poisson number is away."""
    scenario = replace(SCENARIO, stages=stages)
    number, lost = spares_for(scenario), scenario.node_loss_fraction
    mean = (stages.detect_s + stages.repair_s) / (scenario.mtbf_s / lost)
    none_left = [
        1 - sum(math.exp(-mean) * mean**away / math.factorial(away) for away in range(spares))
        for spares in (number - 1, number)
    ]
    assert none_left[1] <= 0.01 < none_left[0]


def test_the_command_prints_tables_and_json(capsys):
    text = printed(capsys, *JOB, "--price", "2")
    assert text.startswith("64 nodes x 8 accelerators, 4 replicas, 10 days of work")
    assert "price" in text
    assert "price" not in printed(capsys, *JOB)
    plan = json.loads(printed(capsys, *JOB, "--json"))
    assert plan["mtbf_s"] == pytest.approx(DAY_S / (64 * 0.012))
    assert [each["policy"] for each in plan["policies"]] == [policy.name for policy in RECOVERY_POLICIES]
    for each in plan["policies"]:
        wall_s = each["time_ratio"]["mean"] * 10 * DAY_S
        assert sum(each["spent_s"].values()) == pytest.approx(wall_s), "the parts are the whole"
    assert plan["sizes"]["spares"] >= 1


def test_output_that_nobody_reads_is_no_error(monkeypatch):
    """As with `| head`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["plan", "--preset", "seeds"]) == 0
        monkeypatch.undo()


def test_equal_arguments_print_equal_plans(capsys):
    assert printed(capsys, *JOB) == printed(capsys, *JOB)
    assert printed(capsys, *JOB) != printed(capsys, *JOB, "--seed", "1")


def test_the_rate_can_be_given_for_the_whole_job(capsys):
    of_job = ["--nodes", "64", "--mtbf-hours", "31.25", "--steps", "86400", "--replicas", "4", "--runs", "20"]
    assert printed(capsys, *of_job) == printed(capsys, *JOB)


def test_an_odd_number_of_nodes_has_one_replica_by_default(capsys):
    text = printed(capsys, "--nodes", "3", "--mtbf-hours", "10", "--days", "1", "--runs", "5")
    assert "3 nodes x 8 accelerators, 1 replica," in text
    assert "elastic: needs at least 2 replicas" in text


def test_stage_times_come_from_a_file_and_options(capsys, tmp_path):
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"detect_s": 0.5, "restore_s": 2, "repair_s": [600, 1200]}))
    scenario = json.loads(printed(capsys, *JOB, "--json", "--stage-times", str(path), "--restore-s", "3"))["scenario"]
    assert scenario["stages"]["detect_s"] == 0.5
    assert scenario["stages"]["restore_s"] == 3
    assert (scenario["stages"]["repair_s"], scenario["measured"]) == (900, {"repair_s": [600, 1200]})
    assert scenario["stages"]["assemble_s"] == StageTimes().assemble_s


def test_failures_come_from_a_trace(capsys, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"duration_s": 5 * DAY_S, "failures": [[3600, 3], [7200.5, 3], [9000, 63]]}))
    arguments = ["--nodes", "64", "--trace", str(path), "--days", "10", "--runs", "20"]
    plan = json.loads(printed(capsys, *arguments, "--json"))
    assert plan["mtbf_s"] == pytest.approx(5 * DAY_S / 3)
    assert plan["policies"][0]["failures"] == pytest.approx(6, abs=1)
    assert "failures are not exponential" in plan["policies"][0]["closed_form_limits"]


def test_a_trace_knows_of_how_many_nodes_it_is(capsys, tmp_path):
    """Two failures in 12 h on 2 nodes are 2 in a node-day: more nodes fail more often."""
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"duration_s": DAY_S / 2, "num_nodes": 2, "failures": [[3600, 0], [7200, 1]]}))
    job = ["--trace", str(path), "--days", "1", "--runs", "5"]
    assert printed(capsys, "--nodes", "2", *job).startswith("2 nodes")
    assert main(["plan", "--nodes", "64", *job]) == 2
    told = capsys.readouterr().err
    assert "is of a run with num_nodes=2" in told
    assert "--failures-per-node-day 2." in told


def test_other_failures_can_be_chosen(capsys):
    for option in (["--weibull-shape", "0.7"], ["--equal-nodes"], ["--exclude-after", "1"], ["--retries", "field"]):
        assert printed(capsys, *JOB, *option) != printed(capsys, *JOB)


@pytest.mark.slow_single
def test_degrees_that_fit_give_the_replicas(capsys, tmp_path):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4,
    ).save_pretrained(tmp_path)  # fmt: skip
    job = [
        "--nodes", "8", "--accelerators-per-node", "2", "--mtbf-hours", "100", "--days", "1", "--runs", "5", "--json",
        "--model", str(tmp_path), "--sequence-length", "16",
    ]  # fmt: skip
    roomy = json.loads(printed(capsys, *job))
    assert roomy["scenario"]["num_replicas"] == 8, "each node holds a copy"
    assert roomy["remarks"][0].startswith("smallest degrees that fit 72 GiB: shard 1, tensor 1 (")
    tight = json.loads(printed(capsys, *job, "--device-memory-gib", "0.012"))
    assert tight["remarks"][0].startswith("smallest degrees that fit 0.012 GiB: shard 4, tensor 1 (")
    assert tight["scenario"]["num_replicas"] == 4, "a copy takes two nodes"
    assert main(["plan", *job, "--device-memory-gib", "0.012", "--replicas", "8"]) == 2
    assert "--replicas 8 are more than fit" in capsys.readouterr().err


SIZES = {
    "vocab_size": 128, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip


def cli_arguments(arguments):
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    return parser.parse_args(arguments)


def of_model(folder, content, *options):
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return [
        "--nodes", "2", "--accelerators-per-node", "2", "--mtbf-hours", "100", "--days", "1", "--runs", "2", "--json",
        "--model", str(folder), "--sequence-length", "512", *options,
    ]  # fmt: skip


@pytest.mark.slow_single
def test_options_of_the_strategy_change_the_plan_of_a_model(capsys, tmp_path):
    pytest.importorskip("transformers")

    def needed_gib(*options):
        sizes = {"model_type": "llama"} | SIZES | {"vocab_size": 1024}  # so that the peak is in the loss
        arguments = cli_arguments(of_model(tmp_path, sizes, "--micro-batch-size", "4", *options))
        return plan_of_model(arguments, 4)[0].device

    plain = needed_gib()
    for options in (
        ["--activation-checkpointing", "full"],
        ["--activation-offload"],
        ["--loss-chunks", "8"],
        ["--optimizer-offload"],
        ["--param-offload"],
        ["--hybrid-shard-degree", "4"],
        ["--tensor-parallel-degree", "2"],
        ["--precision", "bf16-true"],
    ):
        assert needed_gib(*options) < plain, options
    assert needed_gib("--precision", "32-true") > plain
    gathered = "--hybrid-shard-degree", "2", "--float8-recipe", "tensorwise"
    assert needed_gib(*gathered, "--float8-all-gather") <= needed_gib(*gathered)
    arguments = of_model(tmp_path, {"model_type": "llama"} | SIZES, "--tensor-parallel-degree", "2", "--loss-parallel")
    remark = json.loads(printed(capsys, *arguments))["remarks"][0]
    assert remark.startswith("degrees as given, which fit 72 GiB: shard 2, tensor 2 (")
    assert main(["plan", *arguments, "--device-memory-gib", "0.001"]) == 2
    assert "do not fit devices of 0.001 GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "options", "told"),
    [
        ("{", [], "is neither a folder nor a config.json of a transformers model: It looks like the config file"),
        ({"model_type": "flowers"} | SIZES, [], "model type `flowers`"),
        (SIZES, [], "model_type"),
        ({"model_type": "llama"}, [], "config.json has no hidden_size, num_hidden_layers, so the plan would be"),
        ({"model_type": "gpt2", "n_embd": 64}, [], "config.json has no num_hidden_layers"),
        ({"model_type": "llama"} | SIZES | {"hidden_size": None}, [], "hidden_size"),
        ({"model_type": "llama"} | SIZES | {"num_hidden_layers": 2.5}, [], "num_hidden_layers"),
        ({"model_type": "llama"} | SIZES | {"num_hidden_layers": 0}, [], "num_hidden_layers must be a whole number"),
        (
            {"model_type": "llama"} | SIZES | {"intermediate_size": -3},
            [],
            "LlamaConfig cannot be planned: RuntimeError",
        ),
        ({"model_type": "llama"} | SIZES | {"num_attention_heads": 0}, [], "Give a folder with a config.json"),
        ({"model_type": "x", "auto_map": {"AutoConfig": "a.B"}} | SIZES, [], "custom code"),
        (
            {"model_type": "llama"} | SIZES,
            ["--tensor-parallel-degree", "0"],
            "tensor_parallel_degree must be at least 1",
        ),
        ({"model_type": "llama"} | SIZES, ["--hybrid-shard-degree", "3"], "must divide the world size 4"),
        ({"model_type": "llama"} | SIZES, ["--loss-chunks", "-1"], "loss_chunks must be at least 1"),
        (
            {"model_type": "llama"} | SIZES,
            ["--host-memory-gib", "0"],
            "host_memory_gib must be a number of GiB above 0",
        ),
        (
            {"model_type": "llama"} | SIZES,
            ["--precision", "32-true", "--float8-recipe", "rowwise"],
            "Use --precision bf16-mixed or bf16-true",
        ),
    ],
)
def test_models_that_cannot_be_planned_are_refused_by_name(content, options, told, capsys, tmp_path):
    pytest.importorskip("transformers")
    assert main(["plan", *of_model(tmp_path, content, *options)]) == 2
    assert told in capsys.readouterr().err


def test_a_model_that_does_not_exist_and_options_without_a_model_are_refused(capsys, tmp_path):
    job = ["plan", "--nodes", "2", "--mtbf-hours", "1", "--days", "1"]
    assert main([*job, "--model", str(tmp_path / "absent")]) == 2
    assert (
        "absent is neither a folder nor a config.json of a transformers model: it does not exist."
        in capsys.readouterr().err
    )
    assert main([*job, "--loss-chunks", "2", "--param-offload"]) == 2
    assert "--loss-chunks, --param-offload without --model has no effect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "give --nodes"),
        (["--nodes", "4"], "give --days or --steps"),
        (["--nodes", "4", "--days", "1"], "--failures-per-node-day, --mtbf-hours of the whole job, or --trace"),
        (["--nodes", "0", "--days", "1"], "--nodes=0 must be"),
        (["--nodes", "4", "--days", "-1", "--mtbf-hours", "1"], "--days=-1 must be"),
        (["--nodes", "4", "--days", "1", "--mtbf-hours", "0"], "--mtbf-hours=0 must be"),
        (["--nodes", "4", "--days", "1", "--mtbf-hours", "1", "--replicas", "3"], "must divide the number of nodes, 4"),
        (["--nodes", "4", "--days", "1", "--mtbf-hours", "1", "--price", "nan"], "price_per_accelerator_hour=nan"),
        (["--nodes", "4", "--days", "1", "--mtbf-hours", "1", "--repair-s", "-5"], "repair_s=-5 must be"),
        (["--nodes", "4", "--days", "1", "--mtbf-hours", "1", "--runs", "1"], "num_runs=1 must be at least 2"),
        (["--nodes", "4", "--days", "1", "--mtbf-hours", "1", "--weibull-shape", "0"], "shape=0"),
        (
            ["--nodes", "4", "--days", "1", "--mtbf-hours", "1", "--model", "nowhere"],
            "--model nowhere is neither a folder",
        ),
        (["--nodes", "4", "--days", "1", "--trace", "nowhere"], "--trace nowhere cannot be read as JSON"),
        (["--nodes", "9999", "--days", "99", "--mtbf-hours", "0.01"], "Give less work, or a lower rate of failures"),
        (["--nodes", "4", "--days", "1", "--mtbf-hours", "1e-300"], "Give less work, or a lower rate of failures"),
        (
            ["--nodes", "4", "--days", "1", "--mtbf-hours", "1", "--detect-s", "1e300"],
            "detect_s=1e+300 must be at most",
        ),
        (["--nodes", "4", "--days", "1", "--mtbf-hours", "1", "--repair-s", "9e9"], "spares are computed for at most"),
        (["--nodes", "4", "--days", "1", "--mtbf-hours", "1", "--seed", "-1"], "seed=-1 must be at least 0"),
        (["--nodes", "4", "--steps", "-3", "--mtbf-hours", "1"], "--steps=-3 must be"),
        (["--preset", "flowers"], "invalid choice"),
        (["--preset", "seeds", "--price", "5", "--nodes", "3"], "leave out --price, --nodes"),
        (["--preset", "seeds", "--page", "plan.html"], "leave out --page"),
        (["--days", "1", "--steps", "1"], "not allowed with"),
    ],
)
def test_bad_input_ends_with_code_2_and_says_why(arguments, told, capsys):
    try:
        code = main(["plan", *arguments])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "content", "told"),
    [
        ("--stage-times", {"detect": 1}, "has detect; allowed are step_s, detect_s"),
        ("--stage-times", {"detect_s": "1"}, "detect_s must be a number of seconds"),
        ("--stage-times", {"detect_s": []}, "detect_s must be a number of seconds"),
        ("--stage-times", {"repair_s": [1, -1]}, "repair_s=-1 must be"),
        ("--stage-times", [1], "must hold a JSON object, but holds a list"),
        ("--trace", {"failures": [[1, 0]]}, "is not of the form"),
        ("--trace", {"duration_s": 9, "failures": [1]}, "is not of the form"),
        ("--trace", {"duration_s": 9, "failures": []}, "the run had no failure: use --mtbf-hours"),
        ("--trace", {"duration_s": 9, "failures": [[1, 0]], "num_nodes": "2"}, "is of a run with num_nodes=2"),
        ("--trace", {"duration_s": 9, "failures": [[1, 0]], "num_nodes": "x"}, "is not of the form"),
        ("--trace", {"duration_s": 9, "failures": [[10, 0]]}, "less than duration_s=9"),
        ("--trace", {"duration_s": 9, "failures": [[1, 4]]}, "the cluster has 4 nodes"),
    ],
)
def test_files_of_another_form_are_refused(option, content, told, capsys, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))
    rate = [] if option == "--trace" else ["--mtbf-hours", "10"]
    assert main(["plan", "--nodes", "4", "--days", "1", *rate, option, str(path)]) == 2
    assert told in capsys.readouterr().err


def test_the_guide_shows_what_the_commands_print(capsys):
    page = (Path(__file__).parents[2] / "docs" / "guides" / "planning.md").read_text()
    [command] = [line for line in page.splitlines() if line.startswith("hyperpod plan --nodes 1024")]
    assert f"```text\n{printed(capsys, *command.split()[2:])}```" in page
    claims = printed(capsys, "--preset", "seeds").split("\n\n")[0]
    assert f"```text\n{claims}\n```" in page
    assert f"It prints {len(published_figures())}, beginning" in page


def test_help_shows_defaults_and_no_none(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: None)" not in text
    assert f"(default: {StageTimes().repair_s:g})" in text
    assert math.isclose(StageTimes().repair_s, 2400)
