"""A sharded checkpoint as files that other tools open, made by one process without the program that wrote it.

    export_checkpoint("step-100", "model.ckpt", "lightning")     # LightningModule.load_from_checkpoint, any Trainer

`lightning` is one file with everything that Lightning keeps, optimizers included. `consolidated` is one file for
`torch.load`, `{"model": ..., "optimizers": [...], "extra": ...}`. `dcp` is a folder for
`torch.distributed.checkpoint.load` with the model's own names. `safetensors` are the model's tensors in the layout of
Hugging Face, read and written one file at a time; `hf` adds a configuration. Each is read back and compared before it
gets its name.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hyperpod_plugins.checkpoint_names import previous_path
from hyperpod_plugins.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, ConfigError, format_list
from hyperpod_plugins.parallel.checkpoint.dcp_storage import SafeReader, tensor_entries
from hyperpod_plugins.parallel.checkpoint.files import find, incomplete_path, read_document
from hyperpod_plugins.parallel.checkpoint.safetensors import check_installed, name_of_file, plan_files, write_index
from hyperpod_plugins.parallel.checkpoint.save_load import MODEL, optimizer_prefix, read_tensors, with_prefix
from hyperpod_plugins.parallel.checkpoint.state import CURRENT, NUM_AVERAGED
from hyperpod_plugins.whole_file import sync_folder

ExportForm = Literal["lightning", "safetensors", "hf", "dcp", "consolidated"]
FORMS: tuple[ExportForm, ...] = get_args(ExportForm)
Progress = Callable[[int, int], None]
"""Called with the bytes that were read so far and in all."""
_MAX_FILE_BYTES, _BATCH_BYTES = 4 * 2**30, 2**28
_CONFIG, _VERSION = "config.json", "pytorch-lightning_version"


def export_checkpoint(
    path: str | PathLike[str],
    target: str | PathLike[str],
    form: ExportForm,
    *,
    config: str | PathLike[str] | None = None,
    prefix: str = "",
    weights_only: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint in another form. Call it in one process; it needs no process group.

    `lightning`, `consolidated` and `dcp` hold all tensors in memory; `safetensors` and `hf` those of one file of 4 GiB.

    Args:
        path: Folder of the checkpoint.
        target: File (`lightning`, `consolidated`) or folder to write.
        form: One of `FORMS`.
        config: For `hf`, a folder that holds the model's `config.json`, and perhaps a tokenizer, which are copied too.
        prefix: Only the model's tensors whose names begin so, without it: for a LightningModule that keeps its network
            as `self.model`, `"model."`. Not for `lightning`.
        weights_only: Refuse Python objects besides plain containers, numbers, strings and tensors.
        overwrite: Replace what is at `target`.
        progress: Called as tensors are read.

    Raises:
        CheckpointDamaged: `path` is not a complete checkpoint, or a checksum differs.
        CheckpointMismatch: No tensor has the prefix, or `lightning` is asked for and no Trainer wrote the checkpoint.
        CheckpointError: What was written is not what was read.
        ConfigError: The form is unknown, the target exists and is not to be replaced, or is a folder in which an export
            would not be alone, or options do not go together.
        MissingExtraError: `safetensors` is not installed.
    """
    destination, folder = Path(target), find(Path(path))
    _check(form, config, prefix)
    _check_target(destination, folder, overwrite=overwrite)
    source = _Source(folder, prefix, weights_only=weights_only, progress=progress)
    part = incomplete_path(destination)
    _remove(part)
    try:
        if form in ("lightning", "consolidated"):
            content = source.lightning() if form == "lightning" else source.consolidated()
            _write_file(content, part, weights_only=weights_only)
        elif form == "dcp":
            _write_dcp(source.model(), part)
        else:
            part.mkdir(parents=True)
            _write_safetensors(source, part)
            _copy_config(config, part)
        _replace(destination, part)
    finally:
        _remove(part)


