"""What layers may do under every policy: complex carries, effects, eager calls, second derivatives."""

import functools
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import eval_jaxpr
from jax.experimental import io_callback

from stacked_remat import (
    BlockSeq,
    ScanCheckpointPolicy,
    Stacked,
    checkpoint,
    checkpoint_name,
    fold,
    internals_are_saved,
)
from stacked_remat._placement import compiled_for, platform

from .blocks import quick_jit, with_remat3

Layers = hax.Axis("layers", 4)
NAMES = ["hidden"]
POLICIES = {
    "false": False,
    "true": True,
    "recompute": "recompute",
    "offload": "offload",
    "save_all": "save_all",
    "names": ScanCheckpointPolicy(save_block_internals=NAMES),
    "names offloaded": ScanCheckpointPolicy(offload_block_internals=NAMES),
    "nested": "nested",
    "nested names": ScanCheckpointPolicy(nested=True, save_block_internals=NAMES),
    "nested offload": ScanCheckpointPolicy(nested=True, save_carries="offload"),
    "nested offload names": ScanCheckpointPolicy(
        nested=True, save_carries="offload", save_block_internals=NAMES
    ),
    "first layers": ScanCheckpointPolicy(nested=True, first_layers=2),
    "first layers offload": ScanCheckpointPolicy(nested=True, save_carries="offload", first_layers=1),
}
OFFLOADING = [name for name, policy in POLICIES.items() if "offload" in repr(policy)]
CUT = [name for name in POLICIES if name.startswith(("nested", "first"))]
# One policy for each kind of program.
KINDS = ("true", "recompute", "offload", "nested names", "nested offload", "first layers")
every_policy = pytest.mark.parametrize("policy", with_remat3(POLICIES))
every_stack_and_policy = pytest.mark.parametrize(
    "Stack, policy",
    [
        pytest.param(Stack, *one.values, marks=one.marks, id=f"{Stack.__name__}-{one.id}")
        for Stack, names in ((Stacked, POLICIES), (BlockSeq, KINDS))
        for one in with_remat3({name: POLICIES[name] for name in names}, quick=KINDS)
    ],
)
every_kind = pytest.mark.parametrize("policy", [POLICIES[name] for name in KINDS], ids=KINDS)


every_stack = pytest.mark.parametrize("Stack", [Stacked, BlockSeq])


