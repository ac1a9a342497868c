"""Versions of Python and of packages, collective libraries, and why smddp is or is not available."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

import torch
import torch.distributed as dist

from hyperpod_plugins import env
from hyperpod_plugins.comm.smddp import SUPPORTED_INSTANCES, Smddp, unsupported_instance_reason
from hyperpod_plugins.doctor.finding import CheckStatus, Finding

Release = tuple[int, ...]
PYTHON = (3, 11)
"""Oldest Python that is supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A package and its oldest supported version, as in pyproject.toml."""

    package: str
    oldest: Release
    extra: str = ""
    """Extra, or group of dependencies, that needs the package; empty if all installations need it."""
    purpose: str = ""
    """What the package is for, if it is optional."""

    @property
    def specifier(self) -> str:
        """For pip."""
        return f"{self.package}>={dotted(self.oldest)}"


REQUIREMENTS = (
    Requirement(package="torch", oldest=(2, 10)),
    Requirement(package="numpy", oldest=(1, 26)),
    Requirement(package="filelock", oldest=(3, 12)),
    Requirement(package="lightning", oldest=(2, 6), extra="lightning", purpose="the plugins of Lightning"),
    Requirement(package="safetensors", oldest=(0, 4), extra="lightning", purpose="exports and weights in safetensors"),
    Requirement(package="accelerate", oldest=(1, 15), extra="accelerate", purpose="the plugin of Accelerate"),
    Requirement(package="pyyaml", oldest=(6,), extra="accelerate", purpose="configuration files in YAML"),
    Requirement(package="transformers", oldest=(5, 0), extra="demo", purpose="models of transformers"),
    Requirement(package="torchao", oldest=(0, 18), extra="fp8", purpose="linear layers in float8"),
    Requirement(package="transformer-engine", oldest=(2, 0), extra="te", purpose="layers of Transformer Engine"),
)
"""What pyproject.toml asks for, and this package's adapters use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFault:
    """A fault of certain versions of a package."""

    package: str
    first: Release = ()
    """First version with the fault; empty for all before `fixed`."""
    fixed: Release
    """First version without the fault."""
    status: CheckStatus
    """`ok` if it only concerns programs of a certain kind."""
    what: str
    advice: str

    def concerns(self, package: str, version: Release) -> bool:
        """Whether that version has the fault."""
        return package == self.package and self.first <= version < self.fixed


KNOWN_FAULTS = (
    KnownFault(
        package="nccl",
        fixed=(2, 19, 1),
        status="error",
        what="ncclCommAbort hangs if several threads abort at a time, as a repair does (NVIDIA/nccl issue 992)",
        advice="install a torch whose nccl is 2.26.2 or later",
    ),
    KnownFault(
        package="nccl",
        first=(2, 25, 1),
        fixed=(2, 26, 2),
        status="error",
        what="ncclCommAbort hangs (pytorch issue 149153)",
        advice="install a torch whose nccl is 2.26.2 or later",
    ),
    KnownFault(
        package="nccl",
        first=(2, 19, 1),
        fixed=(2, 25, 1),
        status="warning",
        what="older than 2.26.2, the oldest with which NVIDIA's resiliency extension restarts in process",
        advice="install a torch whose nccl is 2.26.2 or later, if repairs hang in an abort",
    ),
    KnownFault(
        package="nccl",
        first=(2, 28, 3),
        fixed=(2, 28, 9),
        status="warning",
        what="NVIDIA's resiliency extension excludes 2.28.3 to 2.28.8 for restarts in process",
        advice="install nvidia-nccl 2.28.9 or later, or a torch that brings it",
    ),
    KnownFault(
        package="torch",
        fixed=(2, 13),
        status="ok",
        what="FSDP2 has no reset_iter_state: this package's own code resets it after a repair, which was not tried "
        "with this version",
        advice="torch 2.13 or later has it",
    ),
    KnownFault(
        package="torch",
        fixed=(2, 14),
        status="ok",
        what="nccl's pre-multiplied sum gives zeros in bfloat16 (pytorch issue 190747)",
        advice="do not use set_gradient_divide_factor or ReduceOp.PREMUL_SUM with bfloat16 on nccl",
    ),
    KnownFault(
        package="transformers",
        first=(5,),
        fixed=(5, 24),
        status="ok",
        what="save_pretrained of a model that was sharded while loading deadlocks with tensor parallelism "
        "(transformers issue 48569)",
        advice="export with this package, which makes such models plain",
    ),
)
"""From the documentation of this package and the issues that each entry names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareFacts:
    """What is installed."""

    python: Release
    packages: Mapping[str, str]
    """Version of each package of `REQUIREMENTS` that is installed."""
    has_gloo: bool
    has_nccl: bool
    """Whether this build of torch has nccl, with or without a GPU."""
    smddp_reason: str | None
    """Why smddp is not available; None if it is."""
    instance_type: str | None
    variables: Mapping[str, str]
    """See `env.machine_variables`."""


def gather_software() -> SoftwareFacts:
    """Look at what is installed."""
    packages: dict[str, str] = {}
    for each in REQUIREMENTS:
        try:
            packages[each.package] = metadata.version(each.package)
        except metadata.PackageNotFoundError:
            continue
    packages["torch"] = str(torch.__version__)
    return SoftwareFacts(
        python=sys.version_info[:3],
        packages=packages,
        has_gloo=dist.is_gloo_available(),
        has_nccl=dist.is_nccl_available(),
        smddp_reason=Smddp().unsupported_reason("cuda"),
        instance_type=env.instance_type(),
        variables=env.machine_variables(),
    )


def parsed(version: str) -> Release:
    """The release of a version, such as (2, 13, 0) of `2.13.0+cpu`; empty if it does not begin with a number."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:  # as in 2.0rc1
            break
    return tuple(numbers)