class _Source:
    """Reads a checkpoint."""

    def __init__(self, folder: Path, prefix: str, *, weights_only: bool, progress: Progress | None) -> None:
        """Read what is not tensors."""
        self._document = read_document(folder, weights_only=weights_only)
        self._reader = SafeReader(folder)
        self._saved = tensor_entries(self._reader, folder)
        self._prefix, self._progress = prefix, progress
        self._tied = _names_in(self._document.get("tied", {}), folder)
        first = [name for name in with_prefix(self._saved, MODEL) if name.startswith(prefix)]
        named = {name: name for name in first} | {
            name: other
            for name, other in self._tied.items()
            if name.startswith(prefix) and not other.startswith(prefix)  # tied to what lies elsewhere
        }
        self.names = {name.removeprefix(prefix): f"{MODEL}{saved}" for name, saved in named.items()}
        """Names of the model's tensors, and under which they are saved."""
        if not named:
            some = format_list(with_prefix(self._saved, MODEL))
            raise CheckpointMismatch(f"no tensor of the model in {folder} begins with {prefix!r}; there are {some}.")
        self._folder = folder
        self._read_bytes, self._total_bytes = 0, 0

    def num_bytes(self, name: str) -> int:
        """Bytes of a saved tensor."""
        entry = self._saved[name]
        return entry.size.numel() * entry.properties.dtype.itemsize

    def tensors(self, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Read tensors, which are given by their names in the result and in the checkpoint."""
        found: dict[str, torch.Tensor] = {}
        sizes = {name: self.num_bytes(saved) for name, saved in names.items()}
        for batch in plan_files(sizes, _BATCH_BYTES):
            for name in batch:
                entry = self._saved[names[name]]
                found[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
            read_tensors({names[name]: found[name] for name in batch}, self._reader, None, is_alone=True)
            self._read_bytes += sum(sizes[name] for name in batch)
            if self._progress is not None:
                self._progress(self._read_bytes, self._total_bytes)
        return found

    def expect(self, *names: Mapping[str, str]) -> None:
        """Set what will be read in all, for the progress."""
        self._total_bytes = sum(self.num_bytes(saved) for each in names for saved in each.values())

    def model(self) -> dict[str, torch.Tensor]:
        """The model's tensors, tied ones under each of their names."""
        self.expect(self.names)
        return self._with_ties(self.tensors(self.names))

    def _with_ties(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tied = {name.removeprefix(self._prefix): first.removeprefix(self._prefix) for name, first in self._tied.items()}
        return tensors | {
            name: tensors[first] for name, first in tied.items() if first in tensors and name not in tensors
        }

    @property
    def _module_states(self) -> dict[str, Any]:
        """The results of the modules' `get_extra_state`, by name."""
        return with_prefix(self._document["module_states"], self._prefix)

    @property
    def _of_optimizers(self) -> list[dict[str, str]]:
        """For each optimizer, names of its tensors, and under which they are saved."""
        prefixes = map(optimizer_prefix, range(len(self._document["optimizers"])))
        return [{name: f"{each}{name}" for name in with_prefix(self._saved, each)} for each in prefixes]

    def consolidated(self) -> dict[str, Any]:
        """Everything under names."""
        self.expect(self.names, *self._of_optimizers)
        return {
            "model": self._with_ties(self.tensors(self.names)) | self._module_states,
            "optimizers": [
                {"state": self.tensors(names), **described}
                for names, described in zip(self._of_optimizers, self._document["optimizers"], strict=True)
            ],
            "extra": self._document["extra"],
        }

    def lightning(self) -> dict[str, Any]:
        """What Lightning saves with one device.

        Raises:
            CheckpointMismatch: The checkpoint lacks what a Trainer saves.
        """
        if _VERSION not in self._document["extra"]:
            raise CheckpointMismatch(
                f"{self._folder} was not written by a Trainer: it lacks what Lightning saves beside tensors, such as "
                f"{_VERSION}. Export it as consolidated, dcp or safetensors."
            )
        averaged = {name: f"{CURRENT}{name}" for name in with_prefix(self._saved, CURRENT)}
        counts = {"n_averaged": NUM_AVERAGED} if NUM_AVERAGED in self._saved else {}
        self.expect(self.names, averaged, counts, *self._of_optimizers)
        state = self._with_ties(self.tensors(self.names)) | self._module_states
        found = {**self._document["extra"], "state_dict": state}
        if described := self._document["optimizers"]:
            found["optimizer_states"] = [
                _numbered(self.tensors(names), each, self._folder)
                for names, each in zip(self._of_optimizers, described, strict=True)
            ]
        if counts:
            found["current_model_state"] = self._with_ties(self.tensors(averaged)) | self._module_states
            found["averaging_state"] = self.tensors(counts)
        return found


def _names_in(found: object, folder: Path) -> dict[str, str]:
    """Check that names of tied weights are names: the file may come from others."""
    if not isinstance(found, dict):
        raise CheckpointDamaged(f"the tied weights in {folder} are not listed by name.")
    return {str(name): str(first) for name, first in cast("dict[object, object]", found).items()}


def _numbered(tensors: Mapping[str, torch.Tensor], described: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """An optimizer's `state_dict`, which numbers the parameters in the order of its groups.

    Raises:
        CheckpointDamaged: There is state of a parameter that is in no group.
    """
    groups: Sequence[Mapping[str, Any]] = described["param_groups"]
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    named: dict[str, dict[str, Any]] = {name: dict(values) for name, values in described["values"].items() if values}
    for entry, tensor in tensors.items():
        name, _, key = entry.rpartition(".")
        named.setdefault(name, {})[key] = tensor
    if unknown := named.keys() - numbers.keys():
        raise CheckpointDamaged(
            f"{folder} has optimizer state of {format_list(sorted(unknown))}, which no group names."
        )
    state = {numbers[name]: values for name, values in named.items()}
    numbered = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    return {"state": dict(sorted(state.items())), "param_groups": numbered}


def _check(form: str, config: str | PathLike[str] | None, prefix: str) -> None:
    if form not in FORMS:
        raise ConfigError(f"{form!r} is not a form of checkpoint; allowed are {', '.join(FORMS)}.")
    if form == "hf" and (config is None or not (Path(config) / _CONFIG).is_file()):
        raise ConfigError(
            f"the form hf needs a folder with the model's {_CONFIG} (--config), but got {config}. A folder that "
            "`from_pretrained` loaded the model from has one; or call `model.config.save_pretrained(folder)`."
        )
    if form != "hf" and config is not None:
        raise ConfigError(f"only the form hf takes a configuration, but the form is {form}.")
    if prefix and form == "lightning":
        raise ConfigError(f"a Lightning checkpoint has the names of the LightningModule: leave {prefix!r} out.")
    if config is not None:
        try:
            json.loads((Path(config) / _CONFIG).read_text())
        except ValueError as error:
            raise ConfigError(f"{Path(config) / _CONFIG} is not JSON: {error}.") from None
    if form in ("safetensors", "hf"):
        check_installed()


def _check_target(destination: Path, source: Path, *, overwrite: bool) -> None:
    """Refuse what an export would delete beside an earlier export."""
    if not destination.exists():
        return
    if not overwrite:
        raise ConfigError(f"{destination} exists. Choose another name, or allow it to be replaced (--overwrite).")
    is_checkpoint = source.resolve().is_relative_to(destination.resolve())
    if is_checkpoint or (destination.is_dir() and any(each.is_dir() for each in destination.iterdir())):
        what = "is or holds the checkpoint itself" if is_checkpoint else "has folders in it, which no export makes"
        raise ConfigError(f"{destination} {what}, and would be replaced as a whole. Choose another name.")


def _replace(destination: Path, part: Path) -> None:
    """Give what was written its name; an earlier export of that name is removed only then."""
    old = previous_path(destination)
    if part.is_file() and not destination.is_dir():
        part.replace(destination)
    else:
        if destination.exists():
            _remove(old)
            destination.rename(old)
        part.rename(destination)
    sync_folder(destination.parent)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_file(content: dict[str, Any], part: Path, *, weights_only: bool) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, part)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    found = torch.load(part, map_location="cpu", weights_only=weights_only, mmap=True)
    _compare(_tensors_in(content), _tensors_in(found), part)


def _write_dcp(tensors: dict[str, torch.Tensor], part: Path) -> None:
    found = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to .* in a single process.*")
        save(dict(tensors), checkpoint_id=part, no_dist=True)
        load(found, checkpoint_id=part, no_dist=True)
    _compare(tensors, found, part)


def _write_safetensors(source: _Source, part: Path) -> None:
    from safetensors.torch import load_file, save_file

    sizes = {name: source.num_bytes(saved) for name, saved in source.names.items()}
    files = plan_files(sizes, _MAX_FILE_BYTES)
    source.expect(source.names)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file_name = name_of_file(number, len(files))
        tensors = source.tensors({name: source.names[name] for name in names})
        save_file(tensors, part / file_name, metadata={"format": "pt"})
        _compare(tensors, load_file(part / file_name), part / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    if len(files) > 1:
        write_index(part, weight_map, sum(sizes.values()))


def _copy_config(config: str | PathLike[str] | None, part: Path) -> None:
    """Copy the files of a model's folder that are not weights: configuration, tokenizer, templates."""
    if config is None:
        return
    for file in Path(config).iterdir():
        if file.is_file() and file.suffix in (".json", ".txt", ".jinja", ".model") and ".index." not in file.name:
            shutil.copyfile(file, part / file.name)


def _tensors_in(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """The tensors in nested mappings and sequences, by their place."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    return {place: found for key, each in items for place, found in _tensors_in(each, f"{name}/{key}").items()}


def _compare(written: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], where: Path) -> None:
    differ = [
        name
        for name, tensor in written.items()
        if name not in found
        or found[name].dtype != tensor.dtype
        or not torch.equal(_bytes_of(found[name]), _bytes_of(tensor))
    ]
    if differ:
        raise CheckpointError(
            f"{where} does not hold what was written to it: {format_list(differ)} differ. Check the disk, and export "
            "again; the checkpoint itself is unchanged."
        )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
