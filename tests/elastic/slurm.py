"""Debian's Slurm on this machine: munged, slurmctld, and a slurmd for each of some nodes that are all this machine."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path

from recovery.faults import left_processes

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "sinfo", "scancel")
CONF = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/linear
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=1
KillWait=10
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# `cred_expire` is also how long a task that is requeued waits at least; `ReturnToService=1` leaves a node that was set
# down where it is until somebody resumes it.


def why_not():
    """Why there can be no cluster here, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install slurmctld slurmd slurm-client munge)"
    return None if os.geteuid() == 0 else "slurmd starts jobs only as root"


def _version():
    said = subprocess.run(["slurmd", "-V"], env={"PATH": PATH}, capture_output=True, text=True, timeout=30, check=True)
    return tuple(int(part) for part in said.stdout.split()[-1].split(".")[:2])


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in sockets]


class Cluster:
    """Its nodes are n1, n2, ... Everything that it starts carries a mark in its environment."""

    def __init__(self, folder: Path, num_nodes: int):
        self.folder = folder
        self.names = [f"n{number + 1}" for number in range(num_nodes)]
        self.mark = f"slurm-{uuid.uuid4().hex}"
        self.port, *ports = _free_ports(2 + num_nodes)
        host = socket.gethostname()
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 State=UNKNOWN"
            for name, port in zip(self.names, ports[1:], strict=True)
        ]
        (folder / "state").mkdir()
        for name in self.names:
            (folder / name).mkdir()
        conf = folder / "slurm.conf"
        conf.write_text(CONF.format(folder=folder, ports=ports) + "\n".join(lines) + "\n")
        self.environ = {**os.environ, "PATH": PATH, "SLURM_CONF": str(conf), "SLURM_TEST": self.mark}
        self.daemons = []

    def start(self):
        if _version() >= (23, 11):  # earlier ones need no control groups for these plugins, and have no such word
            (self.folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(32))
        key.chmod(0o600)
        files = [f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files)
        self.await_(lambda: (self.folder / "munge.socket").exists(), 20)
        self._daemon("slurmctld", "-D", "-f", self.environ["SLURM_CONF"])
        for name in self.names:
            self._daemon("slurmd", "-D", "-N", name, "-f", self.environ["SLURM_CONF"])
        self.await_(lambda: self.states() == dict.fromkeys(self.names, "idle"), 30)

    def _daemon(self, *command):
        with (self.folder / f"{command[0]}-{len(self.daemons)}.output").open("w") as output:
            self.daemons.append(
                subprocess.Popen(command, env=self.environ, cwd=self.folder, stdout=output, stderr=subprocess.STDOUT)
            )

    def stop(self):
        """End all that runs here; whose end it takes by SIGKILL is not returned, whatever else is left is."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.call("scancel", "--user=root")
            self.await_(lambda: not self.queue(), 15)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
        left = left_processes(self.mark, patience_s=5.0)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in self.daemons:
            daemon.wait(10)
        return left

    def call(self, *command, environ=None, cwd=None):
        """What one of Slurm's commands says."""
        environ = {**self.environ, **(environ or {})}
        done = subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self.output()}"
        return done.stdout.strip()

    def states(self):
        """Of each node."""
        with contextlib.suppress(AssertionError):  # the controller is not there yet
            return dict(line.split() for line in self.call("sinfo", "-h", "-N", "-o", "%N %t").splitlines())
        return {}

    def queue(self):
        """State and node of each task of an array that is pending or running, by its number."""
        lines = self.call("squeue", "-h", "-r", "-o", "%K %T %N").splitlines()
        return {int(words[0]): (words[1], *words[2:]) for words in map(str.split, lines)}

    def await_(self, condition, patience_s):
        until_s = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < until_s, f"in vain for {patience_s} s\n{self.output()}"
            time.sleep(0.2)

    def output(self):
        """Last words of the daemons."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.output"))
