"""What each policy does: values and gradients, what it keeps and what it offloads."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from stacked_remat import BlockSeq, ScanCheckpointPolicy, Stacked, checkpoint_name, fold, scan

from .blocks import NamedBlock, PlainBlock, quick_jit, with_remat3
from .jaxprs import equations_of
from .random_arrays import normal

POLICIES = {
    "True": True,
    "False": False,
    "recompute": "recompute",
    "offload": "offload",
    "save_all": "save_all",
    "nested": "nested",
    "internals": ScanCheckpointPolicy(save_block_internals=["hidden"]),
    "internals alone": ScanCheckpointPolicy(save_carries=False, save_block_internals=["hidden"]),
    "internals offloaded": ScanCheckpointPolicy(offload_block_internals=["hidden"]),
    "nested=1": ScanCheckpointPolicy(nested=1),
    "nested=3": ScanCheckpointPolicy(nested=3),
    "levels": ScanCheckpointPolicy(nested=(4, 4, 4)),
    "4 carries": ScanCheckpointPolicy(max_carries=4),
    "nested, boundaries offloaded": ScanCheckpointPolicy(nested=True, save_carries="offload"),
    "nested, internals": ScanCheckpointPolicy(nested=True, save_block_internals=["hidden"]),
    "nested, everything": ScanCheckpointPolicy(nested=True, save_block_internals=True),
    "nested, everything, boundaries offloaded": ScanCheckpointPolicy(
        nested=True, save_block_internals=True, save_carries="offload"
    ),
    "2 keep internals": ScanCheckpointPolicy(first_layers=2),
    "2 keep internals, nested": ScanCheckpointPolicy(nested=True, first_layers=2),
    "5 keep a name, nested=2, boundaries offloaded": ScanCheckpointPolicy(
        nested=2,
        save_carries="offload",
        first_layers=5,
        first_policy=ScanCheckpointPolicy(save_block_internals=["hidden"]),
    ),
    "5 keep carries, offload": ScanCheckpointPolicy(
        save_carries="offload", first_layers=5, first_policy=True
    ),
}
Hidden = hax.Axis("hidden", 3)
Out = hax.Axis("out", 3)


def arguments(N):
    """A carry, weights, a shift for each layer with the axis last, and a factor that all layers share."""
    return normal(0, 3), 0.5 * normal(1, N, 3, 3), normal(2, 3, N), normal(3)


def named_layer(carry, weight, shift, factor, index):
    h = checkpoint_name(hax.dot(carry, weight, axis=Hidden).rename({"out": "hidden"}) + shift, "hidden")
    y = carry + factor * hax.tanh(h) / (1.0 + index)
    return y, hax.sum(y * y)


def plain_layer(carry, weight, shift, factor, index):
    h = checkpoint_name(carry @ weight + shift, "hidden")
    y = carry + factor * jnp.tanh(h) / (1.0 + index)
    return y, jnp.sum(y * y)


def run_policy(remat, reverse, N, ways):
    """The layers by `scan` with named arrays and by `fold` with plain ones, each on its own arguments."""
    Layers = hax.Axis("layers", N)
    index = np.arange(N, dtype=np.float32)
    options = dict(remat=remat, reverse=reverse)

    def named(carry, weight, shift, factor):
        return (
            hax.named(carry, Hidden),
            hax.named(weight, (Layers, Hidden, Out)),
            hax.named(shift, (Hidden, Layers)),
            hax.named(factor, ()),
            hax.named(index, Layers),
        )

    def plain(carry, weight, shift, factor):  # the layer closes over the factor, which is traced
        def step(carry, weight, shift, index):
            return plain_layer(carry, weight, shift, factor, index)[0]

        return fold(step, "layers", **options)(carry, weight, shift.T, index)

    return {"scan": scan(named_layer, Layers, **options)(*named(*ways["scan"])), "fold": plain(*ways["fold"])}


def run_loop(reverse, N, ways):
    def loop(carry, weight, shift, factor):
        outputs: list = [None] * N
        for i in reversed(range(N)) if reverse else range(N):
            carry, outputs[i] = plain_layer(carry, weight[i], shift[:, i], factor, float(i))
        return carry, jnp.stack(outputs)

    return {"scan": loop(*ways["scan"]), "fold": loop(*ways["fold"])[0]}


def weighted_sum(results):
    """A sum in which every entry of the results has its own weight."""

    def weighted(leaf):
        return jnp.sum(leaf * jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape))

    return sum(weighted(leaf) for leaf in jax.tree.leaves(results))


def values_and_gradients(run, N):
    """What `run` returns for each way of running, and the gradient with respect to each way's arguments."""

    def loss(ways):
        results = {way: jax.tree.leaves(result) for way, result in run(N, ways).items()}
        return weighted_sum(results), results

    gradients, results = quick_jit(jax.grad(loss, has_aux=True))(
        {way: arguments(N) for way in ("scan", "fold")}
    )
    return {way: (results[way], gradients[way]) for way in results}


