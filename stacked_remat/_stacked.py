"""`Stacked`: one copy of a block whose arrays have a leading `Layers` axis.

A stack of layers of one kind is a single module with the layers' arrays stacked, so that applying it is a
scan: the block is traced and compiled once, however deep the stack. What a scan does is in `_scan/`.
"""

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, Unpack, overload

import equinox as eqx
import haliax.nn
import jax.tree_util as jtu
from equinox.nn import State
from haliax import Axis
from haliax.state_dict import (
    StateDict,
    flatten_modules_for_export,
    unflatten_modules_from_export,
)
from jax.core import Tracer

from ._block_foldable import B, BlockFoldable, M
from ._placement import has_host_arrays, on_device, on_several_devices
from ._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ._scan.api import scan_for, vmap_layers
from ._scan.arguments import Caller, argument_namer, check_stacked, warn_of_ambiguous
from ._scan.checks import axis_or_name, layers_axis
from ._scan.layer_axis import layer_getter, split_tree
from ._scan.layer_state import arrays_in_indices, check_no_state, marked_alike, part_of
from ._scan.marks import Marked, changed, is_array, map_unsliced
from ._scan.stacking import number_of_layers, numbers_to_arrays, stack_layers, take_layers, with_axis
from ._scan.sweep_back import SweepBack
from ._scan.vjp import vjp_for
from ._stacked_methods import (
    AnyLayers,
    BuiltByInit,
    InitOf,
    P,
    PolicyOptions,
    block_call,
    block_second,
    check_layer_index,
    check_modules,
    check_options,
    layers_builder,
    method_caller,
    owner_of,
)
from ._state_dict import layers_from_state_dict, stack_as
from ._sweep.store import at_least_one

S = TypeVar("S")


if TYPE_CHECKING:

    class _InitOfBlocks(Protocol):
        @overload
        def __call__(
            self, Layers: Axis | int, Block: BuiltByInit[P, B], **options: Unpack[PolicyOptions]
        ) -> "Callable[P, Stacked[B]]": ...

        @overload
        def __call__(
            self, Layers: Axis | int, Block: Callable[P, B], **options: Unpack[PolicyOptions]
        ) -> "Callable[P, Stacked[B]]": ...

    class _Init:
        @overload
        def __get__(self, stack: object, cls: "type[Stacked[AnyLayers]]") -> _InitOfBlocks: ...

        @overload
        def __get__(self, stack: object, cls: type[S]) -> InitOf[S]: ...

        def __get__(self, stack: object, cls: Any) -> Any: ...


