"""The command: its arguments, exit codes, table, JSON and page of the manual."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hyperpod_plugins.cli import main
from hyperpod_plugins.doctor import Facts, Finding, JobSize, findings_of
from hyperpod_plugins.doctor import doctor_command as command
from hyperpod_plugins.doctor.cluster import ClusterFacts
from hyperpod_plugins.doctor.doctor_command import as_json, as_table, exit_code
from hyperpod_plugins.doctor.gpus import Gpu, GpuFacts, TorchGpus
from hyperpod_plugins.doctor.machine import Limit, MachineFacts
from hyperpod_plugins.doctor.network import NetworkFacts
from hyperpod_plugins.doctor.peer import PeerFacts
from hyperpod_plugins.doctor.software import SoftwareFacts

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "doctor.md"
OK = Finding(name="a", status="ok", found="good")
WARNING = Finding(name="b-name", status="warning", found="so so", advice="do this.")
ERROR = Finding(name="c", status="error", found="bad", advice="do that.")
SKIPPED = Finding(name="d", status="skipped", found="not checked", advice="check it.")
LIMIT = Limit(soft=1024, hard=1024)
FACTS = Facts(
    software=SoftwareFacts(
        python=(3, 11, 0),
        packages={"torch": "2.13.0"},
        has_gloo=True,
        has_nccl=True,
        smddp_reason="no",
        instance_type=None,
        variables={},
    ),
    machine=MachineFacts(open_files=LIMIT, processes=LIMIT, locked_memory=LIMIT, core_size=LIMIT),
    gpus=GpuFacts(
        gpus=(Gpu(index=0, name="H200", driver="1", memory=1, used=0),),
        has_driver=True,
        cuda="13.0",
        torch=TorchGpus(count=1, nccl=(2, 25, 1)),
    ),
    network=NetworkFacts(host="n1", variables={}),
    cluster=ClusterFacts(variables={}, slurm_job={}),
)


@pytest.mark.parametrize(
    ("findings", "code", "strict_code"),
    [
        ([OK], 0, 0),
        ([OK, SKIPPED], 0, 0),
        ([OK, WARNING], 0, 1),
        ([WARNING, ERROR], 2, 2),
        ([ERROR, SKIPPED], 2, 2),
    ],
)
def test_exit_codes(findings, code, strict_code):
    assert exit_code(findings, is_strict=False) == code
    assert exit_code(findings, is_strict=True) == strict_code


def test_the_table_has_the_advice_below_each_line():
    assert as_table([OK, WARNING]) == [
        "ok       a       good",
        "warning  b-name  so so",
        "                 -> do this.",
        "1 ok, 1 warning, 0 error, 0 skipped",
    ]


def test_long_lines_are_wrapped():
    lines = as_table([replace(WARNING, found="word " * 100, advice="deed " * 100)])
    assert max(map(len, lines)) <= 118
    assert sum(line.count("word") for line in lines) == sum(line.count("deed") for line in lines) == 100


def test_json_has_all_findings():
    report = json.loads(as_json([OK, ERROR], "n1", 2))
    assert (report["format"], report["host"], report["exit_code"]) == (1, "n1", 2)
    assert report["findings"][1] == {"name": "c", "status": "error", "found": "bad", "advice": "do that."}


def test_the_version_of_nccl_comes_from_the_process_that_asked():
    found = {each.name: each for each in findings_of(FACTS, JobSize())}
    assert found["nccl"].status == "error"
    assert "2.25.1" in found["nccl"].found
    assert found["peer"].status == found["checkpoint-folder"].status == "skipped"


def test_a_cluster_is_told_to_measure_another_node():
    found = {each.name: each for each in findings_of(FACTS, JobSize(world_size=2))}
    assert "--listen" in found["peer"].advice


def test_the_command_examines_this_machine(tmp_path, capsys):
    code = main(["doctor", "--json", "--port", "0", "--checkpoint-folder", str(tmp_path)])
    report = json.loads(capsys.readouterr().out)
    statuses = {each["status"] for each in report["findings"]}
    assert code == report["exit_code"] == (2 if "error" in statuses else 0)
    assert statuses <= {"ok", "warning", "error", "skipped"}
    for each in report["findings"]:
        assert set(each) == {"name", "status", "found", "advice"}
        assert each["found"]
        assert each["advice"] or each["status"] == "ok"
    names = [each["name"] for each in report["findings"]]
    assert len(names) == len(set(names))
    assert {"python", "torch", "shared-memory", "open-files", "interface", "clock", "checkpoint-folder"} <= set(names)
    assert list(tmp_path.iterdir()) == []


def test_the_manual_explains_every_finding():
    measured = replace(FACTS, peer=PeerFacts(peer="n2"))
    names = {each.name for facts in (FACTS, measured) for each in findings_of(facts, JobSize())}
    names |= {"checkpoint-space", "checkpoint-file-system"}
    assert names == set(
        re.findall(r"`([a-z0-9-]+)`", "".join(re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE)))
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--world-size", "0"], "--local-world-size 0 must be at least 1"),
        (["--world-size", "2", "--local-world-size", "4"], "at most --world-size 2"),
        (["--snapshot-gib", "-1"], "--snapshot-gib -1"),
        (["--port", "70000"], "--port 70000"),
        (["--wait", "0"], "--wait 0"),
        (["--wait", "nan"], "--wait nan"),
        (["--peer", "n2:7"], "needs --token"),
        (["--peer", "n2", "--token", "00" * 16], "--peer 'n2' must be HOST:PORT"),
        (["--peer", "n2:7", "--token", "xyz"], "32 hexadecimal digits"),
        (["--token", "00" * 16], "--token needs --peer or --listen"),
        (["--listen", "n2:x"], "--listen 'n2:x'"),
        (["--listen", "--peer", "n2:7"], "not allowed with"),
    ],
)
def test_bad_arguments_are_explained(arguments, words, capsys, monkeypatch):
    for name in ("gather_software", "gather_machine", "gather_gpus", "gather_network", "gather_cluster"):
        monkeypatch.setattr(command, name, lambda *_: pytest.fail("nothing should be examined"))
    try:
        code = main(["doctor", *arguments])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert words in capsys.readouterr().err


def test_with_json_the_invitation_goes_to_stderr(capsys, monkeypatch):
    monkeypatch.setattr(command, "serve_one", lambda *_: PeerFacts(peer="n2", error="none called"))
    for name in ("software", "machine", "gpus", "network", "cluster"):
        monkeypatch.setattr(command, f"gather_{name}", lambda *_, name=name: getattr(FACTS, name))
    assert main(["doctor", "--json", "--listen", "127.0.0.1", "--token", "ab" * 16]) == 2
    printed = capsys.readouterr()
    assert re.fullmatch(
        rf"run on the other node: hyperpod doctor --peer 127\.0\.0\.1:\d+ --token {'ab' * 16}\n", printed.err
    )
    assert json.loads(printed.out)["exit_code"] == 2
