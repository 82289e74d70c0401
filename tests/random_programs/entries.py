"""How the library runs the layers of a program, and what is right where that is no
plain loop.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from equinox.nn import StateIndex
from jax import lax

import stacked_remat as sr

from .programs import Program, Spec, layer_of, policy_of, reference, stacked
from .transformations import along, direction, floats

Run = Callable[[Program, dict[str, Any]], Any]
ENTRIES: dict[str, tuple[Run, Run]] = {}


def entry(right: Run = reference) -> Callable[[Run], Run]:
    """Register an entry point of the library, and its reference."""

    def register(ours: Run) -> Run:
        ENTRIES[ours.__name__] = ours, right
        return ours

    return register


class Block(eqx.Module):
    """A layer whose weights are in fields, in a field that is not sliced, and in an
    argument.
    """

    weights: dict[int, Any]
    layer: Callable[..., Any] = eqx.field(static=True)
    outputs: bool = eqx.field(static=True)
    table: dict[int, Any] = sr.unsliced(default_factory=dict)

    def scanned(self, carry: Any, rest: dict[int, Any], shared: Any) -> tuple[Any, Any]:
        table = sr.LayerStack.of(self.table).layer
        by_number = without_names({**self.weights, **table, **rest})
        weights = [by_number[number] for number in sorted(by_number)]
        carry, output = self.layer(without_names(carry), weights, shared)
        return carry, output

    def __call__(self, carry: Any, rest: dict[int, Any], shared: Any) -> Any:
        new, output = self.scanned(carry, rest, shared)
        new = with_names_of(carry, new)
        return (new, output) if self.outputs else new


def parted(weights: list[Any]) -> tuple[dict[int, Any], ...]:
    """The weights by part, in a field, in one that is not sliced, and in an
    argument.
    """
    return tuple(
        {n: own for n, own in enumerate(weights) if n % 3 == place}
        for place in range(3)
    )


def layers_of(
    program: Program, weights: list[Any], layer: Any = None
) -> tuple[sr.Stacked, Any]:
    """A stack of all layers, and the rest of their weights."""
    spec = program.spec
    fields, table, rest = parted(weights)
    if spec.named:
        fields, table, rest = (
            with_names(tree, spec.layers) for tree in (fields, table, rest)
        )
    block = Block(fields, layer or program.layer, spec.outputs != "none", table)
    Layers = hax.Axis("layers", spec.layers)
    return sr.Stacked(block, Layers, policy_of(spec)), (
        sr.per_layer(rest) if jax.tree.leaves(rest) else rest
    )


def with_names(tree: Any, layers: int | None = None) -> Any:
    """A tree with named arrays for its plain ones; of all layers, if their number is
    given.
    """

    def name(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        sizes = leaf.shape if layers is None else leaf.shape[1:]
        axes = [hax.Axis(f"dim{number}", size) for number, size in enumerate(sizes)]
        return hax.named(
            leaf, axes if layers is None else [hax.Axis("layers", layers), *axes]
        )

    return jax.tree.map(name, tree)


def is_named(leaf: Any) -> bool:
    return isinstance(leaf, hax.NamedArray)


def without_names(tree: Any) -> Any:
    """The tree with plain arrays."""
    return jax.tree.map(
        lambda leaf: leaf.array if is_named(leaf) else leaf, tree, is_leaf=is_named
    )


def with_names_of(like: Any, tree: Any) -> Any:
    """The tree with named arrays where the other has them."""
    return (
        with_names(tree)
        if any(map(is_named, jax.tree.leaves(like, is_leaf=is_named)))
        else tree
    )


def first_carry(program: Program, inputs: dict[str, Any]) -> Any:
    carry = program.carry(inputs)
    return with_names(carry) if program.spec.named else carry


def as_pair(spec: Spec, result: Any) -> tuple[Any, Any]:
    """The result of a fold or a scan."""
    result = result if spec.outputs != "none" else (result, None)
    return without_names(result)


@entry()
def stacked_layers(program: Program, inputs: dict[str, Any]) -> Any:
    """`fold` or `scan` of a `Stacked`, or `fold_via` where layers close over what they
    share.
    """
    return _stacked(program, inputs)


def _stacked(program: Program, inputs: dict[str, Any], **options: Any) -> Any:
    spec = program.spec
    blocks, rest = layers_of(program, inputs["weights"])
    carry = first_carry(program, inputs)
    options |= {"reverse": spec.reverse, "unroll": spec.unroll}
    if not spec.closure:
        run = blocks.scan if spec.outputs != "none" else blocks.fold
        return as_pair(spec, run(carry, rest, sr.shared(inputs["shared"]), **options))
    run = blocks.scan_via if spec.outputs != "none" else blocks.fold_via
    applied = run(
        lambda block, carry, rest: block(carry, rest, inputs["shared"]), **options
    )
    return as_pair(spec, applied(carry, rest))


@functools.lru_cache(maxsize=16)
def step_of(layer: Callable[..., Any], outputs: str) -> Callable[..., Any]:
    """A layer as a function of the carry, its weights, and what is shared; the same for
    the same layer.
    """

    def step(carry: Any, weights: Any, shared: Any) -> Any:
        new, output = layer(without_names(carry), without_names(weights), shared)
        new = with_names_of(carry, new)
        return new if outputs == "none" else (new, output)

    return step


@entry()
def bare(program: Program, inputs: dict[str, Any]) -> Any:
    """`fold` or `scan` of a function."""
    return _bare(program, inputs)


def _bare(program: Program, inputs: dict[str, Any], **options: Any) -> Any:
    spec = program.spec
    run = sr.fold if spec.outputs == "none" else sr.scan
    weights = (
        with_names(inputs["weights"], spec.layers) if spec.named else inputs["weights"]
    )
    axis = hax.Axis("layers", spec.layers) if spec.named else spec.layers
    options |= {
        "remat": policy_of(spec),
        "reverse": spec.reverse,
        "unroll": spec.unroll,
    }
    step, carry = step_of(program.layer, spec.outputs), first_carry(program, inputs)
    if spec.closure:
        applied = run(
            lambda carry, weights: step(carry, weights, inputs["shared"]),
            axis,
            **options,
        )
        return as_pair(spec, applied(carry, weights))
    return as_pair(
        spec, run(step, axis, **options)(carry, weights, sr.shared(inputs["shared"]))
    )


@entry()
def lax_scan(program: Program, inputs: dict[str, Any]) -> Any:
    """`lax_scan`, as `lax.scan` is called."""
    spec = program.spec
    return sr.lax_scan(
        lambda carry, weights: program.layer(carry, weights, inputs["shared"]),
        program.carry(inputs),
        inputs["weights"],
        length=spec.layers,
        reverse=spec.reverse,
        unroll=spec.unroll,
        remat=policy_of(spec),
    )


def loop_of_kinds(program: Program, inputs: dict[str, Any]) -> Any:
    spec, kinds = program.spec, program.kinds()
    carry, outputs = program.carry(inputs), {"a": {}, "b": {}}
    for index in range(spec.layers)[:: -1 if spec.reverse else 1]:
        layer = program.layer if kinds[index] == "a" else program.other_layer
        carry, output = layer(
            carry, layer_of(inputs["weights"], index), inputs["shared"]
        )
        outputs[kinds[index]][index] = output
    found = {
        kind: stacked([own[i] for i in sorted(own)]) for kind, own in outputs.items()
    }
    return carry, found if spec.outputs != "none" else None


@entry(loop_of_kinds)
def pattern(program: Program, inputs: dict[str, Any]) -> Any:
    """A `StackedPattern` of two kinds."""
    spec, kinds = program.spec, program.kinds()
    stacks, rests = {}, {}
    for kind, layer in (("a", program.layer), ("b", program.other_layer)):
        rows = jnp.asarray([i for i, own in enumerate(kinds) if own == kind], jnp.int32)
        of_kind = program._replace(spec=Spec(**{**vars(spec), "layers": len(rows)}))
        stacks[kind], rests[kind] = layers_of(
            of_kind, layer_of(inputs["weights"], rows), layer
        )
    blocks = sr.StackedPattern(
        stacks, kinds, hax.Axis("layers", spec.layers), policy_of(spec)
    )
    run = blocks.scan if spec.outputs != "none" else blocks.fold
    options = {"reverse": spec.reverse, "unroll": spec.unroll}
    shared = sr.shared(inputs["shared"])
    carry, outputs = as_pair(
        spec, run(first_carry(program, inputs), sr.per_kind(rests), shared, **options)
    )
    if spec.outputs != "none":
        outputs = {
            kind: own if kind in kinds else None for kind, own in outputs.items()
        }
    return carry, outputs


@entry()
def block_seq(program: Program, inputs: dict[str, Any]) -> Any:
    """A `BlockSeq` of the same layers."""
    spec = program.spec
    blocks, rest = layers_of(program, inputs["weights"])
    blocks = sr.BlockSeq(blocks.unstacked(), blocks.Layers, policy_of(spec))
    run = blocks.scan if spec.outputs != "none" else blocks.fold
    shared = sr.shared(inputs["shared"])
    return as_pair(
        spec, run(first_carry(program, inputs), rest, shared, reverse=spec.reverse)
    )


def masked_loop(program: Program, inputs: dict[str, Any]) -> Any:
    spec, first, weights = program.spec, program.carry(inputs), inputs["weights"]
    start = layer_of(weights, -1 if spec.reverse else 0) if spec.layers else None

    def one(carry: Any, own: Any) -> tuple[Any, Any]:
        done = program.is_over(carry)
        choose = functools.partial(jax.tree.map, functools.partial(jnp.where, done))
        new, output = program.layer(
            choose(first, carry), choose(start, own), inputs["shared"]
        )
        return choose(carry, new), jax.tree.map(
            lambda leaf: jnp.where(done, 0, leaf), output
        )

    return lax.scan(one, first, weights, length=spec.layers, reverse=spec.reverse)


@entry(masked_loop)
def until(program: Program, inputs: dict[str, Any]) -> Any:
    """A loop that stops on its own: of a function, or of a stack."""
    run = _stacked if program.spec.layers % 2 else _bare
    return run(
        program, inputs, until=lambda carry: program.is_over(without_names(carry))
    )


@entry()
def streamed(program: Program, inputs: dict[str, Any]) -> Any:
    """A stack in host memory."""
    spec = program.spec
    blocks, rest = layers_of(program, inputs["weights"])
    blocks = sr.streaming.to_host(blocks)
    run = blocks.scan if spec.outputs != "none" else blocks.fold
    shared = sr.shared(inputs["shared"])
    return as_pair(
        spec, run(first_carry(program, inputs), rest, shared, reverse=spec.reverse)
    )


@entry()
def checkpoint(program: Program, inputs: dict[str, Any]) -> Any:
    """A Python loop with `checkpoint` around each layer."""
    spec = program.spec
    save = (
        spec.policy["save_block_internals"]
        if isinstance(spec.policy, dict) and "save_block_internals" in spec.policy
        else False
    )
    layer = sr.checkpoint(program.layer, save=save)
    return reference(program._replace(layer=layer), inputs)


def batch_of(inputs: dict[str, Any]) -> jax.Array:
    x = inputs["x"]
    return jnp.stack([x, x * 0.5, jnp.sin(x)])


def vmapped(program: Program, inputs: dict[str, Any]) -> Any:
    return jax.vmap(lambda x: reference(program, {**inputs, "x": x}))(batch_of(inputs))


@entry(vmapped)
def tiled(program: Program, inputs: dict[str, Any]) -> Any:
    """A fold of a batch, by tiles of it."""
    tiles = int(program.spec.numbers("tiles").integers(1, 4))

    def of_batch(x: Any) -> Any:
        return jax.vmap(lambda x: _bare(program, {**inputs, "x": x}))(x)

    return sr.tiled(of_batch, 0, tiles=tiles)(batch_of(inputs))


def by_layer(program: Program, inputs: dict[str, Any]) -> Any:
    carry, results = program.carry(inputs), []
    for index in range(program.spec.layers):
        results.append(
            program.layer(carry, layer_of(inputs["weights"], index), inputs["shared"])
        )
    return stacked(results)


@entry(by_layer)
def map_over_layers(program: Program, inputs: dict[str, Any]) -> Any:
    """`map`, of layers that all get the first carry."""
    spec, carry = program.spec, program.carry(inputs)
    apply = functools.partial(program.layer, carry)
    options = {"reverse": spec.reverse, "unroll": spec.unroll, "remat": policy_of(spec)}
    return sr.map(apply, spec.layers, **options)(
        inputs["weights"], sr.shared(inputs["shared"])
    )


@entry(by_layer)
def all_at_once(program: Program, inputs: dict[str, Any]) -> Any:
    """`vmap` of a stack."""
    blocks, rest = layers_of(
        program._replace(spec=Spec(**{**vars(program.spec), "named": False})),
        inputs["weights"],
    )
    return blocks.vmap_via(Block.scanned)(
        sr.shared(program.carry(inputs)), rest, sr.shared(inputs["shared"])
    )


class StateBlock(eqx.Module):
    """A layer that also keeps a state of its own."""

    block: Block
    index: StateIndex

    def __call__(self, carry: Any, state: Any, rest: Any, shared: Any) -> Any:
        own = state.get(self.index)
        carry, output = self.block.scanned(carry, rest, shared)
        carry, own = with_state(carry, own)
        return carry, (output, state.set(self.index, own))


def with_state(carry: Any, own: jax.Array) -> tuple[Any, jax.Array]:
    """A carry and a layer's state after the layer."""
    x = carry["x"]
    return {**carry, "x": x + own}, own * 0.5 + jnp.mean(x)


