"""Primitives whose rules are methods: all that this library knows of
`jax.experimental.hijax`.

JAX's class is `VJPHiPrimitive` in 0.10, and `HiPrim` since 0.12. What it binds is
"high": before XLA's program is written, JAX makes a jaxpr without it of every jaxpr
that has one. Two things it can't do then: call such a jaxpr from a scan in a
`jax.checkpoint` (0.10: `closed_call` has no rule for it), and unroll the known part of
such a scan (0.10, 0.12). A `LowPrimitive` has the same methods and the same rules. But
it is lowered like any other primitive of JAX, and so lies in any of JAX's loops.

JAX asks the jaxprs of a program, before it lowers anything, for devices (of sharding
constraints) and for host memory: without an equation that moves an array there, moves
are lowered to nothing (0.10, 0.12). What a lowering rule computes it doesn't see. So
equations also have the jaxprs that a primitive is known to evaluate, as `programs`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.core import internal_mutable_array_effect
from jax._src.hijax import call_hi_primitive_p
from jax._src.interpreters.ad import fancy_transposes, primitive_linearizations
from jax.core import eval_jaxpr
from jax.experimental import hijax
from jax.extend.core import Jaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from ._memory_spaces import is_on_host
from ._static import PyTree

HiPrim: Any = getattr(hijax, "HiPrim", None) or getattr(hijax, "VJPHiPrimitive")  # noqa: B009


class LowPrimitive(HiPrim):
    """A primitive with JAX's methods for its rules.

    A subclass sets `in_avals`, `out_aval`, `params`, `effects` and `programs`, and
    calls `super().__init__()`, which makes the entries of `params` attributes. Two are
    equal if their classes, `params` and `effects` are. Its methods:

        expand(*args)                              what it computes
        jvp, lin and linearized                    forward mode
        vjp_fwd(nonzero, *args)                    results and residuals
        input_cotangents(residuals, cotangents)    the cotangents of `args`
        transposed(linear, args, cotangents)       those of its linear inputs
        batch(axis, args, dims)                    `jax.vmap`

    Cotangents are trees like `args`, with None where there is none.
    """

    # Jaxprs with all sharding constraints and moves of what it evaluates.
    programs: tuple[Jaxpr, ...] = ()

    def __init__(self) -> None:
        # JAX hashes a primitive with its effects. References that are made in here, and
        # end here, are no effect: JAX would look in callers' jaxprs for what they hold.
        self.effects = frozenset(self.effects) - {internal_mutable_array_effect}
        super().__init__()

    def __call__(self, *args: PyTree) -> PyTree:
        # `used=None` until JAX's pass for dead code says which results are read.
        leaves = self.in_tree.flatten_up_to(args)
        results = _call_p.bind(*leaves, _prim=self, programs=self.programs, used=None)
        return self.out_tree.unflatten(results)

    def vjp_bwd(self, residuals: PyTree, cotangents: PyTree, *sums: PyTree) -> None:
        self._add(sums, self.input_cotangents(residuals, cotangents))

    def transpose(self, cotangents: PyTree, *args: PyTree) -> None:
        """In the place of linear inputs there are JAX's sums of their cotangents."""
        leaves = self.in_tree.flatten_up_to(args)
        linear = tuple(map(_is_sum, leaves))
        known = [None if _is_sum(leaf) else leaf for leaf in leaves]
        self._add(
            args, self.transposed(linear, self.in_tree.unflatten(known), cotangents)
        )

    def _add(self, sums: PyTree, cotangents: PyTree) -> None:
        """Add the cotangents of inputs to JAX's sums."""
        totals = self.in_tree.flatten_up_to(sums)
        leaves = self.in_tree.flatten_up_to(cotangents)
        for total, type_, leaf in zip(totals, self.in_avals_flat, leaves, strict=True):
            if _is_sum(total):
                _check_memory(total, type_)
                total.accum(leaf)

    def transposed(
        self, linear: tuple[bool, ...], args: PyTree, cotangents: PyTree
    ) -> PyTree:
        """The cotangents of the linear inputs, for which `args` has None."""
        raise NotImplementedError(f"{type(self).__name__} has no transpose.")


def _is_sum(leaf: Any) -> bool:
    return hasattr(leaf, "accum")


