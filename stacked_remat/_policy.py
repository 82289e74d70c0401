"""What the backward pass of a scan over layers keeps, moves to the host, or recomputes.

A block takes a *carry* and its own inputs (its weights and whatever else is split over
the layers), and returns the next carry. Its derivative reads the inputs, of which no
copy is made, and some of the intermediate values, the *internals*. A
`ScanCheckpointPolicy` says of carries and internals whether the forward pass keeps them
for the backward pass; `_scan/` follows it.
"""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Self,
    SupportsIndex,
    TypeAlias,
)

import wadler_lindig
from haliax.nn import ScanCheckpointPolicy as HaliaxPolicy
from jax.core import Tracer

from . import _haliax_names
from ._messages import did_you_mean, shown
from ._place_names import is_place
from ._remat import EVERYTHING, JaxPolicy, Kept, Remat, as_written
from ._schedule import (
    Schedule,
    bounded,
    equal,
    off_device,
    shrinking,
    whole_number,
)

if TYPE_CHECKING:
    Names: TypeAlias = Iterable[str]
    SavedInternals: TypeAlias = bool | Names | JaxPolicy
else:
    # What configs write: draccus reads the annotations of fields, and decodes no
    # Iterable and no Callable.
    Names = list[str]
    SavedInternals = bool | Names

OFFLOAD = "offload"
DISK = "disk"
# Where the carries of layers are, by `save_carries`; None where none is kept
_CARRIES: dict[bool | str, Any] = {
    True: "device",
    OFFLOAD: "host",
    DISK: "disk",
    False: None,
}
# The environment variable that is read where a policy has no `carries_folder`
FOLDER_VARIABLE = "STACKED_REMAT_CARRIES_FOLDER"


class _Cut(NamedTuple):
    """What a field of a policy means that says how the layers are cut."""

    # The value as it is compared; raises if it is none of the field's.
    checked: Callable[[Any], Any]
    # The schedule of a number of layers, by the field's value and that number.
    schedule: Callable[[Any, int], Schedule]


def _checked_nested(nested: Any) -> bool | int:
    if isinstance(nested, bool):
        return nested
    return whole_number("nested", nested, "True or a number of segments")


def _checked_carries(most: Any) -> int:
    meaning = "a number of carries including the stack's input"
    return whole_number("max_carries", most, meaning, least=2)


def _checked_folder(folder: Any) -> str:
    if not folder or not isinstance(folder, str | os.PathLike):
        raise TypeError(f"carries_folder is the path of a folder; got {folder!r}.")
    return os.fspath(folder)


def _nested(nested: bool | int, length: int) -> Schedule:
    return shrinking(length) if nested is True else equal(length, nested)


def _off_device(nested: bool | int, most: int | None, length: int) -> Schedule:
    """The cut with the first carries of segments on the host or on disk, by `nested`
    and `max_carries`; without `nested` these are the carries of all layers.
    """
    segments = int(nested) or length
    if nested is True:
        segments = math.isqrt(length - 1) + 1  # √N, rounded up
    return off_device(equal(length, segments), most)


def _bounded(most: int, length: int) -> Schedule:
    return bounded(length, max_carries=most)


