"""What a checkpoint policy means for a number of layers: what a scan or a sweep over
them executes.

`_policy.py` has what users write. For a number of layers that becomes a `Remat`: which
carries are kept, where, and which internals of a layer (`Kept`). The same `Remat` is
executed by a plain `lax.scan` under `jax.checkpoint`, or by a sweep (`_sweep/`) after
`Remat.swept`. For eight layers that is:

    policy                carries   segments                first layers
    True                  device    1 1 1 1 1 1 1 1         none
    "offload"             host      1 1 1 1 1 1 1 1         none
    save_carries="disk"   disk      1 1 1 1 1 1 1 1         none
    "nested"              device    4 3 1                   none
    nested=2, names       device    4 4, which keep names   none
    False                 device    no schedule             8, which keep everything
    names                 device    no schedule             8, which keep names
    first_layers=3        device    1 1 1 1 1               3, which keep everything

`names` are `save_block_internals=[...]`. So a sweep knows two things alone: first
layers, whose inputs and `first_kept` stay until they are reversed, and a schedule. Both
are executed as a `Program` (`_schedule.py`). For gradients (`jax.grad`), not with a
visitor, `"nested"` may become segments of one length that keep everything, once the
layers are traced (`_sweep/reverse_spec.py`).
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from ._schedule import Schedule, equal, off_device

# Where the carries between layers are kept; None if they are not.
Carries: TypeAlias = Literal["device", "host", "disk"] | None
# From an operation, its operands' types and its parameters to whether the result is
# saved or offloaded.
JaxPolicy: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class Kept:
    """Which internals of a layer are kept for its derivative."""

    # True for all, False for none, checkpoint names (sorted), or a policy of JAX that
    # decides for each operation.
    internals: bool | tuple[str, ...] | JaxPolicy = False
    # Names of those that are kept on the host; none of them is among `internals`.
    offloaded: tuple[str, ...] = ()

    @classmethod
    def of(cls, save: Any, offload: Any, field: str = "") -> "Kept":
        """What a user wrote for two fields, whose names begin with `save` and
        `offload`.
        """
        if save is jax.checkpoint_policies.everything_saveable:
            save = True
        elif save is jax.checkpoint_policies.nothing_saveable:
            save = False
        elif callable(save):
            check_jax_policy(save)
        elif not isinstance(save, bool):
            save = _names(f"save{field}", save) or False
        offloaded = _names(f"offload{field}", offload)
        kept = cls(save, offloaded)
        if both := [name for name in offloaded if save is True or name in kept._saved]:
            raise ValueError(
                f"{both} are in both save{field}={as_written(save)} and offload{field}."
                " Keep one."
            )
        return kept

    @property
    def names(self) -> tuple[str, ...] | Literal[True]:
        """The names of what is kept anywhere; True for everything. What a policy of JAX
        keeps has none.
        """
        return True if self.internals is True else (*self._saved, *self.offloaded)

    @property
    def _saved(self) -> tuple[str, ...]:
        return self.internals if isinstance(self.internals, tuple) else ()

    def policy(self, carry_name: str = "") -> JaxPolicy:
        """The `jax.checkpoint` policy of a layer, which moves its carry to the host if
        that has a name.

        Of names alone it is one of JAX's own, which are data and so survive
        `JAX_REMAT3=1`. Not for `EVERYTHING`: callers leave such a layer as it is.
        """
        offloaded = (carry_name, *self.offloaded) if carry_name else self.offloaded
        if not callable(self.internals):
            return _named_policy(self._saved, offloaded)
        if _goes_by_names(self.internals):
            internals = self.internals
        elif getattr(jax.config, "jax_remat3", False):
            raise ValueError(
                "JAX_REMAT3=1 keeps values by name alone and does not support"
                f" {as_written(self.internals)}. Name the values inside the block with"
                ' checkpoint_name(value, "name") and save ["name"], or unset'
                " JAX_REMAT3."
            )
        else:
            internals = _OfRealValues(self.internals)
        return _joined_policy(internals, offloaded) if offloaded else internals

    def checkpoint(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a layer, for a trace that says what its derivative reads."""
        if self.internals is True:
            return layer
        return jax.checkpoint(layer, policy=self.policy(), prevent_cse=False)


EVERYTHING = Kept(True)
NOTHING = Kept()