@functools.cache
def reference(reverse, N):
    return values_and_gradients(functools.partial(run_loop, reverse), N)


@pytest.mark.parametrize("remat", with_remat3(POLICIES))
def test_values_and_gradients_equal_the_python_loop(remat):
    assert_as_looped(remat, 12)


# One policy for each kind of program.
KINDS = ("True", "internals", "nested, boundaries offloaded", "5 keep a name, nested=2, boundaries offloaded")


@pytest.mark.parametrize("remat", with_remat3(POLICIES, quick=KINDS))
def test_layers_in_reverse_equal_the_python_loop(remat):
    assert_as_looped(remat, 7, reverse=True)


@pytest.mark.parametrize("name", ["recompute", "offload", "levels", "2 keep internals, nested"])
def test_a_stack_of_one_layer(name):
    assert_as_looped(POLICIES[name], 1)


def assert_as_looped(remat, N, reverse=False):
    found = values_and_gradients(functools.partial(run_policy, remat, reverse), N)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
    jax.tree.map(close, found, reference(reverse, N))


@functools.cache
def value_and_gradient_of_a_block_seq(remat):
    """Under a policy, or of the Python loop where that is `None`."""
    keys, scales = jax.random.split(jax.random.key(0), 7), jnp.linspace(0.1, 0.7, 7)
    sequence = BlockSeq.init(hax.Axis("layers", 7), PlainBlock)(3, key=keys)
    arrays, static = eqx.partition((sequence, jnp.linspace(-0.5, 1.0, 3)), eqx.is_array)

    def loss(arrays):
        layers, x = eqx.combine(arrays, static)
        if remat is not None:
            return jnp.sum(layers.fold(x, scales, remat=remat) ** 2)
        for block, scale in zip(layers.blocks, scales, strict=True):
            x = block(x, scale)
        return jnp.sum(x**2)

    value, gradient = quick_jit(jax.value_and_grad(loss))(arrays)
    return value, jax.tree.leaves(gradient)


@pytest.mark.parametrize("remat", with_remat3(POLICIES, quick=(*KINDS, "False", "recompute", "nested")))
def test_values_and_gradients_of_a_block_seq_equal_the_python_loop(remat):
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, value_and_gradient_of_a_block_seq(remat), value_and_gradient_of_a_block_seq(None))


N = 12


def by_fold(layers, x, remat):
    return layers.fold(x, remat=remat)


def by_scan(layers, x, remat):
    return layers.scan_via(lambda block, carry: (block(carry), jnp.sum(carry)), remat=remat)(x)


def in_reverse(layers, x, remat):
    step = fold(lambda carry, block: block(carry), layers.Block, remat=remat, reverse=True)
    return step(x, layers.stacked)


def by_name(layers, x, remat):
    def step(carry, weight):
        h = checkpoint_name(hax.sin(carry * hax.sum(weight)), "h")
        return carry + checkpoint_name(hax.cos(h), "o")

    weights = hax.named(layers.stacked.weight, ("layers", "weights"))
    return fold(step, layers.Block, remat=remat)(hax.named(x, Hidden), weights).array


def kept(layers, remat, x, way=by_fold):
    """The shapes of what the forward pass keeps for the backward pass, without the weights."""

    def forward(layers, x):
        return way(layers, x, remat)

    pullback = jax.eval_shape(lambda layers, x: jax.vjp(forward, layers, x)[1], layers, x)
    shapes = [leaf.shape for leaf in jax.tree.leaves(pullback) if leaf.size]
    return sorted(shape for shape in shapes if shape[-1:] != (5,))


class Elementwise(eqx.Module):
    """Weights of shape (5,), whose sum a carry of shape (3,) is multiplied by."""

    weight: jax.Array

    def __call__(self, x):
        h = checkpoint_name(jnp.sin(x * jnp.sum(self.weight)), "h")
        return x + checkpoint_name(jnp.cos(h), "o")


REMAT3_OF_JAX_0_10 = (
    jax.config.jax_remat3  # pyright: ignore[reportAttributeAccessIssue]
    and jax.__version_info__ < (0, 11)
)


