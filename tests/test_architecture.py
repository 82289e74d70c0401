"""Rules for the source: which layer imports which, the length and the names of files,
and their first line.

See "Layers" in CONTRIBUTING.md. The rules read syntax trees, so nothing has to be
importable. Each rule yields every violation in a file.
"""

import ast
import dataclasses
import functools
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from scripts import mutate

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("stacked_remat", "models", "benchmarks", "scripts", "tests")

CORE = "compat base schedule placement remat policy sweep scan stacks"
# By layer, the files and folders directly under stacked_remat/ (`_stacked` covers
# `_stacked_*.py`), and what each may import beside its own layer. `public` is
# stacked_remat/__init__.py.
LAYERS = {
    "compat": ("_compat", ""),
    "base": (
        "_activity _carry_files _files _hijax _in_files _messages _microbatches _noted"
        " _pictures _place_names _memory_spaces _python_calls _static _trips",
        "compat",
    ),
    "schedule": ("_schedule", "base"),
    "placement": ("_names _places _xla_hints", "compat base"),
    "remat": ("_remat", "compat base schedule"),
    "policy": ("_haliax_names _policy", "compat base schedule remat"),
    "sweep": ("_sweep", "compat base schedule placement remat"),
    "scan": ("_checkpoint _scan", "compat base schedule placement remat policy sweep"),
    "stacks": (
        "_block_foldable _block_seq _layer_checks _paths _stacked _state_dict _tiled"
        " _tiles",
        CORE,
    ),
    "offload_check": ("_offload_check", "policy scan"),
    "fused": ("_fused", "compat base placement policy sweep scan stacks"),
    "pipeline": (
        "_pipeline",
        "compat base schedule placement policy sweep scan stacks fused",
    ),
    # Not `scan`, whose public names they take from `public`, nor each other
    "lora": ("lora", "base sweep stacks"),
    "ops": ("ops", "compat base placement sweep public"),
    "streaming": ("streaming", "base placement policy sweep scan stacks"),
    "levanter": ("levanter", "base policy scan stacks"),
    "while": ("_while", "compat base schedule sweep"),
    "diffrax": ("diffrax", "base schedule while"),
    "nnx": ("nnx", "base public"),
    "ghost": ("ghost", CORE + " ops"),
    "memory": (
        "memory",
        "compat base schedule placement remat policy sweep public",
    ),
    "training": (
        "training",
        CORE + " fused ghost lora ops pipeline streaming memory public",
    ),
}

# Modules of the library that may use private names of JAX and Haliax.
MAY_USE_PRIVATE_NAMES = (
    "stacked_remat/_compat.py",
    "stacked_remat/_hijax.py",
    "stacked_remat/ops/_cudnn.py",
)

# What a package of models/ may import from models/ beside itself; the other files there
# may import all of it.
MODEL_IMPORTS = {
    "parts": set(),
    "generation": {"parts"},
    "hf_io": {"parts"},
}

# Private modules of the library that models/ may import too
SHARED_MODULES = {"_files", "_messages", "_pictures"}

# What takes long to import, and neither help nor an error in a config needs.
SLOW_IMPORTS = {"orbax", "grain", "matplotlib", "pyarrow", "tokenizers", "jinja2"}
# NumPy and SciPy come with JAX.
THIRD_PARTY = {
    "jax",
    "equinox",
    "haliax",
    "jaxtyping",
    "numpy",
    "scipy",
    "wadler_lindig",
}
# Packages that import more than these when they are imported, and the extras that
# install it.
EXTRAS = {"training": ["train"], "nnx": ["nnx"], "diffrax": ["diffrax"]}
# Where a distribution and its module differ
IMPORT_NAMES = {
    "pyyaml": "yaml",
    "orbax-checkpoint": "orbax",
}
# Modules whose versions a package chooses, and that its users import
PARTS = {"pydantic": {"pydantic_core", "annotated_types"}}

ARCHITECTURES = re.compile(
    r"qwen|llama|gemma|mistral|mixtral|gpt2|gpt_|olmo|deepseek|smollm|granite|cohere"
    r"|glm|minimax",
    re.IGNORECASE,
)
FOR_ANY_ARCHITECTURE = (
    "stacked_remat/training/",
    "models/parts/",
    "models/hf_io/",
    "models/generation/",
    "models/candidate.py",
    "models/command.py",
    "models/export_hf.py",
    "models/generate.py",
    "models/lm.py",
    "models/loading.py",
    "models/plan_lm.py",
    "models/replay_lm.py",
    "models/run_state.py",
    "models/train_lm.py",
)
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
LONGEST_FILE = 600
LONGEST_FUNCTION = 75
LONGEST_PURPOSE = 110