def states_of(program: Program, inputs: dict[str, Any]) -> jax.Array:
    factors = program.spec.numbers("state").normal(size=program.spec.layers)
    return jnp.asarray(factors, inputs["x"].dtype) * jnp.sum(inputs["x"])


def loop_with_states(program: Program, inputs: dict[str, Any]) -> Any:
    spec, states, new = program.spec, states_of(program, inputs), {}
    carry, outputs = program.carry(inputs), {}
    for index in range(spec.layers)[:: -1 if spec.reverse else 1]:
        carry, outputs[index] = program.layer(
            carry, layer_of(inputs["weights"], index), inputs["shared"]
        )
        carry, new[index] = with_state(carry, states[index])
    return (
        carry,
        stacked([outputs[i] for i in range(spec.layers)]),
        stacked([new[i] for i in range(spec.layers)]),
    )


@entry(loop_with_states)
def state(program: Program, inputs: dict[str, Any]) -> Any:
    """A stack whose layers keep an `eqx.nn.State`."""
    spec = program.spec
    plain = program._replace(spec=Spec(**{**vars(spec), "named": False}))
    blocks, rest = layers_of(plain, inputs["weights"])

    def make() -> sr.Stacked:
        # Not zeros, whose type differs inside jax.shard_map.
        index = StateIndex(states_of(program, inputs))
        return sr.Stacked(
            StateBlock(blocks.stacked, index), blocks.Layers, blocks.remat
        )

    model, first = eqx.nn.make_with_state(make)()
    index = model.stacked.index
    first = first.set(index, states_of(program, inputs))
    shared = sr.shared(inputs["shared"])
    carry, (outputs, last) = model.scan(
        program.carry(inputs), first, rest, shared, reverse=spec.reverse
    )
    return carry, outputs, last.get(index)


