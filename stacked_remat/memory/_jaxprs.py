"""The jaxprs of a traced program as they are counted: without dead code, and those that equations call."""

from typing import Any

import jax
from jax.extend.core import Literal
from jax.interpreters import partial_eval

_EXPANDED = "call_hi_primitive"  # what `jax.experimental.hijax` makes of a primitive that expands into others


class Jaxprs:
    """The jaxprs within one program. Each is made once, because the ids of equations are keys."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[Any, Any]] = {}
        self._expansions: dict[int, tuple[Any, Any]] = {}
        self._is_used: dict[int, list[bool]] = {}

    def live(self, jaxpr: Any) -> Any:
        """A jaxpr, open or closed, without equations whose results are never used."""
        if id(jaxpr) not in self._live:
            open_jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
            live, _ = partial_eval.dce_jaxpr(open_jaxpr, [True] * len(open_jaxpr.outvars), instantiate=True)
            self._live[id(jaxpr)] = (jaxpr, live)
            if any(eqn.primitive.name == _EXPANDED for eqn in live.eqns):
                atoms = [*live.outvars, *(atom for eqn in live.eqns for atom in eqn.invars)]
                read = {atom for atom in atoms if not isinstance(atom, Literal)}
                self._is_used |= {id(eqn): [out in read for out in eqn.outvars] for eqn in live.eqns}
        return self._live[id(jaxpr)][1]

    def called(self, eqn: Any) -> Any:
        """The jaxpr that an equation calls with its own operands; None for any other equation."""
        if eqn.primitive.name == _EXPANDED:
            if id(eqn) not in self._expansions:
                is_used = self._is_used.get(id(eqn), [True] * len(eqn.outvars))
                self._expansions[id(eqn)] = eqn, _expansion(eqn, is_used)
            return self._expansions[id(eqn)][1]
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "call"):
            found = eqn.params.get(key)
            if found is not None and len(getattr(found, "jaxpr", found).invars) == len(eqn.invars):
                return found
        return None


def _expansion(eqn: Any, is_used: list[bool]) -> Any:
    """What a primitive expands into, with 0 in place of each result that is not used."""
    primitive = eqn.params["_prim"]

    def expand(*operands: Any) -> Any:
        results = primitive.expand(*jax.tree.unflatten(primitive.in_tree, operands))
        flat = primitive.out_tree.flatten_up_to(results)
        return [result if used else 0 for result, used in zip(flat, is_used, strict=True)]

    with eqn.ctx.manager:  # its mesh, of which the axes of `jax.shard_map` are bound
        mesh = jax.sharding.get_abstract_mesh()
        axes = [(name, mesh.shape[name]) for name in mesh.manual_axes]
        return jax.make_jaxpr(expand, axis_env=axes)(*primitive.in_avals_flat)
