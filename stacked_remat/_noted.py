"""Calls that a trace of a program notes, with a rule for whoever interprets the traced program."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

DERIVATIVE_OF_RESULT = "derivative of result"
"""The rule of a function whose `jax.custom_vjp`s are only a cheaper way to the derivative of its result."""

_PREFIX = "stacked_remat_noted_"


class Notes:
    """The rules of the calls that one trace noted, by the name of the call's equation.

    Args:
        instead: makes what is called in the place of the noted functions, which then have no rules.
    """

    def __init__(self, instead: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None) -> None:
        self.instead = instead
        self.rules: dict[str, Any] = {}
        self.types: dict[str, list[Any]] = {}

    def rule_of(self, equation: Any) -> Any:
        """The rule of an equation, None where it is of no noted call.

        What `jax.grad` and `jax.vmap` make of a call has its name and other arrays.
        """
        name = equation.params.get("name")
        rule = self.rules.get(name) if isinstance(name, str) else None
        is_call = rule == DERIVATIVE_OF_RESULT or self.types.get(name) == _types(
            [*equation.invars, *equation.outvars]
        )
        return rule if is_call else None


def is_noted(equation: Any) -> bool:
    """Whether an equation is of a noted call, of whatever trace."""
    name = equation.params.get("name")
    return isinstance(name, str) and name.startswith(_PREFIX)


_notes = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def noting(notes: Notes) -> Iterator[None]:
    """Within it, `noted` calls of what is traced are noted."""
    with _notes(notes):
        yield


def is_noting() -> bool:
    """Whether `noted` calls are noted here."""
    return _notes.value is not None


def noted(rule: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which within `noting` is traced as one `jit` equation that the notes know by its name.

    Elsewhere it is `fn` itself.

    Args:
        rule: what the interpreter needs to know; may hold no traced values.
        fn: takes and returns trees of arrays.
    """
    notes = _notes.value
    if notes is None:
        return fn
    if notes.instead is not None:
        return notes.instead(fn)

    def call(*args: Any) -> Any:
        return fn(*args)

    name = call.__name__ = f"{_PREFIX}{len(notes.rules)}"
    notes.rules[name] = rule

    def noting_types(*args: Any) -> Any:
        found = jax.jit(call)(*args)
        notes.types[name] = _types(jax.tree.leaves((args, found)))
        return found

    return noting_types


def _types(arrays: Iterable[Any]) -> list[Any]:
    avals = (array.aval if hasattr(array, "aval") else jax.typeof(array) for array in arrays)
    return [(aval.shape, aval.dtype) for aval in avals]
