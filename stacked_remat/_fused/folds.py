"""The fold of a stack as one equation of the traced loss, with a reverse pass of ours.

A fused update needs two things that `jax.grad` of a loss does not give: control of the
reverse sweep over a stack, and results of that sweep, the updated layers, that are no
cotangents. `update.py` gets them in three steps:

1. While the loss is traced, a `FollowedStack` is in the place of each trained stack.
   Its `fold` and `scan` add one equation to the trace: a `FollowedFold`, a primitive
   whose operands are the arrays of the stack and of the arguments.
2. `followed` inlines the `jax.jit` calls around each fold, checks that the fold happens
   once and that nothing else reads the weights, and gives the equation a `FoldPass`.
3. `jax.value_and_grad` of the edited program differentiates everything around the
   folds. At a fold it calls two rules of `FollowedFold`: in the forward pass `vjp_fwd`,
   which runs the stack's `fold_vjp` or `scan_vjp`, and in the backward pass
   `input_cotangents`, which sweeps back. What the sweep returns beside cotangents, and
   what a second sweep needs, the rules leave in the `FoldPass`.

A pipeline (`_pipeline/`) follows one fold too, and cuts the program there (`inlined`,
`only_use`).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters import ad
from jax.interpreters.partial_eval import dce_jaxpr

from .._activity import CALLS, is_in, name_of, programs_in
from .._block_foldable import BlockFoldable
from .._compat import without_constants
from .._hijax import LowPrimitive, primitive_of, with_primitive
from .._scan.returned import is_none
from .._scan.visitor import SweepResult
from .._static import PyTree, Static


@dataclass(eq=False)
class FoldPass:
    """A fold as the loss is differentiated. The fold's rules set what is None here."""

    # Runs the reverse sweep of this fold, in the backward pass. The cotangents of the
    # arguments are of its result.
    sweep: Callable[["FoldPass"], SweepResult]
    # The stack's reverse sweep, from the forward pass.
    sweep_back: Any = None
    # Which leaves of the arguments `(args, kwargs)` have a cotangent.
    wanted: Any = None
    # The cotangent of the fold's result; None for zeros.
    cotangent: PyTree = None
    # What the sweep returned. None after a backward pass that did not reach the fold,
    # as the value does not depend on it.
    result: Any = None


class Purpose(NamedTuple):
    """What needs the fold of a stack, for errors."""

    # As "a fused update".
    what: str
    # Why the weights are for the fold alone.
    reason: str
    # What a user may do to use a stack otherwise; "" if there is no way.
    way_out: str = ""

    def __str__(self) -> str:
        """It, at the beginning of a sentence."""
        return self.what.capitalize()


FUSED_UPDATE = Purpose(
    "a fused update",
    "its weights are updated in the backward pass of the one fold",
    "freeze the stack (trainable)",
)


class FollowedFold(LowPrimitive):
    """A fold as a primitive: `(stack, init, args, kwargs) -> result`, arrays only."""

    # The path of the stack in the model, for errors.
    name: str
    purpose: Purpose
    # "fold" or "scan", and the options of the call that are not operands.
    verb: str
    options: Static
    # `(suffix, stack, init, args, kwargs)` calls the stack's `fold` or `scan`; with the
    # suffix "_vjp" the method that also returns its reverse sweep.
    call: Callable
    # What of `(stack, init, args, kwargs)` is no array.
    static: Static
    # None while the loss is traced.
    fold_pass: FoldPass | None

    def __init__(self, in_types: PyTree, out_types: PyTree, **params: Any) -> None:
        self.in_avals = in_types
        self.out_aval = out_types
        self.params = params
        super().__init__()

    def expand(self, *arrays: PyTree) -> PyTree:
        operands = eqx.combine(arrays, self.static.value)
        return eqx.filter(self.call("", *operands), eqx.is_array)

    def vjp_fwd(self, nonzero: PyTree, *arrays: PyTree) -> tuple[PyTree, None]:
        # While the loss is traced, a derivative is one that the loss itself takes.
        if self.fold_pass is None:
            raise _refusal(self.name, self.purpose, _DERIVATIVE)
        operands = eqx.combine(arrays, self.static.value)
        result, sweep_back = self.call("_vjp", *operands)
        _, _, args_nonzero, kwargs_nonzero = nonzero
        self.fold_pass.sweep_back = sweep_back
        self.fold_pass.wanted = args_nonzero, kwargs_nonzero
        # No residuals: the reverse sweep has what the policy keeps.
        return eqx.filter(result, eqx.is_array), None

    def input_cotangents(self, residuals: None, cotangents: PyTree) -> PyTree:
        fold = self.fold_pass
        assert fold is not None
        leaves = self.out_tree.flatten_up_to(cotangents)
        leaves = map(ad.instantiate_zeros, leaves)
        fold.cotangent = self.out_tree.unflatten(leaves)
        fold.result = fold.sweep(fold)
        # The stack, the first operand, gets no cotangent: its layers are updated.
        stack, *arguments = self.in_avals
        cotangents_in = [None] * len(jax.tree.leaves(stack))
        swept = fold.result.carry, fold.result.args, fold.result.kwargs
        pairs = zip(leaves_or_none(arguments), leaves_or_none(swept), strict=True)
        for argument, cotangent in pairs:
            if argument is not None:
                cotangents_in.append(cotangent)
        return self.in_tree.unflatten(cotangents_in)

    def jvp(self, primals: PyTree, tangents: PyTree) -> PyTree:
        raise _refusal(self.name, self.purpose, _DERIVATIVE)

    def batch(self, axis: Any, args: PyTree, dims: PyTree) -> PyTree:
        raise _refusal(self.name, self.purpose, "jax.vmap")


