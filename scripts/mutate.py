"""Changes the core in one place at a time, and counts the changes that tests notice.

    python -m scripts.mutate --mutants 100 --seed 0 [--only _policy.py:99]

A *mutant* is the core with one operator or constant changed: `<` for `<=`, `and` for
`or`, `+` for `-`, 2 for 1, a condition turned round. It is *killed* by a test that
fails, and those that survive are printed: each is a place that no test checks, or one
where both ways are right. The tests of a module are in the files that name it below.
Those marked `deep`, those of any module, and last those of all other modules run only
with a mutant that the ones before pass; all stop at the first failure. They have to
pass without a change. A mutant with which they take much longer is killed too.

Works in a copy of the checkout. Exit status 1 if fewer than `--least` are killed.
"""

import argparse
import ast
import functools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "stacked_remat"
# Tests of programs of any kind: what they do, have, cost and say where they fail
OF_ANY_MODULE = (
    "tests/test_defaults.py",
    "tests/test_program_sizes.py",
    "tests/test_error_texts.py",
    "tests/memory/test_flops.py",
    "tests/test_random_programs.py",
)

# Tests of each module or folder of the core, the fastest first. What is inside of a
# folder may have its own.
TESTS = {
    "_activity": "test_activity test_any_layer test_custom_rules test_transformations"
    " test_fused_update",
    "_block_foldable": "test_stacked test_stack_of_layers",
    "_block_seq": "test_stacked test_checkpoint test_policies_at_work",
    "_carry_files": "test_carries_on_disk",
    "_checkpoint": "test_checkpoint test_checkpoint_composition test_jax_policies",
    "_compat": "test_compat test_scan test_policies_at_work",
    "_files": "test_files training/test_run_folder training/data/test_token_cache",
    "_fused": "test_fused_update test_updates_on_meshes",
    "_haliax_names": "test_policy test_haliax_stacks",
    "_hijax": "test_transformations test_custom_rules test_visitor"
    " test_values_used_again",
    "_in_files": "test_in_files",
    "_layer_checks": "test_argument_errors test_error_texts test_stacked"
    " test_stack_of_layers",
    "_messages": "test_messages test_error_texts test_stacked test_state_dict"
    " memory/test_plan",
    "_microbatches": "test_microbatches test_pipeline_errors test_pipeline"
    " training/test_step",
    "_names": "test_policies_at_work test_checkpoint test_places",
    "_noted": "test_noted ghost/test_grad_dot",
    "_offload_check": "test_offload_check",
    "_paths": "lora/test_adapter",
    "_pictures": "models/test_plot ghost/test_log",
    "_pipeline": "test_pipeline_errors test_pipeline",
    "_pipeline/schedule": "test_pipeline_schedule test_pipeline",
    "_memory_spaces": "test_any_layer test_streaming test_policies_at_work",
    "_place_names": "test_places",
    "_places": "test_places",
    "_policy": "test_policy test_policies_at_work memory/test_plan test_sweep_memory",
    "_python_calls": "test_carries_on_disk test_in_files",
    "_remat": "test_policy test_policies_at_work test_any_layer test_jax_policies",
    "_scan": "test_scan test_until test_layer_state test_visitor test_layer_axis"
    " test_stacked_pattern test_policies_at_work test_values_used_again",
    "_scan/checks": "test_scan test_error_texts test_until test_stack_of_layers",
    "_scan/arguments": "test_argument_errors test_scan test_layer_axis test_lax_scan"
    " test_stacked",
    "_scan/lax_arguments": "test_lax_scan",
    "_scan/layer_axis": "test_scan test_layer_axis test_stacked_pattern test_pipeline",
    "_scan/layers": "test_scan test_until test_layer_state test_visitor test_layer_axis"
    " test_stacked_pattern test_policies_at_work test_values_used_again test_export"
    " test_gathered_ahead test_streaming",
    "_scan/layer_state": "test_layer_state",
    "_scan/marks": "test_scan test_layer_axis test_stacked_pattern",
    "_scan/returned": "test_visitor test_stacked_pattern test_layer_state",
    "_scan/stacking": "test_scan test_stacked test_stack_of_layers test_state_dict"
    " test_visitor test_layer_axis test_stacked_pattern test_policies_at_work",
    "_scan/until": "test_until",
    "_schedule": "test_schedule test_policy",
    "_stacked": "test_stacked test_stack_of_layers test_state_dict test_equal_sweeps"
    " test_until",
    "_stacked_pattern": "test_stacked_pattern",
    "_state_dict": "test_state_dict",
    "_static": "test_stacked test_scan test_visitor",
    "_sweep": "test_scan test_visitor test_transformations test_until"
    " test_sweep_memory test_policies_at_work test_stacked_pattern"
    " test_values_used_again test_policy_memory test_custom_rules"
    " test_sweeps_on_meshes test_gathered_ahead test_pipeline test_xla_hints",
    "_sweep/ahead": "test_gathered_ahead test_xla_hints",
    "_sweep/disk": "test_carries_on_disk",
    "_sweep/forward": "test_scan test_visitor test_transformations test_until"
    " test_sweep_memory test_policies_at_work test_stacked_pattern"
    " test_gathered_ahead test_policy_memory test_carries_on_disk",
    "_sweep/gathers": "test_gathered_ahead test_xla_hints",
    "_sweep/kinds": "test_stacked_pattern test_gathered_ahead test_xla_hints",
    "_sweep/programs": "test_program_keys test_outside_of_jit test_scan test_until",
    "_sweep/trips": "test_until",
    "_tiled": "test_tiled test_tiled_transformations",
    "_tiles": "test_tiled test_tiled_transformations",
    "_trips": "memory/test_flops memory/test_collectives",
    "_while": "test_while_loop",
    "_xla_hints": "test_xla_hints test_gathered_ahead",
    "diffrax": "test_other_libraries",
    "levanter": "test_levanter",
    "streaming": "test_streaming",
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

    @property
    def place(self) -> str:
        """As `stacked_remat/_policy.py:99`."""
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place}: {self.before} -> {self.after}"


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
    """The nodes that run: neither types nor texts of errors. Not `strict=` of `zip`
    either, which says what holds anyway.
    """
    match node:
        case ast.keyword("strict" | "covariant" | "total"):
            return
        case ast.AnnAssign(annotation=ast.Name("TypeAlias")):
            return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "exc", "msg", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.AST):
                yield child
                yield from _running(child)


