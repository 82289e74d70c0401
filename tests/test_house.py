"""The rules of the house, read off the source: who imports whom, how long things are, what they are called.

See "The rooms" in CONTRIBUTING.md. The rules look at the syntax tree, so nothing has to be importable.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "stacked_remat"

# Every module of the library belongs to one room. Packages are named by their folder.
ROOMS = {
    "_policy": "DECIDE",
    "_jax_policies": "DECIDE",
    "_schedule": "DECIDE",
    "_placement": "MOVE",
    "_block_foldable": "RUN",
    "_block_seq": "RUN",
    "_checkpoint": "RUN",
    "_derivative_errors": "RUN",
    "_eager": "RUN",
    "_effects": "RUN",
    "_layer_axis": "RUN",
    "lora": "RUN",
    "ops": "RUN",
    "_offload_check": "RUN",
    "_scan": "RUN",
    "_stacked": "RUN",
    "_state_dict": "RUN",
    "_sweep": "RUN",
    "memory": "MEASURE",
    "training": "TRAIN",
}
MAY_IMPORT = {
    "DECIDE": {"DECIDE"},
    "MOVE": {"MOVE"},
    "RUN": {"RUN", "DECIDE", "MOVE"},
    "MEASURE": {"MEASURE", "RUN", "DECIDE", "MOVE"},
    "TRAIN": {"TRAIN", "MEASURE", "RUN", "DECIDE", "MOVE"},
}
ROOMLESS = {
    "_compat",
    "_files",
    "_messages",
    "",
}  # below all rooms, and the public face: stacked_remat/__init__.py
USE_THE_PUBLIC_FACE = {"MEASURE", "TRAIN"}  # nothing that __init__.py imports may import __init__.py

CORE = {"jax", "equinox", "haliax", "jaxtyping", "numpy"}  # numpy comes with jax
# A package whose module imports more than the core at its top, and the extras that bring it.
EXTRAS_AT_TOP = {"training": ["train"], "nnx": ["nnx"]}
IMPORT_NAMES = {"pyyaml": "yaml", "orbax-checkpoint": "orbax"}  # where a distribution and its module differ

ARCHITECTURES = re.compile(r"qwen|llama|gemma|mistral|mixtral|gpt2|gpt_|olmo|deepseek", re.IGNORECASE)
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
LONGEST_FILE = 500
LONGEST_FUNCTION = 60


def _files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found, f"no Python file under {folders}"
    return found


def _here(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _imports_in(nodes: Iterator[ast.AST], package: str) -> Iterator[tuple[str, int]]:
    """Dotted name and line of every import among `nodes`, relative ones resolved from `package`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, node.module] if node.module else above)
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def _package(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).parts[:-1])


def _imports(path: Path) -> list[tuple[str, int]]:
    return list(_imports_in(ast.walk(_tree(path)), _package(path)))


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs when the module is imported and is not there for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _outside_functions(node)


def _module_of(path: Path) -> str:
    """The name under which ROOMS knows a file of the library."""
    return path.relative_to(LIBRARY).with_suffix("").parts[0].replace("__init__", "")


def _room(module: str) -> str | None:
    """A file that continues another (`_sweep_forward`) is in its room."""
    owners = [known for known in ROOMS if module == known or module.startswith(f"{known}_")]
    return ROOMS[max(owners, key=len)] if owners else None


def _extra_modules(extras: list[str]) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [need for extra in extras for need in project["optional-dependencies"][extra]]
    names = {re.split(r"[\[<>=!~; ]", need, maxsplit=1)[0].lower() for need in needed}
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}


def test_every_module_of_the_library_is_in_a_room():
    homeless = {_module_of(path) for path in _files("stacked_remat")} - ROOMLESS
    homeless = {module for module in homeless if _room(module) is None}
    assert not homeless, f"say in ROOMS which room these belong to: {sorted(homeless)}"


@pytest.mark.parametrize("path", _files("stacked_remat"), ids=_here)
def test_a_room_imports_only_the_rooms_below_it(path):
    module = _module_of(path)
    if module == "_compat":
        inside = [name for name, _ in _imports(path) if name.startswith("stacked_remat")]
        assert not inside, f"_compat.py is below everything and imports {inside}"
    room = _room(module)
    for name, line in _imports(path):
        if name.split(".")[0] != "stacked_remat" or room is None:
            continue
        other = (name.split(".") + [""])[1]
        if _room(other) is None and room in USE_THE_PUBLIC_FACE:
            continue
        assert other in ROOMLESS - {""} or _room(other) in MAY_IMPORT[room], (
            f"{_here(path)}:{line} ({room}) imports {name} ({_room(other) or 'the public face'}); "
            f"it may import {sorted(MAY_IMPORT[room])}"
        )


