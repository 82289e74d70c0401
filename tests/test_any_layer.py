"""What layers may do under every policy: complex carries, effects, eager calls, second
derivatives.
"""

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
from stacked_remat._memory_spaces import (
    compiled_for,
    on_several_devices,
    platform,
)

from .blocks import POLICIES, assert_close, is_by_name, policies, quick_jit

Layers = hax.Axis("layers", 4)
# One policy for each kind of program.
KINDS = policies(
    "True", "recompute", "offload", "nested, names", "nested, offload", "first layers"
)
every_kind = pytest.mark.parametrize("policy", KINDS.values(), ids=KINDS)
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


@pytest.mark.parametrize(
    "by_name", [False, pytest.param(True, marks=pytest.mark.remat3)]
)
@every_stack
def test_complex_carries_and_constant_outputs(Stack, by_name):
    def value(weights, run):
        x, (zero, three, size) = run(weights, ONES.astype(np.complex64))
        assert (zero.shape, three.shape) == ((4,), (4,))
        return jnp.abs(x).sum() + size.sum() + zero.sum()

    def loop(weights, x):
        outputs = []
        for weight in weights:
            x, output = ComplexBlock(weight)(x)
            outputs.append(output)
        return x, jax.tree.map(lambda *leaves: jnp.asarray(leaves), *outputs)

    runs = {
        name: _scan_under(Stack, remat)
        for name, remat in POLICIES.items()
        if is_by_name(remat) == by_name
    }
    found = quick_jit(
        lambda w: {
            name: jax.value_and_grad(value)(w, run)
            for name, run in {**runs, "loop": loop}.items()
        }
    )(weights())
    expected = found.pop("loop")
    assert_close(found, dict.fromkeys(found, expected), 1e-4, 1e-5)


def _scan_under(Stack, policy):
    return lambda weights, x: Stack.init(Layers, ComplexBlock, remat=policy)(
        weights
    ).scan(x)


class TestEffects:
    @pytest.mark.parametrize(
        "name", ["nested, offload, names", "nested, names", "offload", "first layers"]
    )
    def test_callbacks_get_only_carries_of_the_stack(self, name):
        seen = []

        def body(x, weight):
            jax.debug.callback(lambda x: seen.append(np.asarray(x)), x)
            return checkpoint_name(x * weight, "hidden") + 1.0

        value = jax.jit(
            jax.grad(lambda w: fold(body, Layers, remat=POLICIES[name])(ONES, w).sum())
        )
        jax.block_until_ready(value(weights()))
        jax.effects_barrier()
        carries = [ONES]
        for weight in weights():
            carries.append(np.asarray(carries[-1] * weight + 1.0))
        assert seen and all(
            any(np.allclose(x, carry) for carry in carries[:-1]) for x in seen
        )

    @every_stack
    def test_ordered_callbacks_are_refused_where_values_are_offloaded(self, Stack):
        class Ordered(Block):
            def __call__(self, x):
                io_callback(lambda _: None, None, x, ordered=True)
                return super().__call__(x)

        for policy in [
            policy for policy in POLICIES.values() if "offload" in repr(policy)
        ]:
            stack = Stack.init(Layers, Ordered, remat=policy)(weights())
            with pytest.raises(TypeError, match="ordered effects.*ordered=True"):
                jax.eval_shape(stack.fold, ONES)

    def test_references_are_refused_where_layers_are_cut(self):
        reference = jax.new_ref(jnp.zeros(3))

        def body(x, weight):
            reference[...] += 1.0
            return x * weight

        for name in [name for name in POLICIES if name.startswith(("nested", "first"))]:
            with pytest.raises(TypeError, match="jax.Ref"):
                fold(body, Layers, remat=POLICIES[name])(ONES, weights())
        fold(body, Layers, remat=True)(ONES, weights())
        assert reference[...].tolist() == [4.0] * 3

    def test_references_of_a_layer_s_own_have_derivatives(self):
        def layer(x, weight):
            reference = jax.new_ref(jnp.zeros(3))
            reference[...] = jnp.tanh(x * weight)
            return reference[...]

        def gradient(run):
            return jax.jit(jax.grad(lambda weights: jnp.sum(run(ONES, weights))))(
                weights()
            )

        found = gradient(fold(layer, Layers, remat="nested"))
        expected = gradient(lambda x, weights: functools.reduce(layer, weights, x))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@every_kind
def test_export_with_symbolic_shapes(policy):
    (rows,) = jax.export.symbolic_shape("rows")

    def value(weights, x):
        return fold(lambda x, weight: jnp.sin(x * weight[None]), Layers, remat=policy)(
            x, weights
        ).sum()

    x = jax.ShapeDtypeStruct((rows, 3), jnp.float32)
    exported = jax.export.export(jax.jit(jax.grad(value)))(jax.typeof(weights()), x)
    found = exported.call(weights(), jnp.ones((2, 3)))
    np.testing.assert_allclose(
        found, jax.grad(value)(weights(), jnp.ones((2, 3))), rtol=1e-5
    )


