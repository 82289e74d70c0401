"""What primitives of loops have in common: forward mode, by a linear primitive, and its
transpose.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import ad
from jax.interpreters.partial_eval import dce_jaxpr

from .._activity import active_outputs, has_rules, is_differentiable
from .._compat import named_axes, without_constants
from .._hijax import LowPrimitive
from .._memory_spaces import is_on_host
from .._static import PyTree, Static
from .gradient import merge, pick, scatter_leaves
from .programs import found_in
from .slots import Arrays, Mask, types_of
from .store import zeros_of


@dataclass(frozen=True)
class Bound:
    """A function with its first arguments: a `functools.partial` that equals another
    with equal ones.
    """

    name: str
    # JAX's caches of traces compare functions; a lambda would be new each time.
    fn: Callable = field(repr=False)
    # JAX asks for the text of what it traces
    bound: tuple[Any, ...] = field(repr=False)

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: PyTree) -> PyTree:
        return self.fn(*self.bound, *args)


def floats(types: PyTree) -> Mask:
    return tuple(is_differentiable(type_.dtype) for type_ in jax.tree.leaves(types))


class Differentiable(LowPrimitive):
    """A primitive with a linear primitive for its tangents."""

    def active(self, nonzero: Mask) -> Mask:
        """Which outputs have a tangent, given which inputs have one."""
        raise NotImplementedError

    def tangent(self, nonzero: Mask, primals: PyTree, tangents: Arrays) -> Arrays:
        """The tangents of the active outputs, from those of the inputs that have
        one.
        """
        return tangent_of(self.expand, nonzero, self.active(nonzero), primals, tangents)

    def primal(self, nonzero: Mask, args: PyTree) -> PyTree:
        """The outputs where the inputs in the mask are differentiated: custom rules may
        compute them.
        """
        return self(*args)

    def reference(self, *args: PyTree) -> PyTree:
        """What reverse mode differentiates."""
        return self.expand(*args)

    def cotangents(
        self, nonzero: Mask, has_ct: Mask, args: PyTree, cts: Arrays
    ) -> Arrays:
        """The cotangents of the inputs in the first mask, from those of the outputs in
        the second.
        """
        return cotangents_of(self.reference, nonzero, has_ct, args, cts)

    def vjp_fwd(self, nonzero: PyTree, *args: PyTree) -> PyTree:
        # All arguments are residuals, and the reverse pass runs the reference again.
        nonzero = self._nonzero(self.in_tree.flatten_up_to(nonzero))
        return self.primal(nonzero, args), (args, Static(nonzero))

    def input_cotangents(self, residuals: PyTree, cotangents: PyTree) -> PyTree:
        args, how = residuals
        nonzero = how.value
        has_ct = self._has_cotangent(cotangents)
        given = pick(self.out_tree.flatten_up_to(cotangents), has_ct)
        input_cts = self.cotangents(nonzero, has_ct, args, as_arrays(given))
        return self.in_tree.unflatten(scatter_leaves(input_cts, nonzero))

    def _has_cotangent(self, cotangents: PyTree) -> Mask:
        """Which outputs have a cotangent that is not known to be zero."""
        leaves = self.out_tree.flatten_up_to(cotangents)
        has_ct = []
        for is_float, ct in zip(floats(self.out_aval), leaves, strict=True):
            has_ct.append(is_float and not isinstance(ct, ad.Zero))
        return tuple(has_ct)

    def _nonzero(self, flags: Sequence[bool]) -> Mask:
        nonzero = []
        for flag, is_float in zip(flags, floats(self.in_avals), strict=True):
            nonzero.append(flag and is_float)
        return tuple(nonzero)

    def jvp(self, primals: PyTree, tangents: PyTree) -> PyTree:
        given = self.in_tree.flatten_up_to(tangents)
        zeros = [ad.Zero(type_.to_tangent_aval()) for type_ in self.out_avals_flat]
        nonzero = self._nonzero([not isinstance(tangent, ad.Zero) for tangent in given])
        # Outputs without a tangent keep a symbolic zero, which costs nothing.
        return self.primal(nonzero, primals), self._tangents(primals, given, zeros)

    def lin(self, nonzero: PyTree, *primals: PyTree) -> PyTree:
        return (
            self.primal(self._nonzero(self.in_tree.flatten_up_to(nonzero)), primals),
            primals,
        )

    def linearized(self, primals: PyTree, *tangents: PyTree) -> PyTree:
        # Here JAX takes arrays alone.
        zeros = [
            instantiated(ad.Zero(type_.to_tangent_aval()))
            for type_ in self.out_avals_flat
        ]
        return self._tangents(primals, self.in_tree.flatten_up_to(tangents), zeros)

    def transposed(self, linear: Mask, args: PyTree, cotangents: PyTree) -> PyTree:
        """Reverse mode at zeros."""
        # What is linear in some inputs has the same pullback wherever they are.
        zeros = [
            instantiated(ad.Zero(type_)) for type_ in pick(self.in_avals_flat, linear)
        ]
        leaves = merge(self.in_tree.flatten_up_to(args), zeros, linear)
        return self.pull_back(linear, self.in_tree.unflatten(leaves), cotangents)

    def pull_back(self, nonzero: Mask, primals: PyTree, cotangents: PyTree) -> PyTree:
        """The cotangents of the inputs in the mask."""
        flags = self.in_tree.unflatten(nonzero)
        _, residuals, *_ = self.vjp_fwd(flags, *primals)
        return self.input_cotangents(residuals, cotangents)

    def _tangents(
        self, primals: PyTree, given: Sequence[PyTree], zeros: Sequence[PyTree]
    ) -> PyTree:
        nonzero = self._nonzero([not isinstance(tangent, ad.Zero) for tangent in given])
        found: Arrays = []
        # A primitive of its own, so that `jax.checkpoint` and partial evaluation can
        # have the values without the tangents, and transpose the tangents alone.
        if any(active := self.active(nonzero)):
            found = Linear(self, nonzero, primals, pick(given, nonzero))(
                primals, pick(given, nonzero)
            )
        return self.out_tree.unflatten(merge(zeros, found, active))


class Ruled(NamedTuple):
    """A jaxpr where some inputs are differentiated, with what the rules of
    `jax.custom_vjp`s compute then.
    """

    values: ClosedJaxpr
    active: Mask  # which outputs have a tangent, as JAX finds it
    # What forward rules close over, which may be gone when they run again
    closures: list[Tracer]


def ruled(jaxpr: Jaxpr, nonzero: Sequence[bool]) -> Ruled:
    """A jaxpr where the inputs in the mask are differentiated."""
    if not any(nonzero) or not has_rules(jaxpr):
        return Ruled(ClosedJaxpr(jaxpr, ()), tuple(active_outputs(jaxpr, nonzero)), [])
    return found_in(
        jaxpr, ("ruled", tuple(nonzero)), lambda: _traced_rules(jaxpr, nonzero)
    )


def _traced_rules(jaxpr: Jaxpr, nonzero: Sequence[bool]) -> Ruled:
    # Under `jax.jvp` a `custom_vjp` computes its values by its forward rule. So the
    # jaxpr is traced under `jvp` at zeros, and the tangents are cut off as dead code.
    active = [False] * len(jaxpr.outvars)

    # A rule is told which tangents JAX knows to be zero.
    @jax.custom_jvp
    def observed(*outputs: PyTree) -> tuple[PyTree, ...]:
        return outputs

    def observe(primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> Any:
        active[:] = [not isinstance(tangent, SymbolicZero) for tangent in tangents]
        return primals, tangents

    observed.defjvp(observe, symbolic_zeros=True)

    def run(*inputs: PyTree) -> Sequence[PyTree]:
        of_layer, part = of_part(
            functools.partial(eval_jaxpr, jaxpr, ()), inputs, nonzero
        )
        zeros = [*map(jnp.zeros_like, part)]

        def run_observed(part: Arrays) -> tuple[PyTree, ...]:
            return observed(*of_layer(part))

        values, _ = jax.jvp(run_observed, (part,), (zeros,))
        return values

    closed = jax.make_jaxpr(run)(*(var.aval for var in jaxpr.invars))
    without_tangents, _ = dce_jaxpr(
        closed.jaxpr, [True] * len(jaxpr.outvars), instantiate=True
    )
    return Ruled(
        ClosedJaxpr(without_tangents, closed.consts),
        tuple(active),
        _traced_constants(closed.jaxpr, closed.consts),
    )


def _traced_constants(jaxpr: Jaxpr, constants: Sequence[Any]) -> list[Tracer]:
    """The constants of a jaxpr, and of those within it, that are traced values."""
    found = [constant for constant in constants if isinstance(constant, Tracer)]
    params = [list(equation.params.values()) for equation in jaxpr.eqns]
    for value in jax.tree.leaves(
        params, is_leaf=lambda value: isinstance(value, ClosedJaxpr | Jaxpr)
    ):
        if isinstance(value, Jaxpr | ClosedJaxpr):
            # From JAX 0.12 on these are one class, and any may hold constants.
            inner: Any = getattr(value, "jaxpr", value)
            found += _traced_constants(inner, getattr(value, "consts", ()))
    return found


def primal_of(jaxpr: Jaxpr, nonzero: Sequence[bool]) -> ClosedJaxpr:
    """A jaxpr as its custom rules compute it where the inputs in the mask are
    differentiated.
    """
    return ruled(jaxpr, nonzero).values


def without_closures(
    jaxpr: Jaxpr, nonzero: Sequence[bool], active: Mask
) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """The jaxpr with what its custom rules close over as constants, and a second one
    that computes its values.

    `nonzero` and `active` are the inputs and outputs that are differentiated.
    """

    # The pullback is traced once, with what the rules close over still alive; from
    # then on it is a jaxpr whose constants are arrays like any others.
    def forward(*inputs: PyTree) -> tuple[Sequence[PyTree], Callable]:
        def run(part: Arrays) -> tuple[Arrays, Sequence[PyTree]]:
            outputs = eval_jaxpr(jaxpr, (), *merge(inputs, part, nonzero))
            return pick(outputs, active), outputs

        _, pullback, outputs = jax.vjp(run, pick(inputs, nonzero), has_aux=True)
        return outputs, pullback

    types = types_of(jaxpr.invars)
    count = len(jaxpr.outvars)
    traced, found = jax.make_jaxpr(forward, return_shape=True)(*types)
    pullback = jax.tree.structure(found[1])
    cotangents = [
        type_.to_ct_aval() for type_ in pick(traced.out_avals[:count], active)
    ]
    # The leaves of a pullback, as JAX makes it, are what it keeps.
    residuals = traced.out_avals[count:]
    traced_back = jax.make_jaxpr(
        lambda leaves, cts: pullback.unflatten(leaves)(cts)[0]
    )(residuals, cotangents)

    @jax.custom_vjp
    def run(constants: PyTree, inputs: PyTree) -> Sequence[PyTree]:
        return with_residuals(constants, inputs)[0]

    def with_residuals(
        constants: PyTree, inputs: PyTree
    ) -> tuple[Sequence[PyTree], PyTree]:
        forwards, backwards = constants
        outputs = eval_jaxpr(traced.jaxpr, forwards, *inputs)
        return outputs[:count], (backwards, outputs[count:])

    def back(residuals: PyTree, cotangents: Sequence[PyTree]) -> tuple[None, PyTree]:
        constants, leaves = residuals
        found = eval_jaxpr(
            traced_back.jaxpr, constants, *leaves, *pick(cotangents, active)
        )
        return None, tuple(scatter_leaves(found, nonzero))

    run.defvjp(with_residuals, back)
    # The two jaxprs are the rules of a layer that closes over its constants openly.
    constants = traced.consts, traced_back.consts
    layer = jax.make_jaxpr(lambda *inputs: run(constants, inputs))(*types)
    is_result = [True] * count + [False] * len(residuals)
    values, _ = dce_jaxpr(traced.jaxpr, is_result, instantiate=True)
    return layer, ClosedJaxpr(values, traced.consts)


def primal_by_rules(fn: Callable, nonzero: Mask, *args: PyTree) -> PyTree:
    """`fn` as custom rules compute it where the leaves in the mask are
    differentiated.
    """
    closed, types = jax.make_jaxpr(fn, return_shape=True)(*args)
    # What `fn` closes over is an input too, but none that is differentiated.
    jaxpr, constants = without_constants(closed)
    of_constants = [False] * len(constants)
    by_rules = primal_of(jaxpr, [*of_constants, *nonzero])
    inputs = [*constants, *jax.tree.leaves(args)]
    leaves = eval_jaxpr(by_rules.jaxpr, by_rules.consts, *inputs)
    return jax.tree.unflatten(jax.tree.structure(types), leaves)


def tangent_of(
    fn: Callable, nonzero: Mask, active: Mask, primals: PyTree, tangents: Arrays
) -> Arrays:
    """The tangents of some outputs of `fn`, from those of some inputs."""
    run, part = of_part(fn, primals, nonzero, active)
    results, result_tangents = jax.jvp(run, (part,), (tangents,))
    return [*map(in_memory_of, result_tangents, results)]


def cotangents_of(
    fn: Callable, nonzero: Mask, has_ct: Mask, args: PyTree, cts: Arrays
) -> Arrays:
    """The cotangents of some inputs of `fn`, from those of some outputs."""
    run, part = of_part(fn, args, nonzero, has_ct)
    _, pullback = jax.vjp(run, part)
    (input_cts,) = pullback(cts)
    return [*map(in_memory_of, input_cts, part)]


def of_part(
    fn: Callable, args: PyTree, nonzero: Sequence[bool], active: Mask | None = None
) -> tuple[Callable, Arrays]:
    """`fn` as a function of some leaves of its arguments to some of its results; and
    these leaves.
    """
    leaves, tree = jax.tree.flatten(args)

    def run(part: Arrays) -> Arrays:
        arguments = tree.unflatten(merge(leaves, part, nonzero))
        results = jax.tree.leaves(fn(*arguments))
        return results if active is None else pick(results, active)

    return run, pick(leaves, nonzero)


def as_arrays(cotangents: Sequence[PyTree]) -> Arrays:
    return [jnp.asarray(instantiated(ct)) for ct in cotangents]


def instantiated(tangent: PyTree) -> PyTree:
    """A tangent or cotangent, or the zeros that it stands for, in the memory of their
    type; JAX makes zeros on the device alone (0.10.2, 0.12).
    """
    type_: Any = tangent.aval if isinstance(tangent, ad.Zero) else None
    if is_on_host(type_):
        return zeros_of(type_)
    return ad.instantiate_zeros(tangent)


def in_memory_of(tangent: Any, primal: Any) -> Any:
    """A tangent or cotangent that JAX computed for a value. One on the device of a
    value on the host is zeros that JAX made: zeros on the host instead.
    """
    if is_on_host(primal) and not is_on_host(tangent):
        type_ = jax.typeof(tangent)
        return zeros_of(type_.update(memory_space=jax.memory.Space.Host))
    return tangent


class Linear(Differentiable):
    """The tangents of a primitive's outputs, which `jax.checkpoint` computes apart from
    the primals.
    """

    of: Differentiable
    nonzero: Mask

    def __init__(
        self, of: Differentiable, nonzero: Mask, primals: PyTree, tangents: Arrays
    ) -> None:
        self.in_avals = jax.tree.map(jax.typeof, (primals, tangents))
        active = of.active(nonzero)
        self.out_aval = [
            type_.to_tangent_aval() for type_ in pick(of.out_avals_flat, active)
        ]
        self.params = {"of": of, "nonzero": nonzero}
        self.effects = of.effects
        self.programs = of.programs
        super().__init__()

    def expand(self, primals: PyTree, tangents: Arrays) -> Arrays:
        return self.of.tangent(self.nonzero, primals, tangents)

    def active(self, nonzero: Mask) -> Mask:
        return (any(nonzero),) * len(self.out_aval)

    def transposed(self, linear: Mask, args: PyTree, cotangents: PyTree) -> PyTree:
        """The cotangents of tangents; of those that are known there are none."""
        primals, tangents = args
        active = self.of.active(self.nonzero)
        zeros = [ad.Zero(type_.to_ct_aval()) for type_ in self.of.out_avals_flat]
        # Outputs that are not active have no tangent, and so no cotangent.
        every = self.of.out_tree.unflatten(merge(zeros, cotangents, active))
        # The tangents are the last inputs.
        is_linear = linear[len(linear) - len(tangents) :]
        nonzero = tuple(merge(self.nonzero, is_linear, self.nonzero))
        input_cts = self.of.pull_back(nonzero, primals, every)
        found = self.of.in_tree.flatten_up_to(input_cts)
        no_primals = self.of.in_tree.unflatten([None] * len(found))
        return no_primals, pick(found, self.nonzero)

    def batch(self, axis: Any, args: PyTree, dims: PyTree) -> PyTree:
        if not_mapped(self, axis, dims):
            return self(*args), [None] * len(self.out_aval)
        results = mapped(self.expand, axis, dims)(*args)
        return results, [0] * len(results)


def not_mapped(primitive: Any, axis: Any, dims: PyTree) -> bool:
    """Whether `jax.vmap` over an axis maps no input of a primitive, which has no
    collective over it.
    """
    if any(dim is not None for dim in primitive.in_tree.flatten_up_to(dims)):
        return False
    # A collective over the axis has other results than one call gives.
    return axis.name not in named_axes(primitive.effects)


def mapped(fn: Callable, axis: Any, dims: PyTree) -> Callable:
    names = {
        "axis_name": axis.name,
        "spmd_axis_name": axis.spmd_name or axis.explicit_mesh_axis,
    }
    return jax.vmap(fn, in_axes=tuple(dims), out_axes=0, axis_size=axis.size, **names)


def moved(array: Any, dim: int | None, to: int = 0) -> Any:
    """The array with its batch axis at another place, if it has one."""
    return array if dim is None else jnp.moveaxis(array, dim, to)
