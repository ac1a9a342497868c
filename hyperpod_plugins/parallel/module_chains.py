"""Find the module lists that a model runs as a chain: every element, in every forward, regardless of the data.

FSDP2 gathers a unit when it runs, so all ranks must run the same units in the same order. The layers of a transformer
meet this condition; experts, task heads, randomly dropped layers and layers behind an early exit do not.
The modules themselves do not show the difference, but the loop that runs them does, so its source code is analyzed.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache

from torch import nn

_TRANSPARENT = frozenset({"list", "tuple", "reversed", "iter"})  # the same elements, in a fixed order
_LEAVES_LOOP = (ast.Break, ast.Continue, ast.Return)
Path = tuple[str, ...]


def find_chains(model: nn.Module) -> set[str]:
    """Return the names of the `nn.ModuleList`s in `model` whose elements all run, in order, in each forward.

    A list qualifies if the class of an enclosing module has a loop that calls each of its elements unconditionally,
    and if that module does not itself run conditionally, as an element of an `nn.ModuleDict` or of a list that does
    not qualify. If the source is not available, or does not use the list, the list does not qualify.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chains: set[str] = set()
    for name, module in modules.items():  # enclosing modules come first
        if not isinstance(module, nn.ModuleList):
            continue
        path = tuple(name.split(".")) if name else ()
        for depth in range(len(path) - 1, -1, -1):
            verdict = runs_all(type(modules[".".join(path[:depth])]), path[depth:])
            if verdict and _is_always_run(path[:depth], modules, chains):
                chains.add(name)
            if verdict is not None:
                break
    return chains


def _is_always_run(path: Path, modules: Mapping[str, nn.Module], chains: set[str]) -> bool:
    """Whether no module from the root to `path` is one of several of which some may be skipped."""
    for depth in range(len(path) - 1, -1, -1):
        around = ".".join(path[:depth])
        if around in chains:
            return True  # the modules around the chain were checked when the chain was found
        if isinstance(modules[around], nn.ModuleDict | nn.ModuleList):
            return False
    return True


def runs_all(owner: type, path: Path) -> bool | None:
    """Whether the methods of a class run every element of the list at `self.<path>`.

    Returns:
        True: all loops that call its elements call each of them. False: a loop may skip some, or an element is called
        by an index that is not a loop counter. None: no method calls an element.
    """
    verdicts = [verdict for method in _methods(owner) for verdict in _MethodAnalyzer(method, path).verdicts()]
    return all(verdicts) if verdicts else None


@cache
def _methods(owner: type) -> tuple[ast.FunctionDef, ...]:
    """Return the methods of a class and its base classes whose source is available."""
    found: dict[str, ast.FunctionDef] = {}
    for each in owner.__mro__:
        if each in nn.Module.__mro__:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        except (OSError, TypeError, SyntaxError):  # created at run time, or entered at a prompt
            continue
        body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
        for node in body:
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, node)
    return tuple(found.values())


