"""Which training examples move the validation loss: gradient dot products in the same backward pass."""

from ._grad_dot import GradDots, grad_dot, val_direction
from ._interpret import UnsupportedLeafError

__all__ = ["GradDots", "UnsupportedLeafError", "grad_dot", "val_direction"]
