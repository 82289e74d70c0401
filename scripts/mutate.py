"""Changes the core in one place at a time, and counts the changes that tests notice.

    python -m scripts.mutate --mutants 100 --seed 0 [--only _schedule]

A *mutant* is the core with one operator or constant changed: `<` for `<=`, `and` for
`or`, `+` for `-`, 2 for 1, a condition turned round. It is *killed* by a test that
fails, and those that survive are printed: each is a place that no test checks, or one
where both ways are right. The tests of a module are the files that name it below, and
stop at the first failure; a mutant that no longer ends counts as killed.

Works in a copy of the checkout. Exit status 1 if fewer than `--least` are killed.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "stacked_remat"

# Tests of each module or folder of the core, the fastest first.
TESTS = {
    "_schedule": ["test_schedule"],
    "_policy": ["test_policy", "test_policies_at_work"],
    "_remat": ["test_policy", "test_policies_at_work"],
    "_scan": ["test_scan", "test_until", "test_layer_state", "test_visitor"],
    "_sweep": ["test_scan", "test_visitor", "test_transformations", "test_until"],
    "_fused": ["test_fused_update"],
    "_stacked": ["test_stacked", "test_stack_of_layers"],
    "_stacked_pattern": ["test_stacked_pattern"],
    "_block_foldable": ["test_stacked", "test_stack_of_layers"],
    "_block_seq": ["test_stacked", "test_checkpoint"],
    "_checkpoint": ["test_checkpoint", "test_checkpoint_composition"],
    "_state_dict": ["test_state_dict"],
    "_tiled": ["test_tiled"],
    "levanter": ["test_levanter"],
    "streaming": ["test_streaming"],
}

COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
}


class Mutant(NamedTuple):
    """One change of a file."""

    path: Path
    line: int
    before: str
    after: str
    source: str  # of the whole file


def changed(node: ast.AST) -> ast.AST | None:
    """The node with one thing changed; None where there is nothing to change."""
    match node:
        case ast.Compare(left, [operator], right) if type(operator) in COMPARED:
            return ast.Compare(left, [COMPARED[type(operator)]()], right)
        case ast.BoolOp(operator, values):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            return ast.BoolOp(other, values)
        case ast.BinOp(left, operator, right) if type(operator) in COMPUTED:
            return ast.BinOp(left, COMPUTED[type(operator)](), right)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(bool() as value):
            return ast.Constant(not value)
        case ast.Constant(int() as value):
            return ast.Constant(value + 1)
        case ast.IfExp(test, body, otherwise):
            return ast.IfExp(test, otherwise, body)
    return None


def mutants(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw = source.encode()

    def place(line: int, column: int) -> int:
        return starts[line - 1] + column

    for node in _running(ast.parse(source)):
        other = changed(node)
        if other is None or not isinstance(node, ast.expr):
            continue
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin = place(node.lineno, node.col_offset)
        end = place(node.end_lineno, node.end_col_offset)
        # In parentheses, so that it is one operand as the node was
        after = f"({ast.unparse(ast.fix_missing_locations(other))})"
        whole = (raw[:begin] + after.encode() + raw[end:]).decode()
        yield Mutant(path, node.lineno, raw[begin:end].decode(), after, whole)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run: neither types nor texts of errors."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "exc", "msg", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.AST):
                yield child
                yield from _running(child)


def tests_of(path: Path) -> list[str]:
    """The files with the tests of a module; empty where none is named."""
    unit = path.relative_to(CORE).parts[0].removesuffix(".py")
    return [f"tests/{name}.py" for name in TESTS.get(unit, ())]


def is_killed(mutant: Mutant, copy: Path, seconds: float) -> bool:
    """Whether a test fails in a copy of the checkout with the mutant in it."""
    file = copy / mutant.path.relative_to(ROOT)
    original = file.read_text(encoding="utf-8")
    file.write_text(mutant.source, encoding="utf-8")
    options = ["-q", "-x", "-p", "no:cacheprovider", "-n", "0"]
    selected = ["-m", "not slow and not deep"]
    command = [sys.executable, "-m", "pytest", *options, *selected]
    try:
        done = subprocess.run(
            [*command, *tests_of(mutant.path)],
            cwd=copy,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(original, encoding="utf-8")
    return done.returncode != 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mutants", type=int, default=100, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the paths to change")
    parser.add_argument("--least", type=float, default=0.9, help="share to be killed")
    parser.add_argument("--seconds", type=float, default=900, help="for each mutant")
    options = parser.parse_args()
    found = []
    for path in sorted(CORE.rglob("*.py")):
        if options.only in str(path) and tests_of(path):
            found += mutants(path)
    chosen = random.Random(options.seed).sample(found, min(options.mutants, len(found)))
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("stacked_remat", "tests", "scripts", "models", "benchmarks"):
            shutil.copytree(
                ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(ROOT / "pyproject.toml", copy)
        for number, mutant in enumerate(chosen, 1):
            is_dead = is_killed(mutant, copy, options.seconds)
            killed += is_dead
            if not is_dead:
                place = f"{mutant.path.relative_to(ROOT)}:{mutant.line}"
                print(f"survived: {place}: {mutant.before} -> {mutant.after}")
            print(f"{killed} of {number} killed", end="\r", flush=True)
    share = killed / max(len(chosen), 1)
    print(f"{killed} of {len(chosen)} killed ({share:.0%}), of {len(found)} mutants")
    return int(share < options.least)


if __name__ == "__main__":
    sys.exit(main())
