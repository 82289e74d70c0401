"""What the methods of `Stacked` and `BlockSeq` have in common: builders, options, and names for errors."""

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

import equinox as eqx
from equinox.nn import State
from haliax import Axis
from jax.core import Tracer

from ._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ._scan.arguments import parameters_of
from ._scan.checks import describe
from ._scan.marks import is_array
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


def init_policy(remat: Any, gradient_checkpointing: Any) -> ScanCheckpointPolicy:
    """The policy given under either name of the argument; `True` by default."""
    if remat is not None and gradient_checkpointing is not None:
        raise ValueError(
            f"remat={remat!r} and gradient_checkpointing={gradient_checkpointing!r} name one argument. "
            "Pass one of them."
        )
    given = gradient_checkpointing if remat is None else remat
    return resolve_policy(True if given is None else given)


def block_builder(Block: Any, what: str) -> Callable[..., Any]:
    """The static `init` of a block, Haliax style, or the block itself."""
    if inspect.isclass(Block) and is_of_nnx(Block):
        raise TypeError(
            f"{what} builds modules of Equinox; got {Block.__name__}, one of Flax NNX. Use stacked_remat.nnx."
        )
    kind = type(Block).__name__
    # Equinox's partial and jitted functions are modules too.
    is_block = isinstance(Block, eqx.Module) and not (
        isinstance(Block, eqx.Partial) or hasattr(Block, "__wrapped__")
    )
    if is_block or not callable(Block):
        write = f"{what}(Layers, {kind if is_block else 'Block'})(...)"
        if isinstance(Block, Sequence) and any(isinstance(layer, eqx.Module) for layer in Block):
            write = "Stacked.of(layers)"
        raise TypeError(
            f"{what} takes the class of the blocks, or a function that builds one, and calls it for every "
            f"layer; got {f'a {kind} that is built already' if is_block else describe(Block)}. Write {write}."
        )
    if not inspect.isclass(Block):
        return Block
    init = inspect.getattr_static(Block, "init", None)
    if init is None:
        return Block
    if inspect.isfunction(init):
        name = Block.__name__
        raise TypeError(
            f"{what} builds blocks with {name}.init, which is an ordinary method and needs a block to be "
            f"called on. Make it a @staticmethod that returns a block, or, if it is for something else, name "
            f"the constructor: {what}(Layers, lambda *args, **kwargs: {name}(*args, **kwargs))."
        )
    return getattr(Block, "init")  # noqa: B009 - pyright knows of no `init`


def check_options(blocks: Iterable[PyTree], verb: str, options: dict[str, Any]) -> None:
    """Refuse an option of a fold that has the name of a parameter of its blocks; says how to write each."""
    given = {name: value for name, value in options.items() if value is not None}
    for kind in {type(block) for block in blocks} if given else ():
        parameters = parameters_of(kind.__call__)
        for name, value in given.items():
            if name in parameters:
                call = f"{kind.__name__}.__call__"
                of_block = f"{verb}_via(lambda block, x: block(x, {name}=...))(x)"
                of_verb = f"{verb}_via({call}, {name}=...)(x)"
                if verb.endswith("_vjp"):  # stacks have no such methods
                    step = f"stacked_remat.{verb}(lambda x, block: block"
                    of_block = f"{step}(x, {name}=...), Layers)(x, layers.stacked)"
                    of_verb = f"{step}(x), Layers, {name}=...)(x, layers.stacked)"
                raise TypeError(
                    f"{name}={value!r} may be for {verb} or for {call}, which has a parameter `{name}` too. "
                    f"For the block write {of_block}, for {verb} write {of_verb}."
                )


def check_modules(layers: PyTree, what: str, name: str = "layers") -> None:
    takes = f"{what} holds a list of modules, one for each layer"
    if isinstance(layers, eqx.Module):
        raise TypeError(f"{takes}; got {type(layers).__name__}.")
    if not isinstance(layers, Sequence):
        raise TypeError(f"{takes}; got {no_module(layers)}")
    for i, layer in enumerate(layers):
        if not isinstance(layer, eqx.Module):
            raise TypeError(f"{takes}; {name}[{i}] is {no_module(layer)}")


def no_module(value: Any) -> str:
    """What stands in place of a module of Equinox, and what to write."""
    if isinstance(value, type):
        return f"the class {value.__name__}. Build it."
    if is_array(value):
        return f"{describe(value)}. To loop over arrays, stack them and use fold or scan."
    if is_of_nnx(type(value)):
        return f"a module of Flax NNX, {type(value).__name__}. Use stacked_remat.nnx."
    if isinstance(value, tuple) and any(isinstance(part, State) for part in value):
        build = "Stacked.init(Layers, Block)"
        return f"a pair of a module and its State. Write eqx.nn.make_with_state({build})(...)."
    if isinstance(value, Mapping | Iterator):
        values = "layers.values()" if isinstance(value, Mapping) else "layers"
        return f"{describe(value)}. Write list({values})."
    return f"{describe(value)}. Let it be an eqx.Module."


def is_of_nnx(kind: type) -> bool:
    return any(base.__module__.startswith("flax.nnx") for base in kind.__mro__)


def check_layer_index(index: Any, Layers: Axis) -> int:
    """The index counted from the front; an error outside of the axis."""
    if isinstance(index, Tracer):
        raise TypeError(
            f"Layer {index} of `{Layers.name}` is chosen by a traced integer, and these layers may differ. "
            "Choose by a Python one, or stack layers of one kind in a Stacked."
        )
    if isinstance(index, str | tuple | list | float):
        raise TypeError(f"A layer is chosen by an integer, several by one slice [start:stop]; got {index!r}.")
    position = operator.index(index)
    if not -Layers.size <= position < Layers.size:
        held = f"layers 0 to {Layers.size - 1}" if Layers.size else "no layers"
        raise IndexError(f"Layer {position} does not exist: `{Layers.name}` has {held}.")
    return position % Layers.size
