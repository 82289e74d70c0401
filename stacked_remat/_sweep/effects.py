"""Refuses effects in layers that are run again or whose values are moved to the host."""

from collections.abc import Sequence

from jax.extend.core import Jaxpr

from .._compat import is_reference, ordered_effects
from .._static import PyTree


def check_effects(jaxpr: Jaxpr, constants: Sequence[PyTree], *, offloads: bool) -> None:
    """Refuse effects of a layer with which JAX cannot compile the backward pass; says what to do instead."""
    if any(map(is_reference, constants)):
        raise TypeError(
            "The layer reads or writes a jax.Ref, which a policy that cuts the layers (nested, "
            "max_carries, first_layers) cannot differentiate. Make it part of the carry or "
            "an output, or use remat=True or remat=False; with True the layer runs again in the backward "
            "pass, and so do its writes."
        )
    ordered = ordered_effects(jaxpr)
    if offloads and ordered:
        raise TypeError(
            f"The layer has ordered effects ({', '.join(ordered)}), which JAX cannot compile in a program "
            "that uses host memory. Drop ordered=True from the callback, or use a policy that does not "
            "offload."
        )
