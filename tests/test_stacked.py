"""The methods of `Stacked` and `BlockSeq`: which blocks and options they take,
applying, and taking apart.
"""

import copy
import pickle
from typing import assert_type

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat import (
    BlockFoldable,
    BlockSeq,
    ScanCheckpointPolicy,
    Stacked,
    StackedPattern,
)

from .blocks import Hidden, NamedBlock, PlainBlock, PlainScanBlock
from .jaxprs import equations_of, outline

Layers = hax.Axis("layers", 4)
both = pytest.mark.parametrize("Stack", [Stacked, BlockSeq])


def keys(n=Layers.size):
    return jax.random.split(jax.random.key(0), n)


@both
class TestInit:
    def test_haliax_style_and_equinox_style(self, Stack):
        named = Stack.init(Layers, NamedBlock)(Hidden, key=keys())
        plain = Stack.init(Layers, PlainBlock)(3, key=keys())
        for i, key in enumerate(keys()):
            expected = NamedBlock.init(Hidden, key=key)
            np.testing.assert_array_equal(
                named.get_layer(i).weight.array, expected.weight.array
            )
            assert named.get_layer(i).weight.axes == expected.weight.axes
            np.testing.assert_array_equal(
                plain.get_layer(i).weight, PlainBlock(3, key=key).weight
            )
        assert plain.get_layer(0).size == 3

    def test_a_number_is_an_axis(self, Stack):
        stack = Stack.init(4, PlainBlock)(3, key=keys())
        assert stack == Stack(stack.stacked if Stack is Stacked else stack.blocks, 4)
        assert stack.Layers == stack.Block == Layers and isinstance(
            stack, BlockFoldable
        )
        assert jax.tree.structure(
            pickle.loads(pickle.dumps(stack))
        ) == jax.tree.structure(stack)

    def test_the_policy_has_two_names(self, Stack):
        assert (
            Stack.init(Layers, PlainBlock)(3, key=keys()).remat
            == ScanCheckpointPolicy()
        )
        assert Stack.init(Layers, PlainBlock, remat=False)(
            3, key=keys()
        ).remat.saves_everything
        stack = Stack.init(Layers, PlainBlock, gradient_checkpointing="nested")(
            3, key=keys()
        )
        policy = ScanCheckpointPolicy(nested=True)
        assert stack.remat == stack.gradient_checkpointing == policy
        with pytest.raises(
            ValueError, match="remat and gradient_checkpointing name one argument"
        ):
            Stack.init(Layers, PlainBlock, remat=True, gradient_checkpointing=False)

    def test_a_subclass_comes_back_as_itself(self, Stack):
        class Tower(Stack):
            def twice(self, x):
                return self.fold(self.fold(x))

        tower = Tower.init(Layers, PlainBlock)(3, key=keys())
        assert type(tower) is Tower and tower.twice(jnp.ones(3)).shape == (3,)
        assert type(tower.from_state_dict(tower.to_state_dict())) is Tower


