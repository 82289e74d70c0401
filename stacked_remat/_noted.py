"""Tag calls, with a rule, so that a jaxpr interpreter recognises them.

`ghost/` interprets the jaxpr of a loss, and some operations it is to take whole, by a
rule of their own: grouped experts, attention, cross entropy. In a jaxpr they would be
many equations. So an operation calls its function by `noted(rule, fn)`. Within `noting`
that is traced as one `jit` equation, and the `Notes` have its rule by its name;
elsewhere it is the function itself.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax

from ._static import PyTree

DERIVATIVE_OF_RESULT = "derivative of result"
"""The rule of a function whose `jax.custom_vjp`s are only a cheaper way to the
derivative of its result.
"""


@dataclass(eq=False)  # a context of jax.jit must have a hash
class Notes:
    """The calls that one trace noted."""

    # By the name of the call's equation: its rule, and the shapes and dtypes of its
    # inputs and outputs
    calls: dict[str, tuple[Any, list[Any]]] = field(default_factory=dict)

    def rule_of(self, equation: Any) -> Any:
        """The rule of an equation, None where it is of no noted call.

        What `jax.grad` and `jax.vmap` make of a call has its name and other arrays.
        """
        name = str(equation.params.get("name"))
        rule, types = self.calls.get(name, (None, []))
        is_call = rule == DERIVATIVE_OF_RESULT or types == _types(
            [*equation.invars, *equation.outvars]
        )
        return rule if is_call else None


# `with noting(notes):` notes the calls of a trace; with a function of functions, it
# makes what is called.
noting = jax.make_user_context(default_value=None)


def noted(rule: Any, fn: Callable, otherwise: Callable | None = None) -> Callable:
    """`fn`, which within `noting` is traced as one `jit` equation that the notes know
    by its name.

    `rule` may hold no traced values. Elsewhere it is `otherwise`, which may, or `fn`
    itself.
    """
    notes = noting.value
    if notes is None:
        return otherwise or fn
    if not isinstance(notes, Notes):
        return notes(fn)

    # A new function for each call, since `jax.jit` caches what it traced of one, and
    # with it its name.
    def call(*args: PyTree) -> PyTree:
        return fn(*args)

    name = call.__name__ = f"stacked_remat_noted_{len(notes.calls)}"
    notes.calls[name] = rule, []

    def noting_types(*args: PyTree) -> PyTree:
        results = jax.jit(call)(*args)
        arrays = jax.tree.leaves((args, results))
        notes.calls[name] = rule, _types(arrays)
        return results

    return noting_types


def _types(arrays: Iterable[Any]) -> list[Any]:
    """The shapes and dtypes of arrays, or of a jaxpr's variables."""
    types = []
    for array in arrays:
        aval = array.aval if hasattr(array, "aval") else jax.typeof(array)
        types.append((aval.shape, aval.dtype))
    return types
