"""What `grad_dot` returns beside the gradients."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import NamedArray


class GradDots(eqx.Module):
    """Dot products of examples' gradients with a direction. All arrays are in float32.

    Attributes:
        loss: the reduced loss.
        scores: by the path of the array or layer, `[layers, batch]` in a stack and `[batch]` elsewhere. In
            paths `*` stands for the layers of a stack. Empty for the granularity "total".
        total: the sum of all of them, `[batch]`, or of documents.
        direction_norm: the norm of the direction.
        norms: like `scores`, the norms of the examples' gradients; None unless asked for.
        total_norm: `[batch]`, of everything that is scored; None unless asked for.
        aux: what `per_example_loss` returned beside the losses.
        covered: by path, how many numbers of the model each scored array holds.
        uncovered: the same for arrays that are trained and have no direction.
    """

    loss: Any
    scores: dict[str, NamedArray]
    total: NamedArray
    direction_norm: Any
    norms: dict[str, NamedArray] | None
    total_norm: NamedArray | None
    aux: Any
    covered: dict[str, int] = eqx.field(static=True)
    uncovered: dict[str, int] = eqx.field(static=True)

    def coverage(self) -> float:
        """The share of the trained numbers that are scored; `uncovered` has the paths of the others."""
        covered = sum(self.covered.values())
        return covered / max(covered + sum(self.uncovered.values()), 1)

    @property
    def cosines(self) -> NamedArray:
        """The cosines between the examples' gradients and the direction, `[batch]`; zero for a zero gradient.

        Raises:
            ValueError: norms were not asked for.
        """
        if self.total_norm is None:
            raise ValueError("Cosines need the norms of the gradients: give grad_dot norms=True.")
        product = self.total_norm * self.direction_norm
        return hax.where(product > 0, self.total / hax.where(product > 0, product, 1.0), 0.0)

    def shares(self, loss_reduction: Any = None) -> NamedArray:
        """The scores as parts of the reduction of the validation loss, to compare examples across steps.

        Raw scores are large in the first steps, when gradients are. By default they are divided by the sum of
        their absolute values, so that a step's shares have an absolute sum of 1.

        Args:
            loss_reduction: a scalar to divide by instead, such as the measured reduction of the validation
                loss by the step.
        """
        if loss_reduction is None:
            loss_reduction = jnp.sum(jnp.abs(self.total.array))
        return self.total / jnp.where(loss_reduction == 0, 1.0, loss_reduction)
