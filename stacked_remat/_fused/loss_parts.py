"""A loss function cut at the folds of its stacks: what comes before, between and after them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .._activity import active_variables, is_differentiable, name_of, programs_in
from .folds import Fold, FollowedStack, fold_p, run, with_arrays

_CALLS = ("jit", "pjit")  # the names of jit's primitive in the versions of JAX


class Part(NamedTuple):
    """Equations of the loss without a fold, or a fold alone.

    Attributes:
        inputs: the variables that it reads.
        outputs: those that it defines and a later part reads; of a fold, all.
        jaxpr: None for a fold.
        fold: None for equations.
    """

    inputs: list[Var | Literal]
    outputs: list[Var]
    jaxpr: Jaxpr | None
    fold: Fold | None


class LossParts(NamedTuple):
    """A loss function as parts that are evaluated one after the other.

    Attributes:
        parts: in order.
        inputs: the variables of the arrays of the model, then those of the other arguments.
        constants: the values of variables that are no inputs.
        outputs: what the function returns, in leaves.
        struct: the same as a tree, each array replaced by its type.
    """

    parts: list[Part]
    inputs: list[Var]
    constants: dict[Var, Any]
    outputs: list[Var | Literal]
    struct: Any


def cut_at_folds(
    loss: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]
) -> LossParts:
    """Trace a loss function and cut it at the folds.

    Args:
        loss: a function of the model and the other arguments.
        model: with a `FollowedStack` in the place of each stack that is followed.
        args: the other arguments.
        kwargs: those by name.
        names: of these stacks, for errors.

    Raises:
        ValueError: a stack is not folded exactly once, is folded inside of a loop or another transformation,
            or its weights are used otherwise.
    """
    closed, struct, static = eqx.filter_make_jaxpr(loss)(model, *args, **kwargs)
    jaxpr = closed.jaxpr
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    equations: list[JaxprEqn] = []
    same = dict(_inline(jaxpr, {}, equations, constants, names))
    outputs = [_resolve(var, same) for var in jaxpr.outvars]
    _check_uses(model, jaxpr.invars, equations, names)
    return LossParts(
        _parts(jaxpr, equations, outputs), list(jaxpr.invars), constants, outputs, eqx.combine(struct, static)
    )


def _resolve(var: Any, same: dict[Any, Any]) -> Any:
    while isinstance(var, Var) and var in same:
        var = same[var]
    return var


def _folds_in(jaxpr: Jaxpr) -> Iterator[Fold]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is fold_p:
            yield eqn.params["fold"]
        for inner in programs_in(eqn):
            yield from _folds_in(inner)


def _inline(
    jaxpr: Jaxpr,
    same: dict[Var, Any],
    equations: list[JaxprEqn],
    constants: dict[Var, Any],
    names: Sequence[str],
) -> dict[Var, Any]:
    """Append the equations of `jaxpr` to `equations`, with those of the jits that hold a fold in their place.

    Returns:
        `same`: from variables to those that they stand for.
    """
    for eqn in jaxpr.eqns:
        invars = [_resolve(var, same) for var in eqn.invars]
        folds = [fold for inner in programs_in(eqn) for fold in _folds_in(inner)]
        if not folds:
            equations.append(eqn.replace(invars=invars))
        elif eqn.primitive.name not in _CALLS or any(
            fold is other.params.get("fold") for fold in folds for other in equations
        ):
            what = f"`{name_of(eqn)}`" if eqn.primitive.name not in _CALLS else "a function called twice"
            raise ValueError(
                f"{names[folds[0].number]} is folded inside of {what}. A fused update follows a fold that "
                "the loss calls once, directly or inside of jax.jit: move it out, or freeze the stack "
                "(trainable)."
            )
        else:
            (inner,) = programs_in(eqn)
            constants |= dict(zip(inner.constvars, getattr(eqn.params["jaxpr"], "consts", ()), strict=True))
            same |= dict(zip(inner.invars, invars, strict=True))
            _inline(inner, same, equations, constants, names)
            same |= dict(zip(eqn.outvars, inner.outvars, strict=True))
    return same


def _check_uses(model: Any, inputs: Sequence[Var], equations: list[JaxprEqn], names: Sequence[str]) -> None:
    folded = [eqn.params["fold"].number for eqn in equations if eqn.primitive is fold_p]
    for number, name in enumerate(names):
        if folded.count(number) != 1:
            raise ValueError(
                f"The loss folds {name} {folded.count(number)} times. A fused update needs one call of fold "
                "or scan: freeze the stack (trainable), or compute its gradient with jax.grad."
            )
    leaves = jtu.tree_leaves(eqx.filter(model, eqx.is_array), is_leaf=_is_followed)
    variables = iter(inputs)
    for leaf in leaves:
        own = [next(variables) for _ in jax.tree.leaves(leaf)]
        if not isinstance(leaf, FollowedStack):
            continue
        for eqn in equations:
            is_fold = eqn.primitive is fold_p and eqn.params["fold"].number == leaf._number
            if list(eqn.invars[: len(own)]) != own if is_fold else _reads(eqn, set(own)):
                by = "changes" if is_fold else f"uses (in `{name_of(eqn)}`)"
                raise ValueError(
                    f"The loss {by} the weights of {leaf._name} outside of its layers. A fused update gives "
                    "them to the fold alone: cast or change them in the block's own call."
                )


def _reads(eqn: JaxprEqn, variables: set[Var]) -> bool:
    """Whether an equation reads some of these; a call that is given them and leaves them unread does not."""
    if variables.isdisjoint(_variables(eqn)):
        return False
    inner = programs_in(eqn)
    if not inner or any(len(body.invars) != len(eqn.invars) for body in inner):
        return True
    for body in inner:
        pairs = zip(body.invars, eqn.invars, strict=True)
        own = {var for var, given in pairs if isinstance(given, Var) and given in variables}
        if any(_reads(of_body, own) for of_body in body.eqns):
            return True
    return False


def _is_followed(node: Any) -> bool:
    return isinstance(node, FollowedStack)


def _variables(eqn: JaxprEqn) -> list[Var]:
    return [var for var in eqn.invars if isinstance(var, Var)]


def _parts(jaxpr: Jaxpr, equations: list[JaxprEqn], outputs: Sequence[Any]) -> list[Part]:
    groups: list[list[JaxprEqn]] = [[]]
    for eqn in equations:
        if eqn.primitive is fold_p:
            groups += [[eqn], []]
        else:
            groups[-1].append(eqn)
    read_later = {var for var in outputs if isinstance(var, Var)}
    parts: list[Part] = []
    for i in reversed(range(len(groups))):
        group = groups[i]
        defined = dict.fromkeys(var for eqn in group for var in eqn.outvars)
        read = dict.fromkeys(var for eqn in group for var in _variables(eqn) if var not in defined)
        if i % 2:
            (eqn,) = group
            parts.append(Part(list(eqn.invars), list(eqn.outvars), None, eqn.params["fold"]))
        elif group:
            results = [var for var in defined if var in read_later]
            inner = jaxpr.replace(constvars=[], invars=list(read), outvars=results, eqns=group)
            parts.append(Part(list(read), results, inner, None))
        read_later |= set(read)
    return parts[::-1]


def _type(var: Any) -> Any:
    return var.aval


class Values:
    """Values and cotangents of the variables of a loss, evaluated part by part."""

    def __init__(self, loss: LossParts, arrays: Sequence[Any], wanted: Iterable[bool]):
        """Arrays are the inputs' values; `wanted` are those that are differentiated."""
        self.loss = loss
        self.values: dict[Var, Any] = {**loss.constants, **dict(zip(loss.inputs, arrays, strict=True))}
        self.cotangents: dict[Var, Any] = {}
        self.wanted = [var for var, is_ in zip(loss.inputs, wanted, strict=False) if is_]
        self.active = set(self.wanted)

    def read(self, var: Var | Literal) -> Any:
        return var.val if isinstance(var, Literal) else self.values[var]

    def is_active(self, var: Any) -> bool:
        return isinstance(var, Var) and var in self.active

    def add_cotangents(self, variables: Sequence[Any], cotangents: Sequence[Any]) -> None:
        """Add what is not None to the cotangents of the variables that are differentiated."""
        for var, cotangent in zip(variables, cotangents, strict=True):
            if cotangent is not None and self.is_active(var):
                cotangent = cotangent.astype(_type(var).dtype)
                before = self.cotangents.get(var)
                self.cotangents[var] = cotangent if before is None else before + cotangent

    def cotangent(self, var: Any) -> Any:
        """Removes the cotangent of a variable and returns it: zeros if there is none, None for integers."""
        found = self.cotangents.pop(var, None)
        if not is_differentiable(_type(var).dtype):
            return None
        return jnp.zeros(_type(var).shape, _type(var).dtype) if found is None else found

    def forward(self) -> list[Callable[[], Any]]:
        """Evaluate all parts; returns for each its pullback, or what sweeps back over its layers."""
        return [self._sweep(part) if part.fold else self._evaluate(part) for part in self.loss.parts]

    def _sweep(self, part: Part) -> Any:
        assert part.fold is not None
        y, sweep_back = run(part.fold, "_vjp", [self.read(var) for var in part.inputs])
        arrays = [leaf for leaf in jax.tree.leaves(y) if eqx.is_array(leaf)]
        self.values |= dict(zip(part.outputs, arrays, strict=True))
        self.active |= {var for var in part.outputs if is_differentiable(_type(var).dtype)}
        return sweep_back

    def _evaluate(self, part: Part) -> Callable[[], None]:
        jaxpr = part.jaxpr
        assert jaxpr is not None
        inputs: list[Any] = [var for var in part.inputs if self.is_active(var)]
        self.active |= active_variables(jaxpr, inputs)
        outputs = [var for var in part.outputs if self.is_active(var)]

        def evaluate(active: list[Any]) -> tuple[list[Any], list[Any]]:
            own = dict(zip(inputs, active, strict=True))
            values = [own[var] if var in own else self.read(var) for var in jaxpr.invars]
            found = dict(zip(part.outputs, eval_jaxpr(jaxpr, (), *values), strict=True))
            return [found.pop(var) for var in outputs], list(found.values())

        found, pull_back, rest = jax.vjp(evaluate, [self.values[var] for var in inputs], has_aux=True)
        others = [var for var in part.outputs if not self.is_active(var)]
        self.values |= dict(zip([*outputs, *others], [*found, *rest], strict=True))

        def add() -> None:
            (cotangents,) = pull_back([self.cotangent(var) for var in outputs])
            self.add_cotangents(inputs, cotangents)

        return add

    def returned(self) -> Any:
        """What the loss function returned."""
        return with_arrays(self.loss.struct, [self.read(var) for var in self.loss.outputs])
