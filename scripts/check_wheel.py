"""Build the source archive and from it the wheel, install that in its own environment,
and use it there.

Both are left in `dist/` and must pass `twine check --strict`. The wheel must hold one
top-level package, and that package must import and fold with only the core
dependencies, at the versions of constraints/py3XX.txt. rattler-build must take the
conda recipe.

    python scripts/check_wheel.py
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from rattler_build import Stage0Recipe, VariantConfig

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PACKAGE = "stacked_remat"

# Runs inside the clean environment, outside the checkout.
PROOF = """
import importlib.metadata, importlib.util, sys
for extra in ("pydantic", "matplotlib", "pytest"):
    found = importlib.util.find_spec(extra)
    assert found is None, f"{extra} is here, so this is no core install"

import equinox as eqx
import jax
import jax.numpy as jnp
import stacked_remat
from stacked_remat import Stacked
import haliax as hax

assert "site-packages" in stacked_remat.__file__, stacked_remat.__file__
assert stacked_remat.__version__ == importlib.metadata.version("stacked_remat")
packages = ("lora", "memory", "nnx", "ops", "training")
imported = [name for name in packages if f"stacked_remat.{name}" in sys.modules]
assert not imported, f"import stacked_remat imports {imported}"
assert stacked_remat.memory.report
assert stacked_remat.ops.causal_attention and stacked_remat.lora.apply_lora
try:
    stacked_remat.training
except ModuleNotFoundError as error:
    assert "pip install 'stacked_remat[train]'" in str(error), error
else:
    raise AssertionError("training was imported without the extra that it takes")

class Block(eqx.Module):
    scale: jax.Array

    def __init__(self, *, key):
        self.scale = jax.random.normal(key, ())

    def __call__(self, x):
        return x + jnp.tanh(self.scale * x)

Layers = hax.Axis("layers", 5)
keys = jax.random.split(jax.random.key(0), Layers.size)
blocks = Stacked.init(Layers, Block, remat=True)(key=keys)
x = expected = jnp.arange(3.0)
for block in blocks.unstacked():
    expected = block(expected)
is_close = jnp.allclose(blocks.fold(x), expected, atol=1e-6)
assert is_close, "the fold differs from the loop"
version = importlib.metadata.version("stacked_remat")
print(f"stacked_remat {version} folds with jax {jax.__version__} alone")
"""


def run(*command: str | Path, **options) -> None:
    subprocess.run(
        [str(part) for part in command], check=True, stdin=subprocess.DEVNULL, **options
    )


def build(temporary: Path) -> Path:
    """Build both with the hatchling that is installed, so that its version is pinned
    too.
    """
    shutil.rmtree(DIST, ignore_errors=True)
    hatchling = (sys.executable, "-m", "hatchling", "build", "-d", DIST, "-t")
    run(*hatchling, "sdist", cwd=ROOT)
    (sdist,) = DIST.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(temporary, filter="data")
    run(*hatchling, "wheel", cwd=temporary / sdist.name.removesuffix(".tar.gz"))
    (wheel,) = DIST.glob("*.whl")
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    return wheel


def check_contents(wheel: Path) -> None:
    """Raise unless the wheel holds exactly the package's files and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = (
        path.relative_to(ROOT) for path in (ROOT / PACKAGE).rglob("*") if path.is_file()
    )
    in_checkout = {str(path) for path in files if "__pycache__" not in path.parts}
    assert f"{PACKAGE}/py.typed" in in_checkout, (
        "type checkers would not read the wheel"
    )
    if held != in_checkout:
        raise SystemExit(
            f"the wheel and {PACKAGE}/ differ: only in the wheel"
            f" {sorted(held - in_checkout)}, only in the checkout"
            f" {sorted(in_checkout - held)}"
        )


def check_recipe() -> None:
    """Parse and render the conda recipe; raises for what conda's builder would not
    take.
    """
    recipe = Stage0Recipe.from_file(ROOT / "conda" / "recipe.yaml")
    recipe.render(VariantConfig())


def install(wheel: Path, venv: Path) -> Path:
    """Make a clean environment with the wheel and its core dependencies; return its
    interpreter.
    """
    constraints = ROOT / "constraints" / f"py3{sys.version_info.minor}.txt"
    pins = ["-c", constraints] if constraints.exists() else []
    python = venv / "bin" / "python"
    found = subprocess.run([ROOT / "scripts" / "find_uv.sh"], stdout=subprocess.PIPE)
    if found.returncode == 0:
        uv = found.stdout.decode().strip()
        run(uv, "venv", "--quiet", "--python", sys.executable, venv)
        run(uv, "pip", "install", "--quiet", "--python", python, *pins, wheel)
    else:
        run(sys.executable, "-m", "venv", venv)
        run(
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-compile",
            *pins,
            wheel,
        )
    return python


def main() -> None:
    check_recipe()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel = build(folder)
        check_contents(wheel)
        python = install(wheel, folder / "venv")
        run(python, "-I", "-c", PROOF, cwd=folder)


if __name__ == "__main__":
    main()
