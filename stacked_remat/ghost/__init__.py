"""Which training examples move the validation loss: gradient dot products in the same backward pass."""

from ._grad_dot import GradDots, grad_dot, val_direction
from ._interpret import UnsupportedLeafError
from .log import LOG_FOLDER, ScoreLog, ScoreLogError, StepScores
from .manager import GhostManager

__all__ = [
    "LOG_FOLDER",
    "GhostManager",
    "GradDots",
    "ScoreLog",
    "ScoreLogError",
    "StepScores",
    "UnsupportedLeafError",
    "grad_dot",
    "val_direction",
]
