"""`stacked_remat._compat` and `_hijax`: what a version of JAX lacks is there."""

import ast
import importlib
import operator
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.core
import jax.numpy as jnp
import pytest

from stacked_remat import (
    ScanCheckpointPolicy,
    _compat,
    checkpoint_name,
    fold,
    tiled,
)
from stacked_remat._compat import is_eager, nothing_is_traced

from .blocks import assert_close

ROOT = Path(__file__).resolve().parents[1]

# The private names of JAX in `_compat.py`, and what to do where a JAX has one no more.
PRIVATE = {
    "clusters.ClusterEnv": "Ask the cluster that jax.distributed.initialize finds."
    " cluster_size may return None: every process then needs distributed={...}.",
    "config.trace_context": "Any hashable value of all settings that change what is"
    " traced or compiled will do. None is wrong: programs would be found that other"
    " settings compiled.",
    "core.NamedAxisEffect": "named_axes needs the names of the axes of jax.vmap and"
    " jax.shard_map that a jaxpr's collectives are over: look for the effect's new"
    " class, or for axis names in the parameters of equations.",
    "distributed.global_state": "exchange needs the client of the coordination service,"
    " which Orbax uses too: see what it does.",
    "effects.ordered_effects": "A function of an effect that says whether it has an"
    " order; io_callback(ordered=True) and debug.print(ordered=True) have one.",
    "interpreters.batching.batch_jaxpr": "jax.make_jaxpr of jax.vmap, with outputs"
    " mapped that depend on a mapped input (`_activity.active_outputs`, where all"
    " variables count).",
    "interpreters.partial_eval.convert_constvars_jaxpr": "jaxpr.replace with constvars"
    " in front of invars, once for each jaxpr: specs compare jaxprs by identity.",
    "util.register_cache": "cleared_with_jax may return the cache as it is: then"
    " jax.clear_caches leaves the executables of calls outside of jax.jit.",
}


@pytest.mark.parametrize("name", PRIVATE)
def test_jax_has_what_is_private(name):
    module, _, attribute = f"jax._src.{name}".rpartition(".")
    assert hasattr(importlib.import_module(module), attribute), PRIVATE[name]


def test_no_other_name_of_jax_is_private():
    source = Path(_compat.__file__).read_text(encoding="utf-8")
    used = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and "_src" in str(node.module):
            module = str(node.module).removeprefix("jax._src.")
            used.update(f"{module}.{alias.name}" for alias in node.names)
    assert used == {*PRIVATE}
    assert "import jax._src" not in source


def test_the_error_where_haliax_fails_to_import_has_the_versions_that_go_together(
    tmp_path,
):
    (tmp_path / "haliax.py").write_text("import jax\njax.no_such_name\n")
    run = subprocess.run(
        [sys.executable, "-c", "import stacked_remat"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.returncode == 1
    message = run.stderr.splitlines()[-1]
    assert "no attribute 'no_such_name'" in message
    pins = "".join(path.read_text() for path in (ROOT / "constraints").glob("*.txt"))
    (haliax,) = {*re.findall(r"^haliax==(.*)$", pins, re.MULTILINE)}
    assert f"haliax=={haliax}" in message
    versions = re.findall(r"^jax==(\d+\.\d+)(\S*)$", pins, re.MULTILINE)
    oldest, newest = min(versions), max(versions)
    assert f"jax {''.join(oldest)} to {newest[0]}." in message


def test_what_is_traced_around_a_call():
    def state():
        return is_eager(), nothing_is_traced()

    def seen(transform):
        found = []
        transform(lambda x: (found.append(state()), x)[1])(jnp.ones(2))
        return found[0]

    assert state() == (True, True)
    assert seen(jax.vmap) == (True, False)
    assert seen(lambda fn: lambda x: jax.vjp(fn, x)) == (True, False)
    assert seen(jax.jit) == seen(jax.checkpoint) == (False, False)
    with jax.disable_jit():
        assert state() == (False, True)


@pytest.mark.filterwarnings("ignore:jax.core.is_constant_dim is deprecated")
def test_haliax_finds_constant_dimensions():
    (symbolic,) = jax.export.symbolic_shape("n")
    assert [*map(jax.core.is_constant_dim, (3, symbolic))] == [True, False]  # pyright: ignore[reportAttributeAccessIssue]


def _with_reference(carry, weight):
    reference = jax.new_ref(carry)
    reference[...] *= weight
    return reference[...]


def _with_callback(carry, weight):
    jax.debug.callback(lambda _: None, carry)
    return carry * weight


@pytest.mark.parametrize("layer", [operator.mul, _with_reference, _with_callback])
def test_a_sweep_lies_in_a_scan_of_a_checkpoint(layer):
    run = fold(layer, 3, remat="nested")
    twice = jax.checkpoint(
        lambda x: jax.lax.scan(
            lambda carry, _: (run(carry, jnp.arange(2.0, 5)), None), x, None, 2
        )[0]
    )
    assert jax.jit(jax.grad(twice))(1.0) == 24.0**2


def test_jax_sees_sharding_constraints_in_a_sweep():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("d"))

    def layer(carry, weight):
        return jax.lax.with_sharding_constraint(carry * weight, sharding)

    def value(x, weights):
        return fold(layer, 3, remat="nested")(x, weights)

    def gradient(x, weights):
        return jax.grad(lambda x: jnp.sum(value(x, weights)))(x)

    def tangent(x, weights):
        return jax.jvp(lambda x: value(x, weights), (x,), (x,))[1]

    # The devices of a program come from its arguments, and from constraints within it.
    for fn in (value, gradient, tangent):
        result = jax.jit(fn)(jnp.ones(8), jnp.ones((3, 8)))
        assert result.sharding.is_equivalent_to(sharding, 1), fn


def test_jax_sees_moves_to_the_host_in_a_sweep():
    policy = ScanCheckpointPolicy(nested=True, save_carries="offload")
    run = fold(lambda carry, weight: jnp.sin(carry * weight), 4, remat=policy)
    gradient = jax.jit(jax.grad(lambda x: run(x, jnp.ones(4))))
    lowered = gradient.trace(1.0).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("annotate_device_placement") == 2


def test_a_hessian_product_in_a_batch_of_a_checkpointed_scan_of_tiles():
    def value(x, weights, remat, total):
        def layer(x, weight):
            hidden = checkpoint_name(jnp.sin(x * weight), "hidden")
            return x + hidden * total(hidden)

        return jnp.sum(fold(layer, 3, remat=remat, unroll=2)(x, weights) ** 2)

    def total(hidden):
        return jnp.sum(jnp.cos(hidden) * hidden)

    def products(*how):
        gradient = jax.grad(
            lambda x: value(x, jnp.linspace(0.1, 1, 12).reshape(3, 4), *how)
        )
        return jax.jit(jax.vmap(lambda x: jax.jvp(gradient, (x,), (jnp.cos(x),))[1]))(
            jnp.eye(2, 4)
        )

    policy = ScanCheckpointPolicy(save_carries=False, save_block_internals=["hidden"])
    assert_close(
        products(policy, tiled(total, 0, tiles=2, reduce="sum")),
        products(False, total),
        1e-4,
    )
