"""Scans that are called outside of `jit`: calls with the same program share one compilation.

JAX caches a compiled loop by its body function, and every call makes a new one for its layers. Here every
call is traced, so that changed code takes effect, and compiled programs are cached by the traced program.
"""

import collections
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import Jaxpr

from .._compat import is_concrete, is_reference
from .._placement import platform
from .._static import Static

_MOST_PROGRAMS = 128


def compiled_once(run: Callable[..., Any], init: Any, arguments: Any) -> Any:
    """`run(init, arguments)`, compiled as one program where none of its inputs is traced.

    Cost: traces and lowers `run` in every call, and compiles it once for calls that give the same program.

    Args:
        run: returns a tree.
        init: a tree whose arrays and numbers are arguments of the program.
        arguments: a tree whose arrays are; other leaves are constants.
    """
    leaves, structure = jax.tree.flatten((init, arguments))
    numbers = len(jax.tree.leaves(init))
    is_argument = [
        eqx.is_array_like(leaf) if i < numbers else isinstance(leaf, jax.Array | np.ndarray)
        for i, leaf in enumerate(leaves)
    ]
    arrays = [leaf for leaf, is_ in zip(leaves, is_argument, strict=True) if is_]
    if not all(map(_is_known, arrays)):
        return run(init, arguments)

    def of_arrays(arrays: Sequence[Any]) -> tuple[Any, Static]:
        given = iter(arrays)
        merged = [next(given) if is_ else leaf for leaf, is_ in zip(leaves, is_argument, strict=True)]
        found, rest = eqx.partition(run(*jax.tree.unflatten(structure, merged)), eqx.is_array)
        return found, Static(rest)

    closed, (found, rest) = jax.make_jaxpr(of_arrays, return_shape=True)(arrays)
    inputs = [*closed.consts, *arrays]
    if closed.jaxpr.effects or not all(map(_is_known, inputs)):  # it closes over what is traced
        return run(init, arguments)
    program = _program(closed.jaxpr, len(closed.consts), inputs)
    if program is None:
        return run(init, arguments)
    outputs = program(inputs)
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(found), outputs), rest.value)


def _is_known(array: Any) -> bool:
    return not is_reference(array) and is_concrete(array)


_programs: collections.OrderedDict[Any, Callable[[Sequence[Any]], list[Any]]] = collections.OrderedDict()


def _program(
    jaxpr: Jaxpr, constants: int, inputs: Sequence[Any]
) -> Callable[[Sequence[Any]], list[Any]] | None:
    """A compiled program for `jaxpr`, from an earlier call if one had the same program.

    None for a program that calls Python, since such programs cannot be compared, and for a differentiated one
    without a gradient: JAX has its forward derivative, or the error.
    """

    def evaluate(inputs: Sequence[Any]) -> list[Any]:
        return eval_jaxpr(jaxpr, inputs[:constants], *inputs[constants:])

    types = [jax.typeof(leaf) for leaf in inputs]
    # Derivatives may have rules of their own, which the program itself does not show.
    differentiated = any(isinstance(leaf, Tracer) for leaf in inputs)
    texts = [_text(evaluate, types)]
    if differentiated:
        try:
            texts.append(_text(_gradient(evaluate), types))
        except Exception:
            return None
    if any("callback" in text or "stablehlo.send" in text for text in texts):
        return None
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    key = (*types, *(out.aval for out in jaxpr.outvars), *digests)
    program = _programs.pop(key, None) or jax.jit(evaluate)
    _programs[key] = program
    if len(_programs) > _MOST_PROGRAMS:
        _programs.popitem(last=False)
    return program


def _gradient(evaluate: Callable[[Sequence[Any]], list[Any]]) -> Callable[[Sequence[Any]], Any]:
    """A function that applies the pullback of `evaluate` to ones."""

    def gradient(inputs: Sequence[Any]) -> Any:
        is_wanted = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in inputs]
        wanted, rest = eqx.partition(list(inputs), is_wanted)
        outputs, pullback = jax.vjp(lambda wanted: evaluate(eqx.combine(wanted, rest)), wanted)
        return pullback([_ones(leaf) for leaf in outputs])

    return gradient


def _ones(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.ones_like(leaf)
    return np.zeros(leaf.shape, jax.dtypes.float0)


def _text(fn: Callable[[Sequence[Any]], Any], types: Sequence[Any]) -> str:
    with jax.log_compiles(False):  # nothing is compiled
        # Types tell the mesh of sharded arrays, but not its devices.
        lowered = jax.jit(fn).trace(list(types)).lower(lowering_platforms=(platform(),))
    return lowered.as_text()
