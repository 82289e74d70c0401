"""Layers of several kinds in one stack: what they compute, their gradients, and how
they are taken apart.
"""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis

import stacked_remat as sr
from stacked_remat import StackedPattern, per_kind, streaming

from .blocks import assert_close, policies as some_policies
from .jaxprs import equations

Embed = Axis("embed", 4)
N = 7
Layers = Axis("layers", N)


class Tanh(eqx.Module):
    weight: hax.NamedArray

    @staticmethod
    def init(key):
        return Tanh(hax.random.normal(key, (Embed, Embed.alias("out"))) * 0.3)

    def __call__(self, x, scale, own, shift):
        h = hax.tanh(x.dot(self.weight, axis=Embed).rename({"out": "embed"}))
        return x + h * scale + own + shift, None


class Sine(eqx.Module):
    weight: hax.NamedArray
    gate: jax.Array

    @staticmethod
    def init(key):
        return Sine(
            hax.random.normal(key, (Embed, Embed.alias("out"))) * 0.3,
            jax.random.normal(key, (4,)),
        )

    def __call__(self, x, scale, own, shift):
        h = hax.sin(x.dot(self.weight, axis=Embed).rename({"out": "embed"}))
        h = sr.checkpoint_name(h, "hidden")
        return x + h * scale * hax.named(self.gate, Embed) * own + shift, hax.sum(h)


KINDS = {"tanh": Tanh, "sine": Sine, "cosine": Sine}
PATTERNS = {
    "cycle with remainder": ("tanh", "sine", "sine"),
    "table of three kinds": (
        "sine",
        "cosine",
        "tanh",
        "tanh",
        "cosine",
        "sine",
        "tanh",
    ),
}


# One policy for each kind of program; what each policy does is in
# test_policies_at_work.py.
SOME = [
    *some_policies(
        "nested, names", "nested, offload", "first layers", "recompute"
    ).values()
]


def blocks_of(pattern, **options):
    kinds = {name: KINDS[name] for name in pattern}
    return StackedPattern.init(Layers, kinds, pattern, **options)(
        jax.random.split(jax.random.key(0), N)
    )


def arguments(blocks):
    """The carry; an argument split over all layers; one for each kind; one that all
    kinds share.
    """
    own = {
        name: jnp.linspace(0.5, 1.5, len(stack))
        for name, stack in blocks.stacks.items()
    }
    scale = hax.named(jnp.linspace(0.5, 1.5, len(blocks)), blocks.Layers)
    return (
        hax.random.normal(jax.random.key(1), (Embed,)),
        scale,
        own,
        hax.ones(Embed) * 0.1,
    )


def outputs_value(carry, outputs):
    return hax.sum(carry * carry).array + sum(
        jnp.sum(jnp.cos(y)) for y in jax.tree.leaves(outputs)
    )


def looped(blocks, x, scale, own, shift):
    outputs, seen = [], dict.fromkeys(blocks.pattern, 0)
    for i, block in enumerate(blocks.unstacked()):
        name = blocks.pattern[i]
        x, y = block(x, scale["layers", i], own[name][seen[name]], shift)
        seen[name] += 1
        outputs.append(y)
    return outputs_value(x, outputs)


def swept(blocks, x, scale, own, shift, **options):
    # Whose gradients are summed
    shift = per_kind({name: sr.shared(shift) for name in own})
    return outputs_value(*blocks.scan(x, scale, per_kind(own), shift, **options))


# Of the table of three kinds
ALL, TANH_ALONE, NOTHING = (
    slice(None),
    slice(2, 4),
    slice(4, 4),
)


@pytest.mark.parametrize(
    ("pattern", "part", "reverse"),
    [
        ("cycle with remainder", ALL, False),
        ("table of three kinds", ALL, True),
        ("table of three kinds", TANH_ALONE, False),
        ("table of three kinds", NOTHING, False),
    ],
)
@jax.enable_x64(True)  # in float32 what nearly cancels differs by more
def test_values_and_gradients_are_those_of_the_loop_under_every_policy(
    pattern, part, reverse
):
    blocks = blocks_of(PATTERNS[pattern])[part]
    given = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float64), (blocks, *arguments(blocks))
    )

    def loop(blocks, x, scale, own, shift):
        if not reverse:
            return looped(blocks, x, scale, own, shift)
        backwards = {name: values[::-1] for name, values in own.items()}
        return looped(blocks[::-1], x, scale["layers", ::-1], backwards, shift)

    @jax.jit
    def run(*given):
        of_loop = jax.value_and_grad(loop, range(5))(*given)
        ours = [
            jax.value_and_grad(
                functools.partial(swept, remat=remat, reverse=reverse), tuple(range(5))
            )(*given)
            for remat in SOME
        ]
        return of_loop, ours

    expected, found = run(*given)
    for remat, result in zip(SOME, found, strict=True):
        assert_close(result, expected, name=repr(remat))


