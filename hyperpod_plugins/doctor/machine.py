"""Limits of this machine or container: shared memory, open files, processes, cores, memory, swap; and its clock."""

import ctypes
import os
import resource
import struct
from dataclasses import dataclass
from pathlib import Path

from hyperpod_plugins.doctor.finding import (
    GIB_BYTES,
    MIB_BYTES,
    CheckStatus,
    Finding,
    JobSize,
    file_text,
    gib,
    number_of,
    within,
)
from hyperpod_plugins.elastic.process import OPEN_FILES, is_private
from hyperpod_plugins.env import shared_memory_folder
from hyperpod_plugins.recovery.snapshot_memory import room_for_snapshots

UNLIMITED = -1
"""A limit that does not limit."""
_SLOTS = 2  # snapshots that a rank keeps
_SHM_BYTES_PER_RANK = 20 * MIB_BYTES  # of nccl, which takes about 10 MB for each connection between ranks of a node
_FILES_OF_A_PROCESS, _FILES_PER_RANK = 512, 5
_TASKS_PER_RANK = 256
_HOST_BYTES_PER_RANK = 2 * GIB_BYTES
_CORE_BYTES = GIB_BYTES
_STA_UNSYNC, _TIME_ERROR = 0x40, 5
_TIMEX = struct.Struct("@I4xqqqqi")  # of the kernel's struct timex: modes, offset, freq, maxerror, esterror, status
_STATVFS_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit of `ulimit`; `UNLIMITED` for none."""

    soft: int
    hard: int

    def __str__(self) -> str:
        """For a message."""
        return "unlimited" if self.soft == UNLIMITED else f"{self.soft:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Limits and state of this machine; sizes are in bytes, and None means that the kernel does not report it."""

    shm_total: int | None = None
    """Size of /dev/shm; None if there is none."""
    shm_free: int = 0
    shm_is_foreign: bool = False
    """Whether the folder of snapshots there belongs to another user or is open to others."""
    open_files: Limit
    processes: Limit
    locked_memory: Limit
    core_size: Limit
    max_tasks: int | None = None
    """Processes and threads that the cgroup allows."""
    num_tasks: int = 0
    """Processes and threads that it has."""
    num_cores: int = 1
    """Cores that this process may use."""
    core_quota: float | None = None
    """Cores' worth of time that the cgroup grants."""
    memory_total: int | None = None
    memory_available: int | None = None
    memory_limit: int | None = None
    """Limit of the cgroup."""
    memory_used: int = 0
    """What the cgroup uses of it."""
    num_oom_kills: int = 0
    """Processes of the cgroup that the kernel has killed as memory was short."""
    swap_total: int = 0
    swap_free: int = 0
    overcommit: int | None = None
    """`vm.overcommit_memory`."""
    has_rdma: bool = False
    """Whether there are InfiniBand, RoCE or EFA devices."""
    clock_is_synchronized: bool | None = None
    clock_error_s: float | None = None
    """The kernel's estimate of the largest error of the clock."""


# -- gathering --------------------------------------------------------------------------------------------------------