def tests_of(path: Path) -> tuple[str, ...]:
    """The files with the tests of a module; empty where none is named."""
    module = path.relative_to(CORE).with_suffix("").as_posix()
    parts = [part for part in TESTS if f"{module}/".startswith(f"{part}/")]
    if not parts:
        return ()
    names = TESTS[max(parts, key=len)].split()
    return tuple(f"tests/{name}.py" for name in names)


class Selection(NamedTuple):
    """Tests that run together."""

    files: tuple[str, ...]
    # An expression of pytest's
    marks: str

    def pass_in(self, copy: Path, seconds: float | None = None) -> bool:
        """Whether all pass in a copy of the checkout."""
        options = ["-q", "-x", "-p", "no:cacheprovider", "-n", "0", "-m", self.marks]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *self.files],
            cwd=copy,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            timeout=seconds,
        )
        # Files may have no tests with these marks
        no_tests = pytest.ExitCode.NO_TESTS_COLLECTED
        return done.returncode in (pytest.ExitCode.OK, no_tests)


def selections_of(path: Path) -> Iterator[Selection]:
    """What a mutant of a module has to pass to survive, the fastest first."""
    files = tests_of(path)
    yield Selection(files, "not slow and not deep")
    yield Selection(files, "deep and not slow")
    yield Selection(OF_ANY_MODULE, "not slow")
    others = []
    for name in sorted({*" ".join(TESTS.values()).split()}):
        file = f"tests/{name}.py"
        if file not in files:
            others.append(file)
    yield Selection(tuple(others), "not slow and not deep")


@functools.cache
def seconds_of(tests: Selection, copy: Path) -> float:
    """How long the tests of the unchanged core take; they have to pass."""
    start = time.monotonic()
    if not tests.pass_in(copy):
        raise SystemExit(f"Without a change these fail: {' '.join(tests.files)}")
    return time.monotonic() - start


def is_killed(mutant: Mutant, copy: Path) -> bool:
    """Whether a test fails in a copy of the checkout with the mutant in it."""
    return any(
        is_killed_by(tests, mutant, copy) for tests in selections_of(mutant.path)
    )


def is_killed_by(tests: Selection, mutant: Mutant, copy: Path) -> bool:
    # A mutant has other programs, which are not in the cache of compilations
    most = 120 + 5 * seconds_of(tests, copy)
    file = copy / mutant.path.relative_to(ROOT)
    original = file.read_text(encoding="utf-8")
    file.write_text(mutant.source, encoding="utf-8")
    try:
        return not tests.pass_in(copy, most)
    except subprocess.TimeoutExpired:
        print(f"no end after {most:.0f} s: {mutant}")
        return True
    finally:
        file.write_text(original, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mutants", type=int, default=100, help="how many to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default="", help="part of the places to change, as _policy.py:99"
    )
    parser.add_argument("--least", type=float, default=0.9, help="share to be killed")
    options = parser.parse_args()
    found = []
    for path in sorted(CORE.rglob("*.py")):
        if tests_of(path):
            found += [each for each in mutants(path) if options.only in each.place]
    chosen = random.Random(options.seed).sample(found, min(options.mutants, len(found)))
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        # Environments, runs and the like are not part of the checkout
        others = shutil.ignore_patterns("__pycache__", ".*", "runs", "site", "dist")
        shutil.copytree(ROOT, copy, ignore=others, dirs_exist_ok=True)
        for number, mutant in enumerate(chosen, 1):
            is_dead = is_killed(mutant, copy)
            killed += is_dead
            if not is_dead:
                print(f"survived: {mutant}")
            print(f"{killed} of {number} killed", end="\r", flush=True)
    share = killed / max(len(chosen), 1)
    print(f"{killed} of {len(chosen)} killed ({share:.0%}), of {len(found)} mutants")
    return int(share < options.least)


if __name__ == "__main__":
    sys.exit(main())