class Block(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return x + jnp.sin(checkpoint_name(x * self.weight, "hidden"))


class ComplexBlock(Block):
    def __call__(self, x):
        x = x * jnp.exp(1j * checkpoint_name(x * self.weight.astype(x.dtype), "hidden"))
        return x, (0.0, 3, jnp.abs(x).sum())  # constants are outputs too


def weights(scale: float = 1.0):
    return scale * jnp.linspace(0.1, 0.5, 12).reshape(4, 3)


ONES = np.ones(3, np.float32)


@every_stack_and_policy
def test_vmap_with_complex_carries_and_constant_outputs(Stack, policy):
    def value(scale, weights):
        x, (zero, three, size) = Stack.init(Layers, ComplexBlock, remat=policy)(weights).scan(
            (scale * ONES).astype(np.complex64)
        )
        assert (zero.shape, three.shape) == ((4,), (4,))
        return jnp.abs(x).sum() + size.sum() + zero.sum()

    scales, gradient = jnp.array([1.0, 0.5]), jax.value_and_grad(value, 1)
    if jax.config.jax_remat3:  # pyright: ignore[reportAttributeAccessIssue]
        compiled = quick_jit(gradient)  # its names have no rule for vmap
        found = [compiled(scale, weights()) for scale in scales]
    else:
        found = zip(*quick_jit(jax.vmap(gradient, (0, None)))(scales, weights()), strict=True)
    for scale, (found_value, found_gradient) in zip(scales, found, strict=True):
        expected = _loop_of_complex_blocks(float(scale))
        np.testing.assert_allclose(found_value, expected[0], rtol=1e-5)
        np.testing.assert_allclose(found_gradient, expected[1], rtol=1e-4, atol=1e-5)


@functools.cache
def _loop_of_complex_blocks(scale):
    def value(weights):
        x, total = (scale * ONES).astype(np.complex64), 0.0
        for weight in weights:
            x, (_, _, size) = ComplexBlock(weight)(x)
            total += size
        return jnp.abs(x).sum() + total

    return quick_jit(jax.value_and_grad(value))(weights())


@functools.cache
def _second_derivative(Stack, policy, length):
    def penalty(weights):
        def value(weights):
            return Stack.init(Layers.resize(length), Block, remat=policy)(weights).fold(ONES).sum()

        return jnp.sum(jax.grad(value)(weights) ** 2)

    return quick_jit(jax.grad(penalty))(weights()[:length])


@every_stack_and_policy
def test_second_derivatives(Stack, policy):
    found, expected = (_second_derivative(Stack, remat, 4) for remat in (policy, False))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", [True, POLICIES["nested offload"]], ids=str)
def test_second_derivatives_of_one_layer(policy):
    found, expected = (_second_derivative(Stacked, remat, 1) for remat in (policy, False))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


class TestEffects:
    @pytest.mark.parametrize("name", ["nested offload names", "nested names", "offload", "first layers"])
    def test_callbacks_get_only_carries_of_the_stack(self, name):
        seen = []

        def body(x, weight):
            jax.debug.callback(lambda x: seen.append(np.asarray(x)), x)
            return checkpoint_name(x * weight, "hidden") + 1.0

        value = jax.jit(jax.grad(lambda w: fold(body, Layers, remat=POLICIES[name])(ONES, w).sum()))
        jax.block_until_ready(value(weights()))
        jax.effects_barrier()
        carries = [ONES]
        for weight in weights():
            carries.append(np.asarray(carries[-1] * weight + 1.0))
        assert seen and all(any(np.allclose(x, carry) for carry in carries[:-1]) for x in seen)

    @pytest.mark.parametrize("name", OFFLOADING)
    @every_stack
    def test_ordered_callbacks_are_refused_where_values_are_offloaded(self, name, Stack):
        class Ordered(Block):
            def __call__(self, x):
                io_callback(lambda _: None, None, x, ordered=True)
                return super().__call__(x)

        stack = Stack.init(Layers, Ordered, remat=POLICIES[name])(weights())
        with pytest.raises(TypeError, match="ordered effects.*ordered=True"):
            jax.eval_shape(stack.fold, ONES)

    @pytest.mark.parametrize("name", CUT)
    def test_references_are_refused_where_layers_are_cut(self, name):
        reference = jax.new_ref(jnp.zeros(3))

        def body(x, weight):
            reference[...] += 1.0
            return x * weight

        with pytest.raises(TypeError, match="jax.Ref"):
            fold(body, Layers, remat=POLICIES[name])(ONES, weights())
        fold(body, Layers, remat=True)(ONES, weights())
        assert reference[...].tolist() == [4.0] * 3


@every_kind
def test_export_with_symbolic_shapes(policy):
    (rows,) = jax.export.symbolic_shape("rows")

    def value(weights, x):
        return fold(lambda x, weight: jnp.sin(x * weight[None]), Layers, remat=policy)(x, weights).sum()

    x = jax.ShapeDtypeStruct((rows, 3), jnp.float32)
    exported = jax.export.export(jax.jit(jax.grad(value)))(jax.typeof(weights()), x)
    found = exported.call(weights(), jnp.ones((2, 3)))
    np.testing.assert_allclose(found, jax.grad(value)(weights(), jnp.ones((2, 3))), rtol=1e-5)


@every_kind
def test_linear_layers_are_transposed(policy):
    def linear(x):
        return fold(lambda x, weight: x * weight, Layers, remat=policy)(x, weights())

    expected = jnp.prod(weights(), 0)
    for transpose in (jax.linear_transpose(linear, ONES), jax.vjp(linear, ONES)[1]):
        np.testing.assert_allclose(transpose(jnp.ones(3))[0], expected, rtol=1e-6)


class TestStacksInStacks:
    @staticmethod
    def gradient(remat, depth):
        def sine(x, weight):
            return jnp.sin(x * weight)

        layer: Any = sine
        for _ in range(depth):
            layer = fold(layer, Layers, remat=remat)
        return quick_jit(jax.grad(lambda w: layer(ONES, w).sum()))

    @every_kind
    def test_gradients(self, policy):
        stacked = jnp.linspace(0.3, 0.9, 48).reshape(4, 4, 3)
        found, expected = (self.gradient(remat, 2)(stacked) for remat in (policy, False))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize(
        "settings",
        [
            {"first_layers": 1},
            {"first_layers": 2, "first_policy": True},
            {"first_layers": 2, "save_carries": "offload"},
        ],
        ids=str,
    )
    def test_programs_grow_with_their_depth(self, settings):
        """Linearly: two copies of a level would double them."""

        def size(remat, depth):
            shape = jnp.zeros((Layers.size,) * depth + (3,))
            return len(self.gradient(remat, depth).lower(shape).as_text())

        policy = ScanCheckpointPolicy(nested=True, **settings)
        sizes = [size(policy, depth) for depth in (1, 2, 3, 4)]
        growth = np.diff(sizes)
        assert growth[-1] < 1.5 * growth[0]


class TestInternalsAreSaved:
    @pytest.mark.parametrize(
        "policy, saved",
        [
            (False, True),
            ("save_all", True),
            (True, False),
            ("nested", False),
            (ScanCheckpointPolicy(nested=True, save_block_internals=True), True),
            (ScanCheckpointPolicy(nested=True, first_layers=4), True),
            (ScanCheckpointPolicy(nested=True, first_layers=9, first_policy=True), False),
            (ScanCheckpointPolicy(nested=True, first_layers=2), False),
        ],
    )
    @every_stack
    def test_whether_its_internals_are_saved(self, Stack, policy, saved):
        answers = []

        class AskingBlock(Block):
            def __call__(self, x):
                answers.append(internals_are_saved())
                return super().__call__(x)

        Stack.init(Layers, AskingBlock, remat=policy)(weights()).fold(ONES)
        expected = {saved, True} if Stack is BlockSeq and "first_layers=2" in repr(policy) else {saved}
        assert set(answers) == expected and internals_are_saved()

    @pytest.mark.parametrize(
        "policy, saved",
        [
            (False, ["hidden", "other", None]),
            (True, []),
            (ScanCheckpointPolicy(save_block_internals=["hidden"]), ["hidden"]),
            (
                ScanCheckpointPolicy(nested=True, save_block_internals=["hidden", "other"]),
                ["hidden", "other"],
            ),
            (
                ScanCheckpointPolicy(save_block_internals=["other"], offload_block_internals=["hidden"]),
                ["hidden", "other"],
            ),
            (ScanCheckpointPolicy(save_block_internals=jax.checkpoint_policies.dots_saveable), []),
        ],
    )
    def test_whether_those_of_a_name_are(self, policy, saved):
        answers = set()

        def asking(x):
            answers.add(tuple(name for name in ("hidden", "other", None) if internals_are_saved(name)))
            return x

        def block(x, weight):
            return checkpoint(asking, save=["other"])(asking(x * weight))

        jax.eval_shape(fold(block, Layers, remat=policy), ONES, jnp.ones((4, 3)))
        assert answers == {tuple(saved), tuple(name for name in saved if name == "other")}

    def test_within_a_scan_that_recomputes_nothing_is_saved(self):
        answers = []

        def inner(x, weight):
            answers.append(internals_are_saved())
            return x * weight

        fold(lambda x, w: fold(inner, Layers, remat=False)(x, w), Layers.alias("outer"), remat=True)(
            ONES, jnp.ones((4, 4, 3))
        )
        assert set(answers) == {False}


def test_a_trace_for_one_platform_is_not_reused_for_another():
    @jax.jit
    def for_platform(x):
        return x + {"cpu": 1, "cuda": 2}[platform()]

    with compiled_for("cuda"):
        found = jax.make_jaxpr(for_platform)(0)
    assert for_platform(0) == 1 and eval_jaxpr(found.jaxpr, found.consts, 0) == [2]
