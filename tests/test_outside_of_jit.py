"""Folds outside of `jax.jit`: what is compiled again, what is kept alive; and the text of programs."""

import gc
import types
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat import BlockSeq, Stacked, StackedPattern, fold, scan
from stacked_remat._sweep.rules import compiled

from .blocks import POLICIES, looped
from .test_any_layer import ONES, Block, Layers, every_stack, weights


class Scaled(Block):
    value: Any = eqx.field(static=True, default=None)

    def __call__(self, x, value):
        kind = self.value if value is None else value
        return x * self.weight + float(sum(map(ord, f"{type(kind).__name__}{kind!r}")))


def _outputs_carry(x, weight):
    return x + weight, x


class TestOutsideOfJit:
    @pytest.mark.parametrize(
        "Stack, policy",
        [
            *((Stacked, POLICIES[name]) for name in ("True", "nested, names", "first layers")),
            (BlockSeq, "offload"),
        ],
        ids=str,
    )
    def test_calls_hold_no_arrays(self, Stack, policy):
        Pair = Layers.resize(2)

        def calls(scales):
            for scale in scales:
                held = weights(scale)[:2]
                eqx.filter_grad(lambda stack: stack.fold(ONES).sum())(
                    Stack.init(Pair, Block, remat=policy)(held)
                )
                if Stack is Stacked:
                    fold(lambda x, weight, held=held: x * weight * held[0], Pair, remat=policy)(ONES, held)
            gc.collect()
            return len(jax.live_arrays())

        assert calls((1.0, 2.0)) >= calls((3.0, 4.0, 5.0))

    @pytest.mark.parametrize("policy", [True, POLICIES["nested, names"]])
    def test_no_tracer_leaks(self, policy):
        with jax.checking_leaks():
            jax.grad(lambda w: fold(lambda x, w: x * w, Layers, remat=policy)(ONES, w).sum())(weights())

    @pytest.mark.parametrize("policy", [True, "offload", POLICIES["nested, names"]], ids=str)
    def test_calls_alike_compile_once(self, policy, caplog):
        stack = Stacked.init(Layers, Block, remat=policy)(weights())

        def gradient():
            return eqx.filter_grad(lambda stack: stack.fold(jnp.ones(3)).sum())(stack)

        expected = gradient()
        with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
            for _ in range(2):
                np.testing.assert_array_equal(gradient().stacked.weight, expected.stacked.weight)
        assert "Compiling" not in caplog.text

    @pytest.mark.parametrize("value", [0.0, -0.0, 1, True, 1.0, "up", 2.0])
    def test_python_values_that_are_equal_are_told_apart(self, value):
        """The block computes something else for each of them."""
        for stack in (Stacked.init(Layers, Scaled)(weights()), Stacked(Scaled(weights(), value), Layers)):
            argument = None if stack.stacked.value is not None else value
            np.testing.assert_allclose(stack.fold(ONES, argument), looped(stack, ONES, argument), rtol=1e-6)

    @pytest.mark.parametrize("is_hashed", [True, False])
    def test_what_a_layer_reads_from_elsewhere_is_read_when_it_is_traced(self, is_hashed, monkeypatch):
        """As by `jax.jit`, which an argument without a hash makes trace again."""

        class Changing(Block):
            scale = 1.0

            def __call__(self, x, holder):
                return x * self.scale * held["array"] * getattr(holder, "scale", 1.0)

        holder, held = None if is_hashed else types.SimpleNamespace(scale=1.0), {"array": jnp.ones(3)}
        stack = Stacked.init(Layers, Changing)(weights())

        def total():
            return float(stack.fold(ONES, holder)[0])

        assert total() == 1.0
        Changing.scale, held["array"] = 2.0, 3 * jnp.ones(3)
        assert total() == (1.0 if is_hashed else 6.0**4)
        if holder is not None:
            holder.scale = 0.5
            assert total() == 3.0**4
        monkeypatch.setattr(Changing, "__call__", lambda self, x, holder: x)
        assert total() == 1.0

    def test_a_layer_may_close_over_what_is_differentiated(self):
        holder = types.SimpleNamespace()

        def loss(value):
            holder.value = value
            return fold(lambda x, weight: x * weight * holder.value, Layers)(ONES, jnp.ones((4, 3))).sum()

        assert [float(jax.grad(loss)(value)) for value in (1.0, 2.0)] == [12.0, 96.0]

    def test_functions_that_differ_in_their_second_derivatives_alone(self):
        def slope_of(slope):
            @jax.custom_vjp
            def sine(x):
                return jnp.sin(x)

            @jax.custom_jvp
            def cosine(x):
                return jnp.cos(x)

            cosine.defjvp(lambda primals, tangents: (cosine(*primals), slope * tangents[0]))
            sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (cosine(x) * ct,))
            run = fold(lambda x, weight: sine(x) * weight, Layers.resize(1), remat="nested")
            return float(jax.grad(jax.grad(lambda x: run(x, np.ones(1, np.float32))))(1.0))

        assert [slope_of(1.0), slope_of(2.0)] == [1.0, 2.0]

    @every_stack
    def test_values_are_known_without_jit(self, Stack):
        """`jax.disable_jit` runs the layers in Python: they may print and branch."""
        seen = []

        class Branching(Block):
            def __call__(self, x):
                seen.append(float(x[0]))
                return super().__call__(x) if x[0] < 3 else x

        stack = Stack.init(Layers, Branching, remat="nested")(weights())
        with jax.disable_jit():
            found = stack.fold(ONES)
        folded = seen.copy()
        np.testing.assert_allclose(found, looped(stack, ONES))
        assert seen == 2 * folded and len(folded) == 4

    def test_a_layer_without_a_gradient_has_a_forward_derivative(self):
        def layer(x, weight):
            return jax.lax.while_loop(lambda x: x[0] < 10.0, lambda x: x * weight * 20, x)

        found = jax.jvp(lambda x: fold(layer, Layers)(x, weights()), (jnp.ones(3),), (jnp.ones(3),))
        np.testing.assert_allclose(found[0], found[1], rtol=1e-6)

    def test_directions_and_unrolling_do_not_share_a_program(self):
        order = [
            scan(_outputs_carry, Layers, reverse=r)(0.0, np.arange(4.0))[1].tolist() for r in (True, False)
        ]
        assert order == [[6.0, 5.0, 3.0, 0.0], [0.0, 0.0, 1.0, 3.0]]
        assert scan(_outputs_carry, Layers, unroll=True)(0.0, np.arange(4.0))[1].tolist() == order[1]

        def product(x, weight):
            return x * weight

        before = compiled.cache_info().misses
        for unroll in (1, True):  # equal, and of different programs
            fold(product, Layers, remat="nested", unroll=unroll)(ONES, weights())
        assert compiled.cache_info().misses == before + 2

    def test_another_axis_mapping_traces_again(self):
        seen = []

        def body(x, weight):
            seen.append(hax.partitioning.current_thread_local_mapping())
            return x * weight

        fold(body, Layers)(ONES, weights())
        with hax.axis_mapping({"embed": "data"}):
            fold(body, Layers)(ONES, weights())
        assert seen[0] is None and seen[-1] is not None


def test_the_call_of_one_kind_for_all_layers_is_not_their_own_call():
    class Product(Block):
        def __call__(self, x):
            return x * self.weight

    class Sum(Block):
        def __call__(self, x):
            return x + self.weight

    build = StackedPattern.init(Layers, {"a": Sum, "b": Product}, ("a", "b"))
    blocks = build(jnp.arange(1.0, 5.0))
    assert blocks.fold(1.0) == ((1 + 1) * 2 + 3) * 4
    assert blocks.fold_via(Sum.__call__)(1.0) == 1 + 1 + 2 + 3 + 4


def test_the_text_of_a_program_does_not_depend_on_those_before_it():
    def text(policy, wanted):
        def value(x, w):
            return fold(lambda x, weight: jnp.sin(x * weight), Layers, remat=policy)(x, w).sum()

        return jax.jit(jax.grad(value, wanted)).lower(ONES, weights()).as_text()

    cases = [
        (POLICIES[name], wanted) for name in ("nested, names", "first layers") for wanted in (0, 1, (0, 1))
    ]
    first = [text(*case) for case in cases]
    assert first[::-1] == [text(*case) for case in cases[::-1]]