class _MethodAnalyzer:
    """Analyzes how one method calls the elements of one list."""

    def __init__(self, method: ast.FunctionDef, path: Path) -> None:
        self._method = method
        self._self = method.args.args[0].arg if method.args.args else ""
        self._path = path
        self._aliases: set[str] = set()

    def verdicts(self) -> Iterator[bool]:
        """Yield for each loop that calls elements whether it runs all of them, and False for each call by index."""
        if not self._self:
            return
        nodes = list(ast.walk(self._method))
        assignments = [node for node in nodes if isinstance(node, ast.Assign)]
        self._aliases = set[str]().union(*(_names(node.targets) for node in assignments if self._is_list(node.value)))
        counted: set[int] = set()
        for node in nodes:
            if isinstance(node, ast.For):
                yield from self._of_loop(node, counted)
            elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp):
                yield from self._of_comprehension(node, counted)
        yield from self._of_chosen(nodes, counted)

    def _of_chosen(self, nodes: list[ast.AST], counted: set[int]) -> Iterator[bool]:
        for node in nodes:
            if isinstance(node, ast.Call) and id(node) not in counted and self._is_computed_element(node.func):
                yield False  # an element selected by index
            elif isinstance(node, ast.Assign) and self._is_computed_element(node.value):
                calls = self._calls(self._method, _names(node.targets), set())
                if any(id(call) not in counted for call in calls):
                    yield False

    def _of_loop(self, loop: ast.For, counted: set[int]) -> Iterator[bool]:
        indices = _counters(loop.target, loop.iter)
        elements = self._elements(loop.target, loop.iter) | self._named_in(loop, indices)
        calls = {id(call) for call in self._calls(loop, elements, indices)}
        counted |= calls
        if calls:
            runs_each = _always_reaches(loop.body, calls) and not _may_exit(loop.body, (ast.Break, ast.Return))
            yield runs_each and _is_reached(self._method.body, loop, self._self)

    def _of_comprehension(
        self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, counted: set[int]
    ) -> Iterator[bool]:
        for generator in node.generators:
            elements = self._elements(generator.target, generator.iter)
            calls = {id(call) for call in self._calls(node.elt, elements, _counters(generator.target, generator.iter))}
            counted |= calls
            if calls:
                runs_each = not generator.ifs and _evaluates(node.elt, calls)
                yield runs_each and _is_reached(self._method.body, node, self._self)

    def _is_list(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self._aliases
        path: list[str] = []
        while not isinstance(node, ast.Name):
            if isinstance(node, ast.Attribute):
                path.append(node.attr)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                path.append(str(node.slice.value))
            else:
                return False
            node = node.value
        return node.id == self._self and tuple(reversed(path)) == self._path

    def _elements(self, target: ast.expr, iterated: ast.expr) -> set[str]:
        """Return the names of loop targets that are elements of the list."""
        if isinstance(iterated, ast.Subscript) and isinstance(iterated.slice, ast.Slice):
            iterated = iterated.value
        if self._is_list(iterated):
            return {target.id} if isinstance(target, ast.Name) else set()
        if not isinstance(iterated, ast.Call) or not iterated.args:
            is_children = (
                isinstance(iterated, ast.Call)
                and isinstance(iterated.func, ast.Attribute)
                and iterated.func.attr == "children"
                and self._is_list(iterated.func.value)
            )
            return {target.id} if is_children and isinstance(target, ast.Name) else set()
        name = iterated.func.id if isinstance(iterated.func, ast.Name) else ""
        if name in _TRANSPARENT:
            return self._elements(target, iterated.args[0])
        if name == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            return self._elements(target.elts[1], iterated.args[0])
        if name == "zip" and isinstance(target, ast.Tuple):
            pairs = zip(target.elts, iterated.args, strict=False)
            return set[str]().union(*(self._elements(each, of) for each, of in pairs))
        return set()

    def _named_in(self, loop: ast.For, indices: set[str]) -> set[str]:
        """Return the names that the loop's body binds to the element at a loop counter."""
        found: set[str] = set()
        for node in ast.walk(loop):
            if isinstance(node, ast.Assign) and self._is_element_at(node.value, indices):
                found |= _names(node.targets)
        return found

    def _calls(self, within: ast.AST, elements: set[str], indices: set[str]) -> list[ast.Call]:
        """Return the calls of an element, by name or by index, directly or through activation checkpointing."""

        def is_element(node: ast.expr) -> bool:
            if isinstance(node, ast.Attribute) and node.attr == "__call__":
                node = node.value
            return (isinstance(node, ast.Name) and node.id in elements) or self._is_element_at(node, indices)

        calls = [node for node in ast.walk(within) if isinstance(node, ast.Call)]
        return [
            call
            for call in calls
            if is_element(call.func) or (_is_checkpoint(call.func) and any(map(is_element, call.args)))
        ]

    def _is_element_at(self, node: ast.expr, indices: set[str]) -> bool:
        return (
            isinstance(node, ast.Subscript)
            and isinstance(node.slice, ast.Name)
            and node.slice.id in indices
            and self._is_list(node.value)
        )

    def _is_computed_element(self, node: ast.expr) -> bool:
        is_element = isinstance(node, ast.Subscript) and self._is_list(node.value)
        return is_element and not isinstance(node.slice, ast.Constant | ast.Slice)  # pyright: ignore


def _is_checkpoint(function: ast.expr) -> bool:
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    return "checkpoint" in name


def _is_reached(body: list[ast.stmt], wanted: ast.AST, of_self: str) -> bool:
    """Whether all ranks reach a node of a method: only conditions that are equal on all ranks precede it."""
    for statement in body:
        is_inside = any(node is wanted for node in ast.walk(statement))
        condition = _condition(statement)
        depends = condition is not None and not _is_rank_invariant(condition, of_self)
        if depends and (is_inside or _may_exit([statement], (ast.Return,))):
            return False
        if is_inside:
            blocks = _blocks(statement)
            around = [block for block in blocks if any(node is wanted for each in block for node in ast.walk(each))]
            return all(_is_reached(block, wanted, of_self) for block in around)
    return True


def _is_rank_invariant(test: ast.expr, of_self: str) -> bool:
    """Whether a condition depends only on the module's own attributes, on types or on identity, not on data."""
    if isinstance(test, ast.BoolOp):
        return all(_is_rank_invariant(each, of_self) for each in test.values)
    if isinstance(test, ast.UnaryOp):
        return _is_rank_invariant(test.operand, of_self)
    if isinstance(test, ast.Compare) and all(isinstance(each, ast.Is | ast.IsNot) for each in test.ops):
        return True
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id in ("isinstance", "hasattr"):
        return True
    if any(isinstance(node, ast.Call) for node in ast.walk(test)):
        return False
    return all(node.id == of_self for node in ast.walk(test) if isinstance(node, ast.Name))


def _names(targets: list[ast.expr]) -> set[str]:
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _counters(target: ast.expr, iterated: ast.expr) -> set[str]:
    """Return the loop targets that are counters of `range` or `enumerate`."""
    name = iterated.func.id if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) else ""
    if name == "range" and isinstance(target, ast.Name):
        return {target.id}
    if name == "enumerate" and isinstance(target, ast.Tuple) and isinstance(target.elts[0], ast.Name):
        return {target.elts[0].id}
    return set()


