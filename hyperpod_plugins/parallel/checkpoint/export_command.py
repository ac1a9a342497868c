"""`hyperpod export`: a sharded checkpoint as files that other tools open."""

import argparse
import importlib.util
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from hyperpod_plugins.parallel.checkpoint.export import FORMS, Progress, export_checkpoint

_SUFFIXES = {"lightning": ".ckpt", "consolidated": ".pt"}


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hyperpod export`."""
    parser.add_argument("checkpoint", help="folder of the checkpoint")
    parser.add_argument(
        "target", nargs="?", help="file or folder to write (default: the checkpoint's name and the form)"
    )
    parser.add_argument(
        "--to",
        choices=FORMS,
        required=True,
        help="lightning: a file for load_from_checkpoint and any Trainer. safetensors: the model's weights. hf: these "
        "and a configuration, for from_pretrained. dcp: the model's weights for torch.distributed.checkpoint. "
        "consolidated: everything in one file for torch.load",
    )
    parser.add_argument("--config", help="for hf: a folder with the model's config.json, and perhaps a tokenizer")
    parser.add_argument("--prefix", default="", help="prefix to remove from the model's names, such as model.")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file or folder")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="unpickle Python objects in the checkpoint, which can run any code: only for checkpoints of your own",
    )


def run_export(arguments: argparse.Namespace) -> list[str]:
    """Export a checkpoint, and return what to print.

    Raises:
        HyperPodError: see `export_checkpoint`.
    """
    source = Path(arguments.checkpoint)
    suffix = _SUFFIXES.get(arguments.to, "")
    default = source.with_name(f"{source.name.removesuffix('.ckpt')}-{arguments.to}{suffix}")
    target = Path(arguments.target or default)
    with _progress() as progress:
        export_checkpoint(
            source,
            target,
            arguments.to,
            config=arguments.config,
            prefix=arguments.prefix,
            weights_only=not arguments.trust,
            overwrite=arguments.overwrite,
            progress=progress,
        )
    files = [file for file in target.rglob("*") if file.is_file()] if target.is_dir() else [target]
    size_mb = sum(file.stat().st_size for file in files) / 1e6
    return [f"{target}: {size_mb:,.1f} MB in {len(files)} file{'s' if len(files) > 1 else ''}, read back and equal"]


@contextmanager
def _progress() -> Generator[Progress | None]:
    """A bar in a terminal, if rich is installed; nothing elsewhere."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = "reading", BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("reading")
        yield lambda done, total: bars.update(task, completed=done, total=total)