# All fields that cut the layers. From this table follow what a policy executes, what it
# refuses, and `has_cut`. Written by hand are the errors that name all cuts, in
# `_scan/layers.py`, `_scan/sweep_back.py` and `_sweep/trace.py`, which
# `test_errors_name_all_fields_that_cut` compares with it; what they mean for carries
# off the device, in `_off_device` and `_contradictions`; and how a planner varies each
# cut, in `memory/_variations.py`.
CUTS: dict[str, _Cut] = {
    "nested": _Cut(_checked_nested, _nested),
    "max_carries": _Cut(_checked_carries, _bounded),
}


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class ScanCheckpointPolicy(_haliax_names.HaliaxFields):
    """A gradient checkpoint policy for `fold`, `scan`, `map`, `Stacked` and `BlockSeq`.

    With N layers, a carry of C bytes, internals of I bytes a layer and a block that
    costs F to evaluate, a gradient costs:

    | `remat=` | kept for the backward pass | FLOPs |
    |---|---|---|
    | `False`, `"save_all"` | N·(C + I) | 3·N·F |
    | `True`, `"full"` | N·C, and I for one layer at a time | 4·N·F |
    | `"offload"` | N·C on the host, and I | 4·N·F |
    | `save_carries="disk"` | N·C in a file, and I | 4·N·F |
    | `save_block_internals=[names]` | N·(C + named values), and I | less than 4·N·F |
    | `"nested"` | about √(2N)·C, and I | just under 5·N·F |
    | `"recompute"` | nothing until the backward pass begins, then N·C and I | 5·N·F |
    | any, for layers of several kinds | as above, with the widest I | with the mean F |

    C is of the leaves that replays and derivatives read. Others, an output buffer that
    steps only write to or a sum that they add to, are kept once.

    Policies are frozen, hashable and compare by value. Contradictory settings are
    refused when one is built.

    Attributes:
        save_carries: `True` keeps the carry that goes into each layer. `"offload"`
            moves it to the host until the backward pass. `"disk"` writes it to a file,
            from which the backward pass reads each one ahead: for programs on one CPU
            or GPU that are compiled and run in this process. `False` keeps none: the
            backward pass first replays the stack, from its input and the internals that
            were saved.
        save_block_internals: names given by `checkpoint_name` inside the block that are
            kept, or places of operations (`"dot_general 2/7"`, the second of the
            layer's seven matrix products), or `True` for everything that the backward
            pass reads: no checkpointing at all. With `nested`, they are kept for the
            segment being reversed. One of `jax.checkpoint_policies` (`dots_saveable`,
            ...), or any function of that kind, chooses by operation; `JAX_REMAT3=1`
            takes only those that go by names.
        offload_block_internals: names that are moved to the host instead. For GPUs and
            TPUs none may be given inside a `lax.scan` of the layer.
        nested: cut the layers into segments, keep the carry at the start of each, and
            replay one segment at a time (Chen et al. 2016, "Training deep nets with
            sublinear memory cost"). `True` cuts into segments that each have a layer
            less than the one before, which needs the fewest carries for one replay,
            √(2N); or, where the boundaries are offloaded, into √N of one length. Where
            the internals of a layer take at most C/2, a gradient of layers of one kind
            under `nested=True` alone keeps those of the segment being reversed, which
            is of such a length that the memory is about the same, and the FLOPs are
            4·N·F. `k` cuts into k segments of one length, at most one
            a layer.
        max_carries: keep at most so many carries alive instead, with the least
            recomputation that allows it (Griewank and Walther 2000, "Algorithm 799:
            revolve"). Where the carries of `nested` segments are on the host or on
            disk, it is given beside `nested`: so many of a segment are on the device
            while it is reversed. Of segments with fewer layers it changes nothing.
        first_layers: how many layers, from the one that runs first, keep their
            internals; the rest follow the other settings, which then cut, offload or
            keep carries. It uses the memory that the rest leaves free: with
            `nested=True, first_layers=k` the carries cost about (k + √(2(N - k)))·C,
            the internals k·I, and the FLOPs are 2·k·F fewer.
        carries_folder: the folder whose disk has the carries of `"disk"`, by default
            that of the environment variable `STACKED_REMAT_CARRIES_FOLDER`, read when a
            program is traced. Files there have no names, and end with the process.

    Raises:
        ValueError: for contradictory settings, with the reason.
        TypeError: for a value of a wrong type, with what was expected.
    """

    save_carries: bool | Literal["offload", "disk"] = True
    save_block_internals: SavedInternals = False
    offload_block_internals: Names = ()
    nested: bool | int = False
    max_carries: int | None = None
    first_layers: int = 0
    carries_folder: str | None = None

    def __post_init__(self):
        self.check_haliax_fields()
        if not isinstance(self.save_carries, bool) and not self._moves_carries:
            raise TypeError(
                'save_carries is True, False, "offload" or "disk"; got'
                f" {self.save_carries!r}."
            )
        if self.carries_folder is not None and self.save_carries != DISK:
            raise ValueError(
                f"carries_folder={self.carries_folder!r} has no effect beside"
                f' save_carries={self.save_carries!r}. Write save_carries="disk".'
            )
        kept = Kept.of(
            self.save_block_internals, self.offload_block_internals, "_block_internals"
        )
        first_layers = whole_number(
            "first_layers", self.first_layers, "a number of layers", least=0
        )
        checked: dict[str, Any] = {
            "save_block_internals": kept.internals,
            "offload_block_internals": kept.offloaded,
            "first_layers": first_layers,
        }
        if self.carries_folder is not None:
            checked["carries_folder"] = _checked_folder(self.carries_folder)
        for name, cut in CUTS.items():
            if self._is_set(name):
                checked[name] = cut.checked(getattr(self, name))
        # As they are compared: names as a sorted tuple, numbers of NumPy as Python's
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        written = {}
        for name, value in self._all_settings():
            written[name] = f"{name}={as_written(value)}"
        for one, other, reason in self._contradictions():
            if one in written and other in written:
                raise ValueError(
                    f"{written[one]} and {written[other]} contradict each other:"
                    f" {reason}"
                )
        if self.disable:
            object.__setattr__(self, "save_block_internals", True)

    def _contradictions(self) -> Iterator[tuple[str, str, str]]:
        """Two settings that can't be made both: why, and what to write instead."""
        yield from _haliax_names.contradictions(self)
        # A pair contradicts where both fields differ from their defaults.
        if not self._moves_carries:
            for one, other in itertools.combinations(CUTS, 2):
                reason = "each says how the layers are cut. Keep one."
                yield one, other, reason
        elif not self.nested:
            reason = (
                "without nested=k all carries are off the device. Give the number of"
                " segments whose first carries are there."
            )
            yield "max_carries", "save_carries", reason
        if self.save_carries is False:
            reason = 'to start from the stack\'s input alone use "recompute".'
            for name in (*CUTS, "first_layers"):
                yield name, "save_carries", reason
        for name in CUTS:
            reason = (
                "a segment's internals live while it is reversed. Save them, or offload"
                " the carries."
            )
            yield name, "offload_block_internals", reason
        # Those that follow contradict each other only where layers are not cut.
        if self.has_cut:
            return
        for name in ("save_block_internals", "offload_block_internals"):
            yield (
                "first_layers",
                name,
                f"the others keep carries, unless they are cut ({', '.join(CUTS)}).",
            )
        # (Haliax writes save_carries=False here; carries that no derivative reads are
        # not kept.)
        if self.save_carries == DISK:
            reason = "on disk are the carries of layers that save nothing else"
            for name in ("save_block_internals", "offload_block_internals"):
                yield name, "save_carries", f"{reason}, or are cut (nested=k)."
        elif self.saves_everything and self.save_carries == OFFLOAD:
            yield (
                "save_block_internals",
                "save_carries",
                "all is on the device. Name what to keep instead.",
            )

    def settings(self) -> list[tuple[str, Any]]:
        """Fields that differ from their defaults, in order; none of Haliax's own."""
        settings = self._all_settings()
        return [entry for entry in settings if entry[0] not in _haliax_names.NAMES]

    def _all_settings(self) -> list[tuple[str, Any]]:
        settings = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not field.default and value != ():
                settings.append((field.name, value))
        return settings

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ScanCheckpointPolicy)
            and self._identity == other._identity
        )

    def __hash__(self) -> int:
        return hash(self._identity)

    @functools.cached_property
    def _identity(self) -> tuple[Any, ...]:
        """The settings with their types, since `nested=True` is not `nested=1` though
        `True == 1`.
        """
        settings = self.settings()
        return tuple((name, type(value), value) for name, value in settings)

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{name}={as_written(value)}" for name, value in self.settings()
        )
        return f"ScanCheckpointPolicy({shown})"

    def __pdoc__(self, **_: Any) -> wadler_lindig.AbstractDoc:
        """How a printed module shows it in a field: `remat=True`."""
        return wadler_lindig.TextDoc(shortest_name(self))

    @staticmethod
    def from_bool_or_str(remat_policy: "ScanCheckpointSpec") -> "ScanCheckpointPolicy":
        """The policy that `remat=` makes of an alias, by Haliax's name."""
        return resolve_policy(remat_policy)

    _mk = from_bool_or_str  # Levanter's name for it too

    @property
    def places(self) -> tuple[str, ...]:
        """The names that are places of operations, as `"dot_general 2/7"`."""
        return tuple(filter(is_place, self._names))

    def without_places(self) -> Self:
        """The policy without its places, for other layers than those that it was
        written for.
        """
        kept = {}
        for field in ("save_block_internals", "offload_block_internals"):
            names = getattr(self, field)
            if isinstance(names, tuple):
                kept[field] = [name for name in names if not is_place(name)]
        return dataclasses.replace(self, **kept)

    @property
    def _names(self) -> tuple[str, ...]:
        """The names of values that are kept or moved to the host."""
        saved = self.save_block_internals
        names = saved if isinstance(saved, tuple) else ()
        return *names, *self.offload_block_internals

    @property
    def has_cut(self) -> bool:
        """Whether the layers are cut into segments that are replayed one at a time."""
        return any(map(self._is_set, CUTS))

    def _is_set(self, name: str) -> bool:
        """Whether a field that cuts the layers has another value than its default."""
        return getattr(self, name) is not getattr(ScanCheckpointPolicy, name)

    @property
    def offloads(self) -> bool:
        return self.save_carries == OFFLOAD or bool(self.offload_block_internals)

    @property
    def _moves_carries(self) -> bool:
        """Whether carries are kept elsewhere than on the device."""
        return self.save_carries in (OFFLOAD, DISK)

    @property
    def saves_everything(self) -> bool:
        """Whether nothing inside a layer is recomputed."""
        return self.save_block_internals is True

    def for_layers(self, length: int) -> Remat:
        """What a scan over so many layers executes."""
        # A schedule is computed from the number, in Python. A plain scan takes a
        # symbolic one too (`jax.export`).
        is_on_disk = self.save_carries == DISK
        is_cut = self.has_cut or self.first_layers > 0 or is_on_disk
        if is_cut and not isinstance(length, SupportsIndex):
            raise ValueError(
                f"{self!r} cuts the layers into segments, and their number is symbolic"
                f" ({length}). Export with a length that is known, or use remat=True or"
                ' "offload".'
            )
        if self.first_layers >= max(length, 1):
            # All layers are first ones: nothing is left to cut.
            return Remat(length, EVERYTHING)
        internals: Any = self.save_block_internals
        kept = Kept(internals, tuple(self.offload_block_internals))
        carries = _CARRIES[self.save_carries]
        # A single layer has no carries between layers, so it is checkpointed as it is
        if is_cut and length > 1:
            schedule = self.schedule(length - self.first_layers)
            schedule = dataclasses.replace(schedule, offset=self.first_layers)
            folder = self.disk_folder() if is_on_disk else ""
            return Remat(
                length,
                kept,
                carries,
                schedule,
                self.first_layers,
                may_keep_internals=self == ALIASES["nested"],
                folder=folder,
            )
        if is_on_disk:
            carries = "device"  # there are none
        # With all internals kept the layers need not run again, whatever `save_carries`
        # says.
        return Remat(length, kept, "device" if kept == EVERYTHING else carries)

    def disk_folder(self) -> str:
        """The folder for carries on disk.

        Raises:
            ValueError: neither this policy nor the environment names one.
        """
        folder = self.carries_folder or os.environ.get(FOLDER_VARIABLE)
        if not folder:
            raise ValueError(
                'save_carries="disk" needs a folder, on a disk with room for the carry'
                " of each layer. Give one as carries_folder, or set"
                f" {FOLDER_VARIABLE}."
            )
        return os.path.abspath(os.path.expanduser(folder))

    def schedule(self, length: int) -> Schedule:
        """How `length` layers are cut, which also tells the carries alive and the
        evaluations; where small internals are kept too (`nested`), they are fewer.

        A policy that is not nested keeps the carry of each layer. One with
        `first_layers` cuts those after them, so `length` is their number.

        Raises:
            ValueError: `length` is not positive.
            TypeError: `length` is no integer.
        """
        length = whole_number("length", length, "the number of layers")
        if self._moves_carries:
            return _off_device(self.nested, self.max_carries, length)
        for name in filter(self._is_set, CUTS):  # at most one
            return CUTS[name].schedule(getattr(self, name), length)
        return equal(length, length)


