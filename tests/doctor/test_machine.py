"""Limits, memory and clock of a machine: what the kernel may say, and what that means for jobs of several sizes."""

import time
from dataclasses import replace

import pytest

from hyperpod_plugins.doctor.finding import (
    GIB_BYTES as GIB,
)
from hyperpod_plugins.doctor.finding import (
    MIB_BYTES as MIB,
)
from hyperpod_plugins.doctor.finding import (
    Finding,
    JobSize,
    number_of,
    output_of,
    within,
)
from hyperpod_plugins.doctor.machine import (
    UNLIMITED,
    Limit,
    MachineFacts,
    cgroup_folders,
    check_machine,
    effective_limit,
    gather_machine,
    kernel_clock,
    parse_clock,
    parse_meminfo,
    parse_oom_kills,
    parse_quota,
)
from hyperpod_plugins.errors import ConfigError

NONE = Limit(soft=UNLIMITED, hard=UNLIMITED)
GOOD = MachineFacts(
    shm_total=64 * GIB,
    shm_free=64 * GIB,
    open_files=NONE,
    processes=NONE,
    locked_memory=NONE,
    core_size=Limit(soft=0, hard=UNLIMITED),
    num_cores=64,
    memory_total=256 * GIB,
    memory_available=250 * GIB,
    overcommit=0,
    clock_is_synchronized=True,
    clock_error_s=0.001,
)
NODE = JobSize(world_size=8, local_world_size=8)
CLUSTER = JobSize(world_size=1024, local_world_size=8)


def finding(name, job=NODE, **changes):
    return {each.name: each for each in check_machine(replace(GOOD, **changes), job)}[name]


@pytest.mark.parametrize("job", [JobSize(), NODE, CLUSTER])
def test_a_good_machine(job):
    assert {each.status for each in check_machine(GOOD, job)} == {"ok"}


def shm(free, total):
    return {"shm_free": int(free * GIB), "shm_total": int(total * GIB)}


@pytest.mark.parametrize(
    ("changes", "snapshot_gib", "status", "words"),
    [
        ({"shm_total": None}, 0, "warning", "no /dev/shm"),
        ({"shm_is_foreign": True}, 0, "error", "another user"),
        ({"shm_total": 64 * MIB, "shm_free": 64 * MIB}, 0, "error", "64 MiB free of 64 MiB"),
        (shm(1, 1), 0, "warning", "too little for snapshots"),
        (shm(8, 64), 0, "warning", "too little for snapshots"),
        (shm(64, 64), 0, "ok", "room for snapshots of 2.0 GiB a rank"),
        (shm(64, 64), 2, "ok", "32.0 GiB"),
        (shm(64, 64), 2.1, "warning", "too little for the 33.6 GiB"),
        (shm(64, 64), 100, "warning", "too little"),
    ],
)
def test_shared_memory(changes, snapshot_gib, status, words):
    found = finding("shared-memory", replace(NODE, snapshot_gib=snapshot_gib), **changes)
    assert found.status == status
    assert words in found.found


def test_a_shared_memory_of_the_advised_size_is_enough():
    job = replace(NODE, snapshot_gib=5)
    found = finding("shared-memory", job, **shm(64, 64))
    assert "at least 160.0 GiB" in found.advice
    assert finding("shared-memory", job, **shm(160, 160)).status == "ok"


@pytest.mark.parametrize(
    ("name", "changes", "job", "status", "words"),
    [
        ("open-files", {"open_files": Limit(soft=1024, hard=1024)}, NODE, "ok", "552"),
        ("open-files", {"open_files": Limit(soft=1024, hard=1024)}, CLUSTER, "error", "needs 5,632"),
        ("open-files", {"open_files": Limit(soft=1024, hard=65536)}, CLUSTER, "ok", "hyperpodrun raises"),
        ("open-files", {"open_files": Limit(soft=1024, hard=UNLIMITED)}, CLUSTER, "ok", "hyperpodrun raises"),
        ("processes", {"processes": Limit(soft=1000, hard=1000)}, NODE, "warning", "need 2,048"),
        ("processes", {"processes": Limit(soft=4096, hard=4096)}, NODE, "ok", "4,096"),
        ("processes", {"max_tasks": 4096, "num_tasks": 4000}, NODE, "warning", "room for 96"),
        (
            "locked-memory",
            {"locked_memory": Limit(soft=8 * MIB, hard=8 * MIB)},
            NODE,
            "ok",
            "no RDMA device",
        ),
        ("locked-memory", {"locked_memory": Limit(soft=8, hard=8), "has_rdma": True}, NODE, "error", "RDMA"),
        ("locked-memory", {"has_rdma": True}, NODE, "ok", "unlimited"),
        ("core-files", {"core_size": NONE}, NODE, "warning", "unlimited"),
        ("cores", {"num_cores": 4}, NODE, "warning", "4 cores, for 8 ranks"),
        ("cores", {"core_quota": 4.0}, NODE, "warning", "time of 4"),
        ("cores", {"core_quota": 16.0}, NODE, "ok", "time of 16"),
        ("memory", {"memory_total": None}, NODE, "skipped", "does not report"),
        ("memory", {"memory_available": 8 * GIB}, NODE, "warning", "8 ranks need about 16.0 GiB"),
        ("memory", {"memory_limit": 32 * GIB, "memory_used": 20 * GIB}, NODE, "warning", "12.0 GiB left"),
        ("memory", {"memory_limit": 32 * GIB}, NODE, "ok", "32.0 GiB left"),
        ("memory", {}, replace(NODE, snapshot_gib=10), "warning", "336.0 GiB"),
        ("oom-kills", {"num_oom_kills": 2}, NODE, "warning", "2 processes"),
        ("swap", {"swap_total": GIB, "swap_free": GIB}, NODE, "ok", "0 MiB used"),
        ("swap", {"swap_total": GIB, "swap_free": 0}, NODE, "warning", "1.0 GiB used"),
        ("overcommit", {"overcommit": 2}, NODE, "warning", "=2"),
        ("overcommit", {"overcommit": None}, NODE, "skipped", "does not report"),
        ("clock", {"clock_is_synchronized": None}, NODE, "skipped", "does not report"),
        ("clock", {"clock_is_synchronized": False}, NODE, "ok", "not synchronised"),
        ("clock", {"clock_is_synchronized": False}, CLUSTER, "warning", "not synchronised"),
    ],
)
def test_limits(name, changes, job, status, words):
    found = finding(name, job, **changes)
    assert found.status == status
    assert words in found.found


