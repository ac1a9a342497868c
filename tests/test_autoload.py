"""The entry point: registers what Lightning and torch offer, costs nothing, and never raises.

Every case is a small program of its own, without torch, against a stand-in `lightning` on the path.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GOOD = """
class Registry(dict):
    def register(self, name, make, description=""):
        assert name not in self, "registered twice"
        self[name] = make
StrategyRegistry = Registry()
"""
NO_REGISTRY = "nothing = 1\n"
HOSTILE_REGISTRY = """
class StrategyRegistry(dict):
    def register(self, *args, **kwargs):
        raise RuntimeError("no strategies today")
StrategyRegistry = StrategyRegistry()
"""


@pytest.fixture
def run_program(tmp_path):
    """Run a program that can import ours and the stand-ins; return what it printed as JSON."""

    def run(program, *flags, **stand_ins):
        for package, strategies in stand_ins.items():
            folder = tmp_path.joinpath(*package.split("__"))
            (folder / "strategies").mkdir(parents=True)
            for parent in (folder, *folder.parents):
                if parent == tmp_path:
                    break
                (parent / "__init__.py").touch()
            (folder / "strategies" / "__init__.py").write_text(strategies)
        environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        done = subprocess.run(
            [sys.executable, *flags, "-c", textwrap.dedent(program)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    return run


def test_torch_finds_the_entry_point():
    (found,) = importlib.metadata.entry_points(group="torch.backends", name="hyperpod")
    assert found.value == "hyperpod_plugins._autoload:autoload"
    assert callable(found.load())


def test_this_process_has_been_served():
    """pytest imported torch and, here, Lightning; nobody imported our adapter for their sake."""
    import lightning.pytorch.strategies as strategies
    import torch.distributed as dist

    assert "hyperpod" in strategies.StrategyRegistry.available_strategies()
    assert {"hyperpod", "smddp"} <= set(dist.Backend.backend_list)


def test_importing_ours_imports_neither_torch_nor_lightning(run_program):
    heavy, _ = run_program(
        """
        import json, sys
        import hyperpod_plugins
        heavy = {"torch", "numpy", "lightning", "pytorch_lightning"}
        print(json.dumps(sorted(heavy & sys.modules.keys())))
        """
    )
    assert heavy == []


@pytest.mark.parametrize("package", ["lightning__pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_strategy_is_registered_once_whoever_is_imported_first(run_program, package, is_first):
    name = package.replace("__", ".")
    imports = ["import hyperpod_plugins", f"import {name}.strategies"]
    program = f"""
        import json, sys
        {"; ".join(imports if is_first else reversed(imports))}
        from hyperpod_plugins._autoload import _AfterImport, autoload
        for _ in range(3):
            autoload()
        import {name}.strategies as strategies
        print(json.dumps([
            list(strategies.StrategyRegistry),
            sum(isinstance(finder, _AfterImport) for finder in sys.meta_path),
            "hyperpod_plugins.lightning" in sys.modules,
        ]))
        """
    (names, num_finders, is_adapter_imported), _ = run_program(program, **{package: GOOD})
    assert (names, num_finders, is_adapter_imported) == (["hyperpod"], 1, False)


def test_both_flavours_in_one_program_are_served(run_program):
    names, _ = run_program(
        """
        import json
        import hyperpod_plugins
        import lightning.pytorch.strategies as new, pytorch_lightning.strategies as old
        print(json.dumps([list(new.StrategyRegistry), list(old.StrategyRegistry)]))
        """,
        lightning__pytorch=GOOD,
        pytorch_lightning=GOOD,
    )
    assert names == [["hyperpod"], ["hyperpod"]]


def test_the_module_keeps_its_own_loader_otherwise(run_program):
    """Tools ask a module for its source, its spec and its path."""
    (has_source, name, path), _ = run_program(
        """
        import importlib.util, inspect, json
        import hyperpod_plugins
        import lightning.pytorch.strategies as strategies
        print(json.dumps([
            "class Registry" in inspect.getsource(strategies),
            strategies.__spec__.name,
            strategies.__spec__.origin,
        ]))
        """,
        lightning__pytorch=GOOD,
    )
    assert has_source
    assert (name, Path(path).name) == ("lightning.pytorch.strategies", "__init__.py")


def test_a_reload_is_survived(run_program):
    names, _ = run_program(
        """
        import importlib, json
        import hyperpod_plugins
        import lightning.pytorch.strategies as strategies
        importlib.reload(strategies)
        print(json.dumps(list(strategies.StrategyRegistry)))
        """,
        lightning__pytorch=GOOD,
    )
    assert names == ["hyperpod"]


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ("raise ImportError('half installed')", "ImportError: half installed"),
        ("raise RuntimeError('built for another torch')", "RuntimeError: built for another torch"),
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("this is no Python", "SyntaxError: invalid syntax"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_broken_lightning_fails_with_its_own_error_and_ours_not_at_all(run_program, broken, error, is_first):
    before, after = ("import hyperpod_plugins", "pass") if is_first else ("pass", "import hyperpod_plugins")
    found, _ = run_program(
        f"""
        import json
        {before}
        try:
            import lightning.pytorch.strategies
        except Exception as error:
            text = f"{{type(error).__name__}}: {{error}}"
        {after}
        from hyperpod_plugins._autoload import autoload
        autoload()
        print(json.dumps(text))
        """,
        lightning__pytorch=broken,
    )
    assert found.startswith(error)


def test_no_lightning_at_all_is_reported_by_python_itself(run_program):
    found, _ = run_program(
        """
        import sys, json
        import hyperpod_plugins
        sys.path[:] = [path for path in sys.path if "site-packages" not in path]
        try:
            import pytorch_lightning.strategies
        except ModuleNotFoundError as error:
            print(json.dumps(error.name))
        """
    )
    assert found == "pytorch_lightning"


@pytest.mark.parametrize("flags", [(), ("-W", "error")], ids=["warnings shown", "warnings are errors"])
@pytest.mark.parametrize("registry", [NO_REGISTRY, HOSTILE_REGISTRY], ids=["no registry", "hostile registry"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_lightning_of_another_make_is_left_alone(run_program, registry, is_first, flags):
    """Programs that turn warnings into errors must not lose Lightning or torch to us either."""
    imports = ["import hyperpod_plugins", "import lightning.pytorch.strategies"]
    found, stderr = run_program(
        f"""
        import json
        {"; ".join(imports if is_first else reversed(imports))}
        from hyperpod_plugins._autoload import autoload
        autoload()
        print(json.dumps("went on"))
        """,
        *flags,
        lightning__pytorch=registry,
    )
    assert found == "went on"
    assert flags or "could not register" in stderr


@pytest.mark.parametrize("flags", [(), ("-W", "error")], ids=["warnings shown", "warnings are errors"])
def test_a_torch_of_another_make_is_left_alone(run_program, flags):
    found, stderr = run_program(
        """
        import json, sys, types
        name = "torch.distributed.distributed_c10d"  # without what we look for in it
        sys.modules[name] = types.ModuleType(name)
        import hyperpod_plugins
        print(json.dumps("went on"))
        """,
        *flags,
    )
    assert found == "went on"
    assert flags or "could not register" in stderr


@pytest.mark.slow_single
@pytest.mark.parametrize("is_first", [True, False])
def test_importing_ours_announces_the_backend_to_torch_in_either_order(run_program, is_first):
    """The fallback where the entry point is switched off, as it is here."""
    imports = ["import hyperpod_plugins", "import torch"]
    names, _ = run_program(
        f"""
        import json
        {"; ".join(imports if is_first else reversed(imports))}
        import torch.distributed as dist
        print(json.dumps(dist.Backend.backend_list))
        """
    )
    assert {"hyperpod", "smddp"} <= set(names)