@both
class TestApplying:
    scales = jnp.array([0.5, 1.0, 1.5, 2.0])

    def test_vmap(self, Stack):
        plain = Stack.init(Layers, PlainBlock)(3, key=keys())
        named = Stack.init(Layers, NamedBlock)(Hidden, key=keys())
        assert plain.vmap_via(lambda block: 1.5)().shape == (4,)
        x = jnp.ones((4, 3))  # a row for each layer
        expected = jnp.stack(
            [
                layer(row, s)
                for layer, row, s in zip(plain.unstacked(), x, self.scales, strict=True)
            ]
        )
        np.testing.assert_allclose(plain.vmap(x, self.scales), expected, rtol=1e-5)
        np.testing.assert_allclose(
            plain.vmap_via(PlainBlock.__call__)(x, self.scales), expected, rtol=1e-5
        )
        assert named.vmap(hax.ones(Hidden)).axes == (Layers, Hidden)

    @pytest.mark.parametrize("verb", ["fold", "scan", "fold_via", "scan_via"])
    def test_every_method_uses_the_policy_of_its_call(self, Stack, verb):
        block = PlainScanBlock if verb.startswith("scan") else PlainBlock
        stack = Stack.init(Layers, block, remat=False)(3, key=keys())

        def program(**options):
            def run(stack, x):
                if verb.endswith("via"):
                    return getattr(stack, verb)(block.__call__, **options)(x)
                return getattr(stack, verb)(x, **options)

            return outline(equations_of(run, stack, jnp.ones(3)))

        assert (
            program(remat=True)
            == program(remat="full")
            != program()
            == program(remat=False)
        )
        if Stack is Stacked:
            assert program(unroll=2) != program()

    def test_reverse_goes_from_the_last_layer(self, Stack):
        stack = Stack.init(
            Layers, PlainScanBlock, remat=ScanCheckpointPolicy(first_layers=1)
        )(3, key=keys())
        x, expected = jnp.arange(3.0), []
        for layer, scale in zip(reversed(stack), self.scales[::-1], strict=True):
            x, y = layer(x, scale)
            expected.insert(0, y)  # outputs keep the order of the axis
        via = stack.scan_via(PlainScanBlock.__call__, reverse=True)
        for carry, outputs in (
            stack.scan(jnp.arange(3.0), self.scales, reverse=True),
            via(jnp.arange(3.0), self.scales),
        ):
            np.testing.assert_allclose(carry, x, rtol=1e-5)
            np.testing.assert_allclose(outputs, jnp.stack(expected), rtol=1e-5)
        first = stack.fold_via(lambda block, x, scale: block(x, scale)[0], reverse=True)
        np.testing.assert_allclose(first(jnp.arange(3.0), self.scales), x, rtol=1e-5)

    def test_arguments_may_have_any_name(self, Stack):
        """Names of this library's own parameters, such as `carry` and `block`, too."""

        class Block(eqx.Module):
            weight: jax.Array

            def __call__(self, x, carry=0.0, block=0.0, init=0.0, fn=0.0):
                return (
                    x * self.weight + carry + 10.0 * block + 100.0 * init + 1000.0 * fn
                )

        stack = Stack.init(Layers, Block)(jnp.arange(1.0, 5.0))
        x, ones = jnp.ones(()), jnp.ones(4)
        expected = x
        for i in range(4):
            expected = expected * (i + 1.0) + 1111.0
        for positional in range(5):
            names = ("carry", "block", "init", "fn")[positional:]
            args, kwargs = [ones] * positional, {name: ones for name in names}
            np.testing.assert_allclose(stack.fold(x, *args, **kwargs), expected)
            np.testing.assert_allclose(
                stack.fold_via(Block.__call__)(x, *args, **kwargs), expected
            )
            assert stack.vmap(ones, *args, **kwargs).shape == (4,)
        via = stack.scan_via(lambda layer, x, self, carry: (layer(x, carry), self))
        for _, outputs in (via(x, ones, ones), via(x, carry=ones, self=ones)):
            np.testing.assert_allclose(outputs, ones)
        np.testing.assert_allclose(
            stack.vmap_via(lambda b, fn, self: fn * self)(fn=ones, self=ones), ones
        )

    def test_a_function_without_a_signature(self, Stack):
        class Opaque:
            __signature__ = "none"

            def __call__(self, block, x, scale):
                return block(x, scale)

        stack = Stack.init(Layers, PlainBlock)(3, key=keys())
        got = stack.fold_via(Opaque())(jnp.ones(3), self.scales)
        np.testing.assert_allclose(got, stack.fold(jnp.ones(3), self.scales), rtol=1e-6)
        with pytest.raises(ValueError, match=r"args\[0\] has leading dimension 3"):
            stack.fold_via(Opaque())(jnp.ones(3), jnp.ones(3))


class TestStacked:
    def test_program_size_does_not_grow_with_depth(self):
        def lines(depth, remat):
            stack = Stacked.init(hax.Axis("layers", depth), PlainBlock, remat=remat)(
                3, key=keys(depth)
            )
            gradient = jax.jit(jax.grad(lambda s, x: jnp.sum(s.fold(x))))
            return len(gradient.lower(stack, jnp.ones(3)).as_text().splitlines())

        for remat in (True, False, "nested", "offload"):
            assert lines(48, remat) <= 1.05 * lines(12, remat)

    def test_transformations_may_replace_arrays_by_anything(self):
        stack = Stacked.init(Layers, NamedBlock)(Hidden, key=keys())
        assert jax.tree.leaves(jax.tree.map(lambda _: "leaf", stack)) == [
            "leaf",
            "leaf",
        ]
        arrays, static = eqx.partition(stack, eqx.is_array)
        assert eqx.tree_equal(eqx.combine(arrays, static), stack)
        shapes = eqx.filter_eval_shape(lambda stack: stack, stack)
        assert shapes.stacked.bias.array.shape == (4, 3)
        assert Stacked(shapes.stacked, Layers).remat == ScanCheckpointPolicy()
        build = eqx.filter_vmap(
            lambda keys: Stacked.init(Layers, PlainBlock)(3, key=keys)
        )
        ensemble = build(jax.random.split(jax.random.key(0), (2, 4)))
        assert ensemble.stacked.weight.shape == (2, 4, 3, 3)