def dotted(version: Release) -> str:
    """A version for a message."""
    return ".".join(map(str, version))


def check_software(facts: SoftwareFacts) -> list[Finding]:
    """All findings of this module, except nccl's, which depends on the GPUs."""
    return [
        check_python(facts.python),
        *(check_package(each, facts.packages.get(each.package)) for each in REQUIREMENTS),
        check_gloo(has_gloo=facts.has_gloo),
        check_smddp(facts.smddp_reason, facts.instance_type),
    ]


def check_python(version: Release) -> Finding:
    """Whether Python is new enough."""
    if version < PYTHON:
        return Finding(
            name="python",
            status="error",
            found=f"Python {dotted(version)}",
            advice=f"use Python {dotted(PYTHON)} or later.",
        )
    return Finding(name="python", status="ok", found=f"Python {dotted(version)}")


def check_package(requirement: Requirement, version: str | None) -> Finding:
    """Whether a package is installed, in a supported version without known faults."""
    name, install = requirement.package, f"pip install '{requirement.specifier}'"
    if version is None:
        if not requirement.extra:
            return Finding(name=name, status="error", found="not installed", advice=f"{install}.")
        return Finding(
            name=name, status="skipped", found="not installed", advice=f"only for {requirement.purpose}: {install}."
        )
    release = parsed(version)
    if release < requirement.oldest:
        is_needed = "" if not requirement.extra else f", or do without {requirement.purpose}"
        found = f"{version} is older than {dotted(requirement.oldest)}, the oldest that is supported"
        return Finding(
            name=name, status="error", found=found, advice=f"pip install -U '{requirement.specifier}'{is_needed}."
        )
    return with_faults(name, release, version)


def with_faults(package: str, version: Release, text: str) -> Finding:
    """A finding of the faults of one version: the worst status, and all that is known."""
    faults = [each for each in KNOWN_FAULTS if each.concerns(package, version)]
    statuses = {each.status for each in faults}
    status: CheckStatus = "error" if "error" in statuses else "warning" if "warning" in statuses else "ok"
    return Finding(
        name=package,
        status=status,
        found="; ".join((text, *(each.what for each in faults))),
        advice="; ".join(each.advice for each in faults) + ("." if faults else ""),
    )


def check_gloo(*, has_gloo: bool) -> Finding:
    """Whether torch has gloo, which carries CPU tensors, also beside nccl."""
    if has_gloo:
        return Finding(name="gloo", status="ok", found="this build of torch has gloo")
    return Finding(
        name="gloo",
        status="error",
        found="this build of torch has no gloo, which the vote and all CPU tensors need, also beside nccl",
        advice="install torch from PyPI or pytorch.org, or build it with USE_GLOO=1.",
    )


def check_smddp(reason: str | None, instance_type: str | None) -> Finding:
    """Whether smddp is available; a warning only on instances that it is made for."""
    if reason is None:
        return Finding(
            name="smddp",
            status="ok",
            found="available; used with CommOptions(transport='smddp') only, never by default",
        )
    if unsupported_instance_reason(instance_type) is None:
        return Finding(
            name="smddp",
            status="warning",
            found=f"not available on this {instance_type}, for which it is made: {reason}",
            advice="use an image of SageMaker that contains it, or stay with nccl, which is the default.",
        )
    return Finding(
        name="smddp",
        status="skipped",
        found=f"not available: {reason}",
        advice=f"nothing: it is never used by default. It needs instances of type {' or '.join(SUPPORTED_INSTANCES)}.",
    )


def check_nccl(facts: SoftwareFacts, version: Release | None, *, num_gpus: int, local_world_size: int) -> Finding:
    """Whether nccl is there and its abort, by which a repair ends collectives, can be relied on.

    Args:
        facts: what is installed.
        version: of nccl; None if it is not known.
        num_gpus: GPUs that torch finds.
        local_world_size: ranks on this machine.
    """
    if not facts.has_nccl:
        status: CheckStatus = "error" if num_gpus else "skipped"
        found = "this build of torch has no nccl" + (f", and the machine has {num_gpus} GPUs" if num_gpus else "")
        return Finding(name="nccl", status=status, found=found, advice="install a build of torch with CUDA for GPUs.")
    if version is None:
        return Finding(
            name="nccl",
            status="skipped" if not num_gpus else "warning",
            found="torch has nccl, but its version cannot be read"
            + ("" if num_gpus else ", as there is no usable GPU"),
            advice="run this command on a node with GPUs; repairs need 2.26.2 or later.",
        )
    handling = facts.variables.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    if handling not in ("", "0"):
        return Finding(
            name="nccl",
            status="error",
            found=f"{dotted(version)}, and TORCH_NCCL_ASYNC_ERROR_HANDLING={handling}: torch's watchdog ends the "
            "process at a fault, before it can recover",
            advice="unset the variable; hyperpodrun sets it to 0.",
        )
    return with_faults("nccl", version, f"{dotted(version)}, {local_world_size} ranks on {num_gpus} GPUs")