def gather_machine() -> MachineFacts:
    """Ask the kernel."""
    shm = Path("/dev/shm")
    space = within(_STATVFS_S, lambda: file_system_space(shm)) if shm.is_dir() else None
    memory, cgroup = parse_meminfo(file_text("/proc/meminfo")), Cgroup.of_this_process()
    devices = Path("/sys/class/infiniband")
    quota = parse_quota(cgroup.read("cpu.max", "cpu.cfs_quota_us", "cpu"), cgroup.read("", "cpu.cfs_period_us", "cpu"))
    is_synchronized, error_s = kernel_clock()
    folder = shared_memory_folder()
    return MachineFacts(
        shm_total=None if space is None else space[1],
        shm_free=0 if space is None else space[0],
        shm_is_foreign=folder is not None and is_foreign(folder),
        open_files=limit_of(resource.RLIMIT_NOFILE),
        processes=limit_of(resource.RLIMIT_NPROC),
        locked_memory=limit_of(resource.RLIMIT_MEMLOCK),
        core_size=limit_of(resource.RLIMIT_CORE),
        max_tasks=number_of(cgroup.read("pids.max", "pids.max", "pids")),
        num_tasks=number_of(cgroup.read("pids.current", "pids.current", "pids")) or 0,
        num_cores=len(os.sched_getaffinity(0)),
        core_quota=quota,
        memory_total=memory.get("MemTotal"),
        memory_available=memory.get("MemAvailable"),
        memory_limit=effective_limit(
            number_of(cgroup.read("memory.max", "memory.limit_in_bytes", "memory")), memory.get("MemTotal")
        ),
        memory_used=number_of(cgroup.read("memory.current", "memory.usage_in_bytes", "memory")) or 0,
        num_oom_kills=parse_oom_kills(cgroup.read("memory.events", "memory.oom_control", "memory")),
        swap_total=memory.get("SwapTotal", 0),
        swap_free=memory.get("SwapFree", 0),
        overcommit=number_of(file_text("/proc/sys/vm/overcommit_memory")),
        has_rdma=devices.is_dir() and any(devices.iterdir()),
        clock_is_synchronized=is_synchronized,
        clock_error_s=error_s,
    )


def file_system_space(path: Path) -> tuple[int, int] | None:
    """Free and total bytes of the file system of `path`; None if it cannot be told."""
    try:
        system = os.statvfs(path)
    except OSError:
        return None
    return system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize


def is_foreign(folder: Path) -> bool:
    """Whether a folder exists and is not this user's own."""
    try:
        return not is_private(folder)
    except OSError:
        return False


def limit_of(which: int) -> Limit:
    """One of this process's limits."""
    soft, hard = (UNLIMITED if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(which))
    return Limit(soft=soft, hard=hard)


@dataclass(frozen=True, slots=True)
class Cgroup:
    """Files of this process's cgroup."""

    folders: tuple[tuple[str, Path], ...]
    """Controllers and folder, innermost first: the controller of version 1, or "" for version 2."""

    @classmethod
    def of_this_process(cls) -> "Cgroup":
        """Where the kernel says that this process is; inside a container, the root of what is mounted there."""
        return cls(tuple(cgroup_folders(file_text("/proc/self/cgroup"))))

    def read(self, name: str, name_v1: str, controller: str) -> str:
        """The text of a file, by its name in version 2 and in version 1 of cgroups; empty if there is none."""
        for which, folder in self.folders:
            if which in ("", controller) and (text := file_text(folder / (name_v1 if which else name))):
                return text
        return ""


def cgroup_folders(text: str) -> list[tuple[str, Path]]:
    """Folders that may describe this process, from /proc/self/cgroup."""
    root, found = Path("/sys/fs/cgroup"), list[tuple[str, Path]]()
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if ".." in place or not place.startswith("/"):
            continue
        for controller in controllers.split(","):
            mount = root / controller if controller else root
            found += [(controller, mount / place[1:]), (controller, mount)]
    return found


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes by name, from /proc/meminfo."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and (kib := number_of(words[0])) is not None:
            found[name] = kib * 1024
    return found


def parse_quota(text: str, period_v1: str) -> float | None:
    """Cores' worth of time from `cpu.max`, or `cpu.cfs_quota_us` and `cpu.cfs_period_us`; None for no limit."""
    quota, _, period = text.strip().partition(" ")
    numbers = number_of(quota), number_of(period or period_v1)
    return numbers[0] / numbers[1] if numbers[0] and numbers[1] and min(numbers[0], numbers[1]) > 0 else None


def effective_limit(limit: int | None, total: int | None) -> int | None:
    """A cgroup's limit of memory; None if the machine has less: version 1 of cgroups knows only numbers."""
    return None if limit is None or limit <= 0 or (total is not None and limit >= total) else limit


