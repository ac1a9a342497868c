"""Environment variables of a process and its job. Only this file reads them; explicit arguments take precedence."""

import os
import re
import tempfile
from collections.abc import Generator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hyperpod_plugins.errors import ConfigError

SNAPSHOTS_VARIABLE = "HYPERPOD_SNAPSHOTS"
"""Folder in shared memory for the snapshots of a node's workers; set by agents."""
_SHARED_MEMORY = Path("/dev/shm")
_OF_ACCELERATE = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
_OF_MACHINE = (
    "GLOO_SOCKET_IFNAME",
    "KUBERNETES_SERVICE_HOST",
    "NCCL_SOCKET_IFNAME",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnv:
    """Ranks and world sizes of this process, from torchrun's variables, or Slurm's as a fallback."""

    global_rank: int = 0
    """Rank in the world, in `0 .. world_size - 1`."""
    world_size: int = 1
    """Number of worker processes in the job."""
    local_rank: int = 0
    """Rank on this node, and index of this process's accelerator."""
    local_world_size: int = 1
    """Number of worker processes on this node."""
    node_rank: int = 0
    """Index of this node."""

    def __post_init__(self) -> None:
        """Check that the ranks lie inside their worlds."""
        if not 0 <= self.global_rank < self.world_size:
            raise ConfigError(
                f"RANK={self.global_rank} does not lie in a world of WORLD_SIZE={self.world_size}. "
                "Start the program with torchrun, or unset both variables for a single process."
            )
        if not 0 <= self.local_rank < self.local_world_size:
            raise ConfigError(
                f"LOCAL_RANK={self.local_rank} does not lie on a node of LOCAL_WORLD_SIZE={self.local_world_size}."
            )

    @property
    def num_nodes(self) -> int:
        """Number of nodes, assuming that each has as many workers as this one."""
        return max(1, self.world_size // self.local_world_size)

    @property
    def is_distributed(self) -> bool:
        """Whether a launcher started more than one process."""
        return self.world_size > 1

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read torchrun's variables, or Slurm's where those are absent.

        Raises:
            ConfigError: a variable is not a number, or a rank lies outside its world.
        """
        if "RANK" not in environ and "SLURM_PROCID" in environ and "SLURM_STEP_NODELIST" in environ:
            return cls(
                global_rank=_number(environ, "SLURM_PROCID", 0),
                world_size=_number(environ, "SLURM_NTASKS", 1),
                local_rank=_number(environ, "SLURM_LOCALID", 0),
                local_world_size=_slurm_tasks_here(environ),
                node_rank=_number(environ, "SLURM_NODEID", 0),
            )
        world_size = _number(environ, "WORLD_SIZE", 1)
        local_rank = _number(environ, "LOCAL_RANK", 0)
        return cls(
            global_rank=_number(environ, "RANK", 0),
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE", world_size),
            node_rank=_number(environ, "GROUP_RANK", _number(environ, "NODE_RANK", 0)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnv:
    """What a worker is told about its job and job store, by `hyperpodrun` or by the rendezvous `hyperpod`."""

    run_id: str
    """Name of the job."""
    store_host: str = ""
    """Host of the store, which an agent serves, never a worker; empty if the store is in etcd."""
    store_port: int = 0
    """Port of the store."""
    etcd_url: str = ""
    """`etcd://HOST:PORT[,HOST:PORT...]/NAME` if the store is in etcd, else empty."""
    incarnation: int = 0
    """Number of this process in its worker slot: 0 for the first, higher for a joiner."""
    restart_count: int = 0
    """How often the agents have restarted all workers."""
    agent_pid: int = 0
    """Pid of torchrun's agent, with which this process exits; 0 if `hyperpodrun` takes care of that."""
    resume_from: str = ""
    """Checkpoint to resume from after a restart of all workers; empty to follow the program."""
    shard_degree: int = 0
    """Shard degree requested of the running job; 0 to follow the program."""
    tensor_degree: int = 0
    """Tensor-parallel degree requested with it."""

    @property
    def is_joining(self) -> bool:
        """Whether this process joins a job that may already be running."""
        return self.incarnation > 0

    def to_environ(self) -> dict[str, str]:
        """The environment variables to give to the worker."""
        return {
            "HYPERPOD_STORE": self.etcd_url or f"{self.store_host}:{self.store_port}",
            "HYPERPOD_RUN_ID": self.run_id,
            "HYPERPOD_INCARNATION": str(self.incarnation),
            "HYPERPOD_RESUME_FROM": self.resume_from,
            "HYPERPOD_DEGREES": f"{self.shard_degree}x{self.tensor_degree}" if self.shard_degree else "",
            **({"HYPERPOD_AGENT_PID": str(self.agent_pid)} if self.agent_pid else {}),
        }

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Self | None:
        """Read the variables; None if no agent of ours started this process.

        Raises:
            ConfigError: a variable is malformed.
        """
        address = environ.get("HYPERPOD_STORE")
        if address is None:
            return None
        is_etcd = address.startswith("etcd://")
        host, _, port = ("", "", "0") if is_etcd else address.rpartition(":")
        if not (is_etcd or host) or not port.isdecimal():
            raise ConfigError(
                f"HYPERPOD_STORE={address!r} must be HOST:PORT or etcd://HOST:PORT. Only hyperpodrun should set it."
            )
        shard, tensor = _degrees(environ)
        return cls(
            store_host=host,
            store_port=int(port),
            etcd_url=address if is_etcd else "",
            run_id=environ.get("HYPERPOD_RUN_ID", ""),
            incarnation=_number(environ, "HYPERPOD_INCARNATION", 0),
            restart_count=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
            agent_pid=_number(environ, "HYPERPOD_AGENT_PID", 0),
            resume_from=environ.get("HYPERPOD_RESUME_FROM", ""),
            shard_degree=shard,
            tensor_degree=tensor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalEnv:
    """What `hyperpod rehearse` tells its workers."""

    folder: str
    """Folder for the workers' digests and the record of injected faults."""
    num_steps: int
    """Number of steps after which the first fit or loop of the program ends."""
    faults: str
    """Fault schedule; see `recovery.rehearsal_jobs.parse_schedule`."""

    def to_environ(self) -> dict[str, str]:
        """The environment variables to give to the workers."""
        return {
            "HYPERPOD_REHEARSAL": self.folder,
            "HYPERPOD_REHEARSAL_STEPS": str(self.num_steps),
            "HYPERPOD_REHEARSAL_FAULTS": self.faults,
        }

    def merged_environ(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """`environ` with those variables, for the launcher of a job."""
        return {**environ, **self.to_environ()}

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Self | None:
        """Read the variables; None outside a rehearsal."""
        folder = environ.get("HYPERPOD_REHEARSAL")
        if not folder:
            return None
        num_steps = _number(environ, "HYPERPOD_REHEARSAL_STEPS", 0)
        return cls(folder=folder, num_steps=num_steps, faults=environ.get("HYPERPOD_REHEARSAL_FAULTS", ""))


@contextmanager
def loading_in_this_thread() -> Generator[None]:
    """Make transformers load models in the calling thread, instead of a pool of threads, inside the context."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    former = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if former is not None:
            os.environ[name] = former


def run_id(environ: Mapping[str, str] = os.environ) -> str:
    """The job's `--rdzv-id`, the same in all of its rounds; empty if no launcher started this process."""
    return environ.get("TORCHELASTIC_RUN_ID", "")


def config_path(environ: Mapping[str, str] = os.environ) -> str | None:
    """Path in `HYPERPOD_CONFIG` (a file of SMP JSON; for Accelerate also of its YAML), or None."""
    return environ.get("HYPERPOD_CONFIG") or None


def accelerate_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that `accelerate launch` sets for Accelerate's own plugins."""
    return {name: value for name, value in environ.items() if name.startswith(_OF_ACCELERATE)}


def choose_cpu(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have Accelerate use no GPU in this process, as `accelerate launch --cpu` does."""
    environ["ACCELERATE_USE_CPU"] = "true"


def runtime_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """This user's folder for files that running processes share: in `XDG_RUNTIME_DIR`, else in /tmp."""
    given = environ.get("XDG_RUNTIME_DIR")
    return Path(given, "hyperpod") if given else Path(tempfile.gettempdir(), f"hyperpod-{os.getuid()}")


def events_folder(environ: Mapping[str, str] = os.environ) -> str | None:
    """Folder for each process's events, from `HYPERPOD_EVENTS`, or None."""
    return environ.get("HYPERPOD_EVENTS") or None


def snapshot_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Folder in shared memory for snapshots that outlive this process, from `HYPERPOD_SNAPSHOTS`, or None."""
    given = environ.get(SNAPSHOTS_VARIABLE)
    return Path(given) if given else None


def shared_memory_folder() -> Path | None:
    """This user's folder in shared memory; None if the machine has no /dev/shm."""
    return Path(_SHARED_MEMORY, f"hyperpod-{os.getuid()}") if _SHARED_MEMORY.is_dir() else None


def instance_type(environ: Mapping[str, str] = os.environ) -> str | None:
    """Cloud instance type: the user's setting, else SageMaker's, or None."""
    return environ.get("HYPERPOD_INSTANCE_TYPE") or environ.get("SM_CURRENT_INSTANCE_TYPE") or None


def machine_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables of schedulers and of collective libraries that `hyperpod doctor` examines, as far as they are set."""
    return {name: environ[name] for name in _OF_MACHINE if name in environ}


def _slurm_tasks_here(environ: Mapping[str, str]) -> int:
    """Tasks on this node, from `SLURM_TASKS_PER_NODE`: `4(x2),3` means two nodes of four tasks and one of three."""
    nodes: list[int] = []
    for part in environ.get("SLURM_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found:
            nodes += [int(found[1])] * int(found[2] or 1)
    node = _number(environ, "SLURM_NODEID", 0)
    return nodes[node] if node < len(nodes) else _number(environ, "SLURM_NTASKS_PER_NODE", 1)


def _degrees(environ: Mapping[str, str]) -> tuple[int, int]:
    text = environ.get("HYPERPOD_DEGREES", "")
    shard, _, tensor = text.partition("x")
    if text and not (shard.isdecimal() and tensor.isdecimal()):
        raise ConfigError(f"HYPERPOD_DEGREES={text!r} must be two numbers, such as 4x1. Only agents should set it.")
    return (int(shard), int(tensor)) if text else (0, 0)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment variable {name} must be a whole number, but is {text!r}") from None
