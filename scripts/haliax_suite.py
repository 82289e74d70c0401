"""Run Haliax's own tests of scan and higher-order functions with this library in the place of Haliax's.

    python scripts/haliax_suite.py [pytest arguments]

Fetches the source distribution of the installed version of Haliax, whose tests the wheel does not hold. In
them `Stacked`, `BlockSeq`, `ScanCheckpointPolicy`, `scan`, `fold` and `map` are replaced by this library's.
The cases of `LOOKS_INSIDE` are expected to fail, each for its reason; one that passes is an error.
"""

import importlib.metadata
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import haliax.nn.scan
import pytest

import stacked_remat

FILES = ("test_scan.py", "test_hof.py", "test_utils.py")
REPLACED = ("Stacked", "BlockSeq", "ScanCheckpointPolicy", "scan", "fold", "map")
LOOKS_INSIDE = {
    "test_checkpoint_carries[cos-": "looks for a scan at the top of the program; here it is inside the "
    "checkpoint that lets the backward pass replay the stack",
    "test_checkpoint_carries[nested-": "looks for a scan at the top of the program; here the sweep is a "
    "function with a derivative of its own",
    "test_scan_via_with_bool_unroll": "counts the calls of the attribute haliax.scan",
    "test_fold_with_bool_unroll": "counts the calls of the attribute haliax.fold",
}


class Replace:
    """A pytest plugin: puts this library's names into Haliax's modules before the tests import them."""

    def pytest_configure(self) -> None:
        """Replace the names."""
        for module in (haliax, haliax.nn, haliax.nn.scan):
            for name in REPLACED:
                if hasattr(module, name) and not isinstance(getattr(module, name), type(haliax)):
                    setattr(module, name, getattr(stacked_remat, name))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Expect the cases that look inside Haliax to fail."""
        for start, reason in LOOKS_INSIDE.items():
            matching = [item for item in items if item.name.startswith(start)]
            if not matching:
                raise pytest.UsageError(
                    f"No test of Haliax begins with {start!r}: take it out of LOOKS_INSIDE."
                )
            for item in matching:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def fetch_tests(folder: Path) -> Path:
    """Unpack the test files of the installed Haliax under `folder` and return where they are."""
    version = importlib.metadata.version("haliax")
    subprocess.run(
        [sys.executable, "-m", "ensurepip"], check=True, stdout=subprocess.DEVNULL
    )  # uv makes no pip
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "haliax"]
    subprocess.run([*command, "--dest", str(folder), f"haliax=={version}"], check=True)
    (archive,) = folder.glob("haliax-*.tar.gz")
    tests = folder / "tests"
    tests.mkdir()
    with tarfile.open(archive) as source:
        for member in source.getmembers():
            path = Path(member.name)
            if path.parent.name == "tests" and path.name in FILES:
                content = source.extractfile(member)
                assert content is not None
                (tests / path.name).write_bytes(content.read())
    return tests


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        tests = fetch_tests(Path(folder))
        own = [
            "-c",
            "/dev/null",
            "--rootdir",
            str(tests),
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:warnings",
        ]
        return int(pytest.main([*own, *arguments, str(tests)], plugins=[Replace()]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
