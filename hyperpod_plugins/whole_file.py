"""Files that appear whole, and names that are durable; standard library only."""

import os
import secrets
from pathlib import Path


def write_whole_file(path: str | os.PathLike[str], text: str) -> None:
    """Write text (UTF-8) to a file, which appears, or takes the place of an older one, only when it is complete.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
    """
    target = Path(path)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make new names in a folder durable.

    Raises:
        OSError: the file system cannot do that.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