Alias: TypeAlias = Literal["full", "recompute", "offload", "save_all", "nested"]
if TYPE_CHECKING:
    ScanCheckpointSpec: TypeAlias = (
        ScanCheckpointPolicy | HaliaxPolicy | bool | Alias | JaxPolicy
    )
else:
    ScanCheckpointSpec = ScanCheckpointPolicy | bool | Alias  # for draccus, as above


def resolve_policy(spec: ScanCheckpointSpec) -> ScanCheckpointPolicy:
    if isinstance(spec, HaliaxPolicy):
        spec = ScanCheckpointPolicy(**_haliax_names.settings_of(spec))
    if isinstance(spec, ScanCheckpointPolicy):
        # It set another field, which may be replaced from now on.
        return dataclasses.replace(spec, disable=False) if spec.disable else spec
    # A class is callable too, but no policy
    if callable(spec) and not isinstance(spec, type):
        return ScanCheckpointPolicy(save_block_internals=spec)
    if isinstance(spec, Tracer):
        raise TypeError(
            "remat is traced, and must be known where the program is compiled: close"
            " over it, or pass it to jax.jit as a static argument."
        )
    if not isinstance(spec, bool | str):
        raise TypeError(
            "remat is a ScanCheckpointPolicy of stacked_remat, a bool, an alias or one"
            f" of jax.checkpoint_policies; got {shown(spec)}. For names write"
            " ScanCheckpointPolicy(save_block_internals=[...]), for a number of"
            " segments nested=k."
        )
    if spec not in ALIASES:
        names = [alias for alias in ALIASES if isinstance(alias, str)]
        hint = did_you_mean(str(spec), names)
        if spec == DISK:
            hint = ' Write ScanCheckpointPolicy(save_carries="disk").'
        raise ValueError(
            f"Unknown remat policy {spec!r}.{hint} Use one of"
            f" {', '.join(map(repr, ALIASES))}, a ScanCheckpointPolicy, or one of"
            " jax.checkpoint_policies."
        )
    return ALIASES[spec]


