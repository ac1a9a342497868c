"""Versions, collective libraries and GPUs: what is supported, what is known bad, and what nvidia-smi may print."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from hyperpod_plugins.doctor.finding import GIB_BYTES as GIB
from hyperpod_plugins.doctor.finding import MIB_BYTES as MIB
from hyperpod_plugins.doctor.finding import JobSize
from hyperpod_plugins.doctor.gpus import (
    Gpu,
    GpuFacts,
    TorchGpus,
    check_gpus,
    parse_bad_rows,
    parse_gpus,
    parse_torch,
    with_errors,
)
from hyperpod_plugins.doctor.software import (
    KNOWN_FAULTS,
    PYTHON,
    REQUIREMENTS,
    Requirement,
    SoftwareFacts,
    check_gloo,
    check_nccl,
    check_package,
    check_python,
    check_smddp,
    dotted,
    gather_software,
    parsed,
    with_faults,
)

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
SOFTWARE = SoftwareFacts(
    python=(3, 11, 7),
    packages={},
    has_gloo=True,
    has_nccl=True,
    smddp_reason="no",
    instance_type=None,
    variables={},
)


def test_the_oldest_versions_are_those_of_pyproject():
    groups = {
        "": PROJECT["project"]["dependencies"],
        **PROJECT["project"]["optional-dependencies"],
        **PROJECT["dependency-groups"],
    }
    for each in REQUIREMENTS:
        stated = [text for text in groups[each.extra] if isinstance(text, str)]
        found = [re.fullmatch(rf"{each.package}(?:\[\w+\])?>=([\d.]+)", text) for text in stated]
        assert [parsed(match[1]) for match in found if match] == [each.oldest], each.package
    assert f">={dotted(PYTHON)}" == PROJECT["project"]["requires-python"]
    core = {re.split(r"[>=]", text)[0] for text in groups[""]}
    assert core == {each.package for each in REQUIREMENTS if not each.extra}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("2.13.0+cpu", (2, 13, 0)),
        ("2.0rc1", (2, 0)),
        ("5.0.0.dev0", (5, 0, 0)),
        ("2.14.0a0+git1", (2, 14, 0)),
        ("", ()),
        ("unknown", ()),
        ("1..2", (1,)),
    ],
)
def test_versions_are_parsed(text, version):
    assert parsed(text) == version


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [
        ("3.2", "ok", "3.2"),
        ("3.1.9", "error", "older than 3.2"),
        ("nonsense", "error", "older than 3.2"),
        (None, "skipped", "not installed"),
    ],
)
def test_an_optional_package(version, status, words):
    found = check_package(Requirement(package="x", oldest=(3, 2), extra="e", purpose="this"), version)
    assert (found.name, found.status) == ("x", status)
    assert words in found.found
    assert ("pip install" in found.advice) == (status != "ok")


def test_a_needed_package_must_be_there():
    found = check_package(Requirement(package="numpy", oldest=(1, 26)), None)
    assert (found.status, found.advice) == ("error", "pip install 'numpy>=1.26'.")
    assert check_python((3, 10, 4)).status == "error"
    assert check_python((3, 14, 0)).status == "ok"
    assert check_gloo(has_gloo=False).status == "error"
    assert check_gloo(has_gloo=True).status == "ok"


@pytest.mark.parametrize(
    ("package", "version", "status", "words"),
    [
        ("nccl", (2, 18, 1), "error", "issue 992"),
        ("nccl", (2, 19, 1), "warning", "older than 2.26.2"),
        ("nccl", (2, 25, 1), "error", "149153"),
        ("nccl", (2, 26, 2), "ok", "text"),
        ("nccl", (2, 28, 3), "warning", "2.28.3 to 2.28.8"),
        ("nccl", (2, 28, 9), "ok", "text"),
        ("torch", (2, 11), "ok", "reset_iter_state"),
        ("torch", (2, 13), "ok", "190747"),
        ("torch", (2, 14), "ok", "text"),
        ("transformers", (5, 23), "ok", "48569"),
        ("numpy", (2, 0), "ok", "text"),
    ],
)
def test_known_faults_of_versions(package, version, status, words):
    found = with_faults(package, version, "text")
    assert (found.name, found.status) == (package, status)
    assert words in found.found
    assert bool(found.advice) == (words != "text")


def test_each_known_fault_says_what_to_do():
    for each in KNOWN_FAULTS:
        assert each.first < each.fixed
        assert each.what
        assert each.advice
        assert each.concerns(each.package, each.first or (0,))
        assert not each.concerns(each.package, each.fixed)


@pytest.mark.parametrize(
    ("reason", "instance", "status"),
    [
        (None, "ml.p4d.24xlarge", "ok"),
        ("it cannot be imported", "ml.p4d.24xlarge", "warning"),
        ("it cannot be imported", "ml.p5.48xlarge", "skipped"),
        ("it cannot be imported", None, "skipped"),
    ],
)
def test_smddp_is_missed_only_where_it_is_made_for(reason, instance, status):
    found = check_smddp(reason, instance)
    assert found.status == status
    assert reason is None or reason in found.found


@pytest.mark.parametrize(
    ("changes", "version", "num_gpus", "status", "words"),
    [
        ({"has_nccl": False}, None, 0, "skipped", "no nccl"),
        ({"has_nccl": False}, None, 8, "error", "8 GPUs"),
        ({}, None, 0, "skipped", "no usable GPU"),
        ({}, None, 8, "warning", "cannot be read"),
        ({}, (2, 28, 9), 8, "ok", "2.28.9, 8 ranks on 8 GPUs"),
        ({}, (2, 25, 1), 8, "error", "hangs"),
        ({"variables": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}}, (2, 28, 9), 8, "error", "HANDLING=1"),
        ({"variables": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}}, (2, 28, 9), 8, "ok", "2.28.9"),
    ],
)
def test_nccl(changes, version, num_gpus, status, words):
    found = check_nccl(replace(SOFTWARE, **changes), version, num_gpus=num_gpus, local_world_size=8)
    assert found.status == status
    assert words in found.found


def test_this_installation_is_read():
    facts = gather_software()
    assert {"torch", "numpy", "filelock"} <= set(facts.packages)
    assert facts.python >= PYTHON
    assert facts.has_gloo


# -- GPUs -------------------------------------------------------------------------------------------------------------

H200 = Gpu(index=0, name="NVIDIA H200", driver="570.1", memory=140 * GIB, used=4 * MIB, uncorrected_errors=0)
GOOD = GpuFacts(
    gpus=(H200, replace(H200, index=1)), has_driver=True, cuda="12.8", torch=TorchGpus(count=2, nccl=(2, 28, 9))
)


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("0, NVIDIA H200, 570.1, 143771, 4\n", [(0, "NVIDIA H200", 143771 * MIB, 4 * MIB)]),
        ('0, "A, B", 570.1, [N/A], [Not Supported]', [(0, "A, B", None, None)]),
        ("[N/A], x, y, 1, 2", []),
        ("0, x, y, 1\n0, x, y, 1, 2, 3\nUnable to determine the device handle\n\n", []),
        ('Field "x" is not a valid field to query.', []),
        ("0, x, y, 99999999999999999999999999, -", [(0, "x", None, None)]),
        ("\x1b[31m, \x00, , ,", []),
        ("", []),
    ],
)
def test_whatever_nvidia_smi_prints_is_read(text, gpus):
    assert [(each.index, each.name, each.memory, each.used) for each in parse_gpus(text)] == gpus


def test_errors_are_matched_by_index():
    text = "1, 7\n0, [N/A]\nnonsense"
    assert [each.uncorrected_errors for each in with_errors(GOOD.gpus, text)] == [None, 7]


@pytest.mark.parametrize(
    ("text", "is_bad"),
    [("00:1, 0, 0", False), ("00:1, 1, 0", True), ("00:1, 0, 1", True), ("00:1, [N/A], [N/A]", False), ("1", False)],
)
def test_remapped_rows(text, is_bad):
    assert parse_bad_rows(text) == is_bad


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            'warning\nFOUND{"count": 2, "nccl": [2, 28, 9], "error": ""}\n',
            TorchGpus(count=2, nccl=(2, 28, 9)),
        ),
        ('FOUND{"count": 0, "nccl": [], "error": "no driver"}', TorchGpus(error="no driver")),
        ('FOUND{"count": 0}', None),
        ("FOUND[]", None),
        ("FOUND", None),
        ("Segmentation fault", None),
    ],
)
def test_the_answer_of_torch_is_read(text, wanted):
    assert parse_torch(text) == wanted


def statuses(facts, job=None):
    return {each.name: each.status for each in check_gpus(facts, job or JobSize(world_size=2, local_world_size=2))}


def test_a_machine_without_gpus_is_named_so():
    assert statuses(GpuFacts(smi_failure="nvidia-smi is not installed")) == {"gpus": "skipped"}


def test_good_gpus():
    assert statuses(GOOD) == {"gpus": "ok", "gpu-health": "ok", "gpu-memory": "ok"}


@pytest.mark.parametrize(
    ("changes", "name", "status", "words"),
    [
        ({"gpus": (), "smi_failure": "nvidia-smi did not answer"}, "gpus", "error", "did not answer"),
        ({"cuda": None}, "gpus", "error", "no CUDA"),
        ({"torch": None}, "gpus", "error", "cannot use them"),
        ({"torch": TorchGpus(error="driver too old")}, "gpus", "error", "driver too old"),
        ({"torch": TorchGpus(count=1)}, "gpus", "error", "1 for 2 ranks"),
        ({"gpus": (H200, replace(H200, index=1, name="NVIDIA A100"))}, "gpus", "warning", "A100 and NVIDIA H200"),
        ({"gpus": (replace(H200, uncorrected_errors=3),)}, "gpu-health", "error", "GPU 0: 3"),
        ({"has_bad_rows": True}, "gpu-health", "error", "memory rows"),
        ({"gpus": (replace(H200, uncorrected_errors=None),)}, "gpu-health", "skipped", "does not report memory errors"),
        ({"gpus": (replace(H200, used=30 * GIB),)}, "gpu-memory", "warning", "GPU 0: 30.0 GiB"),
        ({"gpus": (replace(H200, used=None, memory=None),)}, "gpu-memory", "ok", "unknown size"),
    ],
)
def test_bad_gpus(changes, name, status, words):
    job = JobSize(world_size=2, local_world_size=2)
    found = {each.name: each for each in check_gpus(replace(GOOD, **changes), job)}[name]
    assert found.status == status
    assert words in found.found