def test_outputs_are_those_of_each_kind_and_eager_calls_equal_compiled_ones():
    blocks = blocks_of(PATTERNS["table of three kinds"])
    x, scale, own, shift = arguments(blocks)
    carry, outputs = blocks.scan(x, scale, per_kind(own), shift)
    assert outputs["tanh"] is None
    assert outputs["sine"].axes == (Layers.resize(2),) == outputs["cosine"].axes

    @jax.jit
    def run(blocks):
        folded = blocks.fold_via(lambda block, *args: block(*args)[0])(
            x, scale, per_kind(own), shift
        )
        of_all = blocks.vmap(x, scale, per_kind(own), shift)
        first = blocks[0](x, scale["layers", 0], own["sine"][0], shift)
        return blocks.scan(x, scale, per_kind(own), shift), folded, of_all, first

    compiled, folded, of_all, first = run(blocks)
    assert_close((carry, outputs), compiled)
    assert_close(folded, carry)
    assert_close(jax.tree.map(lambda leaf: leaf[0], of_all["sine"]), first)


def test_a_visitor_sees_every_layer_with_its_kind_and_may_replace_it():
    blocks = blocks_of(PATTERNS["cycle with remainder"], remat="nested")
    x, scale, own, shift = arguments(blocks)

    def visitor(sweep_back, visit, kinds):
        zeros = sweep_back.zeros(visit.kind)
        carry, layer, args, _ = jax.tree.map(jnp.add, zeros, visit.vjp())
        new = jax.tree.map(lambda leaf, step: leaf - step, visit.layer, layer)
        counts = kinds.at[["sine", "tanh"].index(visit.kind)].add(visit.layer_index)
        state = visit.layer_state + len(jax.tree.leaves(layer))
        return sr.LayerResult(
            carry, layer=new, args=args, state=counts, layer_state=state
        )

    @jax.jit
    def run(blocks, x, scale, own, shift):
        (carry, outputs), sweep_back = blocks.scan_vjp(x, scale, per_kind(own), shift)
        cotangent = jax.grad(outputs_value, (0, 1))(carry, outputs)
        of_kinds = per_kind(
            {name: jnp.zeros(len(stack)) for name, stack in blocks.stacks.items()}
        )
        visit = functools.partial(visitor, sweep_back)
        visited = [
            sweep_back(cotangent, visit, jnp.zeros(2, jnp.int32), layer_state)
            for layer_state in (hax.zeros(Layers), of_kinds)
        ]
        return jax.grad(looped, range(5))(blocks, x, scale, own, shift), visited

    gradients, (over_all, of_kinds) = run(blocks, x, scale, own, shift)
    for found in (over_all, of_kinds):
        assert_close(
            found.layers,
            jax.tree.map(lambda leaf, step: leaf - step, blocks, gradients[0]),
        )
        assert_close((found.carry, *of_arguments(found)), gradients[1:])
        assert found.state.tolist() == [1 + 2 + 4 + 5, 0 + 3 + 6]
    assert over_all.layer_state.array.tolist() == [1, 2, 2, 1, 2, 2, 1]
    states = {
        name: set(state.tolist()) for name, state in of_kinds.layer_state.values.items()
    }
    assert states == {"sine": {2}, "tanh": {1}}


def of_arguments(result):
    """The cotangents of the split, the kinds' and the shared argument."""
    return result.args[0], result.args[1].values, result.args[2]


def test_cotangents_of_kinds_whose_visitor_returns_none_are_zeros():
    blocks = blocks_of(PATTERNS["cycle with remainder"], remat="nested")
    x, scale, own, shift = arguments(blocks)
    plain = jnp.linspace(0.5, 1.5, N)

    @jax.jit
    def run(x, scale, plain, own, shift):
        (carry, outputs), sweep_back = blocks.scan_vjp(x, scale, plain, shift)
        cotangent = jax.grad(outputs_value, (0, 1))(carry, outputs)

        def visitor(visit, kind):
            carry, _, args, _ = visit.vjp()
            if kind == "first alone":
                args = (args[0], None, None)
            return sr.LayerResult(
                carry, args=args if visit.kind == kind or "alone" in kind else None
            )

        return [
            sweep_back(cotangent, lambda visit, _, kind=kind: visitor(visit, kind)).args
            for kind in ("alone", "tanh", "sine", "first alone", "no kind")
        ]

    every, of_tanh, of_sine, first, nothing = run(x, scale, plain, own, shift)
    is_tanh = jnp.array([float(name == "tanh") for name in blocks.pattern])
    for found, mask in ((of_tanh, is_tanh), (of_sine, 1 - is_tanh)):
        assert_close(found[:2], (every[0] * hax.named(mask, Layers), every[1] * mask))
    assert_close(of_tanh[2] + of_sine[2], every[2])
    assert_close(first[0], every[0])
    assert jax.tree.leaves((first[1:], nothing)) == []


