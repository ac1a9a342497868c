"""The peers' packages in an environment of their own, so that ours stays clean.

    python -m benchmarks.recovery_jobs.peers        # makes .venv-peers, and says what works

It sees the packages of the environment that makes it, through a `.pth` file: torch is not installed twice, and torch's
CPU build is not replaced by gigabytes of CUDA.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.recovery_jobs.job import ROOT

FOLDER = ROOT / ".venv-peers"
PYTHON = FOLDER / "bin" / "python"
REQUIREMENTS = ROOT / "benchmarks" / "requirements-recovery.txt"
PACKAGES = ("torchft", "nvidia_resiliency_ext")


def make_environment() -> None:
    """Make it, or renew what is installed in it; each package by itself, so that one can fail alone.

    Raises:
        CalledProcessError: the environment itself cannot be made.
    """
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    (FOLDER / ".gitignore").write_text("*\n")
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    answer = subprocess.run([PYTHON, "-c", query], check=True, capture_output=True, text=True)
    (Path(answer.stdout.strip()) / "launcher.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    for requirement in filter(None, REQUIREMENTS.read_text().splitlines()):
        if not requirement.startswith("#"):
            subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), requirement], check=False)


def why_not(package: str) -> str | None:
    """Why a peer cannot be run, or None."""
    if not PYTHON.exists():
        return f"{FOLDER.name} is not there: run `python -m benchmarks.recovery_jobs.peers`"
    code = f"import {package}" + ("; from torchft import Manager" if package == "torchft" else ".inprocess")
    environ = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PATH": "/usr/bin:/bin"}
    tried = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, env=environ, timeout=120)
    return None if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["it cannot be imported"])[-1]


if __name__ == "__main__":
    make_environment()
    for name in PACKAGES:
        print(f"{name}: {why_not(name) or 'works'}")