def pulled_back(program: Program, inputs: dict[str, Any]) -> Any:
    given, rest = eqx.partition(inputs, eqx.is_inexact_array)
    result, pullback, others = jax.vjp(
        lambda given: floats(reference(program, eqx.combine(given, rest))),
        given,
        has_aux=True,
    )
    (found,) = pullback(list(map(direction, result)))
    order = jnp.arange(program.spec.layers, dtype=jnp.int32)
    return result, others, found, order if program.spec.reverse else order[::-1]


@entry(pulled_back)
def visitor(program: Program, inputs: dict[str, Any]) -> Any:
    """`scan_vjp` with a visitor that gathers the gradients and the order of the
    layers.
    """
    spec = program.spec
    program = program._replace(spec=Spec(**{**vars(spec), "named": False}))
    blocks, rest = layers_of(program, inputs["weights"])
    run = blocks.scan_vjp if spec.outputs != "none" else blocks.fold_vjp
    result, sweep_back = run(
        program.carry(inputs), rest, sr.shared(inputs["shared"]), reverse=spec.reverse
    )
    cotangent = jax.tree.map(
        lambda leaf: direction(leaf) if eqx.is_inexact_array(leaf) else None, result
    )

    def visit(visit: sr.LayerVisit, order: Any) -> sr.LayerResult:
        cotangents = jax.tree.map(jnp.add, sweep_back.zeros(), visit.vjp())
        carry, layer, args, _ = cotangents
        new = eqx.filter((layer.weights, layer.table), eqx.is_inexact_array)
        order = order[0].at[order[1]].set(visit.layer_index), order[1] + 1
        return sr.LayerResult(carry, args=args, state=order, layer_state=new)

    kept = eqx.filter(
        (blocks.stacked.weights, blocks.stacked.table), eqx.is_inexact_array
    )
    zeros = jax.tree.map(jnp.zeros_like, kept)
    order = jnp.zeros(max(1, spec.layers), jnp.int32), jnp.int32(0)
    found = sweep_back(cotangent, visit, order, zeros)
    of_rest, of_shared = found.args
    by_number = {**found.layer_state[0], **found.layer_state[1], **of_rest}
    # The reference has no gradient of a number that is no array.
    of_carry = jax.tree.map(
        lambda leaf, gradient: gradient if eqx.is_inexact_array(leaf) else None,
        program.carry(inputs),
        found.carry,
        is_leaf=lambda leaf: leaf is None,
    )
    gradients = {
        **of_carry,
        "weights": [by_number[n] for n in sorted(by_number)],
        "shared": of_shared,
    }
    gradients = eqx.filter(gradients, eqx.is_inexact_array)
    return *floats(as_pair(spec, result)), gradients, found.state[0][: spec.layers]


