"""What the loops over the rows of grouped experts have in common: the rules of their derivatives."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .._checkpoint import checkpoint_name
from .._placement import has_host_arrays
from ._perturbed_vjp import perturbed_vjp, vjp_of_part

Expert: TypeAlias = Callable[..., Float[Array, "row embed"]]
"""(weights of one expert, rows, gates of the rows) to rows multiplied by their gates.

With `saved` there is a fourth argument, its result.
"""
Saved: TypeAlias = Callable[[Any, Float[Array, "row embed"]], Any]
"""(weights of one expert, rows) to arrays `[row, ...]`."""


class InStack(eqx.Module):
    """An array of weights, `[expert, ...]`, that is read where it is, in the stack of all layers.

    Attributes:
        stack: the experts of all layers, `[layer and expert, ...]`.
        first: where this layer's begin.
        experts: how many these are.
    """

    stack: Array
    first: Int[Array, ""]
    experts: int = eqx.field(static=True)

    @property
    def own(self) -> Array:
        """This layer's part: a copy, where it is used."""
        return lax.dynamic_slice_in_dim(self.stack, self.first, self.experts)


class Inputs(NamedTuple):
    """What is differentiated: of all tokens, with weights that may be `InStack`, or of an iteration."""

    x: Array
    gates: Any
    weights: tuple[Any, ...]


def trained_sliced(inputs: Inputs, perturbed: Inputs) -> Inputs:
    """The inputs with weights that are differentiated as arrays of this layer."""
    pairs = zip(inputs.weights, perturbed.weights, strict=True)
    return inputs._replace(
        weights=tuple(one.own if is_ and isinstance(one, InStack) else one for one, is_ in pairs)
    )


def perturbed_part(inputs: Inputs, perturbed: Inputs) -> Inputs:
    """The inputs that are differentiated, None for the others."""
    return jax.tree.map(lambda is_, own: own if is_ else None, perturbed, inputs)


@dataclass(frozen=True, eq=False)  # hashed by identity: an expert need not be hashable
class ExpertLoop(ABC):
    """A loop over the rows of all experts, on raw arrays.

    Attributes:
        expert: see `grouped_experts`.
        saved: see there.
        rebuild: makes one expert's tree of weights from a slice of each array.
    """

    expert: Expert
    saved: Saved | None
    rebuild: Callable[[Any], Any]

    @abstractmethod
    def apply(self, inputs: Inputs, kept: Any, at: Any) -> Array:
        """The rows of one iteration, whose plan is `at`; `kept` comes from `keep`."""

    @abstractmethod
    def keep(self, inputs: Inputs, at: Any) -> Any:
        """The saved part of the experts for the rows of one iteration; None where nothing is saved."""

    @abstractmethod
    def forward(self, inputs: Inputs, plan: Any) -> tuple[Array, Any]:
        """The sums of all tokens; also what is saved."""

    @abstractmethod
    def backward(self, perturbed: Inputs, inputs: Inputs, plan: Any, kept: Any, ct: Array) -> Inputs:
        """The cotangents of what is perturbed, `None` for the rest."""

    def iteration_backward(
        self, perturbed: Inputs, inputs: Inputs, kept: Any, at: Any, of_result: Array
    ) -> Inputs:
        """The cotangents of the perturbed inputs of one iteration, from that of its rows."""
        all_kept = jax.tree.map(lambda _: True, kept)
        result, pullback = vjp_of_part(
            lambda both: self.apply(*both, at), (inputs, kept), (perturbed, all_kept)
        )
        ((of_part, of_kept),) = pullback(of_result.astype(result.dtype))
        if self.saved is not None:
            # The pullback of a linear map does not read its result, so this recomputes nothing.
            _, pullback = vjp_of_part(lambda own: self.keep(own, at), inputs, perturbed)
            of_part = jax.tree.map(jnp.add, of_part, *pullback(of_kept))
        return of_part


def masked(rows: Array, real: Array) -> Array:
    """The rows, `[*real.shape, ...]`, with zeros where they are not real."""
    return jnp.where(
        real.reshape(*real.shape, *[1] * (rows.ndim - real.ndim)), rows, jnp.zeros((), rows.dtype)
    )


class _Constants(NamedTuple):
    """The plan of a loop, and weights that are read in the stack of all layers."""

    plan: Any
    in_stacks: tuple[InStack | None, ...]


def apply_experts(
    loop: ExpertLoop, inputs: Inputs, plan: Any, in_stacks: Sequence[InStack | None]
) -> Float[Array, "token out"]:
    """The sums of all tokens. The backward pass computes the rows again, from `inputs` and what is saved.

    Weights that are in `in_stacks` too are read there. Those of `inputs` then only get the gradients, and XLA
    does not compute them.
    """
    return _applied(loop, inputs, _Constants(plan, tuple(in_stacks)))


def _read_in_stacks(inputs: Inputs, constants: _Constants) -> Inputs:
    pairs = zip(inputs.weights, constants.in_stacks, strict=True)
    return inputs._replace(weights=tuple(array if stack is None else stack for array, stack in pairs))


def _run(loop: ExpertLoop, inputs: Inputs, constants: _Constants) -> Array:
    # Without a backward pass nothing is saved.
    return replace(loop, saved=None).forward(_read_in_stacks(inputs, constants), constants.plan)[0]


def _forward(loop: ExpertLoop, inputs: Inputs, constants: _Constants) -> tuple[Array, Any]:
    inputs = _read_in_stacks(inputs, constants)
    out, kept = loop.forward(inputs, constants.plan)
    return out, (inputs, *checkpoint_name((constants.plan, kept), "expert_internals"))


def _backward(loop: ExpertLoop, wanted: tuple[bool, ...], residuals: Any, cotangent: Array) -> Inputs:
    inputs, plan, kept = residuals
    tree = jax.tree.structure(inputs._replace(weights=(0,) * len(inputs.weights)))
    perturbed: Inputs = jax.tree.unflatten(tree, wanted)
    of_weights = zip(inputs.weights, perturbed.weights, strict=True)
    if any(trained and has_host_arrays(array) for array, trained in of_weights):
        raise ValueError(
            "grouped_experts has no gradient of weights in host memory. Move them to the device first: "
            "jax.device_put(weights, jax.memory.Space.Device), or freeze them: "
            "jax.lax.stop_gradient(weights)."
        )
    return loop.backward(perturbed, inputs, plan, kept, cotangent)


_applied = perturbed_vjp(_run, _backward, _forward)
