"""Tests of the bytes that devices send each other."""

import functools

import jax
import jax.numpy as jnp
import pytest
from haliax import Axis, named
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from stacked_remat import ScanCheckpointPolicy, fold, memory
from stacked_remat._policy import resolve_policy
from stacked_remat._trips import known_trips
from stacked_remat.ops import grouped_experts

DEVICES, LAYERS, WIDTH = 4, 6, 32


def on_every_device(mesh, each):
    return jax.shard_map(
        each,
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )


def gather(x):
    return lax.all_gather(x, "data", tiled=True)


def layers_of(mesh, each):
    one = on_every_device(mesh, each)
    return lambda weights: lax.scan(
        lambda x, weight: (x + one(weight).sum(), None), 0.0, weights
    )[0]


def sent(fn, *shapes):
    mesh = jax.sharding.Mesh(jax.devices()[:DEVICES], ("data",))
    spec = NamedSharding(mesh, PartitionSpec(None, "data"))
    args = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=spec) for shape in shapes]
    return memory.report(fn(mesh), *args).sent


RING = WIDTH * 4 * (DEVICES - 1) // DEVICES


@pytest.mark.parametrize(
    ("each", "bytes_a_layer"),
    [
        (gather, RING),
        (lambda x: lax.psum(x, "data"), 2 * RING // DEVICES),
        (lambda x: lax.psum_scatter(x, "data", tiled=True), RING // DEVICES),
        (lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), RING // DEVICES),
        (lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]), WIDTH * 4 // DEVICES),
    ],
)
def test_a_collective_counts_once_for_each_trip_of_its_loop(each, bytes_a_layer):
    assert (
        sent(lambda mesh: layers_of(mesh, each), (LAYERS, WIDTH))
        == LAYERS * bytes_a_layer
    )


def test_what_a_conditional_may_send_counts_with_the_trips_of_a_loop_in_it():
    """Loops of 3, 1 and 2 trips that gather weights, each in a conditional in a loop of
    segments.
    """
    lengths = jnp.array([3, 1, 2])

    def segments(mesh):
        gathered = on_every_device(mesh, gather)

        def segment(x, length):
            with known_trips(LAYERS, len(lengths)):
                return lax.fori_loop(
                    0,
                    length,
                    lambda i, x: x + gathered(lax.cos(x[:, :] * i)[0]).sum(),
                    x,
                )

        def unless_negative(x, length):
            return lax.cond(x.sum() > 0, segment, lambda x, _: x, x, length), None

        return lambda x: lax.scan(unless_negative, x, lengths)[0]

    # For each segment a float summed over the devices
    of_choosing = 3 * 2 * 4 * (DEVICES - 1) // DEVICES
    assert sent(segments, (1, WIDTH)) == LAYERS * RING + of_choosing


@pytest.mark.parametrize("remat", ["nested", ScanCheckpointPolicy(max_carries=3)])
def test_a_fold_sends_what_its_schedule_says(remat):
    """Layers that gather their weights, as often as they run: their loops have trips
    from tables.
    """
    Layers = Axis("layers", 11)
    mesh = jax.sharding.Mesh(jax.devices()[:DEVICES], ("data",))
    spec = NamedSharding(mesh, PartitionSpec(None, "data"))
    weights = jax.ShapeDtypeStruct((Layers.size, WIDTH), jnp.float32, sharding=spec)
    gathered = on_every_device(mesh, gather)

    def loss(x, weights):
        return fold(lambda x, w: jnp.sin(x * gathered(w.array)), Layers, remat=remat)(
            x, named(weights, (Layers, "width"))
        ).sum()

    found = memory.report(
        jax.grad(loss), jax.ShapeDtypeStruct((WIDTH,), jnp.float32), weights
    )
    replays = resolve_policy(remat).schedule(Layers.size).replays
    assert found.sent == (2 * Layers.size + replays) * RING


def test_one_device_sends_nothing():
    assert memory.report(lambda x: x @ x, jnp.ones((8, 8))).sent == 0


@pytest.mark.parametrize("layers", [1, 3])  # XLA drops a loop over one layer
def test_divided_experts_send_what_an_even_routing_does(layers):
    tokens, chosen = 640, 2
    mesh = jax.sharding.Mesh(jax.devices()[:DEVICES], ("data",))
    Experts, divided = Axis("experts", 2 * DEVICES), PartitionSpec("data")

    def expert(weight, rows, gates):
        return rows @ weight * gates[:, None]

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=divided, out_specs=divided, check_vma=False
    )
    def layer(weights, x, choices, gates):
        return x + grouped_experts(
            expert, weights, Experts, x, choices, gates, over=("data",)
        )

    def loss(weights, x, choices, gates):
        run = jax.checkpoint(lambda x, own: (layer(own, x, choices, gates), None))
        return (lax.scan(run, x, weights)[0] ** 2).sum()

    def of(spec, *shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    weights = of(PartitionSpec(None, "data"), layers, Experts.size, WIDTH, WIDTH)
    pairs = (
        of(divided, tokens, chosen, dtype=dtype) for dtype in (jnp.int32, jnp.float32)
    )
    found = memory.report(
        jax.grad(loss, (0, 1, 3)), weights, of(divided, tokens, WIDTH), *pairs
    )
    rows = layers * tokens // DEVICES * chosen * (DEVICES - 1) // DEVICES
    # There and back; there again, and their cotangents there and back.
    assert 1 <= found.sent / ((2 + 3) * rows * WIDTH * 4) < 1.1
