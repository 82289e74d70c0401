"""`SweepBack`s that do the same are equal, to `jax.jit` and to the branches of a
conditional.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from stacked_remat import LayerResult, Stacked, StackedPattern

from .blocks import POLICIES, Tanh
from .test_visitor import N, assert_close, fold_vjp, gradient_of, matrices, sgd


class Linear(Tanh):
    def __call__(self, x):
        return x @ self.weight


class Activated(Tanh):
    activation: Callable = eqx.field(static=True)

    def __call__(self, x):
        return self.activation(x @ self.weight)


class Powered(Tanh):
    power: Any

    def __call__(self, x):
        return jnp.tanh(x @ self.weight)


class TestSweepsThatDoTheSame:
    """A `SweepBack` is as good as another one: to `jax.jit` and to the branches of a
    conditional.
    """

    def traces(self, sweeps, visitor=sgd):
        """How often `jax.jit` traces a function of such."""
        seen = []

        @jax.jit
        def back(sweep_back, ct):
            seen.append(sweep_back)
            return sweep_back(ct, visitor).layers.stacked.weight

        for y, sweep_back in sweeps:
            expected = sweep_back(jnp.ones_like(y), visitor).layers.stacked.weight
            assert_close(back(sweep_back, jnp.ones_like(y)), expected)
        return len(seen)

    @pytest.mark.parametrize(
        "remat", [False, "nested", POLICIES["nested, internals"]], ids=str
    )
    def test_they_are_traced_once(self, remat):
        x = jnp.ones((2, 4))
        assert self.traces(fold_vjp(matrices(seed), x, remat) for seed in range(3)) == 1
        staged = jax.jit(lambda weights: fold_vjp(weights, x, remat))
        assert self.traces(map(staged, (matrices(0), matrices(1)))) == 1

    def test_branches_return_them(self):
        weights, x = matrices(), jnp.ones((2, 4))
        scales = 1.0, -0.5, 2.0

        @jax.jit
        def stepped(index, weights):
            branches = [
                lambda scale=scale: fold_vjp(scale * weights, x, "nested")
                for scale in scales
            ]
            y, sweep_back = jax.lax.switch(index, branches)
            return sweep_back(jnp.ones_like(y), sgd).layers.stacked.weight

        for index, scale in enumerate(scales):
            want = scale * weights - 0.1 * gradient_of(scale * weights, x)
            assert_close(stepped(index, weights), want)

    def test_branches_return_those_of_a_pattern(self):
        kinds = {"linear": Linear, "tanh": Tanh}
        blocks = StackedPattern.init(
            4, kinds, ["tanh", "linear", "tanh", "tanh"], remat="nested"
        )(matrices(layers=4))
        x = jnp.ones((2, 4))

        @jax.jit
        def back(is_doubled):
            run = blocks.fold_vjp
            y, sweep_back = jax.lax.cond(is_doubled, lambda: run(2 * x), lambda: run(x))
            return sweep_back(
                jnp.ones_like(y), lambda visit, _: LayerResult(visit.vjp().carry)
            ).carry

        for scale in (1.0, 2.0):
            assert_close(
                back(scale == 2.0), jax.grad(lambda x: blocks.fold(x).sum())(scale * x)
            )

    def test_those_that_do_something_else_are_traced_again(self):
        def with_slope(slope):
            @jax.custom_vjp
            def line(x):
                return x

            line.defvjp(lambda x: (x, None), lambda _, ct: (slope * ct,))
            return line

        def sweeps():
            for activation in (
                with_slope(1.0),
                with_slope(2.0),
                with_slope(2.0),
                jnp.sin,
                jnp.cos,
            ):
                yield Stacked(Activated(weights, activation), N).fold_vjp(x)
            for power in (1, 1.0, True):
                yield Stacked(Powered(weights, power), N).fold_vjp(x)
            yield Stacked(Powered(weights, 1), N).fold_vjp(x, reverse=True)
            yield Stacked(Powered(weights, 1), N).fold_vjp(x, remat="nested")

        def visitor(visit, state):
            carry, gradient, *_ = visit.vjp()
            kind = type(getattr(visit.layer, "power", None)).__name__
            new = visit.layer.weight - len(kind) * gradient.weight
            return LayerResult(
                carry, eqx.tree_at(lambda it: it.weight, visit.layer, new)
            )

        weights, x = matrices(), jnp.ones((2, 4))
        assert self.traces(sweeps(), visitor) >= 9