@dataclasses.dataclass(frozen=True)
class Source:
    """A Python file, parsed."""

    path: str  # from the root of the checkout
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def package(self) -> str:
        return ".".join(Path(self.path).parts[:-1])

    @property
    def unit(self) -> str | None:
        """The module or package directly under stacked_remat/; empty for its
        `__init__.py`.
        """
        parts = Path(self.path).with_suffix("").parts
        return parts[1].replace("__init__", "") if parts[0] == "stacked_remat" else None

    @functools.cached_property
    def run_on_import(self) -> list[ast.AST]:
        return list(_outside_functions(self.tree))


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        ) or _for_type_checkers(node):
            continue
        yield node
        yield from _outside_functions(node)


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _imports(source: Source, nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Dotted name and line of every import among `nodes`, relative ones resolved."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = source.package.split(".")
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, node.module] if node.module else above)
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def _layer(unit: str) -> str | None:
    for layer, (units, _) in LAYERS.items():
        if any(
            unit == known or unit.startswith(f"{known}_") for known in units.split()
        ):
            return layer
    return None


def _extra_modules(extras: Iterable[str]) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    needed = [
        need for extra in extras for need in project["optional-dependencies"][extra]
    ]
    names = {re.split(r"[\[<>=!~; ]", need, maxsplit=1)[0].lower() for need in needed}
    found = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}
    return found.union(*(PARTS.get(name, set()) for name in found))


def layers_import_only_what_is_below_them(source: Source) -> Iterator[str]:
    if not source.unit:
        return
    own = _layer(source.unit)
    if own is None:
        yield f"{source.path}: add `{source.unit}` to LAYERS in {Path(__file__).name}"
        return
    allowed = {own, *LAYERS[own][1].split()}
    for name, line in _imports(source, source.nodes):
        parts = name.split(".")
        if parts[0] == "stacked_remat":
            other = _layer(parts[1]) or "public"
            if other not in allowed or (own == "compat" and other == own):
                yield (
                    f"{source.path}:{line}: {own} may import {sorted(allowed)}, but not"
                    f" {other} ({name})"
                )


def models_import_what_is_below_them_and_three_private_modules_of_the_library(
    source: Source,
) -> Iterator[str]:
    own = source.package.removeprefix("models.")
    for name, line in _imports(source, source.nodes):
        first, second = name.split(".")[:2] if "." in name else (name, "")
        if (
            own in MODEL_IMPORTS
            and first == "models"
            and second not in MODEL_IMPORTS[own] | {own}
        ):
            yield (
                f"{source.path}:{line}: {own} may import {sorted(MODEL_IMPORTS[own])},"
                f" but not {name}"
            )
        private = second.startswith("_") and second not in SHARED_MODULES
        if source.path.startswith("models/") and first == "stacked_remat" and private:
            yield (
                f"{source.path}:{line} imports {name}: use a public name of"
                " stacked_remat"
            )


def the_library_imports_what_it_declares_and_no_model(source: Source) -> Iterator[str]:
    if source.unit is None:
        return
    for name, line in _imports(source, source.nodes):
        if name.split(".")[0] in {"models", "benchmarks", "tests"}:
            yield (
                f"{source.path}:{line} imports {name}: the library must not import its"
                " applications"
            )
    known = (
        {"stacked_remat"}
        | sys.stdlib_module_names
        | _extra_modules(EXTRAS.get(source.unit, []))
    )
    # Which computes with integers alone
    known |= set() if source.unit == "_schedule" else THIRD_PARTY
    for name, line in _imports(source, source.run_on_import):
        if name.split(".")[0] not in known:
            yield (
                f"{source.path}:{line}: a core install lacks {name}: import it inside a"
                " function"
            )


def only_optional_dependencies_are_imported_inside_functions(
    source: Source,
) -> Iterator[str]:
    if source.unit is None:
        return
    elsewhere = {id(node) for node in source.run_on_import}
    elsewhere |= {
        id(inner)
        for node in source.nodes
        if _for_type_checkers(node)
        for inner in ast.walk(node)
    }
    for name, line in _imports(
        source, (node for node in source.nodes if id(node) not in elsewhere)
    ):
        first = name.split(".")[0]
        optional = (
            name.startswith(("jax.experimental.", "jax._src."))
            or first not in THIRD_PARTY | sys.stdlib_module_names
        )
        if not optional or first == "stacked_remat":
            yield f"{source.path}:{line}: move `{name}` to the top"


def slow_packages_are_imported_where_they_are_used(source: Source) -> Iterator[str]:
    if source.path.startswith(("stacked_remat/", "models/")):
        for name, line in _imports(source, source.run_on_import):
            if name.split(".")[0] in SLOW_IMPORTS:
                yield f"{source.path}:{line}: import {name} inside a function"


def private_jax_and_haliax_stay_in_compat(source: Source) -> Iterator[str]:
    if source.unit is None or source.path in MAY_USE_PRIVATE_NAMES:
        return
    for name, line in _imports(source, source.nodes):
        parts = name.split(".")
        if parts[0] in {"jax", "jaxlib", "haliax", "equinox"} and any(
            p.startswith("_") for p in parts[1:]
        ):
            yield (
                f"{source.path}:{line}: {name} belongs in _compat.py, with the version"
                " and the reason"
            )
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and node.attr == "_src":
            yield (
                f"{source.path}:{node.lineno}: {ast.unparse(node)} belongs in"
                " _compat.py"
            )