def _check_memory(total: Any, type_: Any) -> None:
    """Refuse a sum on the device for an input on the host."""
    if is_on_host(type_) and not is_on_host(total.aval):
        raise ValueError(
            "A loop of JAX (jax.lax.scan, jax.lax.map, ...) closes over layers in host"
            " memory or carries them, and is differentiated by them: JAX (0.10, 0.12)"
            " makes the zeros of such a gradient on the device. Take the gradient"
            " within the loop, or move the layers before it:"
            " stacked_remat.streaming.to_device(model)."
        )


def primitive_of(equation: JaxprEqn) -> Any:
    """The primitive of an equation as an object with methods; None for any other."""
    is_one = equation.primitive in (_call_p, call_hi_primitive_p)
    return equation.params["_prim"] if is_one else None


def with_primitive(equation: JaxprEqn, primitive: LowPrimitive) -> JaxprEqn:
    """The equation with another primitive of the same types."""
    return equation.replace(params={**equation.params, "_prim": primitive})


def _expanded(*leaves: Any, _prim: LowPrimitive, **_: Any) -> list[Any]:
    results = _prim.expand(*_prim.in_tree.unflatten(leaves))
    return _prim.out_tree.flatten_up_to(results)


def _lowered(
    *leaves: Any, _prim: LowPrimitive, used: tuple[bool, ...] | None, **_: Any
) -> list[Any]:
    """Lower a primitive to what it computes, without dead code, and zeros for results
    that are not used: JAX looks for dead code before it lowers anything, and not in
    what lowering rules compute.
    """
    expanded = functools.partial(_expanded, _prim=_prim)
    closed = jax.make_jaxpr(expanded)(*leaves)
    used = used or (True,) * len(closed.out_avals)
    jaxpr = partial_eval.dce_jaxpr(closed.jaxpr, used, instantiate=True)[0]
    computed = iter(eval_jaxpr(jaxpr, closed.consts, *leaves))
    results = []
    for is_used, type_ in zip(used, closed.out_avals, strict=True):
        results.append(next(computed) if is_used else ad.zeros_like_aval(type_))
    return results


def _needs_expansion(*_: Any, _prim: LowPrimitive, **__: Any) -> bool:
    """Whether JAX can't lower it: it reads or writes references of a caller, which JAX
    turns into inputs and outputs of the primitives that it knows.
    """
    return bool(mlir.lowerable_effects.filter_not_in(_prim.effects))


_call_p: Any = Primitive("call_low_primitive")
_call_p.multiple_results = True
_call_p.is_high = _needs_expansion
_call_p.to_lojax = _expanded
_call_p.is_effectful = lambda params: bool(params["_prim"].effects)
_call_p.def_impl(_expanded)
_call_p.def_effectful_abstract_eval(
    lambda *_, _prim, programs, used: (_prim.out_avals_flat, _prim.effects)
)
mlir.register_lowering(_call_p, mlir.lower_fun(_lowered))


def _by_method(rule: Callable[..., Any]) -> Callable[..., Any]:
    """JAX's rule for primitives as objects, which calls a method of `_prim`."""

    def by_method(*args: Any, programs: Any, used: Any, **params: Any) -> Any:
        return rule(*args, **params)

    return by_method


# The rules of JAX's own class call the same methods: they are taken as they are.
_TABLES: tuple[dict[Any, Any], ...] = (
    ad.primitive_jvps,
    primitive_linearizations,
    fancy_transposes,
    batching.fancy_primitive_batchers,
)
for _rules in _TABLES:
    _rules[_call_p] = _by_method(_rules[call_hi_primitive_p])


def _without_dead_code(
    used: Sequence[bool], *args: Any
) -> tuple[list[bool], JaxprEqn | None]:
    """An equation that says which results are used; None without any or an effect.

    JAX 0.12 also gives the inputs that are live.
    """
    # The equation is the last of the arguments in both versions.
    equation: JaxprEqn = args[-1]
    if not any(used) and not equation.effects:
        return [False] * len(equation.invars), None
    equation = equation.replace(params={**equation.params, "used": tuple(used)})
    return [True] * len(equation.invars), equation


partial_eval.dce_rules[_call_p] = _without_dead_code