@pytest.mark.remat3
@pytest.mark.parametrize("way", [by_fold, by_scan, in_reverse, by_name])
@pytest.mark.parametrize(
    "remat, expected",
    [
        (True, [(N, 3)]),
        ("offload", [(N, 3)]),
        ("recompute", [(3,)]),
        (ScanCheckpointPolicy(save_block_internals=["h"]), [(N, 3), (N, 3)]),
        (ScanCheckpointPolicy(save_block_internals=["h", "unknown"]), [(N, 3), (N, 3)]),
        (ScanCheckpointPolicy(offload_block_internals=["h"]), [(N, 3), (N, 3)]),
        (ScanCheckpointPolicy(save_carries=False, save_block_internals=["h"]), [(3,), (N, 3)]),
    ],
)
def test_what_is_kept(remat, expected, way):
    names = isinstance(remat, ScanCheckpointPolicy) and (
        remat.save_carries is False or remat.offload_block_internals
    )
    if REMAT3_OF_JAX_0_10 and names:
        pytest.skip("JAX 0.10's remat3 keeps less than the policy names; gradients are tested above")
    layers = Stacked(Elementwise(jnp.ones((N, 5))), hax.Axis("layers", N))
    assert kept(layers, remat, jnp.ones(3), way) == expected


@pytest.mark.parametrize("way", [by_fold, by_scan, in_reverse, by_name])
@pytest.mark.parametrize("remat", [False, "save_all"])
def test_without_checkpointing_every_layer_keeps_its_internals(remat, way):
    layers = Stacked(Elementwise(jnp.ones((N, 5))), hax.Axis("layers", N))
    shapes = kept(layers, remat, jnp.ones(3), way)
    assert shapes.count((N, 3)) >= 3


