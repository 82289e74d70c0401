"""The folds that a loss function makes of stacks that are updated, followed in its
reverse pass.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import equinox as eqx
import jax
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters import ad
from jax.interpreters.partial_eval import dce_jaxpr

from .._activity import CALLS, name_of, programs_in
from .._block_foldable import BlockFoldable
from .._compat import HiPrim, without_constants
from .._static import PyTree, Static


class FollowedFold(HiPrim):
    """A fold, `(stack, init, args, kwargs) -> result`, of the arrays in these.

    Its reverse pass is that of a follower, which there is none of while the loss is
    traced: it begins with what sweeps back and which arrays of `(init, args, kwargs)`
    have cotangents, and is called with the cotangent of the result. There are none of
    the stack.
    """

    name: str
    call: Callable
    static: Static
    follower: Any

    def __init__(self, in_types: PyTree, out_types: PyTree, **params: Any) -> None:
        self.in_avals, self.out_aval, self.params = in_types, out_types, params
        super().__init__()

    def expand(self, *arrays: PyTree) -> PyTree:
        return eqx.filter(
            self.call("", *eqx.combine(arrays, self.static.value)), eqx.is_array
        )

    def vjp_fwd(self, nonzero: PyTree, *arrays: PyTree) -> tuple[PyTree, None]:
        if self.follower is None:
            raise _refusal(self.name, "a derivative that the loss takes")
        stack, *given = eqx.combine(arrays, self.static.value)
        y, sweep_back = self.call("_vjp", stack, *given)
        self.follower.begin(sweep_back, nonzero[1:])
        return eqx.filter(y, eqx.is_array), None

    def vjp_bwd(self, residuals: None, cotangents: PyTree, *sums: PyTree) -> None:
        leaves = map(ad.instantiate_zeros, self.out_tree.flatten_up_to(cotangents))
        result = self.follower(self.out_tree.unflatten(leaves))
        found = leaves_or_none((result.carry, result.args, result.kwargs))
        for total, cotangent in zip(leaves_or_none(sums[1:]), found, strict=True):
            if total is not None and cotangent is not None:
                total.accum(cotangent)

    def jvp(self, primals: PyTree, tangents: PyTree) -> PyTree:
        raise _refusal(self.name, "a derivative that the loss takes")

    def batch(self, axis: Any, args: PyTree, dims: PyTree) -> PyTree:
        raise _refusal(self.name, "jax.vmap")


def leaves_or_none(tree: PyTree) -> list[PyTree]:
    """The leaves of a tree, None being one."""
    return jax.tree.leaves(tree, is_leaf=lambda node: node is None)


def _refusal(name: str, what: str) -> TypeError:
    return TypeError(
        f"{name} is folded inside of {what}. A fused update follows a fold that the"
        " loss calls once, directly or inside of jax.jit: move it out, or freeze the"
        " stack (trainable)."
    )


class FollowedStack(eqx.Module):
    """What a loss function is given in the place of a stack: it can be folded and
    scanned, no more.
    """

    _stack: BlockFoldable
    _name: str = eqx.field(static=True)

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
        options = {
            name: kwargs.pop(name)
            for name in ("remat", "unroll", "reverse")
            if name in kwargs
        }

        def call(
            suffix: str,
            stack: PyTree,
            init: PyTree,
            args: tuple[PyTree, ...],
            kwargs: dict[str, PyTree],
        ) -> PyTree:
            return getattr(stack, verb + suffix)(init, *args, **options, **kwargs)

        arrays, static = eqx.partition((self._stack, init, args, kwargs), eqx.is_array)
        traced = eqx.filter_make_jaxpr(functools.partial(call, ""))
        closed, types, rest = traced(self._stack, init, args, kwargs)
        if any(isinstance(constant, Tracer) for constant in closed.consts):
            raise ValueError(
                "In the loss of a fused update, a function passed to"
                f" {self._name}.{verb} uses arrays of the loss that are not among its"
                " arguments. Pass these arrays as arguments of their own."
            )
        params = {
            "name": self._name,
            "call": call,
            "static": Static(static),
            "follower": None,
        }
        return eqx.combine(
            FollowedFold(*jax.tree.map(jax.typeof, (arrays, types)), **params)(*arrays),
            rest,
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("Block", "Layers", "remat"):
            return getattr(self._stack, name)
        raise AttributeError(name if name.startswith("__") else self._lacks(repr(name)))

    def __getitem__(self, index: object) -> NoReturn:  # iteration calls it too
        raise TypeError(self._lacks("single layers"))

    def _lacks(self, what: str) -> str:
        return (
            f"In the loss of a fused update, {self._name} has fold and scan, and no"
            f" {what}: its weights are updated in the backward pass of the one fold."
            " Freeze the stack (trainable) to use it otherwise."
        )


def followed(
    closed: ClosedJaxpr, folds: Iterable[tuple[str, Sequence[Var], Any]]
) -> Callable[..., list[PyTree]]:
    """A loss as a function of its inputs; stacks have a name, weights, and a follower
    in the reverse pass.
    """
    jaxpr, constants = without_constants(closed)
    jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    same: dict[Var, Any] = {}
    equations = [*_inlined(jaxpr, same)]
    outputs = [_resolve(var, same) for var in jaxpr.outvars]
    for name, weights, follower in folds:
        at = _only_use(equations, weights, name)
        fold = equations[at].params["_prim"]
        fold = FollowedFold(
            fold.in_avals, fold.out_aval, **{**fold.params, "follower": follower}
        )
        equations[at] = equations[at].replace(params={"_prim": fold})
    return functools.partial(
        eval_jaxpr, jaxpr.replace(eqns=equations, outvars=outputs), (), *constants
    )


def _only_use(equations: Sequence[JaxprEqn], weights: Sequence[Var], name: str) -> int:
    """Which equation is the one fold of a stack, and alone reads its weights."""
    found = []
    for at, eqn in enumerate(equations):
        read = [var for var in eqn.invars if isinstance(var, Var) and var in weights]
        if not read:
            continue
        if not _is_fold(eqn) and any(map(_holds_fold, programs_in(eqn))):
            raise _refusal(name, f"`{name_of(eqn)}`")
        if not _is_fold(eqn) or read != [*weights]:
            how = "changes" if _is_fold(eqn) else f"uses (in `{name_of(eqn)}`)"
            raise ValueError(
                f"The loss {how} the weights of {name} outside of its layers. A fused"
                " update gives them to the fold alone: cast or change them in the"
                " block's own call."
            )
        found.append(at)
    if len(found) != 1:
        raise ValueError(
            f"The loss folds {name} {len(found)} times. A fused update needs one call"
            " of fold or scan: freeze the stack (trainable), or compute its gradient"
            " with jax.grad."
        )
    return found[0]


def _inlined(jaxpr: Jaxpr, same: dict[Var, Any]) -> Iterator[JaxprEqn]:
    """The equations of `jaxpr`, with those of the calls that hold a fold in their
    place.

    Puts into `same` for variables what they stand for.
    """
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=[_resolve(var, same) for var in eqn.invars])
        if eqn.primitive.name not in CALLS or not any(
            map(_holds_fold, programs_in(eqn))
        ):
            yield eqn
            continue
        (inner,), constants = (
            programs_in(eqn),
            getattr(eqn.params["jaxpr"], "consts", ()),
        )
        pairs = zip(inner.constvars, constants, strict=True)
        same |= {var: Literal(value, var.aval) for var, value in pairs}
        same |= zip(inner.invars, eqn.invars, strict=True)
        yield from _inlined(inner, same)
        same |= zip(eqn.outvars, inner.outvars, strict=True)


def _resolve(var: Any, same: dict[Var, Any]) -> Any:
    while isinstance(var, Var) and var in same:
        var = same[var]
    return var


def _is_fold(eqn: JaxprEqn) -> bool:
    return isinstance(eqn.params.get("_prim"), FollowedFold)


def _holds_fold(jaxpr: Jaxpr) -> bool:
    return any(
        _is_fold(eqn) or any(map(_holds_fold, programs_in(eqn))) for eqn in jaxpr.eqns
    )
