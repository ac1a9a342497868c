"""Presets: configuration files for Accelerate, shipped with the package. This module does not import Accelerate."""

from pathlib import Path

from hyperpod_plugins.errors import ConfigError

FOLDER = Path(__file__).parent / "accelerate" / "presets"


def preset_names() -> tuple[str, ...]:
    """Names of all presets, in alphabetical order."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def preset_path(name: str) -> Path:
    """Path of a preset's file, for `accelerate launch --config_file`.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in preset_names():
        raise ConfigError(f"there is no preset {name!r}. Available: {', '.join(preset_names())}.")
    return FOLDER / f"{name}.yaml"


def preset_summary(name: str) -> str:
    """Purpose of a preset: the first line of its file."""
    return preset_path(name).read_text().splitlines()[0].removeprefix("# ")


def write_preset(name: str, path: str | Path | None = None) -> Path:
    """Copy a preset to `path`, a file or a folder (default: the working directory), and return the new path.

    Raises:
        ConfigError: there is no such preset, or the file exists already or cannot be written.
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
