"""Shows the files through which one argument of a function travels: python tools/trips.py FILE:FUNCTION:ARGUMENT ...

    python tools/trips.py varlen/attention.py:varlen_attention:q

A stay is a file that the argument, or something made of it, is passed into, in the order of the source; files one after
the other that are the same are one stay. A return is a stay in a file that it had been in before. Every branch is
walked. The path is read from names alone, so the figures are a measure of the code's shape, and no proof of what runs.
Not seen: functions that come as values or from tables, methods of other objects than self, what an attribute holds,
which of a function's parameters a starred argument fills, and what is behind an op (gate) or behind torch. Checks in
_runtime/arguments.py are no stays.
"""

import ast
import builtins
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "packing_ops"
CHECKS = "_runtime/arguments.py"
# What tells of a value and is no part of it; then what hands it on.
SIZES = {"shape", "dtype", "device", "ndim", "is_cuda", "is_cpu", "requires_grad"}
ANSWERS = {"dim", "size", "numel", "element_size", "stride", "isinstance", "len", "type", "hasattr", "callable", "id"}
BUILTINS = {*dir(builtins)}


class File:
    """Holds a file's functions, methods by Class.name, and where its other names come from."""

    def __init__(self, name: str) -> None:
        self.name, self.functions, self.imports = name, {}, {}
        for node in ast.parse((PACKAGE / name).read_text()).body:
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = node
            elif isinstance(node, ast.ClassDef):
                methods = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
                self.functions |= {f"{node.name}.{method}": part for method, part in methods.items()}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("packing_ops"):
                folder = "/".join(node.module.split(".")[1:])
                for each in node.names:
                    module = f"{folder}/{each.name}.py".lstrip("/")
                    whole = (PACKAGE / module).exists()
                    found = (module, "") if whole else (f"{folder}.py", each.name)
                    if not whole and not (PACKAGE / found[0]).exists():
                        found = (f"{folder}/__init__.py", each.name)
                    self.imports[each.asname or each.name] = found


class Trip:
    """Follows an argument: ``stays`` are the files in their order, ``lost`` the calls that were not followed."""

    def __init__(self, start: str) -> None:
        self.files: dict[str, File] = {}
        self.stays: list[str] = []
        self.lost: list[str] = []
        self.passed: set[tuple[str, str]] = set()
        file, function, argument = start.split(":")
        self.enter(file, function, {argument})

    @property
    def returns(self) -> int:
        return len(self.stays) - len({*self.stays})

    def file(self, name: str) -> File:
        if name not in self.files:
            self.files[name] = File(name)
        return self.files[name]

    def enter(self, name: str, function: str, carried: set[str]) -> None:
        """Go into a function by these parameters of it, and through it if it is the first time."""
        if name == CHECKS:
            return
        if self.stays[-1:] != [name]:
            self.stays.append(name)
        if (name, function) not in self.passed:
            self.passed.add((name, function))
            for statement in self.file(name).functions[function].body:
                self.read(statement, carried, name, function.rpartition(".")[0])

    def read(self, node: ast.AST, carried: set[str], name: str, cls: str) -> None:
        """Read in the order in which it runs: a value before the names that take it."""
        if isinstance(node, ast.Raise):
            return
        children = [*ast.iter_child_nodes(node)]
        if isinstance(node, ast.Assign):
            children = [node.value, *node.targets]
        for loop in getattr(node, "generators", [node] if isinstance(node, ast.For) else []):
            if self.is_it(loop.iter, carried):
                carried |= {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
        for child in children:
            self.read(child, carried, name, cls)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                carried |= {taken.id for taken, value in pairs(target, node.value) if self.is_it(value, carried)}
        elif isinstance(node, ast.Call):
            self.call(node, carried, name, cls)

    def is_it(self, node: ast.AST, carried: set[str]) -> bool:
        """Whether an expression is made of the argument: of more than its sizes, its dtype or an answer about it."""
        if isinstance(node, ast.Name):
            return node.id in carried
        if isinstance(node, (ast.Compare, ast.Lambda)):
            return False
        if isinstance(node, ast.Attribute):
            return node.attr not in SIZES and self.is_it(node.value, carried)
        if isinstance(node, ast.Call):
            function = node.func
            if getattr(function, "attr", getattr(function, "id", "")) in ANSWERS:
                return False
        return any(self.is_it(child, carried) for child in ast.iter_child_nodes(node))

    def call(self, node: ast.Call, carried: set[str], name: str, cls: str) -> None:
        function, args = node.func, node.args
        if ast.unparse(function) in ("functools.partial", "partial") and args:
            function, args = args[0], args[1:]
        places = [i for i, arg in enumerate(args) if self.is_it(arg, carried)]
        names = [word.arg for word in node.keywords if word.arg and self.is_it(word.value, carried)]
        if not (places or names) or ast.unparse(function) in ANSWERS | BUILTINS:
            return
        where, called = self.found(function, name, cls)
        if called is None:
            self.lost.append(f"{ast.unparse(node.func)} ({name}:{node.lineno})")
            return
        given = called.args.posonlyargs + called.args.args
        given = given["." in where[1] :]  # without self
        rest = [] if called.args.vararg is None else [called.args.vararg]
        taken = [parameter.arg for i in places for parameter in [*given[i : i + 1], *rest][:1]]
        known = {parameter.arg for parameter in given + called.args.kwonlyargs}
        carried = {*taken, *(word for word in names if word in known)}
        if carried:
            self.enter(*where, carried)

    def found(self, function: ast.AST, name: str, cls: str) -> tuple[tuple[str, str], ast.FunctionDef | None]:
        """Where a called function is, and its definition: None for one that is not seen."""
        file, text = self.file(name), ast.unparse(function)
        owner, _, attribute = text.rpartition(".")
        if owner == "self":
            where = name, f"{cls}.{attribute}"
        elif owner in file.imports and file.imports[owner][1] == "":
            where = file.imports[owner][0], attribute
        elif text in file.imports:
            where = file.imports[text]
        else:
            where = name, text
        functions = self.file(where[0]).functions if (PACKAGE / where[0]).exists() else {}
        if where[1] not in functions and f"{where[1]}.__init__" in functions:
            where = where[0], f"{where[1]}.__init__"
        return where, functions.get(where[1])


def pairs(target: ast.AST, value: ast.AST) -> list[tuple[ast.Name, ast.AST]]:
    """(name, value) of an assignment, of each part where both sides are tuples."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return [pair for each in zip(target.elts, value.elts, strict=True) for pair in pairs(*each)]
    return [(name, value) for name in ast.walk(target) if isinstance(name, ast.Name)]


if __name__ == "__main__":
    for start in sys.argv[1:]:
        trip = Trip(start)
        print(f"{start}: {len(trip.stays)} stays, {trip.returns} returns: {', '.join(trip.stays)}")
        print(f"  not followed: {', '.join(trip.lost) or 'nothing'}")
