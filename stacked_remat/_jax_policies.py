"""JAX's own checkpoint policies: by name, by operation, and both together.

A policy of JAX is a function of an operation, its operands' types and its parameters, which says whether the
result is saved, offloaded or computed again. Those that go by names are data, and survive `JAX_REMAT3=1`.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

JaxPolicy: TypeAlias = Callable[..., Any]


def policy_with_names(
    internals: bool | Iterable[str] | JaxPolicy,
    saved: tuple[str, ...],
    offloaded: tuple[str, ...],
    field: str = "save_block_internals",
) -> JaxPolicy:
    """A policy that saves and offloads these names, and, if `internals` is callable, follows it too.

    The error names `field`, where users write `internals`.

    Raises:
        ValueError: `JAX_REMAT3` does not support `internals`.
    """
    if not callable(internals):
        return _named_policy(saved, offloaded)
    if getattr(jax.config, "jax_remat3", False) and not _goes_by_names(internals):
        raise ValueError(
            f"JAX_REMAT3=1 keeps values by name alone, so it cannot obey {as_written(internals)}. Name the "
            'values inside the block with checkpoint_name(value, "name") and write '
            f'{field}=["name"], or unset JAX_REMAT3.'
        )
    # A layer's arguments are kept whether they are named or not.
    return _joined_policy(internals, saved, offloaded) if offloaded else internals


@functools.cache
def _joined_policy(internals: JaxPolicy, saved: tuple[str, ...], offloaded: tuple[str, ...]) -> JaxPolicy:
    named = _named_policy(saved, offloaded)

    def policy(primitive: Any, *operands: Any, **params: Any) -> Any:
        is_named = primitive.name == "name" and params["name"] in (*saved, *offloaded)
        return (named if is_named else internals)(primitive, *operands, **params)

    return policy


def _goes_by_names(policy: JaxPolicy) -> bool:
    """Whether a policy is one of those that JAX makes from names."""
    made_by = getattr(policy, "__qualname__", type(policy).__name__)
    return made_by.split(".")[0] in (
        "SaveOnlyTheseNames",
        "SaveAnyNamesButThese",
        "save_only_these_names",
        "save_any_names_but_these",
        "save_and_offload_only_these_names",
    )


@functools.cache  # one object per policy: JAX's caches are keyed by its identity
def _named_policy(saved: tuple[str, ...], offloaded: tuple[str, ...]) -> Callable[..., Any]:
    if not offloaded:
        return jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )


def check_jax_policy(policy: JaxPolicy) -> None:
    """Call it on an operation: a function of another kind fails, or returns something else."""
    try:
        answer = policy(lax.sin_p, jax.ShapeDtypeStruct((), jnp.float32))
    except Exception as error:
        answer = error
    if not isinstance(answer, bool) and type(answer).__name__ not in _ANSWERS:
        raise TypeError(
            f"{as_written(policy)} is not a checkpoint policy as jax.checkpoint takes them, a function of an "
            "operation that says whether its result is saved. Use one of jax.checkpoint_policies, such as "
            "dots_saveable, or one that a function there returns: save_only_these_names(...)."
        )


_ANSWERS = ("RecomputeType", "SaveableType", "Offloadable")


class _AsWritten(str):
    __repr__ = str.__str__


def as_written(value: Any) -> Any:
    """A setting as the user wrote it: a list for a tuple, the name of a function."""
    if callable(value):
        known = vars(jax.checkpoint_policies).items()
        name = next((f"jax.checkpoint_policies.{name}" for name, policy in known if policy is value), None)
        return _AsWritten(name or getattr(value, "__qualname__", repr(value)))
    return list(value) if isinstance(value, tuple) else value