class TestStacksInStacks:
    @staticmethod
    def gradient(remat, depth):
        def sine(x, weight):
            return jnp.sin(x * weight)

        layer: Any = sine
        for _ in range(depth):
            layer = fold(layer, Layers, remat=remat)
        return jax.grad(lambda w: layer(ONES, w).sum())

    def test_gradients(self):
        stacked = jnp.linspace(0.3, 0.9, 48).reshape(4, 4, 3)
        policies = [False, *KINDS.values()]

        def second(remat):
            return jax.grad(lambda w: jnp.sum(self.gradient(remat, 2)(w) ** 2))

        @quick_jit
        def run(w):
            first = [self.gradient(remat, 2)(w) for remat in policies]
            return first, [
                second(remat)(w) for remat in (False, "nested", KINDS["first layers"])
            ]

        for expected, *found in run(stacked):
            assert_close(found, [expected] * len(found))

    @pytest.mark.parametrize(
        "settings",
        [
            {"first_layers": 1},
            {"first_layers": 2, "save_carries": "offload"},
        ],
        ids=str,
    )
    def test_programs_grow_with_their_depth(self, settings):
        """Linearly: two copies of a level would double them."""

        def size(remat, depth):
            shape = jnp.zeros((Layers.size,) * depth + (3,))
            return len(jax.jit(self.gradient(remat, depth)).lower(shape).as_text())

        policy = ScanCheckpointPolicy(nested=True, **settings)
        growth = np.diff([size(policy, depth) for depth in (1, 2, 3)])
        assert growth[-1] < 1.5 * growth[0]


class TestInternalsAreSaved:
    @pytest.mark.parametrize(
        "policy, saved",
        [
            *((policy, ["hidden", "other", None]) for policy in (False, "save_all")),
            (
                ScanCheckpointPolicy(nested=True, save_block_internals=True),
                ["hidden", "other", None],
            ),
            (
                ScanCheckpointPolicy(nested=True, first_layers=4),
                ["hidden", "other", None],
            ),
            (True, []),
            ("nested", []),
            (ScanCheckpointPolicy(nested=True, first_layers=2), []),
            (ScanCheckpointPolicy(save_block_internals=["hidden"]), ["hidden"]),
            (
                ScanCheckpointPolicy(
                    save_block_internals=["other"], offload_block_internals=["hidden"]
                ),
                ["hidden", "other"],
            ),
            (
                ScanCheckpointPolicy(
                    save_block_internals=jax.checkpoint_policies.dots_saveable
                ),
                [],
            ),
        ],
    )
    @every_stack
    def test_whether_all_and_those_of_a_name_are(self, Stack, policy, saved):
        answers, inner = set(), set()

        def asking(x, answers):
            answers.add(
                tuple(
                    name
                    for name in ("hidden", "other", None)
                    if internals_are_saved(name)
                )
            )
            return x

        class AskingBlock(Block):
            def __call__(self, x):
                return checkpoint(lambda x: asking(x, inner), save=["other"])(
                    asking(x, answers)
                )

        jax.eval_shape(
            Stack.init(Layers, AskingBlock, remat=policy)(weights()).fold, ONES
        )
        of_first = (
            {("hidden", "other", None)}
            if Stack is BlockSeq and "first_layers=2" in repr(policy)
            else set()
        )
        assert answers == {tuple(saved)} | of_first and internals_are_saved()
        assert inner == {
            tuple(name for name in of_layer if name == "other") for of_layer in answers
        }

    def test_within_a_scan_that_recomputes_nothing_is_saved(self):
        answers = []

        def inner(x, weight):
            answers.append(internals_are_saved())
            return x * weight

        fold(
            lambda x, w: fold(inner, Layers, remat=False)(x, w),
            Layers.alias("outer"),
            remat=True,
        )(ONES, jnp.ones((4, 4, 3)))
        assert set(answers) == {False}


def test_a_trace_for_one_platform_is_not_reused_for_another():
    @jax.jit
    def for_platform(x):
        return x + {"cpu": 1, "cuda": 2}[platform()]

    with compiled_for("cuda"):
        found = jax.make_jaxpr(for_platform)(0)
    assert for_platform(0) == 1 and eval_jaxpr(found.jaxpr, found.consts, 0) == [2]


def test_what_is_on_several_devices():
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Explicit,))
    divided = jax.device_put(np.ones(2), jax.NamedSharding(mesh, jax.P("d")))
    one, other = jax.device_put(ONES, jax.devices()[0]), {"a": (ONES, 1.0, None)}
    assert not on_several_devices([one, other])
    assert on_several_devices([one, other, divided])
    traced = []
    jax.eval_shape(
        lambda *args: traced.extend(map(on_several_devices, args)), one, divided
    )
    assert traced == [False, True]
    with jax.set_mesh(mesh):
        assert on_several_devices(())
