"""Checks of what layers are built of, and of the index of one.

The classes of layers call them before they build or read anything, so that an error
names what the user wrote.
"""

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
from haliax import Axis
from jax.errors import TracerIntegerConversionError

from ._policy import ALIASES, ScanCheckpointPolicy
from ._scan.arguments import signature_of
from ._scan.checks import axis_or_name, describe, text


def block_builder(Block: Any, what: str, call: str = "") -> Callable[..., Any]:
    """The static `init` of a block, Haliax style, or the block itself.

    Errors show the `call` that takes it.
    """
    # A common mistake is a block instead of its class. Equinox's partial and jitted
    # functions are modules too.
    is_function = isinstance(Block, eqx.Partial) or hasattr(Block, "__wrapped__")
    is_block = isinstance(Block, eqx.Module) and not is_function
    if is_block or not callable(Block):
        raise TypeError(
            f"{what} takes the class of the blocks, or a function that builds one, and"
            f" calls it for every layer; got {describe(Block)}. Write"
            f" {call or f'{what}(Layers, Block)'}(...), or of layers that are built"
            " Stacked.of(layers)."
        )
    if not inspect.isclass(Block):
        return Block
    init = inspect.getattr_static(Block, "init", None)
    # An ordinary method of this name, which needs a block, is for something else.
    if init is None or inspect.isfunction(init):
        return Block
    return getattr(Block, "init")  # noqa: B009


def check_first_call(args: Sequence[Any], kwargs: Mapping[str, Any], what: str) -> None:
    """Refuse what an `init` is given beside the axis, the class and its options."""
    if args and _is_policy(args[0]):
        raise TypeError(f"{what} takes its policy by name. Write remat={args[0]!r}.")
    if args or kwargs:
        arguments = ["..."] * len(args) + [f"{name}=..." for name in kwargs]
        raise TypeError(
            f"{what} takes the axis, the class of the blocks and remat=. Arguments of"
            " the blocks go to what it returns:"
            f" {what}(Layers, Block)({', '.join(arguments)})."
        )


def _is_policy(value: Any) -> bool:
    is_alias = isinstance(value, str) and value in ALIASES
    return is_alias or isinstance(value, bool | ScanCheckpointPolicy)


def check_second_call(
    build: Callable[..., Any], kwargs: Mapping[str, Any], what: str
) -> None:
    """Refuse an option of an `init` among the arguments of a block that has none of
    this name.
    """
    parameters = signature_of(build).parameters
    takes_any = any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    for name in ("remat", "gradient_checkpointing"):
        if name in kwargs and not takes_any and name not in parameters:
            raise TypeError(
                f"{what} takes {name}= in its first call. Write"
                f" {what}(..., {name}={kwargs[name]!r})(...)."
            )


def axis_of_modules(layers: Any, Layers: Any, what: str) -> Axis:
    """The axis of a list of modules, which may be given by its name."""
    if not isinstance(layers, Sequence):
        raise TypeError(
            f"{what} takes a list of modules, one for each layer; got"
            f" {describe(layers)}. Make a list of it."
        )
    for i, layer in enumerate(layers):
        check_module(layer, f"layers[{i}] of {what}")
    # A name alone is an axis with as many layers as there are
    axis = axis_or_name(Layers, what)
    if isinstance(axis, str):
        return Axis(axis, len(layers))
    if axis.size != len(layers):
        raise ValueError(
            f"`{axis.name}` has {axis.size} layers, but {what} was given {len(layers)}."
        )
    return axis


def check_module(value: Any, where: str) -> None:
    if not isinstance(value, eqx.Module):
        got = describe(value)
        if isinstance(value, type):
            got = f"the class {value.__name__}"
        raise TypeError(f"{where} is {got}. Let it be an eqx.Module.")


def check_layer_index(index: Any, Layers: Axis) -> int:
    """The index counted from the front; an error outside of the axis."""
    try:
        position = operator.index(index)
    except TracerIntegerConversionError:  # a `TypeError` that says what to do
        raise
    except TypeError:
        fix = (
            "Write blocks[1], blocks[1:3], or blocks[1].weight[2] for a part of a"
            " layer."
        )
        if isinstance(index, list) or getattr(index, "ndim", 0) == 1:
            fix = "A stack of some is Stacked.of([blocks[i] for i in indices])."
        raise TypeError(
            f"The layers of `{Layers.name}` have one index, an integer or a slice; got"
            f" {text(index)}. {fix}"
        ) from None
    if not -Layers.size <= position < Layers.size:
        held = f"layers 0 to {Layers.size - 1}" if Layers.size else "no layers"
        raise IndexError(
            f"Layer {position} does not exist: `{Layers.name}` has {held}."
        )
    return position % Layers.size
