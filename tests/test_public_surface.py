"""The public names, frozen: adding or removing one shows in a diff of public_surface.json.

After a change that is meant: HYPERPOD_REGENERATE=1 python -m pytest tests/test_public_surface.py
"""

import ast
import importlib
import json
import os
from pathlib import Path

import pytest

SNAPSHOT = Path(__file__).with_name("public_surface.json")
PACKAGES = (
    "accelerate",
    "comm",
    "data",
    "delayed_init",
    "doctor",
    "elastic",
    "fault_injection",
    "lightning",
    "memory",
    "parallel",
    "planning",
    "precision",
    "recovery",
    "report",
    "session",
    "smp",
    "transformers",
)


def public_names(package):
    return list(importlib.import_module(f"hyperpod_plugins.{package}").__all__)


def test_the_surface_is_the_frozen_one():
    found = {package: sorted(public_names(package)) for package in PACKAGES}
    if os.environ.get("HYPERPOD_REGENERATE") == "1":
        SNAPSHOT.write_text(json.dumps(found, indent=2) + "\n")
    assert found == json.loads(SNAPSHOT.read_text()), "see the head of this file for how to accept a change"


def test_what_most_programs_need_comes_from_the_root():
    root = importlib.import_module("hyperpod_plugins")
    names = root._PACKAGE_OF
    for name, package in names.items():
        assert getattr(root, name) is getattr(importlib.import_module(f"hyperpod_plugins.{package}"), name)
        assert name in public_names(package)
    assert set(names) <= set(dir(root))
    tree = ast.parse(Path(root.__file__).read_text())
    typed = {each.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for each in node.names}
    assert typed - {None} == set(names), "type checkers see other names than programs do"
    with pytest.raises(AttributeError, match="no attribute 'Sesion'"):
        _ = root.Sesion


def test_no_package_is_forgotten():
    root = Path(importlib.import_module("hyperpod_plugins").__file__).parent
    assert tuple(sorted(path.parent.name for path in root.glob("*/__init__.py"))) == PACKAGES


@pytest.mark.parametrize("package", PACKAGES)
def test_each_list_is_sorted_and_true(package):
    module = importlib.import_module(f"hyperpod_plugins.{package}")
    names = module.__all__
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    assert not [name for name in names if name.startswith("_")]
    assert all(getattr(module, name) is not None for name in names)


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_imports_for_its_users_is_listed(package):
    """A name that `__init__.py` takes from the package and does not list is neither public nor private."""
    module = importlib.import_module(f"hyperpod_plugins.{package}")
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hyperpod_plugins.")
        for alias in node.names
    }
    assert imported == set(module.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_says_what_it_is(package):
    module = importlib.import_module(f"hyperpod_plugins.{package}")
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value):
            assert value.__doc__, f"{package}.{name} has no docstring"
            assert not value.__doc__.startswith(f"{name}("), f"{package}.{name} has only a generated docstring"
