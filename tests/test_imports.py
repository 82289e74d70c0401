"""What `import stacked_remat` changes in JAX: nothing but entries for primitives of its
own.
"""

import json
import subprocess
import sys

import jax

# Prints the names of all modules that the import of the library imports.
IMPORTED = """
import json, sys
import stacked_remat, stacked_remat.streaming
from stacked_remat import ghost, lora, memory, ops
names = [name for name in sys.modules if name.split(".")[0] != "stacked_remat"]
print(json.dumps(names))
"""

# Imports these modules and then the library, and prints what of JAX has changed: tables
# (by an entry that was there, or is for a class or a primitive of JAX), functions,
# methods, and attributes of primitives.
CHANGED = """
import importlib, json, sys, types
for name in json.loads(sys.stdin.read()):
    try:
        importlib.import_module(name)
    except ImportError:  # it was made by another module
        pass
from jax.extend.core import Primitive

def of_jax(module):
    return module.__name__.split(".")[0] in ("jax", "jaxlib", "haliax", "equinox")

def snapshot():
    found, own = {}, set()
    for module in [*sys.modules.values()]:
        if not isinstance(module, types.ModuleType) or not of_jax(module):
            continue
        for name, value in [*vars(module).items()]:
            path = f"{module.__name__}.{name}"
            if isinstance(value, dict):
                for key, entry in [*value.items()]:
                    if callable(entry):
                        found[f"{path}[{key}]", id(key)] = entry
            elif callable(value):
                found[path, 0] = value
            if isinstance(value, type) or isinstance(value, Primitive):
                own.add(id(value))
                for attribute, entry in [*vars(value).items()]:
                    found[f"{path}.{attribute}", id(value)] = entry
    return found, own

before, own = snapshot()
known = {*sys.modules}
import stacked_remat, stacked_remat.streaming
from stacked_remat import ghost, lora, memory, ops
after, _ = snapshot()
changed = set()
for (path, key), entry in after.items():
    is_new = (path, key) not in before
    # To a table for something of JAX, or to a module.
    is_added = is_new and (key in own or not key and path.rpartition(".")[0] in known)
    if is_added or not is_new and before[path, key] is not entry:
        changed.add(path)
changed |= {path for path, key in before if (path, key) not in after}
print(json.dumps(sorted(changed)))
"""


def _run(script: str, given: str = "") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        input=given,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_the_import_changes_nothing_of_jax():
    changed = _run(CHANGED, json.dumps(_run(IMPORTED)))
    # Haliax's products call it. Until 0.10 JAX has it.
    allowed = {"jax.core.is_constant_dim"} if jax.__version_info__ >= (0, 11) else set()
    assert {*changed} <= allowed, changed