_DERIVATIVE = "a derivative that the loss takes"


def leaves_or_none(tree: PyTree) -> list[PyTree]:
    """The leaves of a tree, where None counts as a leaf.

    Lists of two trees of one structure then match entry by entry.
    """
    return jax.tree.leaves(tree, is_leaf=is_none)


def _as_array(leaf: Any) -> Any:
    return jnp.asarray(leaf) if eqx.is_array_like(leaf) else leaf


def _refusal(name: str, purpose: Purpose, what: str) -> TypeError:
    way_out = f", or {purpose.way_out}" if purpose.way_out else ""
    return TypeError(
        f"{name} is folded inside of {what}. {purpose} follows a fold that the loss"
        f" calls once, directly or inside of jax.jit: move it out{way_out}."
    )


class FollowedStack(eqx.Module):
    """What a loss function is given in place of a stack: it has `fold` and `scan`,
    which bind a `FollowedFold`, and refuses whatever else would read the weights.
    """

    # The layers, with tracers as trained arrays.
    _stack: BlockFoldable
    # The path in the model, as `model.blocks`. Static, so that a jitted function is
    # traced anew for each stack, and `_inlined` meets no jaxpr twice.
    _name: str = eqx.field(static=True)
    _purpose: Purpose = eqx.field(static=True, default=FUSED_UPDATE)

    def __len__(self) -> int:
        return len(self._stack)

    def fold(self, init: PyTree, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self._apply("fold", init, args, kwargs)

    def scan(self, init: PyTree, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self._apply("scan", init, args, kwargs)

    def _apply(
        self,
        verb: str,
        init: PyTree,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
    ) -> PyTree:
        # No sweep with a visitor of ours stops early.
        if callable(kwargs.get("until")):
            raise TypeError(self._lacks(f"until= in {verb}"))
        # These are the loop's own; all other keyword arguments are operands.
        options = {}
        for name in ("remat", "unroll", "reverse"):
            if name in kwargs:
                options[name] = kwargs.pop(name)

        def call(
            suffix: str,
            stack: PyTree,
            init: PyTree,
            args: tuple[PyTree, ...],
            kwargs: dict[str, PyTree],
        ) -> PyTree:
            method = getattr(stack, verb + suffix)
            return method(init, *args, **options, **kwargs)

        # Numbers and NumPy's arrays of the carry come out as arrays of JAX.
        init = jax.tree.map(_as_array, init)
        operands = (self._stack, init, args, kwargs)
        arrays, static = eqx.partition(operands, eqx.is_array)
        # Traced here for the types of the result alone; the jaxpr is dropped.
        trace = eqx.filter_make_jaxpr(functools.partial(call, ""))
        closed, result_types, result_static = trace(*operands)
        # A tracer among the constants is an array of the loss that a function closes
        # over. It is no operand of the primitive, so it would get no gradient.
        if any(isinstance(constant, Tracer) for constant in closed.consts):
            raise ValueError(
                f"In the loss of {self._purpose.what}, a function passed to"
                f" {self._name}.{verb} uses arrays of the loss that are not among its"
                " arguments. Pass these arrays as arguments of their own."
            )
        types = jax.tree.map(jax.typeof, (arrays, result_types))
        primitive = FollowedFold(
            *types,
            name=self._name,
            purpose=self._purpose,
            verb=verb,
            options=Static(options),
            call=call,
            static=Static(static),
            fold_pass=None,
        )
        return eqx.combine(primitive(*arrays), result_static)

    def __getattr__(self, name: str) -> Any:
        # What a loss may read without reading a weight.
        if name in ("Block", "Layers", "remat"):
            return getattr(self._stack, name)
        # Python and JAX ask objects for special methods, which is no use of weights.
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(self._lacks(repr(name)))

    # Iteration calls it too.
    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(self._lacks("single layers"))

    def _lacks(self, what: str) -> str:
        purpose = self._purpose
        otherwise = ""
        if purpose.way_out:
            otherwise = f" {purpose.way_out.capitalize()} to use it otherwise."
        return (
            f"In the loss of {purpose.what}, {self._name} has fold and scan, and no"
            f" {what}: {purpose.reason}.{otherwise}"
        )


def followed(
    closed: ClosedJaxpr, folds: Iterable[tuple[str, Sequence[Var], FoldPass]]
) -> Callable[..., list[PyTree]]:
    """The traced loss as a function of its flat inputs, which can be differentiated.

    Args:
        closed: the loss, traced with `FollowedStack`s.
        folds: for each stack its name, the variables of its trained weights, and what
            the rules of its fold fill in.

    Raises:
        ValueError, TypeError: a stack is not folded exactly once, where it can be
            followed, or something else reads its weights; names the stack.
    """
    jaxpr, constants = inlined(closed)
    equations = [*jaxpr.eqns]
    for name, weights, fold_pass in folds:
        position = only_use(equations, weights, name, FUSED_UPDATE)
        traced = primitive_of(equations[position])
        # A new primitive: those of a jaxpr are shared with JAX's caches.
        params = {**traced.params, "fold_pass": fold_pass}
        fold = FollowedFold(traced.in_avals, traced.out_aval, **params)
        equations[position] = with_primitive(equations[position], fold)
    edited = jaxpr.replace(eqns=equations)
    return functools.partial(eval_jaxpr, edited, (), *constants)


def inlined(closed: ClosedJaxpr) -> tuple[Jaxpr, list[Any]]:
    """The traced loss without the `jax.jit` calls around folds, and its constants,
    which are its first inputs.
    """
    jaxpr, constants = without_constants(closed)
    # What the loss computes of weights and doesn't use is no use of them.
    is_used = [True] * len(jaxpr.outvars)
    jaxpr, _ = dce_jaxpr(jaxpr, is_used, instantiate=True)
    aliases: dict[Var, Any] = {}
    equations = list(_inlined(jaxpr, aliases))
    outputs = _resolved(jaxpr.outvars, aliases)
    return jaxpr.replace(eqns=equations, outvars=outputs), constants


def only_use(
    equations: Sequence[JaxprEqn], weights: Sequence[Var], name: str, purpose: Purpose
) -> int:
    """The position of the one equation that folds a stack; refuses other readers of its
    weights, and folds inside of loops and transformations.
    """
    positions = []
    variables = set(weights)
    for position, eqn in enumerate(equations):
        read = [var for var in eqn.invars if is_in(var, variables)]
        if not read:
            continue
        if not _is_fold(eqn) and _holds_fold(eqn):
            raise _refusal(name, purpose, f"`{name_of(eqn)}`")
        # The stack is the first operand, so a fold of it reads all the weights, in
        # order and once. A stack that the loss has changed has other variables.
        if not _is_fold(eqn) or read != [*weights]:
            how = "changes" if _is_fold(eqn) else f"uses (in `{name_of(eqn)}`)"
            raise ValueError(
                f"The loss {how} the weights of {name} outside of its layers."
                f" {purpose} gives them to the fold alone: cast or change them in the"
                " block's own call."
            )
        positions.append(position)
    if len(positions) != 1:
        way_out = f"{purpose.way_out}, or " if purpose.way_out else ""
        raise ValueError(
            f"The loss folds {name} {len(positions)} times. {purpose} needs one call of"
            f" fold or scan: {way_out}compute its gradient with jax.grad."
        )
    return positions[0]


def _inlined(jaxpr: Jaxpr, aliases: dict[Var, Any]) -> Iterator[JaxprEqn]:
    """The equations of `jaxpr`; a call (`jax.jit`) that holds a fold is replaced by the
    equations of what it calls.

    JAX differentiates the inside of a call in a trace of its own, out of which the
    fold's rules could hand no updated layer. Variables are not renamed: `aliases` is
    filled with what inputs and outputs of inlined calls stand for. No call is inlined
    twice, as its fold would then be one of two, so each variable has one definition.
    """
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=_resolved(eqn.invars, aliases))
        is_call = eqn.primitive.name in CALLS
        if not is_call or not _holds_fold(eqn):
            yield eqn
            continue
        (inner,) = programs_in(eqn)
        constants = getattr(eqn.params["jaxpr"], "consts", ())
        for var, value in zip(inner.constvars, constants, strict=True):
            aliases[var] = Literal(value, var.aval)
        aliases.update(zip(inner.invars, eqn.invars, strict=True))
        yield from _inlined(inner, aliases)
        aliases.update(zip(eqn.outvars, inner.outvars, strict=True))


def _resolved(atoms: Iterable[Any], aliases: dict[Var, Any]) -> list[Any]:
    """What variables stand for, through calls within calls."""
    resolved = []
    for atom in atoms:
        while isinstance(atom, Var) and atom in aliases:
            atom = aliases[atom]
        resolved.append(atom)
    return resolved


def _is_fold(eqn: JaxprEqn) -> bool:
    return isinstance(primitive_of(eqn), FollowedFold)


def _holds_fold(eqn: JaxprEqn) -> bool:
    """Whether an equation is a fold, or has one at any depth."""
    if _is_fold(eqn):
        return True
    for program in programs_in(eqn):
        if any(map(_holds_fold, program.eqns)):
            return True
    return False
