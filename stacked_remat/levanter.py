"""`ArrayStacked`: Levanter's container of layers, over the sweeps of this library.

Levanter's newest stack is of plain arrays, and has a signature of its own: a number of
layers in place of an axis, arguments that all layers share unless `in_axes` says
otherwise, and state dicts that hold more than arrays. This class has that signature and
the same fields, so a model of Levanter changes one import:

    from stacked_remat.levanter import ArrayStacked

Each call divides the block's arrays and the arguments into what is split over the
layers and what is shared, and hands both to `fold` or `scan`.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax.state_dict import StateDict, with_prefix
from jax.core import Tracer

from ._haliax_names import settings_of
from ._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ._scan.api import fold, scan
from ._scan.marks import changed, per_layer, shared
from ._stacked import Stacked
from ._static import PyTree

M = TypeVar("M", bound=eqx.Module)
T = TypeVar("T")  # a carry
Y = TypeVar("Y")  # an output

# For positional arguments: one axis for all, or one for each.
_Axes: TypeAlias = int | None | tuple[int | None, ...]
InAxes: TypeAlias = _Axes | tuple[_Axes, dict[str, int | None]]
"""Along which axis arguments are split: `None` gives them whole to all layers. A pair
with a dict has the axes of keyword arguments too.
"""


def _policy(spec: Any) -> ScanCheckpointPolicy:
    """A policy of this library, of an alias, or of a policy object of Levanter's."""
    # Levanter's class has the fields of Haliax's, and may not be installed.
    if hasattr(spec, "simple") and not isinstance(spec, ScanCheckpointPolicy):
        return resolve_policy(ScanCheckpointPolicy(**settings_of(spec)))
    return resolve_policy(spec)