@pytest.mark.parametrize("path", _files("stacked_remat"), ids=_here)
def test_the_library_knows_no_model_and_imports_what_it_declares(path):
    known = CORE | {"stacked_remat"} | sys.stdlib_module_names
    known |= _extra_modules(EXTRAS_AT_TOP.get(_module_of(path), []))
    for name, line in _imports(path):
        assert name.split(".")[0] not in {"models", "benchmarks", "tests"}, f"{_here(path)}:{line}: {name}"
    for name, line in _imports_in(_outside_functions(_tree(path)), _package(path)):
        assert name.split(".")[0] in known, (
            f"{_here(path)}:{line} imports {name} when it is imported, which a core install has not; "
            "import it inside the function that needs it"
        )


@pytest.mark.parametrize("path", _files("stacked_remat"), ids=_here)
def test_only_optional_dependencies_are_imported_inside_functions(path):
    tree = _tree(path)
    at_top = {id(node) for node in _outside_functions(tree)}
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    nested = (node for node in ast.walk(tree) if id(node) not in at_top | typing_only)
    for name, line in _imports_in(nested, _package(path)):
        first = name.split(".")[0]
        allowed = name.startswith("jax.experimental.") or first not in CORE | sys.stdlib_module_names
        assert allowed and first != "stacked_remat", f"{_here(path)}:{line}: move `{name}` to the top"


def test_the_schedule_is_pure_integers():
    path = LIBRARY / "_schedule.py"
    if not path.exists():
        pytest.skip("there is no _schedule.py yet")
    allowed = sys.stdlib_module_names | {"stacked_remat"}
    assert {name.split(".")[0] for name, _ in _imports(path)} <= allowed


def test_training_names_no_architecture():
    for path in sorted((LIBRARY / "training").rglob("*.py")):
        found = ARCHITECTURES.search(path.read_text(encoding="utf-8"))
        assert not found, f"{_here(path)} speaks of {found and found.group()!r}; models register themselves"


@pytest.mark.parametrize("path", _files("stacked_remat"), ids=_here)
def test_private_jax_and_haliax_stay_in_compat(path):
    if path == LIBRARY / "_compat.py":
        return
    for name, line in _imports(path):
        parts = name.split(".")
        private = parts[0] in {"jax", "jaxlib", "haliax", "equinox"} and any(
            p.startswith("_") for p in parts[1:]
        )
        assert not private, (
            f"{_here(path)}:{line}: {name} belongs in _compat.py, with the version and the reason"
        )
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Attribute) and node.attr == "_src":
            raise AssertionError(f"{_here(path)}:{node.lineno}: {ast.unparse(node)} belongs in _compat.py")


@pytest.mark.parametrize("path", _files("stacked_remat", "models"), ids=_here)
def test_an_init_only_reexports(path):
    if path.name != "__init__.py":
        return
    for node in _tree(path).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        names = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__all__", "__version__")
        inside = isinstance(node, ast.ImportFrom) and (
            node.level > 0 or _package(path) in (node.module or "")
        )
        # The public face imports its packages when they are used, by means of the standard library.
        lazy = path.parent == LIBRARY and (
            (isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__"))
            or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
            or (
                isinstance(node, ast.Import | ast.ImportFrom)
                and ast.unparse(node).split()[1] in sys.stdlib_module_names
            )
        )
        assert docstring or names or inside or lazy, (
            f"{_here(path)}:{node.lineno}: an __init__ only re-exports"
        )


@pytest.mark.parametrize(
    "path", _files("stacked_remat", "models", "benchmarks", "scripts", "tests"), ids=_here
)
def test_files_and_functions_are_short_and_named_for_what_they_do(path):
    assert path.stem.strip("_") not in BANNED_NAMES, f"{_here(path)}: name it for what it does"
    length = len(path.read_text(encoding="utf-8").splitlines())
    assert length < LONGEST_FILE, f"{_here(path)} has {length} lines: split it by purpose"
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = _lines_of_code(node)
            assert lines < LONGEST_FUNCTION, f"{_here(path)}:{node.lineno}: {node.name} has {lines} lines"


def _lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the `def` on, without the docstring."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and ast.get_docstring(function, clean=False) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring
