"""What the methods of `Stacked` and `BlockSeq` have in common: builders, options, and names for errors."""

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

import equinox as eqx
from haliax import Axis

from ._policy import ScanCheckpointSpec
from ._scan.arguments import parameters_of
from ._scan.checks import axis_or_name, describe
from ._static import PyTree

if TYPE_CHECKING:
    from ._block_seq import BlockSeq
    from ._stacked import Stacked

B_co = TypeVar("B_co", bound=eqx.Module, covariant=True)
P = ParamSpec("P")
B = TypeVar("B", bound=eqx.Module)
S = TypeVar("S")


class BuiltByInit(Protocol[P, B_co]):
    """A module class with a static `init`, as is usual with Haliax."""

    @property
    def init(self) -> Callable[P, B_co]: ...


class PolicyOptions(TypedDict, total=False):
    """The options of `init`: two names of one argument."""

    remat: ScanCheckpointSpec | None
    gradient_checkpointing: ScanCheckpointSpec | None


class AnyLayers(eqx.Module):
    """No layers: for type checkers, a stack of these is a class that does not say what its layers are."""


class _InitStacked(Protocol):
    @overload
    def __call__(
        self, Layers: Axis | int, Block: BuiltByInit[P, B], **options: Unpack[PolicyOptions]
    ) -> "Callable[P, Stacked[B]]": ...

    @overload
    def __call__(
        self, Layers: Axis | int, Block: Callable[P, B], **options: Unpack[PolicyOptions]
    ) -> "Callable[P, Stacked[B]]": ...


class _InitBlockSeq(Protocol):
    def __call__(
        self, Layers: Axis | int, Block: Callable[..., B], **options: Unpack[PolicyOptions]
    ) -> "Callable[..., BlockSeq[B]]": ...


class InitOf:
    """For type checkers: `init` of a class of layers, and of a subclass, `class Tower(Stacked[Block])`."""

    @overload
    def __get__(self, layers: object, cls: "type[Stacked[AnyLayers]]") -> _InitStacked: ...

    @overload
    def __get__(self, layers: object, cls: "type[BlockSeq[AnyLayers]]") -> _InitBlockSeq: ...

    @overload
    def __get__(self, layers: object, cls: type[S]) -> Callable[..., Callable[..., S]]: ...

    def __get__(self, layers: object, cls: Any) -> Any: ...


def block_builder(Block: Any, what: str) -> Callable[..., Any]:
    """The static `init` of a block, Haliax style, or the block itself."""
    # Equinox's partial and jitted functions are modules too.
    is_block = isinstance(Block, eqx.Module) and not (
        isinstance(Block, eqx.Partial) or hasattr(Block, "__wrapped__")
    )
    if is_block or not callable(Block):
        raise TypeError(
            f"{what} takes the class of the blocks, or a function that builds one, and calls it for every "
            f"layer; got {describe(Block)}. Write {what}(Layers, Block)(...), or of layers that are built "
            "Stacked.of(layers)."
        )
    init = inspect.getattr_static(Block, "init", None) if inspect.isclass(Block) else None
    # An ordinary method of this name, which needs a block, is for something else.
    return Block if init is None or inspect.isfunction(init) else getattr(Block, "init")  # noqa: B009


def check_options(blocks: Iterable[PyTree], verb: str, options: dict[str, Any]) -> None:
    """Refuse an option of a fold that has the name of a parameter of its blocks."""
    for kind in {type(block) for block in blocks}:
        for name in parameters_of(kind.__call__):
            if options.get(name) is not None:
                call, via = f"{kind.__name__}.__call__", f"{verb.removesuffix('_vjp')}_via"
                raise TypeError(
                    f"{name}={options[name]!r} may be for {verb} or for {call}, which has a parameter "
                    f"`{name}` too. Rename that one, or write {via}(lambda block, x: block(x, {name}=...), "
                    f"{name}=...)(x)."
                )


def axis_of_modules(layers: Any, Layers: Any, what: str) -> Axis:
    """The axis of a list of modules, which may be given by its name."""
    if not isinstance(layers, Sequence):
        raise TypeError(
            f"{what} takes a list of modules, one for each layer; got {describe(layers)}. Make a list of it."
        )
    for i, layer in enumerate(layers):
        check_module(layer, f"layers[{i}] of {what}")
    axis = axis_or_name(Layers, what)
    axis = Axis(axis, len(layers)) if isinstance(axis, str) else axis
    if axis.size != len(layers):
        raise ValueError(f"`{axis.name}` has {axis.size} layers, but {what} was given {len(layers)}.")
    return axis


def check_module(value: Any, where: str) -> None:
    """Refuse what is no module of Equinox."""
    if not isinstance(value, eqx.Module):
        got = f"the class {value.__name__}" if isinstance(value, type) else describe(value)
        raise TypeError(f"{where} is {got}. Let it be an eqx.Module.")


def check_layer_index(index: Any, Layers: Axis) -> int:
    """The index counted from the front; an error outside of the axis."""
    position = operator.index(index)
    if not -Layers.size <= position < Layers.size:
        held = f"layers 0 to {Layers.size - 1}" if Layers.size else "no layers"
        raise IndexError(f"Layer {position} does not exist: `{Layers.name}` has {held}.")
    return position % Layers.size
