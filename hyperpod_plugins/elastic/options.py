"""What a user may choose about an agent."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing import LogsSpecs

from hyperpod_plugins.elastic.crew import Program
from hyperpod_plugins.elastic.restarts import RestartPolicy
from hyperpod_plugins.elastic.zygote_process import ZygoteOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """What torch's `WorkerSpec` does not hold."""

    program: Program
    """What every worker runs."""
    zygote: ZygoteOptions
    """How workers are forked."""
    restarts: RestartPolicy
    """How often they are replaced."""
    logs: LogsSpecs
    """Where their output goes."""
    environ: Mapping[str, str]
    """Inherited by every worker."""
    ending_signals: tuple[signal.Signals, ...]
    """Signals that end the job; each is passed on to the workers first."""
    shutdown_timeout_s: float = 30.0
    """From that signal to SIGKILL."""
    monitor_interval_s: float = 0.1
    """How often the rendezvous is asked for newcomers; the death of a worker is noticed at once."""
    log_line_prefix_template: str | None = None
    """Put before each line copied to the console, with ${role_name}, ${rank} and ${local_rank}."""
    stdout_filters: tuple[str, ...] = ()
    """Lines of copied output with one of these also go to a file of their own."""
    stderr_filters: tuple[str, ...] = ()
    """The same for copied error output."""
    virtual_local_rank: bool = False
    """Show each worker its own GPU alone, as number 0."""