def trained(program: Program, inputs: dict[str, Any]) -> Any:
    weights, rest = eqx.partition(inputs["weights"], eqx.is_inexact_array)

    def loss(weights: Any) -> Any:
        return along(
            reference(program, {**inputs, "weights": eqx.combine(weights, rest)})
        )

    value, gradient = jax.value_and_grad(loss)(weights)
    new = jax.tree.map(
        lambda leaf, own: (leaf - 0.1 * own).astype(leaf.dtype), weights, gradient
    )
    return value, eqx.combine(new, rest)


@entry(trained)
def fused(program: Program, inputs: dict[str, Any]) -> Any:
    """A step of `fused_update`, of weights that are all in the stack."""
    spec = program.spec
    program = program._replace(spec=Spec(**{**vars(spec), "named": False}))
    block = Block(
        dict(enumerate(inputs["weights"])), program.layer, spec.outputs != "none"
    )
    blocks = sr.Stacked(block, hax.Axis("layers", spec.layers), policy_of(spec))

    def loss(blocks: sr.Stacked) -> Any:
        run = blocks.scan if spec.outputs != "none" else blocks.fold
        return along(
            as_pair(
                spec,
                run(
                    program.carry(inputs),
                    {},
                    sr.shared(inputs["shared"]),
                    reverse=spec.reverse,
                ),
            )
        )

    with jax.numpy_dtype_promotion("standard"):
        step = sr.fused_update(loss, optax.sgd(0.1))
        result = step(blocks, step.init(blocks))
    return result.value, [
        result.model.stacked.weights[n] for n in range(len(spec.parts))
    ]