class Model(eqx.Module):
    blocks: StackedPattern
    head: jax.Array
    gain: jax.Array


def test_a_fused_update_and_weights_on_the_host_equal_the_two_steps():
    model = Model(
        blocks_of(PATTERNS["cycle with remainder"], remat="nested"),
        jnp.linspace(0.1, 1.0, 4),
        jnp.ones(()),
    )
    given = arguments(model.blocks)
    trainable = jax.tree_util.tree_map_with_path(
        lambda path, _: "sine" not in jax.tree_util.keystr(path), model
    )

    def loss(model, x, scale, own, shift):
        own = {"tanh": sr.shared(model.gain), "sine": own["sine"] * model.gain}
        carry, outputs = model.blocks.scan(x, scale, per_kind(own), shift)
        return outputs_value(carry * hax.named(model.head, Embed), outputs)

    optimizer = optax.sgd(1e-2, momentum=0.9)
    step = sr.fused_update(loss, optimizer, trainable=trainable, max_grad_norm=1.0)
    trained, rest = eqx.partition(model, trainable)

    @jax.jit
    def run(model, trained):
        gradients = jax.grad(lambda trained: loss(eqx.combine(trained, rest), *given))(
            trained
        )
        norm = optax.tree.norm(gradients)
        clipped = jax.tree.map(lambda leaf: leaf / jnp.maximum(norm, 1.0), gradients)
        updates, _ = optimizer.update(clipped, optimizer.init(trained))
        new = eqx.combine(eqx.apply_updates(trained, updates), rest)
        on_host = streaming.to_host(model)
        of_host = jax.grad(loss)(on_host, *given)
        unrolled = eqx.tree_at(
            lambda model: model.blocks, on_host, on_host.blocks.with_remat("recompute")
        )
        of_host = of_host, jax.grad(loss)(unrolled, *given)
        fused = step(model, step.init(model), *given).model
        return new, fused, jax.grad(loss)(model, *given), streaming.to_device(of_host)

    new, fused, gradients, of_host = run(model, trained)
    assert_close(fused, new)
    for found in of_host:  # in float32, with numbers above 100
        for one, other in zip(
            jax.tree.leaves(found), jax.tree.leaves(gradients), strict=True
        ):
            np.testing.assert_allclose(
                one, other, rtol=1e-5, atol=1e-6 * np.abs(other).max()
            )


def test_layers_are_in_the_order_of_the_model():
    blocks = blocks_of(PATTERNS["table of three kinds"])
    kinds = {"sine": Sine, "cosine": Sine, "tanh": Tanh}
    assert [type(block) for block in blocks] == [kinds[name] for name in blocks.pattern]
    assert len(blocks) == N and eqx.tree_equal(blocks[-1], blocks.unstacked()[-1])
    part = blocks[5:0:-2]
    assert part.pattern == ("sine", "tanh", "cosine") and part.Layers == Layers.resize(
        3
    )
    for block, expected in zip(part, blocks.unstacked()[5:0:-2], strict=True):
        assert eqx.tree_equal(block, expected)
    saved = blocks.to_state_dict("model")
    assert saved["model.4.gate"].tolist() == blocks[4].gate.tolist()
    empty = jax.tree.map(jnp.zeros_like, blocks)
    assert eqx.tree_equal(empty.from_state_dict(saved, "model"), blocks)
    with pytest.raises(ValueError, match=r"missing: .*\.4\."):
        empty.from_state_dict(
            {k: v for k, v in saved.items() if ".4." not in k}, "model"
        )