class Stacked(BlockFoldable[M]):
    """Layers of one kind, applied one after the other (`fold`, `scan`) or in parallel (`vmap`).

    ```python
    Layers = hax.Axis("layers", 48)
    blocks = Stacked.init(Layers, Block, remat="nested")(config, key=jax.random.split(key, Layers.size))
    y = blocks.fold(x)
    ```

    All layers have the same structure, shapes and Python control flow. Blocks with named axes and blocks of
    plain arrays both work. For layers of several kinds use `StackedPattern`, for others `BlockSeq`.

    Indexing, slicing and iterating copy the arrays of the layers that they take.

    Attributes:
        stacked: the block, its named arrays with the axis `Layers` in front, its plain arrays with it as
            first dimension.
        Layers: the axis of the layers, or their number.
        remat: the checkpoint policy of `fold` and `scan`, unless the call gives another.

    Raises:
        TypeError: for what is no axis, and for a block that is not an `eqx.Module`.
        ValueError: where the block's arrays do not have the layers in front.
    """

    stacked: M
    Layers: Axis = eqx.field(static=True, converter=layers_axis)
    remat: ScanCheckpointPolicy = eqx.field(
        static=True, converter=resolve_policy, default=ScanCheckpointPolicy()
    )

    def __check_init__(self):
        what = type(self).__name__
        if not isinstance(self.stacked, eqx.Module):
            raise TypeError(
                f"{what} holds a module whose arrays are stacked; got {self.stacked!r} "
                f"({type(self.stacked).__name__}). Let the block be an eqx.Module, and build the stack by "
                f"{what}.init(Layers, Block)(...)."
            )
        check_stacked(self.stacked, self.Layers, Caller(what, _name_in_stack))

    if TYPE_CHECKING:
        init = _Init()
    else:

        @classmethod
        def init(
            cls,
            Layers: Axis | int,
            Block: Any,
            *,
            remat: ScanCheckpointSpec | None = None,
            gradient_checkpointing: ScanCheckpointSpec | None = None,
        ) -> Callable[..., Self]:
            """Build the layers, all at once.

            Args:
                Layers: the axis to stack along; a number is an axis of this size named `layers`.
                Block: a module class, with a static `init` (Haliax style) or a constructor (Equinox style),
                    or any function that returns a module.
                remat: the checkpoint policy; `True` by default. See `ScanCheckpointPolicy`.
                gradient_checkpointing: another name for `remat`.

            Returns:
                A function of the block's arguments, which returns a stack of this class. Named arrays with
                the axis and plain arrays of at least one dimension are split over the layers, keys among
                them; the rest is shared. `shared` and `per_layer` choose for one argument.

            Raises:
                ValueError: for an argument of another length than the axis, and for a key that was neither
                    split nor marked as shared; for a list with a Python value for each layer that is not
                    marked.
                TypeError: for what is no axis or number, for a block instead of its class, and for a block
                    that is no module.
            """
            return layers_builder(cls, _all_at_once, Layers, Block, remat, gradient_checkpointing)

    @classmethod
    def of(
        cls,
        layers: Sequence[B] | B,
        Layers: Axis | int | str = "layers",
        *,
        remat: ScanCheckpointSpec = True,
    ) -> "Stacked[B]":
        """Stack layers that exist; the inverse of `unstacked`.

        ```python
        blocks = Stacked.of([Block(key) for key in keys], remat="nested")
        blocks = Stacked.of(eqx.filter_vmap(Block)(keys))  # stacked already
        ```

        Args:
            layers: modules of one structure, in order, at least one; or one module whose arrays all have a
                first dimension for the layers.
            Layers: their axis, its name, or their number.
            remat: the checkpoint policy. See `ScanCheckpointPolicy`.

        Returns:
            A stack of this class, with copies of the arrays of a list. Python numbers that are equal in all
            layers stay as they are. Those that differ become an array with a number for each layer, so a
            block can compute with them and not decide by them (`if self.rate > 0`).

        Raises:
            ValueError: for another number of layers than the axis has; for layers that differ in the shape,
                axes or dtype of an array, in their structure, in a bool, a string or a function, or in a
                static field: names the path and both values.
            TypeError: for anything but a sequence of modules, or one.
        """
        what = f"{cls.__name__}.of"
        Layers = axis_or_name(Layers, what)
        is_stacked = isinstance(layers, eqx.Module)
        if not is_stacked:
            check_modules(layers, what)
        size = number_of_layers(layers) if is_stacked else len(layers)
        if not size:
            raise ValueError(
                f"{what} takes at least one layer; got none. Build the stack by {cls.__name__}.init."
            )
        axis = Axis(Layers, size) if isinstance(Layers, str) else Layers
        if size != axis.size:
            raise ValueError(f"`{axis.name}` has {axis.size} layers, but {what} was given {size}.")
        build: Any = cls
        if is_stacked:
            stacked = arrays_in_indices(with_axis(layers, axis), (size,))
        else:
            stacked = stack_layers(marked_alike(layers), axis, what)
        return build(stacked, axis, resolve_policy(remat))

    def _own_part(self, state: State, what: str) -> State:
        return part_of(state, self.stacked, self.Layers, what)

    def _kinds(self) -> tuple[M]:
        return (self.stacked,)

    def _block_call(self) -> Callable[..., Any]:
        return block_call(self.stacked)

    def _scan_via(
        self,
        verb: str,
        fn: Callable[..., Any],
        remat: ScanCheckpointSpec,
        unroll: int | bool,
        reverse: bool,
    ) -> Callable[..., tuple[Any, Any]]:
        caller = method_caller(self, verb, fn, skip=2, first=("stacked",))
        step = block_second(fn, caller.what, has_output=verb == "scan")
        run = scan_for(
            caller, step, self.Layers, remat=remat, unroll=unroll, reverse=reverse, owner=owner_of(fn)
        )

        def scanned(init: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            warn_of_ambiguous(init, args, kwargs, self.Layers, method_caller(self, verb, fn, skip=2))
            return run(init, applied(self.stacked), *args, **kwargs)

        return scanned

    def fold_vjp(
        self,
        init: Any,
        /,
        *args: Any,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Any, SweepBack]:
        """As `fold`; also returns a function that sweeps back over the layers: a `SweepBack`.

        ```python
        y, sweep_back = blocks.fold_vjp(x)
        result = sweep_back(y_cotangent)                      # result.layers: the gradients of the blocks
        result = sweep_back(y_cotangent, visitor, state)      # calls visitor(visit, state) for every layer
        ```

        Arguments as in `fold`. See `SweepBack` for what it takes and returns, and `stacked_remat.fold_vjp`
        for the policies that it supports.
        """
        check_options(self._kinds(), "fold_vjp", remat=remat, unroll=unroll, reverse=reverse)
        return self._vjp("fold_vjp", remat, unroll, reverse)(init, *args, **kwargs)

    def scan_vjp(
        self,
        init: Any,
        /,
        *args: Any,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        reverse: bool | None = None,
        **kwargs: Any,
    ) -> tuple[tuple[Any, Any], SweepBack]:
        """As `fold_vjp`, for blocks that return `(carry, output)`; gives `((carry, outputs), sweep_back)`."""
        check_options(self._kinds(), "scan_vjp", remat=remat, unroll=unroll, reverse=reverse)
        return self._vjp("scan_vjp", remat, unroll, reverse)(init, *args, **kwargs)

    def _vjp(
        self,
        verb: str,
        remat: ScanCheckpointSpec | None,
        unroll: int | bool | None,
        reverse: bool | None,
    ) -> Callable[..., tuple[Any, SweepBack]]:
        call, has_output = self._block_call(), verb == "scan_vjp"
        remat, unroll, reverse = self._options(remat, unroll, reverse)
        run = vjp_for(
            method_caller(self, verb, call, skip=2, first=("stacked",)),
            block_second(call, f"{type(self).__name__}.{verb}", has_output),
            self.Layers,
            has_output=has_output,
            remat=remat,
            unroll=unroll,
            reverse=reverse,
        )
        template = eqx.filter(self, is_array, inverse=True)

        def swept(init: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, SweepBack]:
            check_no_state((args, kwargs), verb, type(self).__name__)
            warn_of_ambiguous(init, args, kwargs, self.Layers, method_caller(self, verb, call, skip=2))
            y, sweep_back = run(init, stored(self.stacked), *args, **kwargs)
            return y, sweep_back.wrapping(
                lambda result: result._replace(layers=changed(template, stacked=result.layers))
            )

        return swept

    def _vmap_via(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        caller = method_caller(self, "vmap", fn, skip=1, first=("stacked",))

        def layer(*args: Any, **kwargs: Any) -> Any:
            return numbers_to_arrays(fn(*args, **kwargs))

        def mapped(*args: Any, **kwargs: Any) -> Any:
            return vmap_layers(layer, self.Layers, caller)(stored(self.stacked), *args, **kwargs)

        return mapped

    def unstacked(self) -> tuple[M, ...]:
        """The layers as separate modules, which `Stacked.of` stacks again. Copies their arrays."""
        return tuple(self)

    def get_layer(self, index: Any) -> M:
        """One layer as a module of its own.

        Args:
            index: counts from the end where negative, as in a list. It may be traced; the nearest layer is
                taken for one outside of the stack, as always in JAX.

        Raises:
            IndexError: for an index outside of the stack.
        """
        place = index if isinstance(index, Tracer) else check_layer_index(index, self.Layers)
        return self._layer_getter()(place)

    def __iter__(self) -> Iterator[M]:
        return map(self._layer_getter(), range(self.Layers.size))

    def _layers(self, rows: slice) -> Self:
        check_stacked(self.stacked, self.Layers, Caller(type(self).__name__, _name_in_stack))
        stacked, Layers = take_layers(self.stacked, self.Layers, range(self.Layers.size)[rows])
        return changed(self, stacked=stacked, Layers=Layers)

    def from_state_dict(self, state_dict: StateDict, prefix: str | None = None) -> Self:
        """This stack with its arrays read from keys `prefix.0.key`, `prefix.1.key`, …

        Raises:
            ValueError: names every layer that is missing, mismatched or unknown, and arrays that all
                layers of this stack share and that differ there.
        """
        layers = layers_from_state_dict([layer_types(self)] * self.Layers.size, state_dict, prefix)
        return changed(self, stacked=stack_as(self.stacked, layers, self.Layers)) if layers else self

    def flatten_for_export(self) -> Self:
        """This stack with every layer's modules in Haliax's export form.

        A linear layer of several axes, for example, becomes one with a matrix.
        """
        caller = Caller("flatten_for_export", argument_namer(flatten_modules_for_export, 1, ("stacked",)))
        flat = vmap_layers(flatten_modules_for_export, self.Layers, caller)(stored(self.stacked))
        return changed(self, stacked=flat)

    def unflatten_from_export(self, template: Any) -> Self:
        """The inverse of `flatten_for_export`.

        Args:
            template: a stack with the axes of the result; only its structure is read.
        """
        names = argument_namer(unflatten_modules_from_export, 2, ("stacked", "template.stacked"))
        caller = Caller("unflatten_from_export", names)
        restore = vmap_layers(unflatten_modules_from_export, self.Layers, caller)
        restored = restore(stored(self.stacked), stored(template.stacked))
        return changed(self, stacked=restored)

    def _layer_getter(self) -> Callable[[Any], M]:
        return layer_getter(stored(self.stacked), self.Layers, Caller(type(self).__name__, _name_in_stack))


def applied(tree: Any) -> Marked:
    """The arrays of a stack for `fold` and `scan`, with fields marked that are not to be sliced.

    Not those in host memory, nor on several devices, where the compiler would gather the whole stack.
    """

    def mark(field: Any) -> Any:
        is_sliced = has_host_arrays(field) or on_several_devices(field)
        return field if is_sliced else Marked(field, "unsliced")

    return stored(map_unsliced(mark, tree))


def stored(tree: Any) -> Marked:
    """The arrays of a stack among the arguments of a scan."""
    return Marked(tree, "stored")


def layer_types(stack: Stacked[M]) -> M:
    """One layer, of a stack that may have none, with the type of each array, on the device."""

    def first(stack: Stacked) -> Any:
        caller = Caller(type(stack).__name__, _name_in_stack)
        layout, arrays, shared = split_tree(stored(stack.stacked), stack.Layers, caller)
        return on_device(layout.layer([at_least_one(array)[0] for array in arrays], shared))

    return eqx.filter_eval_shape(first, stack)


def _name_in_stack(path: tuple[Any, ...]) -> str:
    return f"stacked{jtu.keystr(path)}"


def _all_at_once(build: Callable[..., Any], Layers: Axis, caller: Caller, args: Any, kwargs: Any) -> Any:
    def build_one(*args: Any, **kwargs: Any) -> Any:
        return arrays_in_indices(build(*args, **kwargs))

    return vmap_layers(build_one, Layers, caller)(*args, **kwargs)


# Haliax's maps of trees, quantization and state dicts go layer by layer through what is such a stack for
# `isinstance`. Equinox (0.13) disables `register` of its modules, which have no fields to check here.
abc.ABCMeta.register(haliax.nn.Stacked, Stacked)
