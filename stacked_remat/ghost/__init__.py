"""Which training examples move the validation loss: gradient dot products in the same
backward pass.
"""

from ._by_example import check_examples
from ._grad_dot import GradDots, grad_dot, shapley_direction, val_direction
from ._metasmoothness import metasmoothness
from ._replay import Replay, replay, weighted_step
from ._weights import UnsupportedLeafError
from .log import LOG_FOLDER, ScoreLog, ScoreLogError, StepScores, TokenScores
from .ranking import ExampleRanking, rank_examples

__all__ = [
    "LOG_FOLDER",
    "ExampleRanking",
    "GradDots",
    "Replay",
    "ScoreLog",
    "ScoreLogError",
    "StepScores",
    "TokenScores",
    "UnsupportedLeafError",
    "check_examples",
    "grad_dot",
    "metasmoothness",
    "rank_examples",
    "replay",
    "shapley_direction",
    "val_direction",
    "weighted_step",
]
