"""`hyperpod://FOLDER`: a sharded checkpoint that tools which open URLs read as one Lightning file.

    Module.load_from_checkpoint("hyperpod://runs/step-100.ckpt")
    Trainer(strategy="ddp").fit(module, ckpt_path="hyperpod:///shared/runs/step-100.ckpt")

Lightning opens checkpoints with fsspec, which finds this class by an entry point of the package, so that the program
imports nothing. One slash more begins an absolute path.
"""

import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from fsspec import AbstractFileSystem
from typing_extensions import override

from hyperpod_plugins.checkpoint_names import URL_SCHEME, checkpoint_at
from hyperpod_plugins.errors import CheckpointDamaged, ConfigError
from hyperpod_plugins.parallel.checkpoint.export import export_checkpoint
from hyperpod_plugins.parallel.checkpoint.files import find


class CheckpointFileSystem(AbstractFileSystem):
    """Sharded checkpoints as files, for reading. Local paths, and those of mounted file systems."""

    protocol = URL_SCHEME
    cachable = False

    @classmethod
    @override
    def _strip_protocol(cls, path: str) -> str:
        return str(checkpoint_at(path))

    @override
    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Describe a checkpoint. Its size as one file is not known before it is read.

        Raises:
            FileNotFoundError: There is no complete checkpoint.
        """
        name = self._strip_protocol(path)
        try:
            find(Path(name))
        except CheckpointDamaged as error:
            raise FileNotFoundError(str(error)) from error
        return {"name": name, "size": None, "type": "file"}

    @override
    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """List the checkpoint at a path, and nothing else."""
        found = self.info(path)
        return [found if detail else found["name"]]

    @override
    def modified(self, path: str) -> datetime:
        """When the checkpoint was completed."""
        return datetime.fromtimestamp(find(Path(self._strip_protocol(path))).stat().st_mtime, tz=UTC)

    @override
    def _open(  # pyright: ignore[reportIncompatibleMethodOverride] - an ordinary file; fsspec itself returns such ones
        self, path: str, mode: str = "rb", **kwargs: Any
    ) -> BinaryIO:
        """Open a checkpoint as the file that `hyperpod export --to lightning` writes.

        The file is written to a temporary folder (`TMPDIR`), without a name, and is gone once it is closed. Checksums
        are verified, and no Python object besides plain containers, numbers, strings and tensors is read.

        Raises:
            ConfigError: It is opened for writing.
            HyperPodError: See `export_checkpoint`.
        """
        if mode != "rb":
            raise ConfigError(
                f"{URL_SCHEME}:// is for reading (mode 'rb'), but the mode is {mode!r}. A Trainer with "
                "HyperPodStrategy writes sharded checkpoints."
            )
        with tempfile.TemporaryDirectory(prefix="hyperpod-") as folder:
            target = os.path.join(folder, "checkpoint.ckpt")
            export_checkpoint(path, target, "lightning")
            return open(target, "rb")