@pytest.mark.parametrize("way", [by_fold, by_scan, in_reverse, by_name])
@pytest.mark.parametrize("nested, carries", [(True, 5), (1, 12), (3, 6), (4, 6), (12, 12), (40, 12)])
def test_nested_keeps_a_carry_for_each_segment_and_for_each_layer_of_the_last(nested, carries, way):
    """12 layers: segments of 5, 4 and 3 in 5 slots; 3 of 4 or 4 of 3 in 6 slots; one, or 12, keep all 12."""
    layers = Stacked(Elementwise(jnp.ones((N, 5))), hax.Axis("layers", N))
    shapes = kept(layers, ScanCheckpointPolicy(nested=nested), jnp.ones(3), way)
    assert sum(int(np.prod(shape)) // 3 for shape in shapes if shape[-1:] == (3,)) == carries


@pytest.mark.remat3
@pytest.mark.parametrize(
    "remat, expected",
    [
        # 8 layers in shrinking segments of 4, 3 and 1 need 4 slots; those before them keep a carry each.
        (ScanCheckpointPolicy(nested=True, first_layers=4, first_policy=True), [(4, 3), (4, 3)]),
        (ScanCheckpointPolicy(first_layers=4, first_policy=True, save_carries="offload"), [(4, 3), (8, 3)]),
        (
            ScanCheckpointPolicy(
                nested=True, first_layers=4, first_policy=ScanCheckpointPolicy(save_block_internals=["h"])
            ),
            [(4, 3), (4, 3), (4, 3)],
        ),
        (ScanCheckpointPolicy(first_layers=N, first_policy=True), [(N, 3)]),
        (ScanCheckpointPolicy(nested=True, first_layers=99, first_policy=True), [(N, 3)]),
    ],
    ids=str,
)
def test_what_the_first_layers_keep(remat, expected):
    layers = Stacked(Elementwise(jnp.ones((N, 5))), hax.Axis("layers", N))
    assert kept(layers, remat, jnp.ones(3)) == expected


def host_transfers(fn, *args):
    """The shapes that a program moves to the host."""
    return [
        equation.outvars[0].aval.shape
        for equation in equations_of(fn, *args)
        if equation.primitive.name == "device_put" and "host" in str(equation.params["devices"]).lower()
    ]


STACKS = {
    "Stacked": lambda remat: Stacked(Elementwise(jnp.ones((N, 5))), hax.Axis("layers", N), remat),
    "BlockSeq": lambda remat: BlockSeq(
        [Elementwise(jnp.full(5, i + 1.0)) for i in range(N)], hax.Axis("layers", N), remat
    ),
}


@pytest.mark.remat3
@pytest.mark.skipif(REMAT3_OF_JAX_0_10, reason="JAX 0.10's remat3 ignores offload policies")
@pytest.mark.parametrize("Stack", STACKS)
@pytest.mark.parametrize(
    "remat, shape, times",
    [
        (True, None, 0),
        ("nested", None, 0),
        ("offload", (3,), N),
        (ScanCheckpointPolicy(nested=3, save_carries="offload"), (3,), 3),
        (ScanCheckpointPolicy(first_layers=2, save_carries="offload"), (3,), N - 2),
        (ScanCheckpointPolicy(nested=3, save_carries="offload", save_block_internals=True), (3,), 3),
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
    Layers = hax.Axis("layers", N)
    sequence = BlockSeq([Elementwise(jnp.full(5, i + 1.0)) for i in range(N)], Layers)
    assert kept(sequence, True, jnp.ones(3)) == [(3,)] * N
    assert kept(sequence, "recompute", jnp.ones(3)) == [(3,)]
    assert kept(sequence, ScanCheckpointPolicy(nested=3), jnp.ones(3)) == [(3,)] * 3
    assert kept(sequence, ScanCheckpointPolicy(nested=(2, 2, 3)), jnp.ones(3)) == [(3,)] * 2
    assert kept(sequence, ScanCheckpointPolicy(max_carries=4), jnp.ones(3)) == [(3,)] * 2
    first = ScanCheckpointPolicy(nested=2, first_layers=4, first_policy=True)
    assert kept(sequence, first, jnp.ones(3)) == [(3,)] * 6
    assert len(kept(sequence, False, jnp.ones(3))) >= 3 * N


@pytest.mark.remat3
@pytest.mark.skipif(REMAT3_OF_JAX_0_10, reason="JAX 0.10's remat3 knows no barriers")
def test_barriers_are_where_layers_share_one_program():
    """Without them XLA merges the recomputation with the forward pass. (XLA on the CPU ignores them.)"""
    Layers = hax.Axis("layers", 4)
    stack = Stacked(Elementwise(jnp.ones((4, 5))), Layers)
    sequence = BlockSeq([Elementwise(jnp.full(5, i + 1.0)) for i in range(4)], Layers)

    def has_barriers(layers, **options):
        gradient = jax.jit(jax.grad(lambda layers, x: jnp.sum(layers.fold(x, **options))))
        return "optimization_barrier" in gradient.lower(layers, jnp.ones(3)).as_text()

    assert not has_barriers(stack)
    assert has_barriers(stack, unroll=True)
    assert has_barriers(stack, unroll=4)
    assert not has_barriers(stack, unroll=2)
    assert has_barriers(stack, remat="recompute")
    assert has_barriers(sequence)
    assert has_barriers(sequence, remat="nested")


@pytest.mark.parametrize("Stack", STACKS)
def test_the_call_overrides_the_policy_of_the_stack(Stack):
    layers = STACKS[Stack]("nested")
    assert kept(layers, None, jnp.ones(3)) != kept(layers, True, jnp.ones(3))
    assert kept(layers, None, jnp.ones(3)) == kept(layers, "nested", jnp.ones(3))


def test_named_blocks_keep_their_axes_in_the_gradient():
    Layers = hax.Axis("layers", 4)
    stack = Stacked.init(Layers, NamedBlock, remat="nested")(
        Hidden, key=jax.random.split(jax.random.key(0), 4)
    )
    gradient = eqx.filter_grad(lambda s: hax.sum(s.fold(hax.ones(Hidden))).scalar())(stack)
    assert jtu.tree_structure(gradient) == jtu.tree_structure(stack)
    assert gradient.stacked.weight.axes == (Layers, Hidden, Out)


@pytest.mark.parametrize("carries", [True, False, "offload"])
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda f: f, id="plain", marks=pytest.mark.remat3),
        pytest.param(jax.jit, id="jit", marks=pytest.mark.remat3),
        pytest.param(jax.checkpoint, id="checkpoint"),
    ],
)
def test_offloading_the_carry_by_name_is_refused(carries, wrap):
    def names_its_output(x, w):
        return wrap(lambda x: checkpoint_name(x + jnp.tanh(x * w), "h"))(x)

    def names_what_it_reads(x, w):
        return wrap(lambda x: jnp.sin(checkpoint_name(x * w, "h")))(x)

    def names_both(x, w):
        return checkpoint_name(names_what_it_reads(x, w), "out")

    def returns_it_too(x, w):
        x = checkpoint_name(x + w, "h")
        return x + 0 * jnp.tanh(x)

    remat = ScanCheckpointPolicy(offload_block_internals=["h"], save_carries=carries)
    ws = [jnp.float32(w) for w in range(N)]

    def trace(layer):
        jax.make_jaxpr(jax.grad(fold(layer, hax.Axis("layers", N), remat=remat)))(
            jnp.float32(1), jnp.stack(ws)
        )

    with pytest.raises(ValueError, match="'h' is the carry that a layer returns.*save_carries=\"offload\""):
        trace(names_its_output)
    for layer in (names_what_it_reads, names_both, returns_it_too):
        trace(layer)