# -- what the kernel says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("MemTotal:       100 kB\nHugePages_Total:  7\nSwapFree: 0 kB\n", {"MemTotal": 102400, "SwapFree": 0}),
        ("MemTotal: x kB\nnonsense\n: 1 kB extra\n", {}),
        ("", {}),
    ],
)
def test_meminfo(text, wanted):
    assert parse_meminfo(text) == wanted


@pytest.mark.parametrize(
    ("text", "period", "cores"),
    [
        ("200000 100000\n", "", 2.0),
        ("max 100000\n", "", None),
        ("50000", "100000", 0.5),
        ("-1", "100000", None),
        ("1", "0", None),
        ("", "", None),
        ("a b", "", None),
    ],
)
def test_quota(text, period, cores):
    assert parse_quota(text, period) == cores


def test_oom_kills():
    assert parse_oom_kills("low 0\noom 3\noom_kill 2\noom_group_kill 0\n") == 2
    assert parse_oom_kills("oom_kill x") == parse_oom_kills("") == 0


@pytest.mark.parametrize(
    ("limit", "total", "wanted"), [(None, 8, None), (9, 8, None), (4, 8, 4), (4, None, 4), (0, 8, None), (-1, 8, None)]
)
def test_a_limit_above_the_memory_is_none(limit, total, wanted):
    assert effective_limit(limit, total) == wanted


def test_cgroups_of_both_versions():
    text = "4:cpu,cpuacct:/a\n1:name=systemd:/x\n0::/b\nnonsense\n0::/../../etc\n"
    found = [(which, str(folder)) for which, folder in cgroup_folders(text)]
    assert found[:4] == [
        ("cpu", "/sys/fs/cgroup/cpu/a"),
        ("cpu", "/sys/fs/cgroup/cpu"),
        ("cpuacct", "/sys/fs/cgroup/cpuacct/a"),
        ("cpuacct", "/sys/fs/cgroup/cpuacct"),
    ]
    assert found[-2:] == [("", "/sys/fs/cgroup/b"), ("", "/sys/fs/cgroup")]
    assert not any("etc" in folder for _, folder in found)


@pytest.mark.parametrize(
    ("state", "status", "is_synchronized"), [(0, 0, True), (0, 1, True), (5, 0, False), (0, 0x40, False), (1, 0, True)]
)
def test_the_state_of_the_clock(state, status, is_synchronized):
    assert parse_clock(state, status, 2000) == (is_synchronized, 0.002)


def test_the_kernel_answers():
    facts = gather_machine()
    assert facts.memory_total is not None
    assert facts.memory_total > facts.memory_available > 0
    assert facts.num_cores >= 1
    assert {each.name for each in check_machine(facts, JobSize())} >= {"shared-memory", "clock"}
    is_synchronized, error_s = kernel_clock()
    assert is_synchronized is None or error_s >= 0


# -- findings and deadlines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["warning", "error", "skipped"])
def test_what_is_not_well_needs_advice(status):
    with pytest.raises(ValueError, match="no advice"):
        Finding(name="x", status=status, found="something")


@pytest.mark.parametrize(
    "sizes",
    [
        {"world_size": 0, "local_world_size": 0},
        {"world_size": 4, "local_world_size": 8},
        {"snapshot_gib": -1.0},
        {"snapshot_gib": float("nan")},
        {"snapshot_gib": float("inf")},
        {"port": 65536},
        {"port": -1},
    ],
)
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ConfigError, match="--"):
        JobSize(**sizes)


def test_a_call_and_a_command_end_at_their_deadline():
    began_s = time.monotonic()
    assert within(0.05, lambda: time.sleep(30)) is None
    left_behind = output_of(["sh", "-c", "echo begun; sleep 30 & sleep 30"], 0.3)
    assert (left_behind.text, left_behind.failure) == ("begun\n", "sh did not answer within 0.3 s")
    assert time.monotonic() - began_s < 10
    assert within(5.0, lambda: 7) == 7


def test_how_commands_end():
    assert output_of(["echo", "a"], 5.0).text == "a\n"
    assert output_of(["sh", "-c", "echo why >&2; exit 3"], 5.0).failure == "sh ended with code 3"
    missing = output_of(["hyperpod-no-such-command"], 5.0)
    assert not missing.is_installed
    assert "not installed" in missing.failure


@pytest.mark.parametrize(
    ("text", "number"), [(" 7\n", 7), ("-1", -1), ("", None), ("7.0", None), ("٣", None), ("-", None), ("9" * 30, None)]
)
def test_numbers_of_the_kernel(text, number):
    assert number_of(text) == number
