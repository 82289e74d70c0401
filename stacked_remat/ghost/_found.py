"""What `grad_dot` returns beside the gradients."""

from typing import Any

import equinox as eqx
import haliax as hax
from haliax import NamedArray


class GradDots(eqx.Module):
    """Dot products of examples' gradients with a direction. All arrays are in float32.

    Attributes:
        loss: the reduced loss.
        scores: by the path of the array, `[layers, batch]` in a stack and `[batch]` elsewhere. In
            paths `*` stands for the layers of a stack. Empty for the granularity "total".
        total: the sum of all of them, `[batch]`, or of documents.
        direction_norm: the norm of the direction.
        norms: like `scores`, the norms of the examples' gradients; None unless asked for.
        total_norm: `[batch]`, of everything that is scored; None unless asked for.
        aux: what `per_example_loss` returned beside the losses.
    """

    loss: Any
    scores: dict[str, NamedArray]
    total: NamedArray
    direction_norm: Any
    norms: dict[str, NamedArray] | None
    total_norm: NamedArray | None
    aux: Any

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
