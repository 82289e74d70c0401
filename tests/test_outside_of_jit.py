"""Folds outside of `jax.jit`: what is compiled again, what is kept alive; and the text
of programs.
"""

import contextvars
import dataclasses
import functools
import gc
import types
import weakref
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from stacked_remat import (
    BlockSeq,
    LayerResult,
    Stacked,
    StackedPattern,
    checkpoint,
    fold,
    fused_update,
    lax_scan,
    map as map_layers,
    per_layer,
    scan,
    streaming,
    tiled,
)

from .blocks import POLICIES, assert_close, assert_equal, looped
from .test_any_layer import ONES, Block, Layers, every_stack, weights


class Scaled(Block):
    value: Any = eqx.field(static=True, default=None)

    def __call__(self, x, value):
        kind = self.value if value is None else value
        return x * self.weight + float(sum(map(ord, f"{type(kind).__name__}{kind!r}")))


def _outputs_carry(x, weight):
    return x + weight, x


@jax.custom_vjp
def _doubled(x):
    return 2 * x


_doubled.defvjp(lambda x: (2 * x, x), lambda x, ct: (2 * ct + 0 * jnp.cos(x),))


class _Config:
    factor = 1.0


_config, _held = types.SimpleNamespace(factor=1.0), {"factor": 1.0}
_context = contextvars.ContextVar("factor", default=1.0)


def _factor():
    return _held["factor"] * _context.get() * _Config.factor * _config.factor


def _step(x, weight):
    return jnp.sin(x + weight) * _factor()


class _Flagged(Block):
    def __call__(self, x):
        return _step(x, self.weight)


def _loop(weight, x):
    for own in weight:
        x = _step(x, own)
    return x


def _one(weight, x):
    return _step(x, weight[0, 0])


def _pattern(weight, x):
    kinds = ("a", "b", "a", "b")
    return StackedPattern.init(
        Layers, {"a": _Flagged, "b": _Flagged}, kinds, remat="nested"
    )(weight).fold(x)


def _stack(Stack, remat):
    return lambda weight, x: Stack.init(Layers, _Flagged, remat=remat)(weight).fold(x)


# Ways to call `_step`, and what a Python program writes for them.
_ENTRIES = {
    "fold": (lambda weight, x: fold(_step, Layers, remat=False)(x, weight), _loop),
    "scan": (
        lambda weight, x: scan(lambda *at: (_step(*at), None), Layers, remat="offload")(
            x, weight
        )[0],
        _loop,
    ),
    "lax_scan": (
        lambda weight, x: lax_scan(lambda *at: (_step(*at), None), x, weight)[0],
        _loop,
    ),
    "map": (
        lambda weight, x: map_layers(_step, Layers)(
            per_layer(jnp.stack([x] * 4)), weight
        ).sum(0),
        lambda weight, x: sum(_step(x, own) for own in weight),
    ),
    "Stacked, True": (_stack(Stacked, True), _loop),
    "Stacked, recompute": (_stack(Stacked, "recompute"), _loop),
    "Stacked, nested": (_stack(Stacked, POLICIES["nested, names"]), _loop),
    "StackedPattern": (_pattern, _loop),
    "BlockSeq": (_stack(BlockSeq, True), _loop),
    "fold_vjp": (
        lambda weight, x: Stacked(_Flagged(weight), Layers).fold_vjp(x)[0],
        _loop,
    ),
    "tiled": (
        lambda weight, x: tiled(functools.partial(_one, weight), 0, tiles=2)(x),
        _one,
    ),
    "checkpoint": (checkpoint(_one), _one),
}