def types_that_checkers_know():
    """`make lint` runs pyright over this file."""
    plain = Stacked.init(Layers, PlainBlock)
    named = Stacked.init(Layers, NamedBlock, remat="nested")
    assert_type(plain(3, key=keys()), Stacked[PlainBlock])
    assert_type(named(Hidden, key=keys()), Stacked[NamedBlock])
    assert_type(named(Hidden, key=keys()).get_layer(0), NamedBlock)
    assert_type(plain(3, key=keys())[1:3][0], PlainBlock)
    assert_type(BlockSeq.init(Layers, PlainBlock)(3, key=keys()), BlockSeq[PlainBlock])
    assert_type(
        Stacked.init(Layers, lambda keys: PlainBlock(3, key=keys))(keys()),
        Stacked[PlainBlock],
    )
    plain(3)  # pyright: ignore[reportCallIssue]

    class Tower(Stacked[PlainBlock]):
        pass

    assert_type(Tower.init(4, PlainBlock)(3, key=keys()), Tower)
    kinds = StackedPattern.init(4, {"a": PlainBlock, "b": PlainScanBlock}, ("a", "b"))(
        3, key=keys()
    )
    assert_type(kinds, StackedPattern[PlainBlock])
    x, state = jnp.ones(3), eqx.nn.State({})
    assert_type(plain(3, key=keys()).fold(x, 1.0), jax.Array)
    assert_type(plain(3, key=keys()).fold_via(lambda block, x: block(x))(x), jax.Array)
    kinds.fold_via(lambda block, x, state: (x, state))(x, state)
    named_or_plain = StackedPattern.init(
        4, {"a": PlainBlock, "b": NamedBlock}, ("a", "b")
    )()
    assert_type(named_or_plain, StackedPattern[PlainBlock | NamedBlock])
    assert_type(kinds.fold(x, state), tuple[jax.Array, eqx.nn.State])
    assert_type(
        kinds.fold(x, 1.0, state=state, remat=True), tuple[jax.Array, eqx.nn.State]
    )


class TestBlockSeq:
    def test_a_layer_that_is_not_checkpointed_may_decide_by_an_array_of_numpy(self):
        class Gated(eqx.Module):
            weight: jax.Array
            gates: np.ndarray

            def __call__(self, x):
                return x * self.weight if self.gates.any() else x

        blocks = [
            Gated(jnp.full(3, 2.0), np.array([is_open])) for is_open in (True, False)
        ]
        sequence = BlockSeq(blocks, hax.Axis("layers", 2), False)
        found = jax.jit(lambda x: sequence.fold(x))(jnp.ones(3))
        np.testing.assert_array_equal(found, [2.0, 2.0, 2.0])

    def test_no_layers_are_the_identity(self):
        sequence = BlockSeq([], Layers.resize(0))
        assert sequence.fold(1.0) == 1.0
        assert sequence.scan(1.0) == (1.0, None) and sequence.vmap(1.0) is None

    @pytest.mark.parametrize(
        "outputs, message",
        [
            (
                (jnp.ones(3), jnp.ones(4)),
                r"layers\[0\] is float32\[3\], and layers\[1\] is float32\[4\]",
            ),
            (
                ({"y": hax.ones(Hidden)}, {"y": hax.ones(Layers.alias("o"))}),
                r"0\]\['y'\].*hidden=3.*o=4",
            ),
            ((jnp.ones(3), (jnp.ones(3),)), r"layers\[1\] is a tuple of 1"),
        ],
    )
    def test_outputs_that_cannot_be_stacked(self, outputs, message):
        class Constant(eqx.Module):
            value: object

        sequence = BlockSeq([Constant(value) for value in outputs], Layers.resize(2))
        with pytest.raises(ValueError, match=message):
            sequence.scan_via(lambda block, x: (x, block.value))(1.0)
        with pytest.raises(ValueError, match=message):
            sequence.vmap_via(lambda block: block.value)()


def test_a_layer_by_a_traced_index():
    weights, some = (
        jax.jit(jax.vmap(lambda stack, i: stack[i].weight, (None, 0))),
        jnp.asarray([2, -1, 0]),
    )
    stack = Stacked.init(Layers, PlainBlock)(3, key=keys())
    np.testing.assert_array_equal(weights(stack, some), stack.stacked.weight[some])
    with pytest.raises(TypeError, match="traced"):
        weights(BlockSeq(stack.unstacked(), Layers), some)


@both
def test_a_module_may_build_the_blocks(Stack):
    partial = eqx.Partial(PlainBlock, 3)  # a module too, and one that builds blocks
    for build in (partial, eqx.filter_jit(partial)):
        assert Stack.init(Layers, build)(key=keys())[0].size == 3


@both
def test_an_ordinary_method_named_init_builds_nothing(Stack):
    class Block(PlainBlock):
        def init(self, x):
            return x

    assert Stack.init(Layers, Block)(3, key=keys())[0].init(1) == 1

    class Built(eqx.Module):
        weight: jax.Array

        @classmethod
        def init(cls, size, *, key):
            return cls(jax.random.normal(key, (size,)))

    assert Stack.init(Layers, Built)(3, key=keys())[0].weight.shape == (3,)


