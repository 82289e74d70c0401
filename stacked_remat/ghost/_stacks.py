"""Stacks of layers that hand each layer its part of the direction, and of the probes that get its scores."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from haliax import Axis
from jax.core import eval_jaxpr

from .._block_foldable import BlockFoldable
from .._block_seq import BlockSeq
from .._noted import Notes, noting
from .._policy import ScanCheckpointPolicy
from .._scan.marks import changed, is_named, raw_array
from .._stacked import Stacked
from ._interpret import Program
from ._rows import Units
from ._traced import is_traced, trace
from ._values import UnsupportedLeafError
from ._weights import Leaf

STACKS = (Stacked, BlockSeq)


def is_stack(node: Any) -> bool:
    return isinstance(node, STACKS)


class Traces:
    """What is known of the layers from the trace with more examples, and which trace this is.

    Attributes:
        units: of the scores.
        layers: the traced layer by the number of the call of `fold` or `scan` and the shapes of its arrays.
        is_first: whether this is the trace with more examples.
        calls: how many calls of `fold` and `scan` this trace has made.
    """

    def __init__(self, units: Units) -> None:
        self.units = units
        self.layers: dict[Any, Any] = {}
        self.is_first = True
        self.calls = 0

    def next_call(self) -> int:
        """The number of this call of `fold` or `scan`."""
        self.calls += 1
        return self.calls - 1


class ProbedBlock(eqx.Module):
    """A layer, its direction and its probes, by the path of the array."""

    block: Any
    direction: dict[str, Any]
    probes: dict[str, Any]


class ProbedStack(eqx.Module):
    """What a loss function is given in the place of a stack: it can be folded and scanned, no more."""

    _stack: BlockFoldable
    _traces: Traces = eqx.field(static=True)
    _name: str = eqx.field(static=True)

    @property
    def Block(self) -> Axis:
        """The axis of the layers."""
        return self._stack.Block

    Layers = Block

    @property
    def remat(self) -> ScanCheckpointPolicy:
        """The stack's policy."""
        return self._stack.remat

    def __len__(self) -> int:
        return len(self._stack)

    def fold(self, init: Any, /, *args: Any, **kwargs: Any) -> Any:
        """As `Stacked.fold`."""
        return self._run("fold_via", self._block_call(), init, args, kwargs)

    def scan(self, init: Any, /, *args: Any, **kwargs: Any) -> Any:
        """As `Stacked.scan`."""
        return self._run("scan_via", self._block_call(), init, args, kwargs)

    def fold_via(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """As `Stacked.fold_via`."""
        return self._via("fold_via", fn, options)

    def scan_via(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """As `Stacked.scan_via`."""
        return self._via("scan_via", fn, options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"In a loss whose gradient dot products are taken, {self._name} has fold, scan, fold_via and "
            f"scan_via, and no {name!r}. Give its arrays no direction to use it otherwise."
        )

    def _block_call(self) -> Callable[..., Any]:
        blocks = self._stack._kinds()
        return type(next(iter(blocks)).block).__call__

    def _via(self, verb: str, fn: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
        def run(init: Any, /, *args: Any, **kwargs: Any) -> Any:
            layer = _scored_layer(fn, self._traces, self._traces.next_call(), self._name)
            return getattr(self._stack, verb)(layer, **options)(init, *args, **kwargs)

        return run

    def _run(
        self, verb: str, fn: Callable[..., Any], init: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        options = {name: kwargs.pop(name) for name in ("remat", "unroll", "reverse") if name in kwargs}
        return self._via(verb, fn, options)(init, *args, **kwargs)


def _scored_layer(fn: Callable[..., Any], traces: Traces, call: int, name: str) -> Callable[..., Any]:
    """`fn` of a `ProbedBlock`, with deposits where its weights meet data."""
    name = f"{name}.*".lstrip(".")

    @functools.wraps(fn)
    def layer(probed: ProbedBlock, carry: Any, /, *args: Any, **kwargs: Any) -> Any:
        def apply(block: Any, carry: Any, args: Any, kwargs: Any) -> Any:
            return fn(block, carry, *args, **kwargs)

        notes = Notes()
        with noting(notes):
            closed, inputs, rebuild = trace(apply, probed.block, carry, args, kwargs)
        key = call, tuple(leaf.shape for leaf in filter(is_traced, jtu.tree_leaves(probed.block)))
        if traces.is_first:
            traces.layers[key] = closed
            return rebuild(eval_jaxpr(closed.jaxpr, closed.consts, *inputs))
        program = Program(closed, traces.layers.get(key), traces.units, notes)
        paths = [path for path, _ in leaves_with_paths(probed.block)]
        if missing := sorted(set(probed.direction) - set(paths)):
            raise UnsupportedLeafError(
                f"{name}{missing[0]} is declared unsliced, so its layers read the whole stack of it. Give "
                'it no direction, or use granularity="block" or "total".'
            )
        leaves = {
            at: Leaf(f"{name}{path}", inputs[at], raw_array(probed.direction[path]), probed.probes[path])
            for at, path in enumerate(paths)
            if path in probed.direction
        }
        return rebuild(program.evaluate(inputs, leaves, range(len(paths), len(inputs))))

    return layer


def leaves_with_paths(tree: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of a tree, a named array as one, with their paths as `jax.tree_util.keystr` writes them."""
    for path, leaf in jtu.tree_leaves_with_path(tree, is_leaf=is_named):
        if is_traced(raw_array(leaf)):
            yield jtu.keystr(path), leaf


def probed(stack: Any, name: str, traces: Traces, direction: dict[str, Any], probes: dict[str, Any]) -> Any:
    """A stack with its direction and probes, by the path in the stack."""

    def within(prefix: str, entries: dict[str, Any]) -> dict[str, Any]:
        return {path.removeprefix(prefix): x for path, x in entries.items() if path.startswith(prefix)}

    if isinstance(stack, Stacked):
        block = ProbedBlock(stack.stacked, within(".stacked", direction), within(".stacked", probes))
        return ProbedStack(Stacked(block, stack.Block, stack.remat), traces, name)
    blocks = [
        ProbedBlock(block, within(f".blocks[{i}]", direction), within(f".blocks[{i}]", probes))
        for i, block in enumerate(stack.blocks)
    ]
    return ProbedStack(changed(stack, blocks=blocks), traces, name)
