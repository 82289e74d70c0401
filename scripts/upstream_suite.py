"""Run another library's own tests of scan with this library in its place.

    python scripts/upstream_suite.py haliax [pytest arguments]
    python scripts/upstream_suite.py flax [pytest arguments]

Fetches the source distribution of the installed version, whose tests the wheel does not
hold. In Haliax's tests `Stacked`, `BlockSeq`, `ScanCheckpointPolicy`, `scan`, `fold`
and `map` are this library's; in those of Flax NNX `nnx.scan` is
`stacked_remat.nnx.remat_scan`. The cases of `not_expected` are expected to fail, each
for its reason; one that passes is an error.
"""

import dataclasses
import functools
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest


@dataclasses.dataclass(frozen=True)
class Suite:
    """Tests of a library, and a plugin of pytest.

    Attributes:
        files: the paths of the tests in the source distribution.
        replace: puts this library's names into its modules, before the tests import
            them.
        not_expected: how the names of tests begin that don't apply, and the reason.
        selected: which tests are run, as pytest's `-k`.
    """

    files: tuple[str, ...]
    replace: Callable[[], None]
    not_expected: Mapping[str, str]
    selected: str = ""

    def pytest_configure(self) -> None:
        """Replace the names."""
        self.replace()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Expect the cases that don't apply to fail."""
        for start, reason in self.not_expected.items():
            matching = [item for item in items if item.name.startswith(start)]
            if not matching:
                raise pytest.UsageError(f"No test begins with {start!r}: take it out.")
            for item in matching:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def use_for_haliax() -> None:
    import haliax
    import haliax.nn.scan

    import stacked_remat

    def policy(
        *,
        simple: bool = False,
        save_inputs: bool = True,
        disable: bool = False,
        **fields: Any,
    ) -> stacked_remat.ScanCheckpointPolicy:
        """Without the fields that have no meaning here, as
        docs/migrating-from-haliax.md says.
        """
        if disable:
            fields = {"save_block_internals": True}
        return stacked_remat.ScanCheckpointPolicy(**fields)

    names = ("Stacked", "BlockSeq", "scan", "fold", "map")
    ours = {name: getattr(stacked_remat, name) for name in names} | {
        "ScanCheckpointPolicy": policy
    }
    for module in (haliax, haliax.nn, haliax.nn.scan):
        for name, replacement in ours.items():
            if hasattr(module, name) and not isinstance(
                getattr(module, name), type(haliax)
            ):
                setattr(module, name, replacement)


def use_for_flax() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from flax import nnx

    from stacked_remat.nnx import remat_scan

    def scan(
        f: Any = None, *, graph: Any = None, graph_updates: Any = None, **options: Any
    ) -> Any:
        return (
            functools.partial(scan, **options)
            if f is None
            else remat_scan(f, **options)
        )

    nnx.scan = scan


_TOP = "looks for a scan at the top of the program; here "
_TRACES = "counts how often the function is traced; here each call traces it"
_SHARED = (
    "without graph updates nnx.scan carries what is written to shared state; with them"
    " it drops it"
)
_PREFIX = (
    "axes of nnx.prefix are for nnx.scan without graph updates; here they are StateAxes"
)
_WORDS = "the words of an error of nnx.scan without graph updates"
SUITES = {
    "haliax": Suite(
        ("tests/test_scan.py", "tests/test_hof.py", "tests/test_utils.py"),
        use_for_haliax,
        {
            "test_checkpoint_carries[cos-": (
                f"{_TOP}it is inside the checkpoint that lets the backward pass "
                "replay the stack"
            ),
            "test_checkpoint_carries[nested-": (
                f"{_TOP}the sweep is a function with a derivative of its own"
            ),
            "test_scan_via_with_bool_unroll": (
                "counts the calls of the attribute haliax.scan"
            ),
            "test_fold_with_bool_unroll": (
                "counts the calls of the attribute haliax.fold"
            ),
        },
    ),
    "flax": Suite(
        ("tests/nnx/transforms_test.py", "tests/nnx/spmd_test.py"),
        use_for_flax,
        {
            "test_cache_tracing_simple": _TRACES,
            "test_cache_tracing_object": _TRACES,
            "test_broadcast_variable_mutation": _SHARED,
            "test_only_carry_functional": _SHARED,
            "test_variables_broadcast_in_scan": _SHARED,
            "test_carry_pytree_sow_functional": _PREFIX,
            "test_complex_broadcast_dropout_functional": _PREFIX,
            "test_rnn_example_functional": _PREFIX,
            "test_scan_broadcast_keys_functional": _PREFIX,
            "test_all_carry_new_reference_error1": _WORDS,
            "test_scan_carry_identity_error": _WORDS,
            "test_scan_input_output_aliasing": (
                "with graph updates an output may be a variable of arguments"
            ),
        },
        "TestScan or test_add_remove_axis_in_transform",
    ),
}


def fetch(library: str, files: tuple[str, ...], folder: Path) -> list[str]:
    """Unpack the tests of the installed version into `folder`, and return where they
    are.
    """
    pip = (
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        library,
    )
    # uv makes no pip
    subprocess.run(
        [sys.executable, "-m", "ensurepip"], check=True, stdout=subprocess.DEVNULL
    )
    version = importlib.metadata.version(library)
    subprocess.run([*pip, "--dest", str(folder), f"{library}=={version}"], check=True)
    (archive,) = folder.glob(f"{library}-*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    (unpacked,) = folder.glob(f"{library}-*/")
    return [str(shutil.move(unpacked / name, folder)) for name in files]


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in SUITES:
        raise SystemExit(f"Name a library: {', '.join(SUITES)}.")
    suite = SUITES[arguments[0]]
    with tempfile.TemporaryDirectory() as folder:
        tests = fetch(arguments[0], suite.files, Path(folder))
        own = [
            "-c",
            "/dev/null",
            "--rootdir",
            folder,
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:warnings",
        ]
        # Lists the cases that are expected to fail
        own += [
            "-rx",
            "-k",
            suite.selected,
        ]
        return int(pytest.main([*own, *arguments[1:], *tests], plugins=[suite]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