@both
@pytest.mark.parametrize("verb", ["fold", "scan"])
@pytest.mark.parametrize(
    "name, value", [("unroll", 2), ("remat", False), ("reverse", False)]
)
def test_an_option_may_be_a_parameter_of_the_block(Stack, verb, name, value):
    class Block(eqx.Module):
        weight: jax.Array

        def __call__(self, x, remat=1.0, unroll=1.0, reverse=1.0):
            assert remat == unroll == reverse == 1.0
            return x if verb == "fold" else (x, x)

    stack = Stack.init(Layers, Block)(jnp.ones(4))
    getattr(stack, verb)(1.0)
    for method in (verb, f"{verb}_vjp") if Stack is Stacked else (verb,):
        message = (
            rf"{name}= may be for {method} or for Block.__call__.*Rename.*{verb}_via"
        )
        with pytest.raises(TypeError, match=message):
            getattr(stack, method)(1.0, **{name: value})
    getattr(stack, f"{verb}_via")(Block.__call__, **{name: value})(1.0)


@both
def test_with_remat(Stack):
    stack = Stack.init(Layers, PlainBlock)(3, key=keys())
    nested = stack.with_remat("nested")
    assert type(nested) is Stack and nested.remat == ScanCheckpointPolicy(nested=True)
    assert stack.remat == ScanCheckpointPolicy()
    assert eqx.tree_equal(nested.with_remat(True), stack)
    ensemble = eqx.filter_vmap(lambda keys: Stack.init(Layers, PlainBlock)(3, key=keys))
    stacks = ensemble(jax.random.split(jax.random.key(0), (2, 4))).with_remat("nested")
    assert stacks.remat == nested.remat


@both
def test_it_is_a_sequence(Stack):
    stack = Stack.init(Layers, NamedBlock)(Hidden, key=keys())
    layers = list(stack.unstacked())
    assert len(stack) == 4 and eqx.tree_equal(list(stack), layers)
    for i in (0, 3, -1, -4, np.int64(2)):
        assert eqx.tree_equal(stack[i], layers[i]) and eqx.tree_equal(
            stack.get_layer(i), layers[i]
        )
    for rows in (
        slice(1, 3),
        slice(-2, None),
        slice(9),
        slice(None, None, -1),
        slice(2, 2),
    ):
        part = stack[rows]
        assert type(part) is Stack and part.remat == stack.remat
        assert part.Layers == Layers.resize(len(layers[rows]))
        assert eqx.tree_equal(list(part), layers[rows])
    x = hax.ones(Hidden)
    halves = stack[2:].fold(stack[:2].fold(x))
    np.testing.assert_allclose(halves.array, stack.fold(x).array, rtol=1e-6)
    assert eqx.tree_equal(stack[2:2].fold(x), x)
    with pytest.raises(IndexError, match="`layers` has no layers"):
        stack[2:2][0]


@both
def test_slices_of_any_stack(Stack):
    """The axis may be at any place, an array shared, and a subclass may have its own
    constructor.
    """

    class Block(eqx.Module):
        late: hax.NamedArray
        rate: float

    class Tower(Stack):
        def __init__(self, rate):
            made = Stack.init(Layers, Block)(hax.arange(Layers), rate)
            self.Layers, self.remat = Layers, made.remat
            if Stack is Stacked:
                table = hax.arange(Layers).broadcast_axis(Hidden)
                self.stacked = Block(table.rearrange((Hidden, Layers)), rate)
            else:
                self.blocks = made.blocks

    part = Tower(0.5)[1:3].with_remat(False)
    assert (
        type(part) is Tower
        and part.remat.saves_everything
        and [block.rate for block in part] == [0.5, 0.5]
    )
    np.testing.assert_array_equal(
        [block.late.array.ravel()[0] for block in part], [1, 2]
    )


class Width(Stacked):
    @property
    def width(self):
        return self.stacked.wieght.shape[-1]


class Checked(eqx.Module):
    scale: jax.Array

    @property
    def checked(self):
        raise ValueError("of one layer alone")


def test_attributes_that_a_stack_has_not_run_no_code_of_its_blocks():
    layers = [Checked(jnp.ones(2))] * 3
    assert not hasattr(Stacked.of(layers), "checked")
    assert Stacked.of(layers).remat == ScanCheckpointPolicy()
    with pytest.raises(AttributeError, match=r"its layers do: .*\.stacked\.scale, "):
        getattr(Stacked.of(layers), "scale")  # noqa: B009
    with pytest.raises(AttributeError, match="no attribute 'wieght'"):
        getattr(Width.of(layers), "width")  # noqa: B009
    assert copy.deepcopy(Stacked.of(layers)).Layers.size == 3
