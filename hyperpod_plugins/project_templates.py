"""Small projects to begin with: a program, its configuration, files for Slurm and Kubernetes, a test that kills a rank.

The files are in `templates/`; those of programs end in `.txt` there, because they are not modules of this package.
"""

import re
from pathlib import Path

from hyperpod_plugins.errors import ConfigError, format_list

PROJECT_KINDS = {
    "lightning": "a LightningModule and a Trainer",
    "accelerate": "a loop with Accelerate",
    "hf": "a causal language model of transformers, with Accelerate",
    "plain": "a loop in plain torch",
}
"""What the program of each kind of project is."""
_FOLDER = Path(__file__).parent / "templates"
_COMMON = {
    "config.toml": "config.toml",
    "README.md": "README.md.txt",
    ".gitignore": "gitignore.txt",
    "tests/test_recovery.py": "test_recovery.py.txt",
    "slurm/job.sbatch": "job.sbatch",
    "kubernetes/jobset.yaml": "jobset.yaml",
}
"""Files of every project, and from which template each is made."""
_NAME = "my-job"
"""Stands for the name of the job in the templates."""
_MOST_LETTERS = 40
"""Of a job's name: Kubernetes makes longer names of it, of 63 characters at most."""


def write_project(kind: str, folder: str | Path) -> list[Path]:
    """Write a project, and return the paths of its files; the name of its job is made from that of the folder.

    Args:
        kind: one of `PROJECT_KINDS`.
        folder: created if it does not exist; files that it holds already are not changed.

    Raises:
        ConfigError: there is no such kind; a file of the project exists already, so that nothing is written; or one
            cannot be written.
    """
    if kind not in PROJECT_KINDS:
        raise ConfigError(f"there is no template {kind!r}. Available: {', '.join(PROJECT_KINDS)}.")
    root = Path(folder)
    templates = {
        root / name: _FOLDER / template for name, template in {"train.py": f"{kind}.py.txt", **_COMMON}.items()
    }
    existing = [str(path) for path in templates if path.exists()]
    if existing:
        exist = "exists" if len(existing) == 1 else "exist"
        raise ConfigError(f"{format_list(existing)} {exist} already. Give a folder that does not exist yet.")
    for path, template in templates.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x") as file:
                file.write(template.read_text().replace(_NAME, job_name(root)))
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be written ({error.strerror}). Give another folder.") from None
    return [*templates]


def job_name(folder: Path) -> str:
    """The name of a folder as Kubernetes allows it: lower-case letters, digits and hyphens, a letter first."""
    name = re.sub("[^a-z0-9]+", "-", folder.resolve().name.lower())[:_MOST_LETTERS].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".strip("-")
