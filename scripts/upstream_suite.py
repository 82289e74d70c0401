"""Run another library's own tests of scan with this library in its place.

    python scripts/upstream_suite.py haliax [pytest arguments]
    python scripts/upstream_suite.py flax [pytest arguments]
    python scripts/upstream_suite.py levanter CHECKOUT [pytest arguments]
    python scripts/upstream_suite.py diffrax CHECKOUT [pytest arguments]

Fetches the source distribution of the installed version, whose tests the wheel does not
hold. Diffrax's and Levanter's newest distributions don't either: their tests are those
of a checkout. Diffrax's test the installed version, which the checkout has to be of.
Levanter's test the checkout, in an environment with what its pyproject.toml and this
library require. With PyTorch in it the round trips through transformers run too; they,
and those of published configs, read Hugging Face's hub.

For the tests of Haliax, and of Levanter's models, what imports `Stacked`, `BlockSeq`,
`ScanCheckpointPolicy`, `scan`, `fold` and `map` of Haliax gets this library's, as they
are. In those of Flax NNX `nnx.scan` is `stacked_remat.nnx.remat_scan`. In those of
Diffrax `RecursiveCheckpointAdjoint`, its default, solves as a `RematAdjoint`. The cases
of `not_expected` are expected to fail, each for its reason; one that passes is an
error.
"""

import dataclasses
import functools
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest


@dataclasses.dataclass(frozen=True)
class Suite:
    """Tests of a library, and a plugin of pytest.

    Attributes:
        files: the paths of the tests in the source distribution.
        replace: puts this library's names into its modules, before anything imports
            them.
        not_expected: names, or how names begin, of tests that don't apply, and the
            reason.
        selected: which tests are run, as pytest's `-k`.
    """

    files: tuple[str, ...]
    replace: Callable[[], None]
    not_expected: Mapping[str, str]
    selected: str = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Expect the cases that don't apply to fail."""
        for start, reason in self.not_expected.items():
            # A whole name means that test alone.
            matching = [item for item in items if item.name == start]
            if not matching:
                matching = [item for item in items if item.name.startswith(start)]
            if not matching:
                raise pytest.UsageError(f"No test begins with {start!r}: take it out.")
            for item in matching:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


HALIAX_NAMES = (
    "Stacked",
    "BlockSeq",
    "BlockFoldable",
    "ScanCheckpointPolicy",
    "ScanCheckpointSpec",
    "scan",
    "fold",
    "map",
)


def use_for_haliax() -> None:
    import haliax
    import haliax._src.scan
    import haliax.nn.scan

    import stacked_remat

    for module in (haliax, haliax.nn, haliax.nn.scan, haliax._src.scan):
        for name in HALIAX_NAMES:
            # `haliax.nn.scan` is a module.
            if not isinstance(getattr(module, name, haliax), types.ModuleType):
                setattr(module, name, getattr(stacked_remat, name))


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


def use_for_diffrax() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import diffrax
    import jax

    from stacked_remat.diffrax import RematAdjoint

    def loop(self: Any, **options: Any) -> Any:
        """Its default number of checkpoints depends on `max_steps`."""
        carries = {} if self.checkpoints is None else {"max_carries": self.checkpoints}
        return RematAdjoint(**carries).loop(**options)

    diffrax.RecursiveCheckpointAdjoint.loop = loop

    save_at = diffrax.SaveAt

    def save_at_without_caches(*args: Any, **options: Any) -> Any:
        """XLA ends a process that holds as many programs as `test_against` compiles:
        those before each of its settings are dropped.
        """
        jax.clear_caches()
        return save_at(*args, **options)

    diffrax.SaveAt = save_at_without_caches


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
    "levanter": Suite(
        (
            "tests/gpt2_test.py",
            "tests/test_gemma.py",
            "tests/test_hyena.py",
            "tests/test_llama.py",
            "tests/test_llama3.py",
            "tests/test_lora.py",
            "tests/test_mistral.py",
            "tests/test_mixtral.py",
            "tests/test_olmo.py",
            "tests/test_qwen2.py",
            "tests/test_qwen3.py",
        ),
        use_for_haliax,
        {
            "test_mixtral_roundtrip": (
                "its experts read entries stacked over the layers; here each layer "
                "reads its own"
            ),
        },
    ),
    "diffrax": Suite(
        (
            "test/test_adaptive_stepsize_controller.py",
            "test/test_adjoint.py",
            "test/test_event.py",
            "test/test_progress_meter.py",
            "test/test_saveat_solution.py",
            "test/test_step_to.py",
            "test/test_vmap.py",
        ),
        use_for_diffrax,
        {
            "test_implicit": "fails with Diffrax's own adjoint too",
            "test_tqdm_progress_meter": "fails with Diffrax's own adjoint too",
            "test_text_progress_meter": "skips lines in jax.vmap, as the page says",
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


# Libraries whose tests are those of a checkout, and the folders of it that these import
# from: Levanter's import each other in two ways.
CHECKOUTS = {"levanter": ("", "src", "tests"), "diffrax": ()}


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


def run(suite: Suite, folder: Path, tests: list[str], arguments: list[str]) -> int:
    suite.replace()  # before a conftest.py imports the library
    own = ["-c", "/dev/null", "--rootdir", str(folder), "-q"]
    own += ["-p", "no:cacheprovider", "-p", "no:warnings"]
    # -rx lists the cases that are expected to fail.
    own += ["-rx", "-k", suite.selected]
    return int(pytest.main([*own, *arguments, *tests], plugins=[suite]))


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in SUITES:
        raise SystemExit(f"Name a library: {', '.join(SUITES)}.")
    library, *others = arguments
    suite = SUITES[library]
    if library in CHECKOUTS:
        if not others or not (checkout := Path(others[0]).resolve()).is_dir():
            raise SystemExit(f"Name the folder of a checkout of {library}.")
        folders = CHECKOUTS[library]
        sys.path[:0] = [str(checkout / part) for part in folders]
        tests = [str(checkout / name) for name in suite.files]
        return run(suite, checkout, tests, others[1:])
    with tempfile.TemporaryDirectory() as folder:
        tests = fetch(library, suite.files, Path(folder))
        return run(suite, Path(folder), tests, others)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
