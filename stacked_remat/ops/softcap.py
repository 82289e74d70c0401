"""A smooth bound of scores and of logits (Gemma Team 2024, "Gemma 2")."""

import math
from typing import Any

import haliax as hax
import numpy as np


def soft_capped(x: Any, softcap: float | None) -> Any:
    """`softcap * tanh(x / softcap)`, of plain or named arrays; `x` itself for None.

    Its derivative is `1 - (result / softcap) ** 2`.
    """
    return x if softcap is None else hax.tanh(x / softcap) * softcap


def check_softcap(softcap: Any, of: str) -> None:
    """Refuse a bound of the scores or logits that is not a positive number."""
    if softcap is not None and not (
        isinstance(softcap, int | float | np.number) and 0 < softcap < math.inf
    ):
        raise ValueError(
            f"softcap must be a positive number, or None for no cap of the {of}; got"
            f" {softcap!r}."
        )
