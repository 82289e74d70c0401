"""The optimizer inside of the backward pass: no whole gradient of a stack exists."""

from .update import (
    FusedResult as FusedResult,
    FusedState as FusedState,
    FusedUpdate as FusedUpdate,
    fused_update as fused_update,
)
