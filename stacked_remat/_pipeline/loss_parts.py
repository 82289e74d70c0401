"""A loss cut at the fold of its stack: what comes before, and what comes after.

The loss of a model, `loss(model, microbatch)`, folds the stack once. It is traced with
a `FollowedStack` in the stack's place, so that the fold is one equation of the program.
What the operands of that equation depend on is the part before, for the first stage of
a pipeline. What the results of the loss depend on, with the results of the fold as
inputs, is the part after, for the last stage. Other values of the part before that the
part after reads (targets, weights of tokens) are computed in both.

The part before runs several times for a microbatch, the part after once. So effects of
the loss (`jax.debug.print`) are in the part after, also where they come before the
fold. What the fold's operands depend on can have none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr

from .._activity import active_outputs, name_of
from .._compat import named_axes
from .._fused.folds import FollowedFold, FollowedStack, Purpose, inlined, only_use
from .._hijax import primitive_of
from .._policy import resolve_policy
from .._scan.checks import describe
from .._stacked import Stacked
from .._static import PyTree, is_array, is_named, with_leaves
from .two_cotangents import needed_for

PIPELINE = Purpose("a pipeline", "each device has the weights of some layers alone")


@dataclass(frozen=True, eq=False)
class LossParts:
    """The two parts, as functions of the inputs: the leaves of `(rest, microbatch)`,
    where `rest` is the model without the stack.
    """

    before: Jaxpr
    after: Jaxpr
    # The first inputs of both
    constants: list[Any]
    # The fold, which takes `(stack, init, args, kwargs)`
    fold: FollowedFold
    # What the loss returns, with types for arrays
    returned: PyTree

    def operands(self, inputs: Sequence[Any]) -> list[Any]:
        """The arrays of `(init, args, kwargs)` of the fold."""
        return _evaluated(self.before, [*self.constants, *inputs])

    def operands_depend_on(self, inputs: Sequence[bool]) -> list[bool]:
        """Which of these depend on inputs in this mask."""
        constants = [False] * len(self.constants)
        return active_outputs(self.before, [*constants, *inputs])

    def results(self, inputs: Sequence[Any], folded: Sequence[Any]) -> PyTree:
        """What the loss returns, from the arrays of the fold's result."""
        leaves = _evaluated(self.after, [*self.constants, *inputs, *folded])
        arrays, static = eqx.partition(self.returned, _is_type)
        return eqx.combine(with_leaves(arrays, leaves), static)


def _evaluated(program: Jaxpr, inputs: Sequence[Any]) -> list[Any]:
    """The results, all of them arrays; JAX has numbers for some that are constant."""
    results = []
    values = eval_jaxpr(program, (), *inputs)
    for value, atom in zip(values, program.outvars, strict=True):
        type_: Any = atom.aval
        results.append(value if is_array(value) else jnp.asarray(value, type_.dtype))
    return results


def _is_type(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def cut_loss(
    loss: Any,
    model: Any,
    stack: Any,
    rest: PyTree,
    microbatch: PyTree,
    name: str,
    has_aux: bool,
) -> LossParts:
    """The parts of a loss, which is traced here.

    Args:
        loss: of a model and the arguments in `microbatch`.
        model: `(stack, rest)` to the model.
        stack: the whole stack; shapes in place of arrays.
        rest: the arrays of the model without the stack.
        microbatch: the arguments of the loss; arrays, or anything else.
        name: of the stack, for errors.
        has_aux: whether the loss returns a pair.

    Raises:
        ValueError, TypeError: the loss doesn't fold the stack exactly once, where it
            can be followed, something else reads its weights, or it returns no scalar.
    """
    weights, static_stack = eqx.partition(stack, _is_type)

    def traced(weights: PyTree, rest: PyTree, microbatch: PyTree) -> PyTree:
        followed = FollowedStack(eqx.combine(weights, static_stack), name, PIPELINE)
        return loss(model(followed, rest), *microbatch)

    inputs = weights, rest, microbatch
    closed, types, static = eqx.filter_make_jaxpr(traced)(*inputs)
    returned = eqx.combine(types, static)
    _check_returned(returned, has_aux)
    jaxpr, constants = inlined(closed)
    first = len(constants)
    count = len(jax.tree.leaves(weights))
    of_weights = jaxpr.invars[first : first + count]
    of_rest = [*jaxpr.invars[:first], *jaxpr.invars[first + count :]]
    equations = [*jaxpr.eqns]
    position = only_use(equations, of_weights, name, PIPELINE)
    equation = equations.pop(position)
    fold = primitive_of(equation)
    if fold.options.value.get("reverse"):
        raise ValueError(
            f"A pipeline runs the layers of {name} from the first to the last; the loss"
            " folds it with reverse=True."
        )
    _check_policy(stack, fold.options.value.get("remat"), name)
    operands = equation.invars[count:]
    before = needed_for(equations, operands)
    _check_effects(before, name)
    return LossParts(
        before=_program(jaxpr, of_rest, operands, before),
        after=_program(jaxpr, [*of_rest, *equation.outvars], jaxpr.outvars, equations),
        constants=constants,
        fold=fold,
        returned=returned,
    )


def _check_policy(stack: Stacked, remat: Any, name: str) -> None:
    """Refuse the policy that keeps nothing; `remat` is what the fold was given."""
    policy = stack.remat if remat is None else resolve_policy(remat)
    if policy.for_layers(stack.Layers.size).carries is None:
        raise ValueError(
            f'The layers of {name} have the policy {policy!r} ("recompute"), which'
            " keeps no carry, and a stage of a pipeline reverses its layers from those"
            ' that it keeps. Use "nested", "offload", True or another that keeps some.'
        )


def _program(
    like: Jaxpr, inputs: Sequence[Any], outputs: Sequence[Any], eqns: list[JaxprEqn]
) -> Jaxpr:
    """What of the equations these outputs depend on, and those with effects."""
    debug_info = jax.make_jaxpr(lambda: ())().jaxpr.debug_info
    debug_info = debug_info._replace(arg_names=None, result_paths=None)
    whole = Jaxpr([], [*inputs], [*outputs], eqns, like.effects, debug_info)
    return dce_jaxpr(whole, [True] * len(outputs), instantiate=True)[0]


def _check_effects(before: Sequence[JaxprEqn], name: str) -> None:
    for equation in before:
        # Collectives over an axis are effects too, which may be repeated
        if len(equation.effects) > len(named_axes(equation.effects)):
            raise ValueError(
                f"What the loss gives the layers of {name} depends on"
                f" `{name_of(equation)}`, which has effects; a pipeline computes it"
                " several times. Move the effect (jax.debug.print, a callback) out of"
                " it, or behind the fold."
            )


def _check_returned(returned: PyTree, has_aux: bool) -> None:
    """Refuse a loss that returns no scalar, or no pair with one; and aux that can't
    have the microbatches in front.
    """
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    value: Any = returned
    if has_aux:
        value = returned[0] if is_pair else None
    is_scalar = _is_type(value) and not value.shape
    if not (is_scalar and jnp.issubdtype(value.dtype, jnp.floating)):
        wanted = "a pair (scalar, aux), with has_aux" if has_aux else "a scalar"
        raise TypeError(
            f"The loss of a pipeline returns {wanted}, of real floating point; got"
            f" {describe(returned)}."
        )
    aux = returned[1] if has_aux else None
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux, is_leaf=is_named):
        if is_named(leaf):
            raise TypeError(
                f"aux{jax.tree_util.keystr(path)} of the loss is a"
                f" {describe(leaf)}. A pipeline returns aux of all microbatches, in one"
                " more dimension without a name: return its array."
            )
