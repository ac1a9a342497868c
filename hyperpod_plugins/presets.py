"""The presets: configuration files of Accelerate, shipped with the package. Nothing of Accelerate is imported here."""

from pathlib import Path

from hyperpod_plugins.errors import ConfigError

FOLDER = Path(__file__).parent / "accelerate" / "presets"


def preset_names() -> tuple[str, ...]:
    """All presets, in alphabetical order."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def preset_path(name: str) -> Path:
    """The file of a preset, for `accelerate launch --config_file`.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in preset_names():
        raise ConfigError(f"there is no preset {name!r}. There are: {', '.join(preset_names())}.")
    return FOLDER / f"{name}.yaml"


def preset_summary(name: str) -> str:
    """What a preset is for: the first line of its file."""
    return preset_path(name).read_text().splitlines()[0].removeprefix("# ")


def write_preset(name: str, path: str | Path | None = None) -> Path:
    """Copy a preset to `path`, a file or a folder (default: the working directory), to be changed there.

    Raises:
        ConfigError: there is no such preset, or a file where it would be written.
    """
    source = preset_path(name)
    target = Path.cwd() if path is None else Path(path)
    target = target / source.name if target.is_dir() else target
    try:
        with target.open("x") as file:
            file.write(source.read_text())
    except OSError as error:
        raise ConfigError(
            f"the preset {name!r} cannot be written to {str(target)!r} ({error.strerror}). Give the path of a file "
            "that does not exist yet, in a folder that does."
        ) from None
    return target
