"""`Stacked`: one copy of a block whose arrays have a leading `Layers` axis.

A stack of layers of one kind is a single module with the layers' arrays stacked, so that applying it is a
scan: the block is traced and compiled once, however deep the stack. How a scan behaves stands in `_scan.py`;
here are only the modules' verbs.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import equinox as eqx
import jax.tree_util as jtu
from haliax import Axis
from haliax.state_dict import (
    ModuleWithStateDictSerialization,
    StateDict,
    flatten_modules_for_export,
    unflatten_modules_from_export,
)

from ._layer_axis import (
    Caller,
    SplitTree,
    argument_namer,
    check_axis,
    check_stacked,
    is_named,
    is_unsplit_key,
    split_tree,
    stack_trees,
)
from ._policy import ScanCheckpointPolicy, ScanCheckpointSpec, resolve_policy
from ._scan import fold_for, scan_for, vmap_layers
from ._state_dict import layers_from_state_dict, layers_to_state_dict

M = TypeVar("M", bound=eqx.Module)


class Stacked(ModuleWithStateDictSerialization, Generic[M]):
    """Layers of one kind, applied one after the other (`fold`, `scan`) or side by side (`vmap`).

    ```python
    Layers = hax.Axis("layers", 48)
    blocks = Stacked.init(Layers, Block, remat="nested")(config, key=jax.random.split(key, Layers.size))
    y = blocks.fold(x)
    ```

    All layers have the same structure, shapes and Python control flow. Blocks with named axes and blocks of
    plain arrays both work. For layers that differ use `BlockSeq`.

    Attributes:
        stacked: the block, its named arrays with the axis `Block` in front, its plain arrays with it as first
            dimension.
        Block: the axis of the layers; `Layers` is another name for it.
        remat: the checkpoint policy of `fold` and `scan` where the call names no other.

    Raises:
        TypeError: for an axis that is none, and for a block that is no module.
        ValueError: where the block's arrays do not have the layers in front.
    """

    stacked: M
    Block: Axis = eqx.field(static=True)
    remat: ScanCheckpointPolicy = eqx.field(
        static=True, converter=resolve_policy, default=ScanCheckpointPolicy()
    )

    def __check_init__(self):
        what = type(self).__name__
        check_axis(self.Block, f"{what}(block, Layers)")
        if not isinstance(self.stacked, eqx.Module):
            raise TypeError(
                f"{what} holds a module whose arrays are stacked; got {self.stacked!r} "
                f"({type(self.stacked).__name__}). Let the block be an eqx.Module, and build the stack by "
                f"{what}.init(Layers, Block)(...)."
            )
        check_stacked(self.stacked, self.Block, Caller(what, _name_in_stack))

    @property
    def Layers(self) -> Axis:
        """The axis of the layers."""
        return self.Block

    @classmethod
    def init(
        cls,
        Layers: Axis,
        Block: Callable[..., M],
        *,
        remat: ScanCheckpointSpec | None = None,
        gradient_checkpointing: ScanCheckpointSpec | None = None,
    ) -> "Callable[..., Self]":
        """Build the layers, all at once.

        Args:
            Layers: the axis to stack along.
            Block: a module class, with a static `init` (Haliax style) or a constructor (Equinox style), or
                any function that returns a module.
            remat: the checkpoint policy; `True` by default. See `ScanCheckpointPolicy`.
            gradient_checkpointing: the other name of `remat`.

        Returns:
            A function of the block's arguments. Named arrays with the axis and plain arrays of at least one
            dimension are split over the layers, keys among them; the rest is shared.

        Raises:
            ValueError: for an argument whose length is not that of the axis, and for a key that was not
                split.
            TypeError: for an axis that is none, and for a block that is no module.
        """
        check_axis(Layers, f"{cls.__name__}.init")
        policy = init_policy(remat, gradient_checkpointing)
        build = block_builder(Block)

        def build_stack(*args: Any, **kwargs: Any) -> Self:
            caller = init_caller(cls, build)
            check_keys_are_split((args, kwargs), Layers, caller.name_of)
            stacked = vmap_layers(build, Layers, caller)(*args, **kwargs)
            return cls(stacked, Layers, policy)

        return build_stack

    def fold(
        self,
        init: Any,
        /,
        *args: Any,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Apply the layers one after the other: `for block in layers: carry = block(carry, *args, **kwargs)`.

        Args:
            init: the carry that goes into the first layer, a tree of arrays.
            *args: passed on to the blocks. Named arrays with the layers' axis and plain arrays of at least
                one dimension are split over the layers; the rest is shared.
            remat: a policy for this call instead of the stack's own.
            unroll: how many layers one turn of the loop holds; `True` for all.
            **kwargs: as `*args`.

        Returns:
            The carry after the last layer, with the shapes of `init`.

        Raises:
            ValueError: as `stacked_remat.scan` does.
        """
        return self.fold_via(block_call(self.stacked), remat=remat, unroll=unroll)(init, *args, **kwargs)

    def scan(
        self,
        init: Any,
        /,
        *args: Any,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """As `fold`, for blocks that return `(carry, output)`; also stacks the outputs."""
        return self.scan_via(block_call(self.stacked), remat=remat, unroll=unroll)(init, *args, **kwargs)

    def fold_via(
        self,
        fn: Callable[..., Any],
        *,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
    ) -> Callable[..., Any]:
        """Fold with `fn(block, carry, *args, **kwargs)` in place of the block's own call.

        Returns:
            A function of the initial carry and the further arguments. What `fn` closes over goes to every
            layer whole.
        """
        run = fold_for(
            method_caller(self, "fold", fn, skip=2, first=("stacked",)),
            fn,
            self.Block,
            remat=self.remat if remat is None else remat,
            unroll=1 if unroll is None else unroll,
            adapt=(_block_second,),
        )

        def folded(init: Any, /, *args: Any, **kwargs: Any) -> Any:
            return run(init, self.stacked, *args, **kwargs)

        return folded

    def scan_via(
        self,
        fn: Callable[..., tuple[Any, Any]],
        *,
        remat: ScanCheckpointSpec | None = None,
        unroll: int | bool | None = None,
    ) -> Callable[..., tuple[Any, Any]]:
        """Scan with `fn(block, carry, *args, **kwargs) -> (carry, output)` in place of the block's call."""
        run = scan_for(
            method_caller(self, "scan", fn, skip=2, first=("stacked",)),
            fn,
            self.Block,
            remat=self.remat if remat is None else remat,
            unroll=1 if unroll is None else unroll,
            adapt=(_block_second,),
        )

        def scanned(init: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return run(init, self.stacked, *args, **kwargs)

        return scanned

    def vmap(self, /, *args: Any, **kwargs: Any) -> Any:
        """Apply every layer to the same arguments, side by side; the outputs get the layers' axis in front.

        Arguments are split and shared as in `fold`. Costs the internals of all layers at once.
        """
        return self.vmap_via(block_call(self.stacked))(*args, **kwargs)

    def vmap_via(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """As `vmap`, with `fn(block, *args, **kwargs)` in place of the block's own call."""
        caller = method_caller(self, "vmap", fn, skip=1, first=("stacked",))

        def mapped(*args: Any, **kwargs: Any) -> Any:
            return vmap_layers(fn, self.Block, caller)(self.stacked, *args, **kwargs)

        return mapped

    def unstacked(self) -> tuple[M, ...]:
        """The layers as separate modules. Copies their arrays."""
        layers = self._split()
        return tuple(layers.layer(i) for i in range(self.Block.size))

    def get_layer(self, index: int) -> M:
        """One layer as a module of its own.

        Args:
            index: counts from the end where negative, as in a list.

        Raises:
            IndexError: for an index outside of the stack.
        """
        return self._split().layer(check_layer_index(index, self.Block))

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        """The layers' arrays in the form of a torch `Sequential`, under `prefix.0.key`, `prefix.1.key`, …"""
        return layers_to_state_dict(self.unstacked(), prefix)

    def from_state_dict(self, state_dict: StateDict, prefix: str | None = None) -> Self:
        """This stack with its arrays read from keys `prefix.0.key`, `prefix.1.key`, …

        Raises:
            ValueError: names every layer that is missing, misshapen or one too many.
        """
        template = eqx.filter_eval_shape(lambda stack: stack.get_layer(0), self)
        layers = layers_from_state_dict([template] * self.Block.size, state_dict, prefix)
        return eqx.tree_at(lambda stack: stack.stacked, self, stack_trees(layers, self.Block))

    def flatten_for_export(self) -> Self:
        """This stack with every layer's modules in the form in which they are exported, as Haliax has it.

        A linear layer of several axes, for one, becomes one of a matrix.
        """
        caller = Caller("flatten_for_export", argument_namer(flatten_modules_for_export, 1, ("stacked",)))
        flat = vmap_layers(flatten_modules_for_export, self.Block, caller)(self.stacked)
        return eqx.tree_at(lambda stack: stack.stacked, self, flat)

    def unflatten_from_export(self, template: Any) -> Self:
        """The inverse of `flatten_for_export`.

        Args:
            template: a stack with the axes that the result is to have; only its structure is read.
        """
        names = argument_namer(unflatten_modules_from_export, 2, ("stacked", "template.stacked"))
        caller = Caller("unflatten_from_export", names)
        restore = vmap_layers(unflatten_modules_from_export, self.Block, caller)
        return eqx.tree_at(lambda stack: stack.stacked, self, restore(self.stacked, template.stacked))

    def _split(self) -> SplitTree:
        return split_tree(
            self.stacked,
            self.Block,
            name_of=_name_in_stack,
            what=type(self).__name__,
        )


def init_policy(remat: Any, gradient_checkpointing: Any) -> ScanCheckpointPolicy:
    """The policy that the two names of the argument give, `True` where neither does."""
    if remat is not None and gradient_checkpointing is not None:
        raise ValueError(
            f"remat={remat!r} and gradient_checkpointing={gradient_checkpointing!r} name one argument. "
            "Pass one of them."
        )
    given = gradient_checkpointing if remat is None else remat
    return resolve_policy(True if given is None else given)


def block_builder(Block: Callable[..., M]) -> Callable[..., M]:
    """The static `init` of a block, Haliax style, or the block itself."""
    return getattr(Block, "init", Block)


def check_keys_are_split(
    arguments: tuple[Any, Any], Layers: Axis, name_of: Callable[[tuple[Any, ...]], str]
) -> None:
    """Refuse a single random key among the arguments of a stack's blocks.

    Raises:
        ValueError: shows the `jax.random.split` to write.
    """
    for path, leaf in jtu.tree_flatten_with_path(arguments, is_leaf=is_named)[0]:
        name = name_of(path)
        if is_unsplit_key(name, leaf):
            raise ValueError(
                f"{name} is a single random key, and every layer of `{Layers.name}` needs its own. "
                f"Write {name}=jax.random.split({name}, {Layers.size})."
            )


def check_layer_index(index: int, Layers: Axis) -> int:
    """The index counted from the front.

    Raises:
        IndexError: for an index outside of the axis.
    """
    position = operator.index(index)
    if not -Layers.size <= position < Layers.size:
        raise IndexError(
            f"Layer {position} does not exist: `{Layers.name}` has layers 0 to {Layers.size - 1}."
        )
    return position % Layers.size


def block_call(block: eqx.Module) -> Callable[..., Any]:
    """The call of a block as a function of any block of its kind, with the parameters for error messages."""
    return _call_of(type(block))


@functools.lru_cache(maxsize=256)  # the same function each time, by which eager calls are recognised
def _call_of(cls: type) -> Callable[..., Any]:
    @functools.wraps(cls.__call__)
    def apply(block: Any, /, *args: Any, **kwargs: Any) -> Any:
        return block(*args, **kwargs)

    return apply


def method_caller(
    layers: Any, verb: str, fn: Callable[..., Any], *, skip: int, first: tuple[str, ...] = ()
) -> Caller:
    """A method of `Stacked` or `BlockSeq`, for error messages about its arguments."""
    carry = "x" if verb == "vmap" else "carry"
    closure = f"stack.{verb}_via(lambda block, {carry}: block({carry}, array))(x)"
    return Caller(
        f"{type(layers).__name__}.{verb}",
        argument_namer(fn, skip, first),
        (f"close over it ({closure})",),
    )


def init_caller(cls: type, build: Callable[..., Any]) -> Caller:
    """`init` of `Stacked` or `BlockSeq`, for error messages about its arguments."""
    what = f"{cls.__name__}.init"
    closure = f"{what}(Layers, lambda *, key: Block(array, key=key))(key=keys)"
    return Caller(what, argument_namer(build, skip=0), (f"close over it ({closure})",))


def _name_in_stack(path: tuple[Any, ...]) -> str:
    return f"stacked{jtu.keystr(path)}"


def _block_second(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn(block, carry, ...)` as a step with the carry first."""

    def step(carry: Any, block: Any, /, *args: Any, **kwargs: Any) -> Any:
        return fn(block, carry, *args, **kwargs)

    return step