def only_hints_know_the_platform_and_barriers(source: Source) -> Iterator[str]:
    """What XLA does, and on which platform, is in `_xla_hints.py`. Kernels in `ops/`
    are for a platform, and `memory/` counts what a platform runs.
    """
    if source.unit in (None, "_xla_hints"):
        return
    names = {"optimization_barrier"}
    if _layer(source.unit) in {"fused", *CORE.split()}:
        names.add("platform")
    for node in source.nodes:
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.split(".")[-1] in names:
                yield f"{source.path}:{node.lineno}: {called} belongs in _xla_hints.py"


def what_serves_any_architecture_names_none(source: Source) -> Iterator[str]:
    if source.path.startswith(FOR_ANY_ARCHITECTURE):
        for number, line in enumerate(source.text.splitlines(), 1):
            if found := ARCHITECTURES.search(line):
                yield (
                    f"{source.path}:{number} names {found.group()!r}: an architecture"
                    " registers itself"
                )


def an_init_only_reexports(source: Source) -> Iterator[str]:
    path = Path(source.path)
    if path.name != "__init__.py" or path.parts[0] not in ("stacked_remat", "models"):
        return
    for node in source.tree.body:
        imports = isinstance(node, ast.Import | ast.ImportFrom) or _for_type_checkers(
            node
        )
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        names = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (
            "__all__",
            "__version__",
        )
        lazy = isinstance(node, ast.FunctionDef) and node.name in (
            "__getattr__",
            "__dir__",
        )
        if not (imports or docstring or names or lazy):
            yield f"{source.path}:{node.lineno}: an __init__ only re-exports"


def files_and_functions_are_short(source: Source) -> Iterator[str]:
    length = source.text.count("\n")
    if length >= LONGEST_FILE:
        yield f"{source.path} has {length} lines: split it by purpose"
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = _lines_of_code(node)
            if lines >= LONGEST_FUNCTION:
                yield f"{source.path}:{node.lineno}: {node.name} has {lines} lines"


def _lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the `def` on, without the docstring."""
    first = function.body[0]
    documented = ast.get_docstring(function, clean=False) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def files_are_named_for_what_they_do(source: Source) -> Iterator[str]:
    if Path(source.path).stem.strip("_") in BANNED_NAMES:
        yield f"{source.path}: name it for what it does"


def the_first_sentence_says_the_purpose(source: Source) -> Iterator[str]:
    if (
        not source.text
        and source.path.startswith("tests/")
        and source.path.endswith("__init__.py")
    ):
        return
    docstring = ast.get_docstring(source.tree, clean=False) or ""
    purpose = " ".join(docstring.partition("\n\n")[0].split())
    if not source.text.startswith('"""') or not purpose:
        yield (
            f"{source.path}: begin with a docstring whose first sentence says what the"
            " file is for"
        )
    elif not purpose.endswith(".") or len(purpose) > LONGEST_PURPOSE:
        yield (
            f"{source.path}: {purpose!r} is not one sentence of at most"
            f" {LONGEST_PURPOSE} characters"
        )


RULES = [
    layers_import_only_what_is_below_them,
    models_import_what_is_below_them_and_three_private_modules_of_the_library,
    the_library_imports_what_it_declares_and_no_model,
    only_optional_dependencies_are_imported_inside_functions,
    slow_packages_are_imported_where_they_are_used,
    private_jax_and_haliax_stay_in_compat,
    only_hints_know_the_platform_and_barriers,
    what_serves_any_architecture_names_none,
    an_init_only_reexports,
    files_and_functions_are_short,
    files_are_named_for_what_they_do,
    the_first_sentence_says_the_purpose,
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)


@functools.cache
def sources() -> list[Source]:
    paths = [
        path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    return [
        Source(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for path in paths
    ]


@every_rule
def test_every_file_keeps(rule):
    problems = [problem for source in sources() for problem in rule(source)]
    assert not problems, "\n".join(problems)


def test_the_core_imports_nothing_that_stands_on_it():
    on_it = {"public", *LAYERS} - {*CORE.split()}
    for layer in CORE.split():
        allowed = LAYERS[layer][1].split()
        assert not on_it.intersection(allowed), layer


def test_every_module_of_the_core_has_tests_for_its_mutants():
    for source in sources():
        if source.unit and _layer(source.unit) in (*CORE.split(), "fused", "pipeline"):
            tests = mutate.tests_of(ROOT / source.path)
            assert tests, f"add {source.path} to TESTS in scripts/mutate.py"
            for test in tests:
                assert (ROOT / test).exists(), f"scripts/mutate.py names {test}"


FOLDER_ROW = re.compile(r"^\| `([^`]+/)` \| (.+?) \|$", re.MULTILINE)


def test_contributing_describes_every_folder_and_no_other():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    described = {folder for folder, _ in FOLDER_ROW.findall(text)}
    with_python = {f"{Path(source.path).parent}/" for source in sources()}
    assert described >= {
        folder for folder in with_python if not folder.startswith("tests/")
    }
    assert not [folder for folder in described if not (ROOT / folder).is_dir()]