# What `remat` may be instead of a policy. `layers_axis` knows these names too, since an
# alias may be passed by mistake where the axis is expected.
ALIASES: dict[bool | str, ScanCheckpointPolicy] = {
    True: ScanCheckpointPolicy(),
    False: ScanCheckpointPolicy(save_block_internals=True),
    "full": ScanCheckpointPolicy(),
    "recompute": ScanCheckpointPolicy(save_carries=False),
    "offload": ScanCheckpointPolicy(save_carries=OFFLOAD),
    "save_all": ScanCheckpointPolicy(save_block_internals=True),
    "nested": ScanCheckpointPolicy(nested=True),
}


def alias_of(policy: ScanCheckpointPolicy) -> bool | str | None:
    """The alias of a policy, `True` or `"nested"`; None if it has none."""
    # Of several the first listed, which is a bool where there is one
    for alias, meaning in ALIASES.items():
        if meaning == policy:
            return alias
    return None


def shortest_name(policy: ScanCheckpointPolicy) -> str:
    """The alias of a policy, as it is written (`True`, `'nested'`), or its `repr`."""
    alias = alias_of(policy)
    return repr(policy if alias is None else alias)


def recomputes_nothing(spec: ScanCheckpointSpec) -> bool:
    """Whether a backward pass under a policy runs no layer again."""
    policy = resolve_policy(spec)
    return policy.saves_everything and not policy.has_cut
