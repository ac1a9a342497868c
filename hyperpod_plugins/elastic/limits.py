"""What the operating system allows the process that serves a job's store."""

import resource

OPEN_FILES = 65536
"""Enough for 13,000 workers, each of which keeps up to five connections."""


def allow_connections() -> None:
    """Raise this process's limit of open files, 1,024 on most systems, as far as it may, up to `OPEN_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
