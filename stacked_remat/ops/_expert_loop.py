"""What the loops over the rows of grouped experts have in common: the rules of their derivatives."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from .._compat import as_residual, of_residual
from .._placement import is_on_host

Expert: TypeAlias = Callable[..., Float[Array, "row embed"]]
"""(weights of one expert, rows, gates of the rows) to rows multiplied by their gates.

With `saved` there is a fourth argument, its result.
"""
Saved: TypeAlias = Callable[[Any, Float[Array, "row embed"]], Any]
"""(weights of one expert, rows) to arrays `[row, ...]`."""


class Inputs(NamedTuple):
    """What is differentiated: of all tokens, or of one iteration of the loop."""

    x: Array
    gates: Any
    weights: tuple[Array, ...]


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
        """The sums of all tokens; also what is saved, of each iteration."""

    @abstractmethod
    def backward(self, perturbed: Inputs, inputs: Inputs, plan: Any, kept: Any, ct: Array) -> Inputs:
        """The cotangents of what is perturbed, `None` for the rest."""

    def iteration_backward(
        self, perturbed: Inputs, inputs: Inputs, kept: Any, at: Any, of_result: Array
    ) -> Inputs:
        """The cotangents of the perturbed inputs of one iteration, from that of its rows."""
        part, constant = eqx.partition(inputs, perturbed)
        result, pullback = jax.vjp(
            lambda part, kept: self.apply(eqx.combine(part, constant), kept, at), part, kept
        )
        of_part, of_kept = pullback(of_result.astype(result.dtype))
        if self.saved is not None:
            # The pullback of a linear map does not read its result, so this recomputes nothing.
            _, pullback = jax.vjp(lambda part: self.keep(eqx.combine(part, constant), at), part)
            of_part = jax.tree.map(jnp.add, of_part, *pullback(of_kept))
        return of_part


def masked(rows: Array, real: Array) -> Array:
    """The rows, `[*real.shape, ...]`, with zeros where they are not real."""
    return jnp.where(
        real.reshape(*real.shape, *[1] * (rows.ndim - real.ndim)), rows, jnp.zeros((), rows.dtype)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply_experts(loop: ExpertLoop, inputs: Inputs, plan: Any) -> Array:
    """The sums of all tokens. The backward pass computes the rows again, from `inputs` and what is saved."""
    return loop.forward(inputs, plan)[0]


def _forward_rule(loop: ExpertLoop, inputs: Any, plan: Any) -> tuple[Array, Any]:
    perturbed = jax.tree.map(
        lambda leaf: leaf.perturbed and jnp.issubdtype(leaf.value.dtype, jnp.inexact), inputs
    )
    inputs, plan = jax.tree.map(lambda leaf: leaf.value, (inputs, plan))
    out, kept = loop.forward(inputs, plan)
    return out, (as_residual(tuple(jax.tree.leaves(perturbed))), inputs, plan, kept)


def _backward_rule(loop: ExpertLoop, residuals: Any, cotangent: Any) -> tuple[Any, None]:
    differentiated, inputs, plan, kept = residuals
    perturbed = jax.tree.unflatten(jax.tree.structure(inputs), of_residual(differentiated))
    if isinstance(cotangent, SymbolicZero):
        return None, None
    of_weights = zip(perturbed.weights, inputs.weights, strict=True)
    if any(trained and is_on_host(array) for trained, array in of_weights):
        raise ValueError(
            "grouped_experts has no gradient of weights in host memory. Move them to the device first: "
            "jax.device_put(weights, jax.memory.Space.Device), or freeze them: "
            "jax.lax.stop_gradient(weights)."
        )
    return loop.backward(perturbed, inputs, plan, kept, cotangent), None


apply_experts.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
