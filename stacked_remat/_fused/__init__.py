"""The optimizer inside of the backward pass: no whole gradient of a stack exists."""

from .update import FusedResult, FusedState, FusedUpdate, fused_update

__all__ = ["FusedResult", "FusedState", "FusedUpdate", "fused_update"]