def _always_reaches(body: list[ast.stmt], calls: set[int]) -> bool:
    """Whether every path through the statements of a loop's body reaches one of the calls."""
    for statement in body:
        if _statement_reaches(statement, calls):
            return True
        if _may_exit([statement], _LEAVES_LOOP):
            return False
    return False


def _statement_reaches(statement: ast.stmt, calls: set[int]) -> bool:
    if isinstance(statement, ast.If):
        is_in_both = _always_reaches(statement.body, calls) and _always_reaches(statement.orelse, calls)
        return is_in_both or _evaluates(statement.test, calls)
    if isinstance(statement, ast.With | ast.Try):
        return _always_reaches(statement.body, calls)
    if isinstance(statement, ast.Match):  # no case may match
        return _evaluates(statement.subject, calls)
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return):
        return _evaluates(statement, calls)
    return False


def _evaluates(node: ast.AST, calls: set[int]) -> bool:
    """Whether evaluating an expression or a simple statement always reaches one of the calls."""
    if id(node) in calls:
        return True
    if isinstance(node, ast.IfExp):
        return _evaluates(node.test, calls) or (_evaluates(node.body, calls) and _evaluates(node.orelse, calls))
    if isinstance(node, ast.BoolOp):
        return _evaluates(node.values[0], calls)
    if isinstance(node, ast.Lambda | ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp):
        return False
    return any(_evaluates(child, calls) for child in ast.iter_child_nodes(node))


def _may_exit(statements: list[ast.stmt], kinds: tuple[type[ast.stmt], ...]) -> bool:
    """Whether a statement of one of `kinds` may leave this block; break and continue of inner loops do not count."""
    for statement in statements:
        if isinstance(statement, kinds):
            return True
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        own = statement.body if isinstance(statement, ast.For | ast.While) else None
        inner = tuple(kind for kind in kinds if kind is ast.Return)
        if any(_may_exit(block, inner if block is own else kinds) for block in _blocks(statement)):
            return True
    return False


def _condition(statement: ast.stmt) -> ast.expr | None:
    """What decides which block of a statement runs; None for a statement without such a condition."""
    if isinstance(statement, ast.If | ast.While):
        return statement.test
    return statement.subject if isinstance(statement, ast.Match) else None


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks of statements inside a compound statement; none for a simple one."""
    found = [vars(statement).get(field) for field in ("body", "orelse", "finalbody")]
    blocks = [block for block in found if isinstance(block, list)]
    blocks += [handler.body for handler in vars(statement).get("handlers", [])]
    return blocks + [case.body for case in vars(statement).get("cases", [])]
