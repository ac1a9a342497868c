"""Names of a checkpoint and of its job; the packages `parallel` and `elastic` both need them.

When a checkpoint is saved again, the existing folder is first renamed, `step_100` to `.step_100.old`, and the new one
then gets its name. If a process is killed in between, the checkpoint lies under the other name until the next save.

A checkpoint says in `job.json` which job has written it, by the job's `--rdzv-id`: a restart of all processes accepts
no other.
"""

import os
from os import PathLike
from pathlib import Path

JOB = "job.json"
"""File of a checkpoint that names its job: `{"run_id": ...}`."""
URL_SCHEME = "hyperpod"
"""Of URLs of checkpoints, `hyperpod://FOLDER`; see `parallel/checkpoint/filesystem.py`."""


def checkpoint_at(path_or_url: str | PathLike[str]) -> Path:
    """Return the folder of a checkpoint that is given by its path or its URL."""
    return Path(os.fspath(path_or_url).removeprefix(f"{URL_SCHEME}://"))


def previous_path(path: Path) -> Path:
    """Return the name that a checkpoint has while a newer one takes its name."""
    return path.with_name(f".{path.name}.old")


def present_path(path: Path) -> Path:
    """Return where the checkpoint of this name lies; `path` itself if there is none."""
    is_previous = not os.path.exists(path) and os.path.isdir(previous_path(path))  # these raise no OSError
    return previous_path(path) if is_previous else path