def parse_oom_kills(text: str) -> int:
    """The count in `memory.events` or `memory.oom_control`."""
    for line in text.splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return number_of(count) or 0
    return 0


def kernel_clock() -> tuple[bool | None, float | None]:
    """Whether a time service keeps the kernel's clock right, and its largest error in seconds; Nones if unknown."""
    libc, buffer = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(512)
    state = libc.adjtimex(buffer)
    if state < 0 or ctypes.sizeof(ctypes.c_long) != 8:
        return None, None
    _, _, _, max_error_us, _, status = _TIMEX.unpack_from(buffer)
    return parse_clock(state, status, max_error_us)


def parse_clock(state: int, status: int, max_error_us: int) -> tuple[bool, float]:
    """See `kernel_clock`."""
    return state != _TIME_ERROR and not status & _STA_UNSYNC, max_error_us / 1e6


# -- deciding ---------------------------------------------------------------------------------------------------------


def check_machine(facts: MachineFacts, job: JobSize) -> list[Finding]:
    """All findings of this module."""
    return [
        check_shared_memory(facts, job),
        check_open_files(facts.open_files, job),
        check_tasks(facts, job),
        check_locked_memory(facts.locked_memory, has_rdma=facts.has_rdma),
        check_core_files(facts.core_size),
        check_cores(facts, job),
        check_memory(facts, job),
        check_oom_kills(facts.num_oom_kills),
        check_swap(facts.swap_total, facts.swap_free),
        check_overcommit(facts.overcommit),
        check_clock(facts, job),
    ]


def check_shared_memory(facts: MachineFacts, job: JobSize) -> Finding:
    """Whether snapshots fit into /dev/shm, so that they outlive their process, and the rest works there."""
    enlarge = (
        "give the container a larger /dev/shm (docker: --shm-size; Kubernetes: an emptyDir of medium Memory there)"
    )

    def finding(status: CheckStatus, found: str, advice: str = "") -> Finding:
        return Finding(name="shared-memory", status=status, found=found, advice=advice)

    if facts.shm_total is None:
        return finding("warning", "no /dev/shm: snapshots end with their process", "mount a tmpfs at /dev/shm.")
    if facts.shm_is_foreign:
        folder = shared_memory_folder()
        return finding(
            "error",
            f"{folder} belongs to another user or is open to others: no snapshot is kept there",
            f"remove it, as its owner, or make it private: chmod 700 {folder}.",
        )
    total, free = facts.shm_total, facts.shm_free
    size = f"/dev/shm has {gib(free)} free of {gib(total)}"
    if free < _SHM_BYTES_PER_RANK * job.local_world_size:
        return finding("error", f"{size}: too little for nccl and for workers of a DataLoader", f"{enlarge}.")
    room = room_for_snapshots(free, total)
    if not job.snapshot_gib:
        if room <= 0:
            return finding(
                "warning",
                f"{size}: too little for snapshots, as half of it and at least 1 GiB stay free",
                f"{enlarge}.",
            )
        each = gib(room / (job.local_world_size * _SLOTS))
        return finding("ok", f"{size}: room for snapshots of {each} a rank, of which each rank keeps {_SLOTS}")
    needed = int(job.snapshot_gib * GIB_BYTES) * job.local_world_size * _SLOTS
    if needed <= room:
        return finding("ok", f"{size}: room for the {gib(needed)} of {_SLOTS} snapshots of each rank")
    at_least = max(2 * needed, needed + GIB_BYTES)
    return finding(
        "warning",
        f"{size}: too little for the {gib(needed)} of {_SLOTS} snapshots a rank, which then end with their process",
        f"{enlarge}, of at least {gib(at_least)}: half of it and at least 1 GiB stay free.",
    )


