"""What `grad_dot` returns beside the gradients."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray


class GradDots(eqx.Module):
    """Dot products of examples' gradients with a direction. All arrays are in float32.

    Attributes:
        loss: the reduced loss.
        scores: by the path of the array or layer, `[layers, batch]` in a stack and `[batch]` elsewhere; with
            a further axis of positions for `per_token`. In paths `*` stands for the layers of a stack.
        total: the sum of all of them, `[batch]`.
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

    def per_document(self, ids: NamedArray, Documents: Axis, *, of_mean: bool = False) -> "GradDots":
        """Scores of documents from those of tokens, for sequences that are packed into rows.

        Exact where documents do not see each other. `example_ids` of `grad_dot` gives the same.

        Args:
            ids: the number of each token's document, with the axes of the tokens' scores, `[batch, position]`
                or `[rows]`; out-of-range tokens are left out.
            Documents: the axis of the documents.
            of_mean: whether the loss of a row is the mean of its tokens' losses, and that of a document is to
                be the mean of its own.

        Returns:
            The same with `Documents` in the place of the axes of `ids`.

        Raises:
            ValueError: the scores are not of tokens (`per_token`).
        """
        axes = self.total.axes
        if set(ids.axes) != set(axes):
            raise ValueError(
                f"ids has the axes {[axis.name for axis in ids.axes]}, and scores have "
                f"{[axis.name for axis in axes]}. Give grad_dot per_token, and ids of every token."
            )
        flat = ids.rearrange(axes).array.reshape(-1)
        inside = (flat >= 0) & (flat < Documents.size)
        places = jnp.where(inside, flat, Documents.size)  # the last one is dropped
        counts = jnp.zeros(Documents.size + 1).at[places].add(1.0)
        scale = hax.named(axes[-1].size / jnp.maximum(counts[:-1], 1.0), Documents) if of_mean else 1.0

        def summed(score: NamedArray) -> NamedArray:
            before = score.axes[: len(score.axes) - len(axes)]
            rows = score.array.reshape(*(axis.size for axis in before), flat.size)
            sums = jnp.zeros((*rows.shape[:-1], Documents.size + 1)).at[..., places].add(rows)
            return hax.named(sums[..., :-1], (*before, Documents)) * scale

        return eqx.tree_at(
            lambda found: (found.scores, found.total),
            self,
            ({path: summed(score) for path, score in self.scores.items()}, summed(self.total)),
        )
