"""The folds that a loss function makes, noted as equations of their own when it is traced."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
from haliax import Axis
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from .._block_foldable import BlockFoldable
from .._policy import ScanCheckpointPolicy

Place: TypeAlias = Literal["init", "args", "kwargs"]


@dataclasses.dataclass(frozen=True, eq=False)
class Fold:
    """A call of `fold` or `scan` that a loss function makes.

    Attributes:
        number: of the stack among those that are followed.
        verb: "fold" or "scan".
        options: `remat`, `unroll` and `reverse`, where the call gives them.
        given: `(stack, init, args, kwargs)`, each array replaced by its type.
        types: of the arrays that it returns.
        struct: what it returns, each array replaced by its type.
    """

    number: int
    verb: str
    options: dict[str, Any]
    given: Any
    types: tuple[Any, ...]
    struct: Any

    def positions(self, name: Place) -> list[int | None]:
        """For each leaf of a part of `given`, None being a leaf, its place among all arrays, or None."""
        before: list[Any] = []
        for part, tree in zip(("stack", "init", "args", "kwargs"), self.given, strict=True):
            leaves = jax.tree.leaves(tree, is_leaf=lambda node: node is None)
            first = sum(map(is_struct, before))
            if part == name:
                counts = itertools.accumulate(map(is_struct, leaves), initial=first)
                return [at if is_struct(leaf) else None for at, leaf in zip(counts, leaves, strict=False)]
            before += leaves
        raise AssertionError(name)

    def cotangent(self, arrays: Iterable[Any]) -> Any:
        """The cotangent of what it returns, of the cotangents of the arrays in it."""
        return with_arrays(eqx.filter(self.struct, is_struct), arrays)


def is_struct(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def with_arrays(tree: Any, arrays: Iterable[Any]) -> Any:
    given = iter(arrays)
    return jax.tree.map(lambda leaf: next(given) if is_struct(leaf) else leaf, tree)


def run(fold: Fold, suffix: str, arrays: Sequence[Any]) -> Any:
    stack, init, args, kwargs = with_arrays(fold.given, arrays)
    return getattr(stack, fold.verb + suffix)(init, *args, **fold.options, **kwargs)


class FollowedStack(eqx.Module):
    """What a loss function is given in the place of a stack: it can be folded and scanned, no more."""

    _stack: BlockFoldable
    _name: str = eqx.field(static=True)
    _number: int = eqx.field(static=True)

    @property
    def Block(self) -> Axis:
        """The axis of the layers."""
        return self._stack.Layers

    Layers = Block

    @property
    def remat(self) -> ScanCheckpointPolicy:
        """The stack's policy."""
        return self._stack.remat

    def __len__(self) -> int:
        return len(self._stack)

    def fold(self, init: Any, /, *args: Any, **kwargs: Any) -> Any:
        """As `Stacked.fold`."""
        return self._apply("fold", init, args, *_options(kwargs))

    def scan(self, init: Any, /, *args: Any, **kwargs: Any) -> Any:
        """As `Stacked.scan`."""
        return self._apply("scan", init, args, *_options(kwargs))

    def _apply(
        self, verb: str, init: Any, args: tuple[Any, ...], options: dict[str, Any], kwargs: dict[str, Any]
    ) -> Any:
        tree = (self._stack, init, args, kwargs)
        arrays = [leaf for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)]
        given = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if eqx.is_array(leaf) else leaf, tree
        )
        call = Fold(self._number, verb, options, given, (), None)
        closed, struct, static = eqx.filter_make_jaxpr(lambda arrays: run(call, "", arrays))(arrays)
        types = tuple(out.aval for out in closed.jaxpr.outvars)
        call = dataclasses.replace(call, types=types, struct=eqx.combine(struct, static))
        return with_arrays(call.struct, fold_p.bind(*arrays, fold=call))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"In the loss of a fused update, {self._name} has fold and scan, and no {name!r}: its weights "
            "are updated in the backward pass of the one fold. "
            "Freeze the stack (trainable) to use it otherwise."
        )


def _options(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    options = {name: kwargs[name] for name in ("remat", "unroll", "reverse") if name in kwargs}
    return options, {name: value for name, value in kwargs.items() if name not in options}


def _refuse(what: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise TypeError(
            f"A fused update follows a fold that the loss calls once; this one is called inside of {what}. "
            "Move it out, or freeze the stack (trainable)."
        )

    return refuse


fold_p = Primitive("stacked_remat_fused_fold")
fold_p.multiple_results = True
fold_p.def_abstract_eval(lambda *_, fold: list(fold.types))
batching.primitive_batchers[fold_p] = _refuse("jax.vmap")
ad.primitive_jvps[fold_p] = _refuse("a derivative that the loss takes")
