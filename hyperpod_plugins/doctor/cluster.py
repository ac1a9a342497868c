"""What Slurm and Kubernetes tell a job, and whether they warn it before its node is taken away."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hyperpod_plugins import env
from hyperpod_plugins.doctor.finding import MIB_BYTES, CheckStatus, Finding, file_text, output_of

_SLURM_S = 10.0
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_DEFAULT_SHM_BYTES = 64 * MIB_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """What schedulers tell."""

    variables: Mapping[str, str]
    """See `env.machine_variables`."""
    slurm_version: str = ""
    """What `scontrol --version` prints; empty if it is not installed."""
    slurm_job: Mapping[str, str]
    """Fields of `scontrol show job`; empty outside of a job."""
    slurm_failure: str = ""
    """Why there are none in a job."""
    script: str = ""
    """The batch script, if Slurm tells it."""
    has_service_account: bool = False
    """Whether a pod's token is there."""
    namespace: str = ""
    """Namespace of the pod."""


def gather_cluster() -> ClusterFacts:
    """Ask Slurm, if it is installed, and look for traces of Kubernetes."""
    variables, version = env.machine_variables(), output_of(["scontrol", "--version"], _SLURM_S)
    job, failure, script = dict[str, str](), "", ""
    number = variables.get("SLURM_JOB_ID", "")
    if version.is_installed and number.isascii() and number.isdigit():
        answer = output_of(["scontrol", "-o", "show", "job", number], _SLURM_S)
        job, failure = parse_job(answer.text), answer.failure
        if not failure:
            written = output_of(["scontrol", "write", "batch_script", number, "-"], _SLURM_S)
            script = "" if written.failure else written.text
    return ClusterFacts(
        variables=variables,
        slurm_version="" if version.failure else version.text.strip()[:80],
        slurm_job=job,
        slurm_failure=failure,
        script=script,
        has_service_account=(_SERVICE_ACCOUNT / "token").exists(),
        namespace=file_text(_SERVICE_ACCOUNT / "namespace").strip()[:253],
    )


def parse_job(text: str) -> dict[str, str]:
    """Fields of `scontrol -o show job`, which prints NAME=VALUE on one line."""
    return dict(re.findall(r"(?:^|\s)([A-Z][A-Za-z:/]*)=(\S*)", text[:10_000]))


def signal_of(script: str) -> str:
    """The value of `--signal` in the `#SBATCH` lines of a script; empty if it has none."""
    for line in script.splitlines():
        found = re.match(r"#SBATCH\s+(?:.*\s)?--signal[=\s]([A-Za-z0-9:@]+)", line)
        if found:
            return found[1]
    return ""


def check_cluster(facts: ClusterFacts, shm_total: int | None, memory_limit: int | None) -> list[Finding]:
    """All findings of this module; the sizes are of `MachineFacts`."""
    return [check_slurm(facts), check_slurm_notice(facts), check_kubernetes(facts, shm_total, memory_limit)]


def check_slurm(facts: ClusterFacts) -> Finding:
    """Whether this is a job of Slurm, and one that starts again after its node is lost."""
    number = facts.variables.get("SLURM_JOB_ID", "")
    if not number:
        found = facts.slurm_version or "scontrol is not installed or does not answer"
        advice = "if the job will run under Slurm, run this command in one: srun hyperpod doctor."
        return Finding(name="slurm", status="skipped", found=f"not in a job of Slurm ({found})", advice=advice)
    nodes = facts.variables.get("SLURM_JOB_NUM_NODES", "?")
    found = f"job {number} on {nodes} nodes ({facts.slurm_version or 'version unknown'})"
    if facts.slurm_failure:
        return Finding(
            name="slurm",
            status="warning",
            found=f"{found}; {facts.slurm_failure}",
            advice="see whether slurmctld answers: scontrol ping.",
        )
    if facts.slurm_job.get("Requeue") == "0":
        return Finding(
            name="slurm",
            status="warning",
            found=f"{found}; it will not be requeued when its node fails",
            advice="submit it with --requeue, as examples/slurm/elastic.sbatch does.",
        )
    if nodes.isdigit() and int(nodes) > 1:
        return Finding(
            name="slurm",
            status="ok",
            found=found,
            advice="Slurm returns no node to an allocation: an array whose tasks are one node each can replace them.",
        )
    return Finding(name="slurm", status="ok", found=found)


def check_slurm_notice(facts: ClusterFacts) -> Finding:
    """Whether Slurm signals the job before its time is over."""
    name, advice = (
        "slurm-notice",
        "submit it with --signal=B:USR1@120, and a script that passes the signal to hyperpodrun.",
    )
    if not facts.variables.get("SLURM_JOB_ID"):
        return Finding(name=name, status="skipped", found="not in a job of Slurm", advice="see `slurm`.")
    limit = facts.slurm_job.get("TimeLimit", "unknown")
    asked = signal_of(facts.script)
    if asked:
        return Finding(name=name, status="ok", found=f"--signal={asked} in the batch script; time limit {limit}")
    if limit == "UNLIMITED":
        return Finding(name=name, status="ok", found="no time limit")
    if not facts.script:
        found = f"time limit {limit}; Slurm does not show the batch script, so a --signal in it cannot be seen"
        return Finding(name=name, status="skipped", found=found, advice=advice)
    return Finding(
        name=name,
        status="warning",
        found=f"time limit {limit}, and no --signal in the batch script: the node ends in the middle of a step",
        advice=advice,
    )


def check_kubernetes(facts: ClusterFacts, shm_total: int | None, memory_limit: int | None) -> Finding:
    """Whether this is a pod, with enough shared memory and a limit of memory."""
    if not (facts.variables.get("KUBERNETES_SERVICE_HOST") or facts.has_service_account):
        advice = "if the job will run in a cluster of Kubernetes, run this command in a pod of it."
        return Finding(name="kubernetes", status="skipped", found="not in a pod of Kubernetes", advice=advice)
    found = "a pod" + (f" of the namespace {facts.namespace}" if facts.namespace else "")
    remarks: list[tuple[CheckStatus, str, str]] = []
    if shm_total is not None and shm_total <= _DEFAULT_SHM_BYTES:
        advice = "mount an emptyDir of medium Memory at /dev/shm, and count it in limits.memory"
        remarks.append(("warning", "/dev/shm has the default size of 64 MiB", advice))
    if memory_limit is None:
        advice = "set limits.memory, equal to requests.memory: pods without are evicted first"
        remarks.append(("warning", "no limit of memory", advice))
    if facts.has_service_account:
        advice = "automountServiceAccountToken: false, as training needs no token"
        remarks.append(("ok", "with a token of the service account", advice))
    return Finding(
        name="kubernetes",
        status="warning" if any(status == "warning" for status, _, _ in remarks) else "ok",
        found="; ".join((found, *(what for _, what, _ in remarks))),
        advice="; ".join(advice for _, _, advice in remarks) + ("." if remarks else ""),
    )
