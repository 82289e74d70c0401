"""What the loops over the rows of grouped experts have in common: the rules of their derivatives."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._checkpoint import checkpoint_name
from .._placement import has_host_arrays
from ._perturbed_vjp import perturbed_vjp, vjp_of_part

Expert: TypeAlias = Callable[..., Float[Array, "row embed"]]
"""(weights of one expert, rows, gates of the rows) to rows multiplied by their gates.

With `saved` there is a fourth argument, its result.
"""
Saved: TypeAlias = Callable[[Any, Float[Array, "row embed"]], Any]
"""(weights of one expert, rows) to arrays `[row, ...]`."""


class Inputs(NamedTuple):
    """What is differentiated: of all tokens, or of the rows of an iteration."""

    x: Array
    gates: Any
    weights: tuple[Any, ...]


def perturbed_part(inputs: Inputs, perturbed: Inputs) -> Inputs:
    """The inputs that are differentiated, None for the others."""
    return jax.tree.map(lambda is_, own: own if is_ else None, perturbed, inputs)


def sums_of(perturbed: Inputs, inputs: Inputs) -> Inputs:
    """The shapes of gradients that are summed in float32, None for what is not differentiated."""
    return jax.tree.map(
        lambda is_, own: jax.ShapeDtypeStruct(own.shape, jnp.float32) if is_ else None, perturbed, inputs
    )


def like_inputs(gradients: Inputs, inputs: Inputs) -> Inputs:
    """Gradients in the shapes and dtypes of the inputs."""
    return jax.tree.map(lambda new, old: new.reshape(old.shape).astype(old.dtype), gradients, inputs)


@dataclass(frozen=True, eq=False)  # hashed by identity: an expert need not be hashable
class ExpertLoop(ABC):
    """A loop over the rows of all experts, on raw arrays."""

    expert: Expert
    saved: Saved | None
    rebuild: Callable[[Any], Any]  # makes the tree of weights that these take

    @abstractmethod
    def call(self, fn: Callable[..., Any], at: Any, weights: tuple[Array, ...], *rows: Any) -> Any:
        """`fn(weights of their expert, *rows)` for the rows of one iteration, whose plan is `at`."""

    @abstractmethod
    def forward(self, inputs: Inputs, plan: Any) -> tuple[Array, Any]:
        """The sums of all tokens; also what is saved."""

    @abstractmethod
    def backward(self, perturbed: Inputs, inputs: Inputs, plan: Any, kept: Any, ct: Array) -> Inputs:
        """The cotangents of what is perturbed, `None` for the rest."""

    def keep(self, own: Inputs, at: Any) -> Any:
        """What is saved of the rows of one iteration; None where nothing is."""
        return None if self.saved is None else self.call(self.saved, at, own.weights, own.x)

    def apply(self, own: Inputs, kept: Any, at: Any) -> Array:
        """The experts' results for the rows of one iteration; `kept` comes from `keep`."""
        more = () if self.saved is None else (kept,)
        return self.call(self.expert, at, own.weights, own.x, own.gates, *more)

    def gradients(self, perturbed: Inputs, own: Inputs, kept: Any, at: Any, ct: Array) -> Inputs:
        """The cotangents of the perturbed inputs of one iteration, from that of its rows."""
        all_kept = jax.tree.map(lambda _: True, kept)
        result, pullback = vjp_of_part(lambda both: self.apply(*both, at), (own, kept), (perturbed, all_kept))
        ((found, of_kept),) = pullback(ct.astype(result.dtype))
        if self.saved is not None:
            # The pullback of a linear map does not read its result, so this recomputes nothing.
            _, pullback = vjp_of_part(lambda own: self.keep(own, at), own, perturbed)
            found = jax.tree.map(jnp.add, found, *pullback(of_kept))
        return found


def masked(rows: Array, real: Array) -> Array:
    """The rows, `[*real.shape, ...]`, with zeros where they are not real."""
    return jnp.where(
        real.reshape(*real.shape, *[1] * (rows.ndim - real.ndim)), rows, jnp.zeros((), rows.dtype)
    )


def add_at(sums: Array, index: Array, rows: Array) -> Array:
    """Sums in float32 with rows added to them; those with an index beyond all are dropped."""
    return sums.at[index].add(rows.astype(jnp.float32), mode="drop")


class _Constants(NamedTuple):
    """The plan of a loop, and its weights as they are read."""

    plan: Any
    weights: tuple[Any, ...]


def apply_experts(
    loop: ExpertLoop, inputs: Inputs, plan: Any, read: tuple[Any, ...]
) -> Float[Array, "token out"]:
    """The sums of all tokens. The backward pass computes the rows again, from `inputs` and what is saved.

    Weights are read in `read`. Those of `inputs` only get the gradients: where they are others, XLA does not
    compute them.
    """
    return _applied(loop, inputs, _Constants(plan, read))


def _run(loop: ExpertLoop, inputs: Inputs, constants: _Constants) -> Array:
    # Without a backward pass nothing is saved.
    return replace(loop, saved=None).forward(inputs._replace(weights=constants.weights), constants.plan)[0]


def _forward(loop: ExpertLoop, inputs: Inputs, constants: _Constants) -> tuple[Array, Any]:
    inputs = inputs._replace(weights=constants.weights)
    out, kept = loop.forward(inputs, constants.plan)
    return out, (inputs, *checkpoint_name((constants.plan, kept), "expert_internals"))


def _backward(loop: ExpertLoop, wanted: tuple[bool, ...], residuals: Any, cotangent: Array) -> Inputs:
    inputs, plan, kept = residuals
    tree = jax.tree.structure(inputs._replace(weights=(0,) * len(inputs.weights)))
    perturbed: Inputs = jax.tree.unflatten(tree, wanted)
    if has_host_arrays(perturbed_part(inputs, perturbed).weights):
        raise ValueError(
            "grouped_experts has no gradient of weights in host memory. Move them to the device first: "
            "jax.device_put(weights, jax.memory.Space.Device), or freeze them: "
            "jax.lax.stop_gradient(weights)."
        )
    return loop.backward(perturbed, inputs, plan, kept, cotangent)


_applied = perturbed_vjp(_run, _backward, _forward)