def check_open_files(limit: Limit, job: JobSize) -> Finding:
    """Whether agents and ranks can open enough connections."""
    needed = _FILES_OF_A_PROCESS + _FILES_PER_RANK * job.world_size
    advice = f"raise it: ulimit -Hn {max(needed, OPEN_FILES)}, or LimitNOFILE of the service that starts the job."
    if limit.soft == UNLIMITED or limit.soft >= needed:
        return Finding(
            name="open-files", status="ok", found=f"{limit} open files, of which a job of this size needs {needed:,}"
        )
    if limit.hard == UNLIMITED or limit.hard >= needed:
        return Finding(
            name="open-files",
            status="ok",
            found=f"{limit} open files, of the {needed:,} that a job of this size needs; hyperpodrun raises the limit",
            advice=f"for programs that it does not start: ulimit -n {needed}.",
        )
    return Finding(
        name="open-files",
        status="error",
        found=f"at most {limit.hard:,} open files; a job of {job.world_size:,} ranks needs {needed:,}",
        advice=advice,
    )


def check_tasks(facts: MachineFacts, job: JobSize) -> Finding:
    """Whether the ranks can start their threads and processes."""
    needed = _TASKS_PER_RANK * job.local_world_size
    limits = {"ulimit -u": facts.processes.soft, "pids.max of the cgroup": facts.max_tasks}
    left = {
        name: each - (facts.num_tasks if name.startswith("pids") else 0)
        for name, each in limits.items()
        if each is not None and each != UNLIMITED
    }
    if not left:
        return Finding(name="processes", status="ok", found="no limit of processes and threads")
    name = min(left, key=lambda each: left[each])
    if left[name] >= needed:
        return Finding(name="processes", status="ok", found=f"room for {left[name]:,} processes and threads ({name})")
    return Finding(
        name="processes",
        status="warning",
        found=f"room for {left[name]:,} processes and threads ({name}); {job.local_world_size} ranks need {needed:,}",
        advice="raise it: ulimit -u, or the limit of the container (docker: --pids-limit; Kubernetes: podPidsLimit).",
    )


def check_locked_memory(limit: Limit, *, has_rdma: bool) -> Finding:
    """Whether network devices may pin memory."""
    found = "unlimited" if limit.soft == UNLIMITED else gib(limit.soft)
    if limit.soft == UNLIMITED or not has_rdma:
        rest = "" if has_rdma else "; there is no RDMA device that would need more"
        return Finding(name="locked-memory", status="ok", found=f"{found}{rest}")
    return Finding(
        name="locked-memory",
        status="error",
        found=f"{found}, and this machine has RDMA devices, which pin memory",
        advice="ulimit -l unlimited (docker: --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK).",
    )


def check_core_files(limit: Limit) -> Finding:
    """Whether a crash writes a large file first, which delays its detection."""
    if limit.soft != UNLIMITED and limit.soft < _CORE_BYTES:
        return Finding(name="core-files", status="ok", found=f"at most {gib(limit.soft)}")
    return Finding(
        name="core-files",
        status="warning",
        found=f"{'unlimited' if limit.soft == UNLIMITED else gib(limit.soft)}: a crash writes the rank's memory before "
        "its connections close, so its peers notice it late",
        advice="ulimit -c 0, unless you look for a crash.",
    )


def check_cores(facts: MachineFacts, job: JobSize) -> Finding:
    """Whether each rank has a core."""
    granted = min(float(facts.num_cores), facts.core_quota or float("inf"))
    found = f"{facts.num_cores} cores" + (f", and time of {facts.core_quota:g}" if facts.core_quota else "")
    if granted < job.local_world_size:
        return Finding(
            name="cores",
            status="warning",
            found=f"{found}, for {job.local_world_size} ranks",
            advice="give the job a core a rank, better several (Slurm: --cpus-per-task; Kubernetes: limits.cpu).",
        )
    if facts.core_quota is not None and facts.core_quota < facts.num_cores:
        num_threads = max(1, int(granted / job.local_world_size))
        advice = f"libraries start as many threads as there are cores: set OMP_NUM_THREADS={num_threads}."
        return Finding(name="cores", status="ok", found=found, advice=advice)
    return Finding(name="cores", status="ok", found=found)


