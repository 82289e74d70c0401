"""Memory of sweeps with layers or carries on the host, by compiling."""

import re

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import SingleDeviceSharding

from models.parts.decoder import Decoder
from models.parts.linear import cast_floating
from models.parts.sections import ExpertsConfig
from models.qwen3_moe import Qwen3MoeConfig
from stacked_remat import LayerResult, Stacked, memory, streaming
from stacked_remat._memory_spaces import compiled_for, to_host
from stacked_remat._sweep.store import read
from stacked_remat.ops import chunked_cross_entropy
from tests.recorded_on import ON_H200, ON_V5P

LAYERS, TOKENS, WIDTH, INNER = 48, 65_536, 2048, 16_384
SHAPES = (WIDTH, INNER), (INNER, WIDTH)
Layers = hax.Axis("layers", LAYERS)
GIB = 2**30
STACK = LAYERS * 2 * WIDTH * INNER * 2  # bytes of the weights: 6 GiB


class Block(eqx.Module):
    up: jax.Array
    down: jax.Array

    def __call__(self, x):
        return x + jax.nn.silu(x @ self.up) @ self.down


def blocks(sharding=None):
    shapes = [
        jax.ShapeDtypeStruct((LAYERS, *shape), jnp.bfloat16, sharding=sharding)
        for shape in SHAPES
    ]
    return Stacked(Block(*shapes), Layers)


X = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16)
OPTIMIZER = optax.sgd(0.01, momentum=0.9)


def momentum():
    return jax.eval_shape(lambda blocks: blocks.vmap_via(OPTIMIZER.init)(), blocks())


def sgd(visit, state):
    carry, gradient, *_ = visit.vjp()
    updates, momentum = OPTIMIZER.update(gradient, visit.layer_state)
    return LayerResult(
        carry, optax.apply_updates(visit.layer, updates), layer_state=momentum
    )


@pytest.mark.parametrize(
    ("remat", "most", "hidden_in", "carries"),
    [("nested", 5.5, 3, 0), ("offload", 3.1, 2, LAYERS)],
)
@pytest.mark.parametrize("target", [ON_V5P])
def test_layers_on_the_host_are_updated_there_and_transferred_while_others_compute(
    target, remat, most, hidden_in, carries
):
    device = memory.find_target(target).devices()[0]
    host = SingleDeviceSharding(device, memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=SingleDeviceSharding(device))

    def step(blocks, momentum, x):
        # The type of a shape does not say that it is on the host, as that of an array
        # does.
        blocks, momentum = jax.device_put((blocks, momentum), jax.memory.Space.Host)
        y, sweep_back = blocks.fold_vjp(x, remat=remat)
        result = sweep_back(y, sgd, layer_state=momentum)
        return result.layers, result.layer_state

    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host),
        momentum(),
    )
    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=host)
    with compiled_for("tpu"):
        compiled = step.lower(blocks(host), state, x).compile()
    stats = compiled.memory_analysis()
    assert stats.host_alias_size_in_bytes == 2 * STACK
    # And no copy of a stack
    assert stats.host_temp_size_in_bytes == carries * X.size * 2
    assert stats.argument_size_in_bytes < GIB  # nothing of the weights is on the device
    assert stats.temp_size_in_bytes < most * GIB
    hidden = products_during_transfers(compiled.as_text())
    # Forward, replay, visits; a replay has two products, of which the first writes to
    # what the second reads.
    assert len(hidden) == hidden_in and min(hidden.values()) >= 1


@pytest.mark.parametrize(("remat", "most"), [("nested", 7.8), ("offload", 5.5)])
@pytest.mark.parametrize("target", [ON_H200])
def test_gpus_read_layers_ahead_and_copy_no_stack(target, remat, most):
    device = memory.find_target(target).devices()[0]

    # Compilers of absent GPUs take no arguments on the host.
    def step(seed, x):
        def make(_, key):
            return None, to_host(
                Block(*(jax.random.normal(key, s, jnp.bfloat16) for s in SHAPES))
            )

        _, made = jax.lax.scan(
            make, None, jax.random.split(jax.random.key(seed), LAYERS)
        )
        y, sweep_back = Stacked(made, Layers).fold_vjp(x, remat=remat)
        return read(jax.tree.leaves(sweep_back(y, plain_sgd).layers), 0)

    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=SingleDeviceSharding(device))
    seed = jax.ShapeDtypeStruct((), jnp.uint32, sharding=SingleDeviceSharding(device))
    with compiled_for("cuda"):
        compiled = jax.jit(step).lower(seed, x).compile()
    stats = compiled.memory_analysis()
    carries = {"nested": 0, "offload": LAYERS * X.size * 2}[remat]
    assert stats.host_temp_size_in_bytes == STACK + carries
    assert stats.temp_size_in_bytes < most * GIB
    hidden = products_during_transfers(compiled.as_text())
    assert len(hidden) >= {"nested": 3, "offload": 2}[remat]
    assert all(least >= 1 for least in hidden.values())


