"""Operations of a program that call Python while it runs.

To JAX they have no effect: it drops those whose results nothing reads. To XLA they have
one, so that none is dropped, merged with another or done again.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir


@dataclasses.dataclass(frozen=True)
class Caller:
    """What calls Python, for errors."""

    # As users write it.
    name: str
    # What to use for several devices, or for TPUs: a sentence.
    instead: str
    # What to use to size a program for a device that is not attached.
    to_size: str

    def several_devices(self, count: int | str) -> ValueError:
        """The error for a program for several devices."""
        return ValueError(
            f"{self.name} is for programs on one device, and this one is for {count}."
            f" {self.instead}"
        )

    def check(self, context: Any) -> None:
        """Refuse a program for several devices, for others than CPUs and GPUs, or for
        one that is not attached.
        """
        module = context.module_context
        axes = module.axis_context
        # JAX has a number of devices for a program that XLA divides, or a mesh.
        count = getattr(axes, "num_devices", None) or axes.mesh.size
        if count > 1:
            raise self.several_devices(count)
        if "tpu" in module.platforms:
            raise ValueError(
                f"{self.name} is for CPUs and GPUs, and this program is for TPUs."
                f" {self.instead}"
            )
        try:
            module.get_backend()
        except (RuntimeError, ValueError):
            raise ValueError(
                f"A program with {self.name} calls Python, and JAX compiles it only"
                " for one kind of device, which is attached; not for"
                f" {', '.join(module.platforms)}. To size it, use {self.to_size}."
            ) from None


def python_call(
    name: str,
    callback: Callable[..., Any],
    types: Callable[..., list[ShapedArray]],
    caller: Caller,
    *,
    takes_arrays: bool = True,
) -> Any:
    """A primitive whose results a callback computes.

    Args:
        name: of the primitive.
        callback: arrays of NumPy and the parameters to a sequence of arrays.
        types: those of the results, by the types of the arrays and the parameters.
        caller: what is named in errors.
        takes_arrays: whether the callback is given the arrays; else its results depend
            on parameters alone.
    """
    primitive: Any = Primitive(name)
    primitive.multiple_results = True

    def evaluated(*args: Any, **params: Any) -> Any:
        return jax.jit(functools.partial(primitive.bind, **params))(*args)

    def lowered(context: Any, *operands: Any, **params: Any) -> Any:
        caller.check(context)
        if not takes_arrays:
            context = context.replace(avals_in=[])
            operands = ()
        results, _, _ = mlir.emit_python_callback(
            context,
            functools.partial(callback, **params),
            None,
            operands,
            context.avals_in,
            context.avals_out,
            has_side_effect=True,
        )
        return results

    primitive.def_impl(evaluated)
    primitive.def_abstract_eval(types)
    mlir.register_lowering(primitive, lowered)
    return primitive