class ArrayStacked(eqx.Module, Generic[M]):
    """Layers of plain arrays as one module whose arrays have the layers in front.

    ```python
    init = ArrayStacked.init(48, Block, gradient_checkpointing="nested")
    blocks = init(config, key=keys)
    y = blocks.fold(x, mask, key=keys, in_axes=(None, {"key": 0}))
    ```

    Called as Levanter's class of this name. Arrays of the block whose first dimension
    is not `num_layers` are shared by all layers, as everything that is no array is.

    Attributes:
        stacked: the block.
        num_layers: how many layers there are.
        gradient_checkpointing: the checkpoint policy; `False` by default. An alias or a
            policy of Levanter's becomes one of this library.

    Raises:
        ValueError: `num_layers` is below 1.
    """

    stacked: M
    num_layers: int = eqx.field(static=True)
    gradient_checkpointing: ScanCheckpointPolicy = eqx.field(
        static=True, converter=_policy, default=False
    )

    def __check_init__(self):
        _check_count(self.num_layers)

    @classmethod
    def init(
        cls,
        num_layers: int,
        module: type[M],
        *,
        gradient_checkpointing: ScanCheckpointSpec = False,
    ) -> "Callable[..., ArrayStacked[M]]":
        """Build the layers, under one `vmap`.

        Args:
            num_layers: how many.
            module: the class of the blocks, with a static `init` or a constructor.
            gradient_checkpointing: the checkpoint policy.

        Returns:
            A function of the block's arguments. Arrays whose first dimension is
            `num_layers` are split over the layers, keys among them; the rest is shared.
        """
        _check_count(num_layers)
        build = getattr(module, "init", module)

        def build_layers(*args: PyTree, **kwargs: PyTree) -> "ArrayStacked[M]":
            of_layers, of_all = _divided((args, kwargs), num_layers)

            def build_layer(of_layer: PyTree) -> M:
                args, kwargs = eqx.combine(of_layer, of_all)
                return build(*args, **kwargs)

            of_layers = jax.tree.map(jnp.asarray, of_layers)
            built = eqx.filter_vmap(build_layer, axis_size=num_layers)(of_layers)
            return cls(built, num_layers, gradient_checkpointing)

        return build_layers

    def fold(
        self,
        init: T,
        /,
        *args: PyTree,
        unroll: int | bool | None = None,
        in_axes: InAxes = None,
        **kwargs: PyTree,
    ) -> T:
        """Apply the layers one after the other: `carry = layer(carry, *args,
        **kwargs)`.

        Args:
            init: the carry that goes into the first layer.
            *args: passed on to the layers, whole where `in_axes` doesn't split them.
            unroll: how many layers one iteration runs; `True` for all.
            in_axes: along which axes arguments are split over the layers.
            **kwargs: as `*args`.

        Raises:
            ValueError, TypeError: `in_axes` does not fit the arguments.
        """
        run = self.fold_via(operator.call, unroll=unroll, in_axes=in_axes)
        return run(init, *args, **kwargs)

    def scan(
        self,
        init: T,
        /,
        *args: PyTree,
        unroll: int | bool | None = None,
        in_axes: InAxes = None,
        **kwargs: PyTree,
    ) -> tuple[T, PyTree]:
        """As `fold`, for layers that return `(carry, output)`; stacks the outputs."""
        call: Callable[..., Any] = operator.call
        run = self.scan_via(call, unroll=unroll, in_axes=in_axes)
        return run(init, *args, **kwargs)

    def fold_via(
        self,
        fn: Callable[..., T],
        *,
        unroll: int | bool | None = None,
        in_axes: InAxes = None,
    ) -> Callable[..., T]:
        """Fold with `fn(layer, carry, *args, **kwargs)` in place of `layer(...)`."""
        return self._loop(fold, fn, unroll, in_axes)

    def scan_via(
        self,
        fn: Callable[..., tuple[T, Y]],
        *,
        unroll: int | bool | None = None,
        in_axes: InAxes = None,
    ) -> Callable[..., tuple[T, Y]]:
        """Scan with `fn(layer, carry, *args, **kwargs) -> (carry, output)`."""
        return self._loop(scan, fn, unroll, in_axes)

    def vmap_via(
        self,
        fn: Callable[..., Y],
        *,
        in_axes: InAxes = None,
        out_axes: int | None = 0,
    ) -> Callable[..., Y]:
        """Apply `fn(layer, *args, **kwargs)` to all layers at once.

        The layers' axis of the outputs is `out_axes`; None for outputs that are the
        same in all layers.
        """
        if not (out_axes is None or isinstance(out_axes, int)):
            raise TypeError(f"out_axes is an integer or None; got {out_axes!r}.")

        def run(*args: PyTree, **kwargs: PyTree) -> Y:
            of_layers, of_all = self._divided(args, kwargs, in_axes)

            def of_one(of_layer: PyTree) -> Y:
                layer, args, kwargs = eqx.combine(of_layer, of_all)
                return fn(layer, *args, **kwargs)

            axes = None if out_axes is None else eqx.if_array(out_axes)
            mapped = eqx.filter_vmap(
                of_one, in_axes=0, out_axes=axes, axis_size=self.num_layers
            )
            return mapped(of_layers)

        return run

    def get_layer(self, index: Any) -> M:
        """One layer, by an integer that may be traced; negative ones count from the
        end.
        """
        if not isinstance(index, Tracer):
            index = range(self.num_layers)[index]
        of_layers, of_all = _divided(self.stacked, self.num_layers)
        return eqx.combine(jax.tree.map(lambda leaf: leaf[index], of_layers), of_all)

    def unstacked(self) -> Sequence[M]:
        """The layers as separate modules, in order."""
        return tuple(map(self.get_layer, range(self.num_layers)))

    def as_stacked(self) -> Stacked[M]:
        """These layers as a `Stacked`, for what Levanter's class has not: slices,
        visitors, fused updates.
        """
        return Stacked.of(
            self.stacked, self.num_layers, remat=self.gradient_checkpointing
        )

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        """Arrays under `prefix.0.key`, `prefix.1.key`, …; what is no array under
        `prefix.key`, once.
        """
        start = "" if prefix is None else f"{prefix}."
        entries: StateDict = {}
        for key, value in _written(self.stacked, prefix).items():
            if not _is_array(value):
                entries[key] = value
                continue
            for index, of_layer in enumerate(value):
                entries[f"{start}{index}.{key.removeprefix(start)}"] = of_layer
        return entries

    def from_state_dict(self, state_dict: StateDict, prefix: str | None = None) -> Self:
        """These layers with what `to_state_dict` wrote; the arrays here may be
        `jax.ShapeDtypeStruct`s.

        Raises:
            ValueError: entries of a layer are missing.
        """
        start = "" if prefix is None else f"{prefix}."
        entries: StateDict = {}
        of_layers: dict[str, dict[int, Any]] = {}
        for key, value in state_dict.items():
            number, dot, rest = key.removeprefix(start).partition(".")
            if key.startswith(start) and dot and number.isdigit():
                of_layers.setdefault(start + rest, {})[int(number)] = value
            else:
                entries[key] = value
        for key, values in of_layers.items():
            missing = {*range(self.num_layers)} - {*values}
            if missing:
                raise ValueError(
                    f"The state dict has {key.removeprefix(start)!r} of"
                    f" {len(values)} layers at prefix {prefix!r}, and none of layer"
                    f" {min(missing)}. The stack has {self.num_layers} layers."
                )
            entries[key] = jnp.stack([values[i] for i in range(self.num_layers)])
        return changed(self, stacked=_read(self.stacked, entries, prefix))

    def _loop(
        self,
        verb: Callable[..., Any],
        fn: Callable[..., Any],
        unroll: int | bool | None,
        in_axes: InAxes,
    ) -> Callable[..., Any]:
        # None and False are one layer at a time, True all of them.
        if unroll is not None and not isinstance(unroll, bool) and unroll < 1:
            raise ValueError(f"unroll is at least 1; got {unroll}.")

        def run(init: PyTree, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
            def step(carry: PyTree, of_layer: PyTree, of_all: PyTree) -> PyTree:
                layer, args, kwargs = eqx.combine(of_layer, of_all)
                return fn(layer, carry, *args, **kwargs)

            of_layers, of_all = self._divided(args, kwargs, in_axes)
            loop = verb(
                step,
                self.num_layers,
                remat=self.gradient_checkpointing,
                unroll=unroll or 1,
            )
            return loop(init, per_layer(of_layers), shared(of_all))

        return run

    def _divided(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], in_axes: InAxes
    ) -> tuple[PyTree, PyTree]:
        """The block and the arguments: what is split over the layers, which are in
        front, and what all of them share, with None in place of the other.
        """
        of_args, of_kwargs = _axes_of_arguments(in_axes, args, kwargs)
        moved = []
        for number, (value, axis) in enumerate(zip(args, of_args, strict=True)):
            moved.append(_layers_first(value, axis, self.num_layers, f"args[{number}]"))
        named = {}
        for name, value in kwargs.items():
            named[name] = _layers_first(value, of_kwargs[name], self.num_layers, name)
        is_split = (
            jax.tree.map(
                lambda leaf: _is_of_layers(leaf, self.num_layers), self.stacked
            ),
            tuple(axis is not None for axis in of_args),
            {name: axis is not None for name, axis in of_kwargs.items()},
        )
        return eqx.partition((self.stacked, tuple(moved), named), is_split)