@pytest.mark.parametrize("target", [ON_H200])
def test_a_visit_holds_internals_once_where_carries_come_from_the_host(target):
    def step(blocks, x):
        y, sweep_back = blocks.fold_vjp(x, remat="offload")
        return sweep_back(y, plain_sgd).layers

    report = memory.report(step, blocks(), X, target=target, donate=["blocks"])
    assert report.temporaries < 5 * GIB
    assert report.host.temporaries == LAYERS * X.size * 2


@pytest.mark.parametrize("target", [ON_V5P])
def test_the_gradient_of_a_head_is_no_zeros_while_layers_run(target):
    Position, Embed = hax.Axis("position", TOKENS), hax.Axis("embed", WIDTH)
    Vocab = hax.Axis("vocab", 151_936)

    def loss(head, blocks, x, targets):
        hidden = hax.named(blocks.fold(x, remat="nested"), (Position, Embed))
        losses = chunked_cross_entropy(hidden, head, targets, Embed, Vocab)
        return hax.sum(losses).scalar()

    def example():
        head = hax.zeros((Embed, Vocab), dtype=jnp.bfloat16)
        return head, hax.zeros(Position, dtype=jnp.int32)

    head, targets = eqx.filter_eval_shape(example)
    gradients = jax.grad(loss, (0, 1))
    report = memory.report(gradients, head, blocks(), X, targets, target=target)
    assert report.temporaries < 5.5 * GIB  # zeros of the head in float32 are 1.16


@pytest.mark.parametrize("target", [ON_H200, ON_V5P])
def test_a_decoded_token_brings_only_experts_that_it_may_choose_from_the_host(target):
    experts, of_token, rows = 64, 4, hax.Axis("batch", 2)
    config = Qwen3MoeConfig(
        hidden_dim=1024,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        compute_dtype="bfloat16",
        experts=ExpertsConfig(experts, of_token, 512),
    )

    def make():
        made = Decoder.init(config, hax.Axis("vocab", 256), key=jax.random.key(0))
        tokens = hax.zeros((rows, hax.Axis("position", 2)), jnp.int32)
        return (
            cast_floating(made, jnp.bfloat16),
            tokens["position", 0],
            made.prefill(tokens, 8)[1],
        )

    model, tokens, cache = eqx.filter_eval_shape(make)
    model = streaming.to_host(model)
    report = memory.report(
        Decoder.decode, model, tokens, tokens, cache, target=target, donate="caches"
    )
    layers = model.layers.stacked
    on_host = [leaf for leaf in jax.tree.leaves(layers) if streaming.is_on_host(leaf)]
    # And no copy of a stack
    assert report.host.total == sum(2 * leaf.size for leaf in on_host)
    of_layer = (
        2
        * sum(leaf.size for leaf in jax.tree.leaves(layers.mlp.experts))
        / config.num_layers
    )
    assert report.temporaries < 3 * of_layer * of_token * rows.size / experts


def plain_sgd(visit, state):
    carry, gradient, *_ = visit.vjp()
    new = jax.tree.map(
        lambda w, g: w - (0.01 * g).astype(w.dtype), visit.layer, gradient
    )
    return LayerResult(carry, new)


def products_during_transfers(text):
    """For each loop that reads weights from the host, the fewest products while one of
    them is transferred.

    `text` is a scheduled program. A product is a fusion of the kind `kOutput`, a
    `gemm`, or a loop with some.
    """
    found, running, loop = {}, {}, ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            loop, running = line.split()[0], {}
        if loop == "ENTRY":
            continue
        name = line.split(" = ")[0].strip().removeprefix("ROOT ")
        if re.search(
            r"%dynamic-slice-start.* ="
            rf" \(\(bf16\[{LAYERS},({WIDTH},{INNER}|{INNER},{WIDTH})\]",
            line,
        ):
            running[name] = 0
        elif done := re.search(r" \S*-done\((%dynamic-slice-start[\w.-]*)\)", line):
            if done[1] in running:
                found[loop] = min(
                    found.get(loop, running[done[1]]), running.pop(done[1])
                )
        elif "kind=kOutput" in line or "%gemm" in name or " while(" in line:
            running = {key: count + 1 for key, count in running.items()}
    return found