@pytest.mark.parametrize("part", [TANH_ALONE, NOTHING])
def test_kinds_without_layers_have_no_entries_and_lose_no_arrays(part):
    blocks = blocks_of(PATTERNS["table of three kinds"])[part]
    x, scale, own, shift = arguments(blocks)
    sizes = {name: len(stack) for name, stack in blocks.stacks.items()}

    def visitor(visit, state):
        carry, layer, args, _ = visit.vjp()
        entry = visit.layer_state + 1
        return sr.LayerResult(carry, layer=layer, args=args, layer_state=entry)

    @jax.jit
    def run(*given):
        (carry, outputs), sweep_back = blocks.scan_vjp(x, scale, per_kind(own), shift)
        cotangent = jax.grad(outputs_value, (0, 1))(carry, outputs)
        states = per_kind({name: jnp.zeros(size) for name, size in sizes.items()})
        visited = sweep_back(cotangent, visitor, layer_state=states)
        return jax.grad(looped, range(5))(*given), visited, outputs

    expected, by_visitor, outputs = run(blocks, x, scale, own, shift)
    assert_close(
        (by_visitor.layers, by_visitor.carry, *of_arguments(by_visitor)), expected
    )
    shapes = jax.tree.map(jnp.shape, (by_visitor.layers, of_arguments(by_visitor)[1]))
    assert shapes == jax.tree.map(jnp.shape, (blocks, own))
    states = {
        name: stack.shape for name, stack in by_visitor.layer_state.values.items()
    }
    assert states == {name: (size,) for name, size in sizes.items()}
    with jax.disable_jit():
        _, unrolled = blocks.scan(x, scale, per_kind(own), shift)
    mapped = blocks.vmap(x, scale, per_kind(own), shift)
    for found in (
        outputs,
        unrolled,
        mapped[1] if isinstance(mapped, tuple) else mapped,
    ):
        of_kinds = {
            name: jax.tree.leaves(of_kind)[-1:] for name, of_kind in found.items()
        }
        assert [of_kinds[name][0].shape[0] for name in ("cosine", "sine")] == [0, 0]
    step = sr.fused_update(
        lambda blocks: swept(blocks, x, scale, own, shift),
        optax.sgd(0.1, momentum=0.9),
        max_grad_norm=1.0,
    )
    result = jax.jit(step)(blocks, step.init(blocks))
    assert jax.tree.map(jnp.shape, result.model) == jax.tree.map(jnp.shape, blocks)


def deep_gradient(make, layers):
    """The traced gradient of a fold of this many layers."""

    def loss(blocks):
        step = blocks.fold_via(
            lambda block, x: block(x, 1.0, 1.0, 0.0)[0], remat="nested"
        )
        return hax.sum(step(hax.ones(Embed))).array

    blocks = eqx.filter_eval_shape(make, jax.random.split(jax.random.key(0), layers))
    return jax.make_jaxpr(jax.grad(loss))(blocks)


def test_program_size_does_not_grow_with_depth():
    def pattern(layers, *names):
        kinds = {name: Tanh if name == "a" else Sine for name in names}
        return StackedPattern.init(Layers.resize(layers), kinds, names)

    few, many = (
        len([*equations(deep_gradient(pattern(n, "a", "b"), n).jaxpr)])
        for n in (12, 48)
    )
    assert few == many


def test_mistakes_are_refused_by_name():
    with pytest.raises(TypeError, match="a pattern of names"):
        StackedPattern.init(Layers, {"tanh": Tanh}, "tanh")
    with pytest.raises(ValueError, match="pattern is of 8 layers, and `layers` has 7"):
        StackedPattern.init(Layers, {"tanh": Tanh}, ("tanh",) * 8)
    with pytest.raises(TypeError, match="a dict with a name for each"):
        StackedPattern.init(Layers, [Tanh], ("tanh",))
    blocks = blocks_of(PATTERNS["cycle with remainder"])
    x, scale, own, shift = arguments(blocks)
    with pytest.raises(ValueError, match="`layers` has 7 layers, and the pattern 3"):
        StackedPattern(blocks.stacks, ("tanh", "sine", "sine"), Layers)
    with pytest.raises(
        ValueError,
        match=r"stacks\['tanh'\] is a Stacked of layers\(3\); got layers\(4\)",
    ):
        StackedPattern(
            {**blocks.stacks, "tanh": blocks.stacks["sine"]}, blocks.pattern, Layers
        )

    def grown(node):
        return sr.Stacked.of([*node.unstacked(), node[-1]])

    is_stack = lambda node: isinstance(node, sr.Stacked)  # noqa: E731
    longer = jax.tree.map(grown, blocks, is_leaf=is_stack)
    for use in (
        lambda: longer.scan(x, scale, per_kind(own), shift),
        longer.unstacked,
        longer.to_state_dict,
        lambda: longer[0],
        lambda: longer[:2],
    ):
        with pytest.raises(ValueError, match=r"got layers\(5\)\. Of layers that"):
            use()
    with pytest.raises(
        TypeError, match=r"per_kind for own is .*unmarked.*Mark its values"
    ):
        blocks.scan(x, scale, sr.per_layer(per_kind(own)), shift)
    _, sweep_back = blocks.scan_vjp(x, scale, per_kind(own), shift)
    with pytest.raises(ValueError, match="one of .*'sine', 'tanh'.*; got 'cosine'"):
        sweep_back.zeros("cosine")
    with pytest.raises(TypeError, match="marked per_kind"):
        blocks.scan(per_kind({"tanh": x, "sine": x}), scale, own, shift)
    with pytest.raises(ValueError, match=r"is None; did you forget eqx.combine"):
        eqx.filter(blocks, eqx.is_array, inverse=True).scan(
            x, scale, per_kind(own), shift
        )
