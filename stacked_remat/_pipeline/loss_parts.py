"""A loss cut at the fold of its stack: what comes before, and what comes after.

The loss of a model, `loss(model, microbatch)`, folds the stack once. It is traced with
a `FollowedStack` in the stack's place, so that the fold is one equation of the program.
What the operands of that equation depend on is the part before, for the first stage of
a pipeline. What the results of the loss depend on, with the results of the fold as
inputs, is the part after, for the last stage. Other values of the part before that the
part after reads (targets, weights of tokens) are computed in both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr

from .._activity import active_outputs, is_differentiable
from .._fused.folds import FollowedFold, FollowedStack, Purpose, inlined, only_use
from .._hijax import primitive_of
from .._scan.checks import describe
from .._static import PyTree, with_leaves

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
        return eval_jaxpr(self.before, (), *self.constants, *inputs)

    def operands_depend_on(self, inputs: Sequence[bool]) -> list[bool]:
        """Which of these depend on inputs in this mask."""
        constants = [False] * len(self.constants)
        return active_outputs(self.before, [*constants, *inputs])

    def results(self, inputs: Sequence[Any], folded: Sequence[Any]) -> PyTree:
        """What the loss returns, from the arrays of the fold's result."""
        leaves = eval_jaxpr(self.after, (), *self.constants, *inputs, *folded)
        arrays, static = eqx.partition(self.returned, _is_type)
        return eqx.combine(with_leaves(arrays, leaves), static)


def _is_type(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def cut_loss(
    loss: Any, model: Any, stack: Any, rest: PyTree, microbatch: PyTree, name: str
) -> LossParts:
    """The parts of a loss, which is traced here.

    Args:
        loss: of a model and the arguments in `microbatch`.
        model: `(stack, rest)` to the model.
        stack: the whole stack; shapes in place of arrays.
        rest: the arrays of the model without the stack.
        microbatch: the arguments of the loss; arrays, or anything else.
        name: of the stack, for errors.

    Raises:
        ValueError, TypeError: the loss doesn't fold the stack exactly once, where it
            can be followed, or something else reads its weights.
    """
    weights, static_stack = eqx.partition(stack, _is_type)

    def traced(weights: PyTree, rest: PyTree, microbatch: PyTree) -> PyTree:
        followed = FollowedStack(eqx.combine(weights, static_stack), name, PIPELINE)
        return loss(model(followed, rest), *microbatch)

    inputs = weights, rest, microbatch
    closed, types, static = eqx.filter_make_jaxpr(traced)(*inputs)
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
    operands = equation.invars[count:]
    return LossParts(
        before=_program(jaxpr, of_rest, operands, equations),
        after=_program(jaxpr, [*of_rest, *equation.outvars], jaxpr.outvars, equations),
        constants=constants,
        fold=fold,
        returned=eqx.combine(types, static),
    )


def _program(
    like: Jaxpr, inputs: Sequence[Any], outputs: Sequence[Any], eqns: list[JaxprEqn]
) -> Jaxpr:
    """What of the equations these outputs depend on."""
    debug_info = jax.make_jaxpr(lambda: ())().jaxpr.debug_info
    debug_info = debug_info._replace(arg_names=None, result_paths=None)
    # Equations of the part after the fold lack their inputs in the part before it.
    # They are no inputs of these outputs, so they are left out.
    whole = Jaxpr([], [*inputs], [*outputs], eqns, like.effects, debug_info)
    return dce_jaxpr(whole, [True] * len(outputs), instantiate=True)[0]


def check_returned(returned: PyTree, has_aux: bool) -> None:
    """Refuse a loss that returns no scalar, or no pair with one."""
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    value: Any = returned
    if has_aux:
        value = returned[0] if is_pair else None
    is_scalar = _is_type(value) and not value.shape and is_differentiable(value.dtype)
    if not is_scalar:
        wanted = "a pair (scalar, aux), with has_aux" if has_aux else "a scalar"
        raise TypeError(
            f"The loss of a pipeline returns {wanted}, of floating point; got"
            f" {describe(returned)}."
        )