def _check_count(num_layers: int) -> None:
    if num_layers < 1:
        raise ValueError(f"num_layers is at least 1; got {num_layers}.")


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _is_of_layers(leaf: Any, num_layers: int) -> bool:
    return _is_array(leaf) and leaf.ndim > 0 and leaf.shape[0] == num_layers


def _divided(tree: PyTree, num_layers: int) -> tuple[PyTree, PyTree]:
    """The arrays with the layers in front, and the rest."""
    return eqx.partition(tree, lambda leaf: _is_of_layers(leaf, num_layers))


def _axes_of_arguments(
    in_axes: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[tuple[int | None, ...], dict[str, int | None]]:
    """The axis of each positional argument, and of each by name."""
    of_args = in_axes
    of_kwargs = dict.fromkeys(kwargs)
    if isinstance(in_axes, tuple) and len(in_axes) == 2:
        # A pair of axes is of two arguments; one with a dict names those by keyword.
        if isinstance(in_axes[1], dict):
            of_args, of_kwargs = in_axes
    if not isinstance(of_args, tuple):
        of_args = (of_args,) * len(args)
    if len(of_args) != len(args):
        raise ValueError(
            f"in_axes has {len(of_args)} axes for {len(args)} positional arguments."
            " Write one for each, or one for all."
        )
    if {*of_kwargs} != {*kwargs}:
        raise ValueError(
            f"in_axes names the keyword arguments {sorted(of_kwargs)}, and the call has"
            f" {sorted(kwargs)}. Name all of them; None shares one."
        )
    return of_args, of_kwargs


def _layers_first(value: Any, axis: Any, num_layers: int, name: str) -> Any:
    """An argument with the axis that is split in front; unchanged where none is."""
    if axis is None:
        return value
    if not isinstance(axis, int) or not _is_array(value):
        raise TypeError(
            f"in_axes={axis!r} of {name} splits one array along an integer axis; got"
            f" {type(value).__name__}. None shares it."
        )
    if not -value.ndim <= axis < value.ndim or value.shape[axis] != num_layers:
        raise ValueError(
            f"in_axes={axis} splits {name} over {num_layers} layers, and its shape is"
            f" {value.shape}. None shares it."
        )
    return jnp.moveaxis(value, axis, 0)


def _parts(tree: Any) -> list[tuple[str | None, Any]] | None:
    """The parts of a node by their names in a state dict; None for a leaf.

    A module may rename fields by `_state_dict_key_map`; None is a part without a name
    of its own.
    """
    if isinstance(tree, eqx.Module):
        renamed = getattr(tree, "_state_dict_key_map", dict)()
        names = [field.name for field in _fields(tree)]
        return [(renamed.get(name, name), getattr(tree, name)) for name in names]
    if isinstance(tree, dict):
        return [(str(key), value) for key, value in tree.items()]
    if isinstance(tree, list | tuple):
        return [(str(index), value) for index, value in enumerate(tree)]
    return None


def _fields(module: Any) -> list[dataclasses.Field]:
    fields = dataclasses.fields(module)
    return [field for field in fields if not field.metadata.get("static", False)]


def _written(tree: Any, prefix: str | None) -> StateDict:
    """The entries of a tree; a node with `to_state_dict` writes its own."""
    if tree is None:
        return {}
    if hasattr(tree, "to_state_dict"):
        return tree.to_state_dict(prefix)
    parts = _parts(tree)
    if parts is None:
        return {_key(prefix): tree}
    entries: StateDict = {}
    for name, part in parts:
        entries |= _written(part, with_prefix(prefix, name))
    return entries


def _read(tree: Any, entries: StateDict, prefix: str | None) -> Any:
    """The tree with its leaves read from entries; what is no array may lack one."""
    if tree is None:
        return None
    if hasattr(tree, "from_state_dict"):
        return tree.from_state_dict(entries, prefix)
    parts = _parts(tree)
    if parts is None:
        if _is_array(tree):
            return jnp.asarray(entries[_key(prefix)])
        return entries.get(_key(prefix), tree)
    values = [_read(part, entries, with_prefix(prefix, name)) for name, part in parts]
    if isinstance(tree, eqx.Module):
        names = [field.name for field in _fields(tree)]
        return changed(tree, **dict(zip(names, values, strict=True)))
    if isinstance(tree, dict):
        return dict(zip(tree, values, strict=True))
    return type(tree)(values)


def _key(prefix: str | None) -> str:
    if prefix is None:
        raise ValueError("An entry of a state dict takes a prefix. Give one.")
    return prefix
