"""Run another library's own tests of scan with this library in its place.

    python scripts/upstream_suite.py haliax [pytest arguments]
    python scripts/upstream_suite.py flax [pytest arguments]

Fetches the source distribution of the installed version, whose tests the wheel does not hold. In Haliax's
tests `Stacked`, `BlockSeq`, `ScanCheckpointPolicy`, `scan`, `fold` and `map` are this library's; in those of
Flax NNX `nnx.scan` is `stacked_remat.nnx.remat_scan`. The cases of `not_expected` are expected to fail, each
for its reason; one that passes is an error.
"""

import dataclasses
import functools
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest


@dataclasses.dataclass(frozen=True)
class Suite:
    """Tests of a library.

    Attributes:
        library: its distribution.
        files: the paths of the tests in the source distribution.
        replace: puts this library's names into its modules, before the tests import them.
        selected: which tests are run, as pytest's `-k`.
        not_expected: how the names of tests begin that don't apply, and the reason.
    """

    library: str
    files: tuple[str, ...]
    replace: Callable[[], None]
    selected: str
    not_expected: Mapping[str, str]

    def pytest_configure(self) -> None:
        """Replace the names."""
        self.replace()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Expect the cases that don't apply to fail."""
        for start, reason in self.not_expected.items():
            matching = [item for item in items if item.name.startswith(start)]
            if not matching:
                raise pytest.UsageError(f"No test of {self.library} begins with {start!r}: take it out.")
            for item in matching:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    def fetch(self, folder: Path) -> list[str]:
        """Unpack the tests of the installed version under `folder`, and return where they are."""
        version = importlib.metadata.version(self.library)
        subprocess.run(
            [sys.executable, "-m", "ensurepip"], check=True, stdout=subprocess.DEVNULL
        )  # uv makes no pip
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            self.library,
        ]
        subprocess.run([*command, "--dest", str(folder), f"{self.library}=={version}"], check=True)
        (archive,) = folder.glob(f"{self.library}-*.tar.gz")
        with tarfile.open(archive) as source:
            for member in source.getmembers():
                name = member.name.partition("/")[2]
                if name in self.files:
                    content = source.extractfile(member)
                    assert content is not None
                    (folder / Path(name).name).write_bytes(content.read())
        return [str(folder / Path(name).name) for name in self.files]


def haliax() -> Suite:
    import haliax
    import haliax.nn.scan

    import stacked_remat

    def policy(
        *, simple: bool = False, save_inputs: bool = True, disable: bool = False, **fields: Any
    ) -> stacked_remat.ScanCheckpointPolicy:
        """Without the fields that have no meaning here, as docs/migrating-from-haliax.md says."""
        if disable:
            fields = {"save_block_internals": True}
        return stacked_remat.ScanCheckpointPolicy(**fields)

    names = ("Stacked", "BlockSeq", "scan", "fold", "map")
    ours = {name: getattr(stacked_remat, name) for name in names} | {"ScanCheckpointPolicy": policy}

    def replace() -> None:
        for module in (haliax, haliax.nn, haliax.nn.scan):
            for name, replacement in ours.items():
                if hasattr(module, name) and not isinstance(getattr(module, name), type(haliax)):
                    setattr(module, name, replacement)

    not_expected = {
        "test_checkpoint_carries[cos-": "looks for a scan at the top of the program; here it is inside the "
        "checkpoint that lets the backward pass replay the stack",
        "test_checkpoint_carries[nested-": "looks for a scan at the top of the program; here the sweep is a "
        "function with a derivative of its own",
        "test_scan_via_with_bool_unroll": "counts the calls of the attribute haliax.scan",
        "test_fold_with_bool_unroll": "counts the calls of the attribute haliax.fold",
    }
    files = ("tests/test_scan.py", "tests/test_hof.py", "tests/test_utils.py")
    return Suite("haliax", files, replace, "", not_expected)


def flax() -> Suite:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from flax import nnx

    from stacked_remat.nnx import remat_scan

    def scan(f: Any = None, *, graph: Any = None, graph_updates: Any = None, **options: Any) -> Any:
        return functools.partial(scan, **options) if f is None else remat_scan(f, **options)

    def replace() -> None:
        nnx.scan = scan

    traces = "counts how often the function is traced; here each call traces it"
    shared = "without graph updates nnx.scan carries what is written to shared state; with them it drops it"
    prefix = "axes of nnx.prefix are for nnx.scan without graph updates; here they are StateAxes"
    words = "the words of an error of nnx.scan without graph updates"
    not_expected = {
        "test_cache_tracing_simple": traces,
        "test_cache_tracing_object": traces,
        "test_broadcast_variable_mutation": shared,
        "test_only_carry_functional": shared,
        "test_variables_broadcast_in_scan": shared,
        "test_carry_pytree_sow_functional": prefix,
        "test_complex_broadcast_dropout_functional": prefix,
        "test_rnn_example_functional": prefix,
        "test_scan_broadcast_keys_functional": prefix,
        "test_all_carry_new_reference_error1": words,
        "test_scan_carry_identity_error": words,
        "test_scan_input_output_aliasing": "with graph updates an output may be a variable of the arguments",
    }
    files = ("tests/nnx/transforms_test.py", "tests/nnx/spmd_test.py")
    return Suite("flax", files, replace, "TestScan or test_add_remove_axis_in_transform", not_expected)


SUITES = {"haliax": haliax, "flax": flax}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in SUITES:
        raise SystemExit(f"Name a library: {', '.join(SUITES)}.")
    suite = SUITES[arguments[0]]()
    with tempfile.TemporaryDirectory() as folder:
        tests = suite.fetch(Path(folder))
        own = ["-c", "/dev/null", "--rootdir", folder, "-q", "-p", "no:cacheprovider", "-p", "no:warnings"]
        own += ["-rx", "-k", suite.selected]  # lists the cases that are expected to fail
        return int(pytest.main([*own, *arguments[1:], *tests], plugins=[suite]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
