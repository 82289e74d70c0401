"""What each policy does: values and gradients, what it keeps and what it offloads."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat import (
    BlockSeq,
    ScanCheckpointPolicy,
    Stacked,
    checkpoint_name,
    fold,
    scan,
)

from .blocks import POLICIES, assert_close, quick_jit, with_remat3
from .jaxprs import equations_of
from .random_arrays import normal

POLICIES = {
    **POLICIES,
    "save_all": "save_all",
    "internals alone": ScanCheckpointPolicy(
        save_carries=False, save_block_internals=["hidden"]
    ),
    "internals offloaded": ScanCheckpointPolicy(offload_block_internals=["hidden"]),
    "nested=1": ScanCheckpointPolicy(nested=1),
    "nested, everything": ScanCheckpointPolicy(nested=True, save_block_internals=True),
    "nested, everything, boundaries offloaded": ScanCheckpointPolicy(
        nested=True, save_block_internals=True, save_carries="offload"
    ),
    "nested=3, boundaries offloaded, 2 carries": ScanCheckpointPolicy(
        nested=3, save_carries="offload", max_carries=2
    ),
    "2 keep internals": ScanCheckpointPolicy(first_layers=2),
    "5 keep internals, nested=2, boundaries offloaded": ScanCheckpointPolicy(
        nested=2, save_carries="offload", first_layers=5
    ),
    "5 keep internals, offload": ScanCheckpointPolicy(
        save_carries="offload", first_layers=5
    ),
    "2 keep internals, 3 carries": ScanCheckpointPolicy(max_carries=3, first_layers=2),
    "3 carries, internals": ScanCheckpointPolicy(
        max_carries=3, save_block_internals=["hidden"]
    ),
}
Hidden = hax.Axis("hidden", 3)
Out = hax.Axis("out", 3)


def arguments(N):
    """A carry, weights, a shift for each layer with the axis last, and a factor that
    all layers share.
    """
    return normal(0, 3), 0.5 * normal(1, N, 3, 3), normal(2, 3, N), normal(3)


def named_layer(carry, weight, shift, factor, index):
    h = checkpoint_name(
        hax.dot(carry, weight, axis=Hidden).rename({"out": "hidden"}) + shift, "hidden"
    )
    y = carry + factor * hax.tanh(h) / (1.0 + index)
    return y, hax.sum(y * y)


def plain_layer(carry, weight, shift, factor, index):
    h = checkpoint_name(carry @ weight + shift, "hidden")
    y = carry + factor * jnp.tanh(h) / (1.0 + index)
    return y, jnp.sum(y * y)


def run_policy(remat, N, ways):
    """The layers by `scan` with named arrays, and in reverse by `fold` with plain ones
    and random keys.
    """
    Layers = hax.Axis("layers", N)
    index = np.arange(N, dtype=np.float32)

    def named(carry, weight, shift, factor):
        return (
            hax.named(carry, Hidden),
            hax.named(weight, (Layers, Hidden, Out)),
            hax.named(shift, (Hidden, Layers)),
            hax.named(factor, ()),
            hax.named(index, Layers),
        )

    def plain(
        carry, weight, shift, factor
    ):  # the layer closes over the factor, which is traced
        def step(carry, weight, shift, index, key):
            return plain_layer(carry, weight, shift, factor * drawn(key), index)[0]

        run = fold(
            step, "layers", remat=remat, reverse=True, unroll={7: 2, 5: True}.get(N, 1)
        )
        return run(carry, weight, shift.T, index, keys(N))

    scanned = scan(named_layer, Layers, remat=remat)(*named(*ways["scan"]))
    return {"scan": scanned, "fold": plain(*ways["fold"])}


def run_loop(N, ways):
    carry, weight, shift, factor = ways["scan"]
    outputs = []
    for i in range(N):
        carry, output = plain_layer(carry, weight[i], shift[:, i], factor, float(i))
        outputs.append(output)
    last, weight, shift, factor = ways["fold"]
    for i in reversed(range(N)):
        last, _ = plain_layer(
            last, weight[i], shift[:, i], factor * drawn(keys(N)[i]), float(i)
        )
    return {"scan": (carry, jnp.stack(outputs)), "fold": last}


def keys(N):
    return jax.random.split(jax.random.key(0), N)


def drawn(key):
    """A number from 0 to 1, for which less is compiled than for a uniform one."""
    return (jax.random.key_data(key)[0] % 7).astype(jnp.float32) / 6


def weighted_sum(results):
    """A sum in which every entry of the results has its own weight."""

    def weighted(leaf):
        return jnp.sum(
            leaf * jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape)
        )

    return sum(weighted(leaf) for leaf in jax.tree.leaves(results))


def values_and_gradients(run, N):
    """What `run` returns for each way of running, and the gradient with respect to each
    way's arguments.
    """

    def loss(ways):
        results = {way: jax.tree.leaves(result) for way, result in run(N, ways).items()}
        return weighted_sum(results), results

    return quick_jit(jax.grad(loss, has_aux=True))(
        {way: arguments(N) for way in ("scan", "fold")}
    )


@functools.cache
def reference(N):
    return values_and_gradients(run_loop, N)


@pytest.mark.parametrize("remat", with_remat3(POLICIES))
def test_values_and_gradients_equal_the_python_loop(remat):
    assert_as_looped(remat, 12)


@pytest.mark.parametrize(
    ("name", "N"),
    [
        ("recompute", 1),
        *((name, N) for N in (1, 5, 7) for name in ("segments", "first layers")),
    ],
)
def test_a_stack_of_one_layer_and_loops_that_are_unrolled(name, N):
    assert_as_looped(POLICIES[name], N)


def assert_as_looped(remat, N):
    found = values_and_gradients(functools.partial(run_policy, remat), N)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
    jax.tree.map(close, found, reference(N))


N = 12


class Elementwise(eqx.Module):
    """Weights of shape (5,), whose sum a carry of shape (3,) is multiplied by."""

    weight: jax.Array

    def __call__(self, x):
        h = checkpoint_name(jnp.sin(x * jnp.sum(self.weight)), "h")
        return x + checkpoint_name(jnp.cos(h), "o")


STACKS = {
    "Stacked": lambda remat=True: Stacked(
        Elementwise(jnp.ones((N, 5))), hax.Axis("layers", N), remat
    ),
    "BlockSeq": lambda remat=True: BlockSeq(
        [Elementwise(jnp.full(5, i + 1.0)) for i in range(N)],
        hax.Axis("layers", N),
        remat,
    ),
}


def by_fold(layers, x, remat):
    return layers.fold(x, remat=remat)


def by_scan(layers, x, remat):
    return layers.scan_via(
        lambda block, carry: (block(carry), jnp.sum(carry)), remat=remat, reverse=True
    )(x)


def kept(layers, remat, way=by_fold):
    """The shapes of what the forward pass keeps for the backward pass, without the
    weights.
    """

    def forward(layers, x):
        return way(layers, x, remat)

    pullback = jax.eval_shape(
        lambda layers, x: jax.vjp(forward, layers, x)[1], layers, jnp.ones(3)
    )
    shapes = [leaf.shape for leaf in jax.tree.leaves(pullback) if leaf.size]
    return sorted(shape for shape in shapes if shape[-1:] != (5,))


REMAT3_OF_JAX_0_10 = (
    jax.config.jax_remat3  # pyright: ignore[reportAttributeAccessIssue]
    and jax.__version_info__ < (0, 11)
)


@pytest.mark.remat3
@pytest.mark.parametrize("way", [by_fold, by_scan])
def test_what_is_kept(way):
    table = [
        (True, [(N, 3)]),
        ("offload", [(N, 3)]),
        ("recompute", [(3,)]),
        (ScanCheckpointPolicy(save_block_internals=["h", "unknown"]), [(N, 3), (N, 3)]),
        (ScanCheckpointPolicy(offload_block_internals=["h"]), [(N, 3), (N, 3)]),
        (
            ScanCheckpointPolicy(save_carries=False, save_block_internals=["h"]),
            [(3,), (N, 3)],
        ),
    ]
    for remat, expected in table:
        names = isinstance(remat, ScanCheckpointPolicy) and (
            remat.save_carries is False or remat.offload_block_internals
        )
        if not (REMAT3_OF_JAX_0_10 and names):  # which keeps less than these name
            assert kept(STACKS["Stacked"](), remat, way) == expected, remat


@pytest.mark.parametrize("way", [by_fold, by_scan])
def test_what_policies_without_names_keep(way):
    """12 layers: segments of 5, 4 and 3 in 5 slots; 3 of 4 or 4 of 3 in 6 slots; one,
    or 12, keep all 12.
    """
    for remat in (False, "save_all"):
        assert kept(STACKS["Stacked"](), remat, way).count((N, 3)) >= 3
    for nested, carries in ((True, 5), (1, 12), (3, 6), (4, 6), (12, 12), (40, 12)):
        shapes = kept(STACKS["Stacked"](), ScanCheckpointPolicy(nested=nested), way)
        assert (
            sum(int(np.prod(shape)) // 3 for shape in shapes if shape[-1:] == (3,))
            == carries
        ), nested


def host_transfers(fn, *args):
    """The shapes that a program moves to the host."""
    return [
        equation.outvars[0].aval.shape
        for equation in equations_of(fn, *args)
        if equation.primitive.name == "device_put"
        and "host" in str(equation.params["devices"]).lower()
    ]


@pytest.mark.remat3
@pytest.mark.skipif(
    REMAT3_OF_JAX_0_10, reason="JAX 0.10's remat3 ignores offload policies"
)
@pytest.mark.parametrize("Stack", STACKS)
@pytest.mark.parametrize(
    "remat, shape, times",
    [
        (True, None, 0),
        ("nested", None, 0),
        ("offload", (3,), N),
        (ScanCheckpointPolicy(nested=3, save_carries="offload"), (3,), 3),
        (ScanCheckpointPolicy(nested=8, save_carries="offload"), (3,), 8),
        (ScanCheckpointPolicy(nested=N, save_carries="offload"), (3,), N),
        (ScanCheckpointPolicy(first_layers=2, save_carries="offload"), (3,), N - 2),
        (
            ScanCheckpointPolicy(
                nested=3, save_carries="offload", save_block_internals=True
            ),
            (3,),
            3,
        ),
        (ScanCheckpointPolicy(offload_block_internals=["h"]), (3,), N),
    ],
    ids=str,
)
def test_offload_is_in_the_program(Stack, remat, shape, times):
    gradient = jax.grad(lambda layers, x: jnp.sum(layers.fold(x)))
    found = host_transfers(gradient, STACKS[Stack](remat), jnp.ones(3))
    assert {moved[-1:] for moved in found} == ({shape} if times else set())
    if Stack == "BlockSeq":  # no loop, so the program has every transfer
        assert len(found) == times


def test_block_seq_keeps_what_stacked_keeps():
    sequence = STACKS["BlockSeq"]()
    cuts = (
        (dict(nested=3), 3),
        (dict(max_carries=4), 4),
        # Segments of one layer, whose internals are not kept until they are reversed
        (dict(nested=8, save_block_internals=["h"]), 8),
        (dict(nested=N, save_block_internals=True), N),
    )
    for remat, carries in (
        (True, N),
        ("recompute", 1),
        *((ScanCheckpointPolicy(**cut), carries) for cut, carries in cuts),
    ):
        assert kept(sequence, remat) == [(3,)] * carries
    assert len(kept(sequence, False)) >= 3 * N


@pytest.mark.remat3
@pytest.mark.skipif(REMAT3_OF_JAX_0_10, reason="JAX 0.10's remat3 knows no barriers")
def test_barriers_are_where_layers_share_one_program():
    """Without them XLA merges the recomputation with the forward pass. (XLA on the CPU
    ignores them.)
    """

    def has_barriers(layers, **options):
        gradient = jax.jit(
            jax.grad(lambda layers, x: jnp.sum(layers.fold(x, **options)))
        )
        return "optimization_barrier" in gradient.lower(layers, jnp.ones(3)).as_text()

    stack, sequence = STACKS["Stacked"](), STACKS["BlockSeq"]()
    assert not has_barriers(stack)
    assert has_barriers(stack, unroll=True)
    assert has_barriers(stack, unroll=N)
    assert not has_barriers(stack, unroll=2)
    assert has_barriers(stack, remat="recompute")
    assert has_barriers(sequence)
    assert has_barriers(sequence, remat="nested")


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_name_in_an_inner_scan_is_not_offloaded_on_accelerators(platform):
    """XLA's error there names nothing; on a CPU nothing moves, and it runs."""
    weights = jnp.linspace(-0.5, 0.5, 12).reshape(4, 3)

    def gradient(policy, *, in_scan=True):
        def inner(x, weight):
            named = checkpoint_name(jnp.sin(x * weight), "h") if in_scan else x
            return named * weight, None

        def layer(x, weight):
            x = x if in_scan else checkpoint_name(jnp.sin(x), "h")
            return jax.lax.scan(inner, x, jnp.stack([weight, weight]))[0]

        def loss(weights):
            return jnp.sum(fold(layer, 4, remat=policy)(jnp.ones(3), weights))

        return jax.grad(loss)

    offloads = ScanCheckpointPolicy(offload_block_internals=["h"])
    saves = ScanCheckpointPolicy(save_block_internals=["h"])
    assert_close(gradient(offloads)(weights), gradient(saves)(weights))
    # What a program is for is known as it is lowered, also where a CPU exports it.
    for allowed in (gradient(saves), gradient(offloads, in_scan=False)):
        jax.export.export(jax.jit(allowed), platforms=[platform])(weights)
    with pytest.raises(ValueError, match=r"name 'h' inside a lax.scan .*save_block"):
        jax.export.export(jax.jit(gradient(offloads)), platforms=[platform])(weights)
