"""Per-example gradient dot products."""

from .log import ScoreLog as ScoreLog, ScoreLogError as ScoreLogError, StepScores as StepScores
