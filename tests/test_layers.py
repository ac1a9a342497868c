"""Imports point down the layers, and each rule of style that a parser can check holds."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hyperpod_plugins"
LAYERS = (
    "errors _registration",
    "env events checkpoint_names whole_file",
    "ledger",
    "comm data delayed_init memory precision",
    "parallel elastic",
    "recovery",
    "fault_injection planning",
    "report doctor",
    "lightning accelerate session presets project_templates smp",
    "transformers",
    "cli",
)
LAYER_OF = {unit: row for row, units in enumerate(LAYERS) for unit in units.split()}
# The entry point and the root may reach upward: they are how the outside finds the layers.
OUTSIDE = {"__init__", "_autoload"}
BROAD_EXCEPT_ALLOWED = {
    "_autoload.py",  # an exception there would break `import torch` for everybody
    "lightning/trainer_entries.py",  # a failing hook after a fit must not end the job, nor hang the other ranks
    "events.py",  # a listener's mistake must not end a repair
    "ledger.py",  # a loss of a type of the program that cannot be read must not fail a committed step
    "recovery/shutdown.py",  # a checkpoint that fails must not hide why the job ends
    "recovery/step.py",  # whatever a user's step raises is a fault of that step, and is raised again
}
FILES = sorted(PACKAGE.rglob("*.py"))


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_units(tree: ast.AST):
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "hyperpod_plugins" and len(parts) > 1 and parts[1] in LAYER_OF:
                yield parts[1]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    importer = unit_of(path)
    if importer in OUTSIDE:
        return
    assert importer in LAYER_OF, f"{importer} belongs to no layer"
    for imported in imported_units(ast.parse(path.read_text())):
        assert imported == importer or LAYER_OF[imported] < LAYER_OF[importer], f"{importer} imports {imported}"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(tree: ast.AST, modules: set[str]) -> set[str]:
    """Modules of the package that a file names in its imports, those inside of functions included."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner in modules else str(node.module))
    return names & modules


def test_no_import_leads_back_to_itself():
    """A late import is a dependency like any other, and no file is exempt."""
    modules = {module_name(path): path for path in FILES}
    graph = {name: imported_modules(ast.parse(path.read_text()), modules.keys()) for name, path in modules.items()}
    assert graph["hyperpod_plugins._autoload"] > {"hyperpod_plugins.comm", "hyperpod_plugins.lightning"}
    TopologicalSorter(graph).prepare()  # raises a CycleError that names a circle


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_hasattr(path):
    """`hasattr` hides which type a value has; `getattr` with a default is for optional attributes of others."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and unit_of(path) not in OUTSIDE:
            assert node.func.id != "hasattr", f"line {node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_broad_except(path):
    if str(path.relative_to(PACKAGE)) in BROAD_EXCEPT_ALLOWED:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            names = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"bare"}
            assert not names & {"bare", "Exception", "BaseException"}, f"line {node.lineno}"


def test_the_page_on_layers_shows_the_tree():
    text = (PACKAGE.parent / "docs" / "design" / "layers.md").read_text()
    [tree] = [block for block in text.split("```")[1::2] if "recovery/ " in block and "step.py" in block]
    shown, folders = set(), []
    for line in tree.splitlines():
        name = line.split()[0] if line.split() else ""
        depth = (len(line) - len(line.lstrip())) // 2
        if name.endswith("/"):
            folders = [*folders[:depth], name]
        elif name.endswith(".py"):
            shown.add("".join(folders[:depth]) + name)
    found = {str(path.relative_to(PACKAGE)) for path in FILES if path.name != "__init__.py"}
    assert shown - {"__init__.py"} == found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_stay_readable(path):
    assert len(path.read_text().splitlines()) <= 900


SAME_NOTION_TWICE = {
    "clip_grad_norm_": "SMP's form of ours, which is torch's name",
    "get_parser": "of each command",
    "main": "of each command",
    "refuse_unreadable": "of each adapter's own description of its loop",
    "register_strategy": "the hook of torch's entry point, and what it calls",
}
"""Public names that several files define because each means the same thing for another caller."""


IN_EVERY_FILE = {"R", "T", "log", "logger"}
"""Type variables, and the logger of a file."""


def names_defined_by(node: ast.stmt) -> list[str]:
    """Classes and functions, and also constants and aliases of types."""
    match node:
        case ast.ClassDef() | ast.FunctionDef():
            return [node.name]
        case ast.Assign():
            return [each.id for each in node.targets if isinstance(each, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case _:
            return []


def test_no_public_name_has_two_meanings():
    """Read by hand; a new one in two files is renamed, or listed above with the one thing that it means."""
    found = {}
    for path in FILES:
        for name in {name for node in ast.parse(path.read_text()).body for name in names_defined_by(node)}:
            if not name.startswith("_") and name not in IN_EVERY_FILE:
                found.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    assert {name for name, places in found.items() if len(places) > 1} == set(SAME_NOTION_TWICE)