class TestOutsideOfJit:
    @pytest.mark.parametrize(
        "Stack, policy",
        [
            *(
                (Stacked, POLICIES[name])
                for name in ("True", "nested, names", "first layers")
            ),
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
                    fold(
                        lambda x, weight, held=held: x * weight * held[0],
                        Pair,
                        remat=policy,
                    )(ONES, held)
            gc.collect()
            return len(jax.live_arrays())

        assert calls((1.0, 2.0)) >= calls((3.0, 4.0, 5.0))

    def test_changed_stacks_are_not_kept_alive(self):
        """Stacks that are made of others, which call no constructor of Equinox."""

        def visitor(visit, _):
            return LayerResult(visit.vjp().carry, visit.layer)

        def swept(stack):
            result, sweep_back = stack.fold_vjp(ONES)
            return sweep_back(result, visitor).layers

        def updated(stack):
            update = fused_update(lambda stack: stack.fold(ONES).sum(), optax.sgd(0.1))
            return update(stack, update.init(stack)).model

        blocks = {"a": Block, "b": Block}
        pattern = StackedPattern.init(Layers, blocks, ("a", "b", "a", "b"))(weights())
        stack = Stacked.init(Layers, Block, remat="nested")(weights())
        matrices = Stacked.init(Layers, Block)(jnp.ones((4, 3, 3)))
        made = [
            lambda: stack[1:3],
            lambda: pattern[1:3],
            lambda: BlockSeq.init(Layers, Block)(weights())[1:3],
            lambda: swept(stack),
            lambda: swept(pattern),
            lambda: updated(stack),
            lambda: streaming.to_host(matrices),
        ]
        for make in made:
            with pytest.raises(dataclasses.FrozenInstanceError):
                make().remat = True
            # No variable may hold one.
            references = [*map(weakref.ref, jax.tree.leaves(make()))]
            gc.collect()
            left = {id(leaf) for leaf in jax.tree.leaves((stack, pattern, matrices))}
            for reference in references:
                assert reference() is None or id(reference()) in left

    @pytest.mark.parametrize("policy", [True, POLICIES["nested, names"]])
    def test_no_tracer_leaks(self, policy):
        with jax.checking_leaks():
            jax.grad(
                lambda w: fold(lambda x, w: x * w, Layers, remat=policy)(ONES, w).sum()
            )(weights())

    @pytest.mark.parametrize(
        "policy",
        [False, "recompute", "offload", POLICIES["nested, names"], "tiled"],
        ids=str,
    )
    def test_calls_alike_compile_once(self, policy, caplog):
        """Derivatives too, of functions with rules of their own, by whatever object the
        layer is.
        """
        weight = weights()

        def apply(x):
            def layer(x, weight):
                return jax.nn.relu(x * weight) + _doubled(x)

            if policy == "tiled":
                return tiled(lambda x: layer(x, weight[0, 0]), 0, tiles=2)(x)
            return fold(layer, Layers, remat=policy)(x, weight)

        def loss(x):
            return apply(x).sum()

        def hvp(x):
            return jax.jvp(jax.grad(loss), (x,), (x,))[1]

        x = jnp.asarray(ONES)
        pairs = jnp.stack([x, 2 * x])
        calls = {
            "value": lambda: apply(x),
            "gradient": lambda: jax.grad(loss)(x),
            "vmap": lambda: jax.vmap(apply)(pairs),
            "Hessian-vector product": lambda: hvp(x),
            "of a batch": lambda: jax.vmap(hvp)(pairs),
            "gradient of a gradient": lambda: jax.grad(
                lambda x: jax.grad(loss)(x).sum()
            )(x),
        }
        expected = {name: call() for name, call in calls.items()}
        with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
            for name, call in calls.items():
                np.testing.assert_array_equal(call(), expected[name])
                assert "Compiling" not in caplog.text, name

    def test_forward_mode_and_visitors_compile_once(self, caplog):
        stack = Stacked.init(Layers, Block, remat="nested")(weights())
        x = jnp.asarray(ONES)

        def visited():
            y, sweep_back = stack.fold_vjp(x)
            return sweep_back(
                jnp.ones_like(y), lambda visit, _: LayerResult(visit.vjp().carry)
            ).carry

        calls = [
            visited,
            lambda: jax.jvp(stack.fold, (x,), (x,)),
            lambda: jax.linearize(stack.fold, x)[1](x),
        ]
        expected = [call() for call in calls]
        with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
            assert_equal([call() for call in calls], expected)
        assert "Compiling" not in caplog.text
        assert_equal(expected[0], jax.grad(lambda x: stack.fold(x).sum())(x))

    def test_equal_programs_on_other_devices(self):
        def noisy(x, weight, key):
            return x * weight + jax.random.normal(key, x.shape)

        mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        keys = jax.random.split(jax.random.key(0), 4)
        x, run = jnp.ones(4), fold(noisy, Layers, remat="nested")
        expected = x
        for key in keys:
            expected = noisy(expected, 0.5, key)
        for place in (
            *jax.devices()[:2],
            NamedSharding(mesh, P("data")),
            NamedSharding(mesh, P()),
        ):
            everywhere = (
                NamedSharding(mesh, P()) if isinstance(place, NamedSharding) else place
            )
            inputs = jax.device_put((jnp.full(4, 0.5), keys), everywhere)
            found = run(jax.device_put(x, place), *inputs)
            assert_close(found, expected)
            assert (
                found.sharding.device_set
                == jax.device_put(x, place).sharding.device_set
            )
        with jax.default_device(jax.devices()[1]):
            assert run(
                np.ones(4, np.float32), np.full(4, 0.5, np.float32), keys
            ).devices() == {jax.devices()[1]}

    def test_not_a_number_is_found(self):
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
            fold(lambda x, weight: jnp.log(x - weight - 9), Layers, remat="nested")(
                ONES, weights()
            )

    def test_jax_forgets_what_was_compiled(self, caplog):
        def value():
            return fold(lambda x, weight: x * weight, Layers, remat="nested")(
                ONES, weights()
            )

        value()
        jax.clear_caches()
        with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
            value()
        assert "Compiling" in caplog.text

    @pytest.mark.parametrize(
        "policy", [False, "nested", POLICIES["nested, internals"]], ids=str
    )
    @pytest.mark.parametrize("within", ["the layer", "jit", "jit in scan", "rule"])
    def test_arrays_in_closures_are_given_up(self, policy, within):
        def call():
            held = 2 * jnp.ones(777)

            @jax.custom_vjp
            def identity(x):
                return x

            identity.defvjp(lambda x: (x, None), lambda _, ct: (ct * held.sum(),))
            plus = jax.jit(lambda x: x + held.sum())
            run = {
                "the layer": lambda x: x + held.sum(),
                "jit": plus,
                "jit in scan": lambda x: jax.lax.scan(
                    lambda x, _: (plus(x), None), x, None, length=2
                )[0],
                "rule": identity,
            }[within]
            folded = fold(
                lambda x, weight: run(jnp.tanh(x * weight)), Layers, remat=policy
            )
            for _ in range(2):
                folded(ONES, weights())
                jax.grad(lambda x: folded(x, weights()).sum())(jnp.asarray(ONES))
            return weakref.ref(held)

        held = call()
        gc.collect()
        assert held() is None

    def test_arrays_in_closures_are_told_apart(self):
        """Their values are in what was compiled."""

        def value(number):
            held = jnp.full(777, number)
            plus = jax.jit(lambda x: x + held.sum())
            return float(
                fold(lambda x, weight: plus(x * weight), Layers, remat="nested")(
                    ONES, weights()
                )[0]
            )

        def plain(number):
            x = 1.0
            for weight in np.asarray(weights())[:, 0]:
                x = x * weight + 777 * number
            return x

        for number in (1.0, 2.0, 3.0):
            np.testing.assert_allclose(value(number), plain(number), rtol=1e-5)

    @pytest.mark.parametrize("value", [0.0, -0.0, 1, True, 1.0, "up", 2.0])
    def test_python_values_that_are_equal_are_told_apart(self, value):
        """The block computes something else for each of them."""
        for stack in (
            Stacked.init(Layers, Scaled)(weights()),
            Stacked(Scaled(weights(), value), Layers),
        ):
            argument = None if stack.stacked.value is not None else value
            np.testing.assert_allclose(
                stack.fold(ONES, argument), looped(stack, ONES, argument), rtol=1e-6
            )

    def test_a_method_of_a_class_that_was_replaced(self, monkeypatch):
        class Changing(Block):
            def __call__(self, x):
                return x * 2.0

        stack = Stacked.init(Layers, Changing)(weights())
        assert float(stack.fold(ONES)[0]) == 2.0**4
        monkeypatch.setattr(Changing, "__call__", lambda self, x: x)
        assert float(stack.fold(ONES)[0]) == 1.0

    @pytest.mark.parametrize("entry", _ENTRIES)
    def test_what_a_layer_reads_from_elsewhere_is_read_at_each_call(
        self, entry, monkeypatch
    ):
        """As a Python loop reads it, wherever it is, eagerly and by a new `jax.jit` of
        arrays in closures.
        """
        x, weight = jnp.asarray(ONES), weights()
        found, plain = (functools.partial(call, weight) for call in _ENTRIES[entry])

        def gradient(call):
            return jax.grad(lambda x: call(x).sum())(x)

        def check():
            value, slope = plain(x), gradient(plain)
            assert_close(found(x), value)
            assert_close(jax.jit(lambda: found(x))(), value)
            assert_close(gradient(found), slope)
            assert_close(jax.jit(lambda: gradient(found))(), slope)
            assert_close(*(jax.jvp(call, (x,), (x,))[1] for call in (found, plain)))

        check()
        token = _context.set(0.5)
        assert_close(found(x), plain(x))
        monkeypatch.setitem(_held, "factor", -1.5)
        assert_close(found(x), plain(x))
        monkeypatch.setattr(_Config, "factor", 0.7)
        assert_close(found(x), plain(x))
        monkeypatch.setattr(_config, "factor", 1.2)
        check()
        _context.reset(token)
        assert_close(gradient(found), gradient(plain))

    @pytest.mark.parametrize("policy", [False, "nested", "tiled"])
    def test_what_a_rule_reads_from_elsewhere_is_read_at_each_call(
        self, policy, monkeypatch
    ):
        @jax.custom_vjp
        def reversed_by_factor(x):
            return x

        @jax.custom_jvp
        def forward_by_factor(x):
            return x

        reversed_by_factor.defvjp(lambda x: (x, None), lambda _, ct: (ct * _factor(),))
        forward_by_factor.defjvp(
            lambda primals, tangents: (primals[0], tangents[0] * _factor())
        )
        for rule in (reversed_by_factor, forward_by_factor):

            def value(x, rule=rule):
                if policy == "tiled":
                    return tiled(rule, 0, tiles=3)(x).sum()
                return fold(lambda x, weight: rule(x), Layers.resize(1), remat=policy)(
                    x, weights()[:1]
                ).sum()

            for factor in (2.0, 3.0):
                monkeypatch.setitem(_held, "factor", factor)
                np.testing.assert_allclose(jax.grad(value)(jnp.asarray(ONES)), factor)

    def test_a_layer_may_close_over_what_is_differentiated(self):
        holder = types.SimpleNamespace()

        def loss(value):
            holder.value = value
            return fold(lambda x, weight: x * weight * holder.value, Layers)(
                ONES, jnp.ones((4, 3))
            ).sum()

        assert [float(jax.grad(loss)(value)) for value in (1.0, 2.0)] == [12.0, 96.0]

    def test_functions_that_differ_in_their_second_derivatives_alone(self):
        def slope_of(slope):
            @jax.custom_vjp
            def sine(x):
                return jnp.sin(x)

            @jax.custom_jvp
            def cosine(x):
                return jnp.cos(x)

            cosine.defjvp(
                lambda primals, tangents: (cosine(*primals), slope * tangents[0])
            )
            sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (cosine(x) * ct,))
            run = fold(
                lambda x, weight: sine(x) * weight, Layers.resize(1), remat="nested"
            )
            return float(
                jax.grad(jax.grad(lambda x: run(x, np.ones(1, np.float32))))(1.0)
            )

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
            return jax.lax.while_loop(
                lambda x: x[0] < 10.0, lambda x: x * weight * 20, x
            )

        found = jax.jvp(
            lambda x: fold(layer, Layers)(x, weights()), (jnp.ones(3),), (jnp.ones(3),)
        )
        np.testing.assert_allclose(found[0], found[1], rtol=1e-6)

    def test_directions_and_unrolling_do_not_share_a_program(self):
        order = [
            scan(_outputs_carry, Layers, reverse=r)(0.0, np.arange(4.0))[1].tolist()
            for r in (True, False)
        ]
        assert order == [[6.0, 5.0, 3.0, 0.0], [0.0, 0.0, 1.0, 3.0]]
        assert (
            scan(_outputs_carry, Layers, unroll=True)(0.0, np.arange(4.0))[1].tolist()
            == order[1]
        )

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
            return fold(lambda x, weight: jnp.sin(x * weight), Layers, remat=policy)(
                x, w
            ).sum()

        return jax.jit(jax.grad(value, wanted)).lower(ONES, weights()).as_text()

    cases = [
        (POLICIES[name], wanted)
        for name in ("nested, names", "first layers")
        for wanted in (0, 1, (0, 1))
    ]
    first = [text(*case) for case in cases]
    assert first[::-1] == [text(*case) for case in cases[::-1]]