def check_memory(facts: MachineFacts, job: JobSize) -> Finding:
    """Whether host memory is enough for the ranks and their snapshots."""
    if facts.memory_total is None:
        return Finding(
            name="memory", status="skipped", found="the kernel does not report it", advice="look at /proc/meminfo."
        )
    left = [facts.memory_total if facts.memory_available is None else facts.memory_available]
    found = f"{gib(left[0])} available of {gib(facts.memory_total)}"
    if facts.memory_limit is not None:
        left.append(max(0, facts.memory_limit - facts.memory_used))
        found += f", {gib(left[1])} left to the limit of the cgroup, {gib(facts.memory_limit)}"
    needed = int(job.local_world_size * (_HOST_BYTES_PER_RANK + 2 * _SLOTS * job.snapshot_gib * GIB_BYTES))
    if min(left) >= needed:
        return Finding(name="memory", status="ok", found=found)
    what = "their snapshots, and copies of a buddy's" if job.snapshot_gib else "their programs, without snapshots"
    return Finding(
        name="memory",
        status="warning",
        found=f"{found}; {job.local_world_size} ranks need about {gib(needed)} for {what}",
        advice="end other programs, raise the limit (Slurm: --mem=0; Kubernetes: limits.memory), or have fewer ranks.",
    )


def check_oom_kills(count: int) -> Finding:
    """Whether processes were killed here before for lack of memory."""
    if not count:
        return Finding(name="oom-kills", status="ok", found="the kernel has killed no process of this cgroup")
    return Finding(
        name="oom-kills",
        status="warning",
        found=f"the kernel has killed {count} processes of this cgroup for lack of memory",
        advice="look at `dmesg`; give the job more memory, or DataLoaders fewer workers.",
    )


def check_swap(total: int, free: int) -> Finding:
    """Whether the machine swaps, which makes ranks and agents seem lost."""
    if total == 0:
        return Finding(name="swap", status="ok", found="none")
    if free >= total / 2:
        return Finding(name="swap", status="ok", found=f"{gib(total - free)} used of {gib(total)}")
    return Finding(
        name="swap",
        status="warning",
        found=f"{gib(total - free)} used of {gib(total)}: a process that swaps may be taken for lost",
        advice="end other programs, or turn swap off: swapoff -a.",
    )


def check_overcommit(mode: int | None) -> Finding:
    """Whether the kernel refuses reservations of address space."""
    if mode is None:
        return Finding(
            name="overcommit",
            status="skipped",
            found="the kernel does not report it",
            advice="sysctl vm.overcommit_memory.",
        )
    if mode != 2:
        return Finding(name="overcommit", status="ok", found=f"vm.overcommit_memory={mode}")
    return Finding(
        name="overcommit",
        status="warning",
        found="vm.overcommit_memory=2: CUDA reserves more addresses than there is memory, and forks may be refused",
        advice="sysctl -w vm.overcommit_memory=0.",
    )


def check_clock(facts: MachineFacts, job: JobSize) -> Finding:
    """Whether a time service keeps the clock right; `peer-clock` compares it with another node's."""
    if facts.clock_is_synchronized is None:
        return Finding(
            name="clock",
            status="skipped",
            found="the kernel does not report it",
            advice="run `timedatectl` or `chronyc tracking`.",
        )
    if facts.clock_is_synchronized:
        error = "" if facts.clock_error_s is None else f", to {facts.clock_error_s:.3g} s or better"
        return Finding(name="clock", status="ok", found=f"synchronised{error}")
    return Finding(
        name="clock",
        status="warning" if job.has_other_nodes else "ok",
        found="not synchronised by a time service",
        advice="start chrony or systemd-timesyncd on the host: times of events and logs of several nodes are "
        "compared, and Slurm's munge refuses clocks that differ by minutes. Measure with --listen and --peer.",
    )