@dataclass(frozen=True)
class Remat:
    """A policy for a number of layers."""

    # The number of layers.
    length: int
    # The internals of a layer that are kept; with a schedule, while its segment is
    # reversed.
    kept: Kept = NOTHING
    # Where carries are kept: with a schedule, those that it says. None if all layers
    # run again first, together.
    carries: Carries = "device"
    # Of the layers after the first ones; None if they are not cut.
    schedule: Schedule | None = None
    # How many layers, the first to run, keep their carries and `first_kept`; the
    # schedule is that of the others.
    first_layers: int = 0
    # The internals of the first layers that are kept.
    first_kept: Kept = EVERYTHING
    # Whether a sweep may cut into segments of one length instead and keep their
    # internals, where these are small (`_sweep/reverse_spec.py`).
    may_keep_internals: bool = False
    # Where files of carries are, if these are on disk.
    folder: str = ""

    @property
    def form(self) -> Literal["loop", "sweep"]:
        """What executes it: a scan of JAX with checkpointed layers, or a sweep, which
        runs layers again from the carries that it keeps.
        """
        is_cut = self.schedule is not None or self.first_layers
        return "sweep" if is_cut else "loop"

    @property
    def replays(self) -> int:
        """How many layers run again only to make carries."""
        if self.schedule is not None:
            return self.schedule.replays
        return 0 if self.carries else self.length - self.first_layers

    @property
    def offloads(self) -> bool:
        """Whether carries or names are kept on the host; what a policy of JAX offloads
        is not seen.
        """
        names = self.kept.offloaded or self.first_kept.offloaded
        return self.carries == "host" or bool(names)

    @property
    def boundaries_off_device(self) -> bool:
        """Whether the first carries of segments are kept on the host or on disk."""
        return self.schedule is not None and self.schedule.off_device

    def swept(self) -> "Remat":
        """The same for a sweep: layers that are not cut are segments of one layer, or
        all of them first.
        """
        if self.schedule is not None or not self.length:
            return self
        if self.kept == NOTHING:
            schedule = equal(self.length, self.length)
            if self.carries in ("host", "disk"):
                schedule = off_device(schedule)
            return replace(self, schedule=schedule)
        return replace(
            self, first_layers=self.length, first_kept=self.kept, kept=NOTHING
        )


@functools.cache  # one object per policy: JAX's caches are keyed by its identity
def _named_policy(saved: tuple[str, ...], offloaded: tuple[str, ...]) -> JaxPolicy:
    if not offloaded:
        return jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )


@dataclass(frozen=True)
class _OfRealValues:
    """A policy of JAX, but for complex values, which are computed again.

    JAX rounds what `jax.checkpoint` keeps, by an operation that takes real numbers
    alone (0.10.2 and 0.12: `reduce_precision does not accept dtype complex64`).
    """

    policy: JaxPolicy

    def __call__(self, primitive: Any, *operands: Any, **params: Any) -> Any:
        for output in _result_types(primitive, operands, params):
            if jnp.issubdtype(getattr(output, "dtype", bool), jnp.complexfloating):
                return False
        return self.policy(primitive, *operands, **params)


def _result_types(
    primitive: Any, operands: tuple[Any, ...], params: dict[str, Any]
) -> Sequence[Any]:
    """The types of what an equation returns."""
    # Functions with rules of their own, whose primitives tell no types.
    called = params.get("call_jaxpr")
    if called is not None:
        return called.out_avals
    outputs, _ = primitive.abstract_eval(*operands, **params)
    return outputs if primitive.multiple_results else [outputs]


@functools.cache
def _joined_policy(internals: JaxPolicy, offloaded: tuple[str, ...]) -> JaxPolicy:
    """A policy of JAX, but for the names that are offloaded."""
    named = _named_policy((), offloaded)

    def policy(primitive: Any, *operands: Any, **params: Any) -> Any:
        is_named = primitive.name == "name" and params["name"] in offloaded
        return (named if is_named else internals)(primitive, *operands, **params)

    return policy


def _goes_by_names(policy: JaxPolicy) -> bool:
    """Whether it is one of `jax.checkpoint_policies` that are made of names."""
    # A class in newer versions of JAX, a function within a function in others.
    made_by = getattr(policy, "__qualname__", type(policy).__name__).split(".")[0]
    return made_by.lower().replace("_", "") in (
        "saveonlythesenames",
        "saveanynamesbutthese",
        "saveandoffloadonlythesenames",
    )


def check_jax_policy(policy: JaxPolicy) -> None:
    """Call it on an operation: a function of another kind fails, or returns something
    else.
    """
    try:
        answer = policy(lax.sin_p, jax.ShapeDtypeStruct((), jnp.float32))
    except Exception as error:
        answer = error
    if type(answer).__name__ not in (
        "bool",
        "RecomputeType",
        "SaveableType",
        "Offloadable",
    ):
        raise TypeError(
            f"{as_written(policy)} is not a checkpoint policy as jax.checkpoint takes"
            " them. Use one of jax.checkpoint_policies (dots_saveable), or one that a"
            " function there returns (save_only_these_names(...))."
        )


def _names(field: str, value: Any) -> tuple[str, ...]:
    """Checkpoint names that a user wrote for a field, sorted."""
    is_list = isinstance(value, Iterable) and not isinstance(value, str)
    names: set[Any] = {*value} if is_list else {None}
    if not all(isinstance(name, str) for name in names):
        write = value if isinstance(value, str) else "name"
        raise TypeError(
            f"{field} is a list of names that checkpoint_name gives inside the block;"
            f" got {value!r}. Write {field}=[{write!r}]."
        )
    return tuple(sorted(names))


def as_written(value: Any) -> str:
    """A setting as the user wrote it: a list for a tuple, the name of a function."""
    if callable(value):
        for name, policy in vars(jax.checkpoint_policies).items():
            if policy is value:
                return f"jax.checkpoint_policies.{name}"
        return getattr(value, "__qualname__", repr(value))
    return repr([*value] if isinstance(value, tuple) else value)
