"""`RematAdjoint`: how Diffrax's solves are differentiated, over loops of this library.

`diffrax.diffeqsolve` takes an adjoint, which says with which loops the solve runs:

    from stacked_remat.diffrax import RematAdjoint

    diffrax.diffeqsolve(..., adjoint=RematAdjoint(max_carries=32))

Its loops are `while_loop`s of this library, so a solve has reverse and forward mode,
with and without `max_steps`. Diffrax writes the results that a solve saves to arrays in
the carry of its loop; these are not kept with it (`_while/written.py`).
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from ._schedule import whole_number
from ._static import PyTree
from ._while.api import while_loop

try:
    import diffrax
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "stacked_remat.diffrax needs diffrax, which is not installed: pip install"
        " 'stacked_remat[diffrax]'.",
        name="diffrax",
    ) from error

# Solvers whose stages are a loop of Equinox, and which kind of it has forward mode; the
# default one has not.
_STAGES = {diffrax.AbstractRungeKutta: "bounded", diffrax.AbstractSRK: "lax"}


class RematAdjoint(diffrax.AbstractAdjoint):
    """Differentiates the steps of a solve, in reverse and in forward mode.

    In the place of `diffrax.RecursiveCheckpointAdjoint`, which has no forward mode, and
    of `diffrax.DirectAdjoint`, whose time grows with `max_steps`.

    Attributes:
        max_carries: how many states of the solve are kept in reverse mode, as in
            `while_loop`, which has memory and cost. The number of steps need not be
            known: `max_steps=None` is differentiated too.

    Raises:
        TypeError: `max_carries` is no int.
        ValueError: `max_carries` is less than 1, or the solve has an
            `UnsafeBrownianPath`, whose values are other ones when a step runs again.
    """

    max_carries: int = 32

    def __check_init__(self) -> None:
        whole_number("max_carries", self.max_carries, "how many states are kept")

    def loop(
        self,
        *,
        solver: PyTree,
        terms: PyTree,
        throw: bool,
        passed_solver_state: bool,
        passed_controller_state: bool,
        **options: Any,
    ) -> PyTree:
        """Run the solve. `diffeqsolve` calls it."""
        del throw, passed_solver_state, passed_controller_state

        def is_unsafe(leaf: Any) -> bool:
            return isinstance(leaf, diffrax.UnsafeBrownianPath)

        if any(map(is_unsafe, jax.tree.leaves(terms, is_leaf=is_unsafe))):
            raise ValueError(
                "RematAdjoint runs steps again, for which an UnsafeBrownianPath has"
                " other values. Use a VirtualBrownianTree, or"
                " adjoint=diffrax.ForwardMode()."
            )
        for stages, kind in _STAGES.items():
            if isinstance(solver, stages) and solver.scan_kind is None:
                solver = eqx.tree_at(
                    lambda solver: solver.scan_kind,
                    solver,
                    kind,
                    is_leaf=lambda leaf: leaf is None,
                )
        loop = functools.partial(_loop, self.max_carries)
        return self._loop(
            solver=solver,
            terms=terms,
            inner_while_loop=loop,
            outer_while_loop=functools.partial(_outer_loop, self.max_carries),
            **options,
        )


def _outer_loop(max_carries: int, *args: Any, **options: Any) -> PyTree:
    """The loop over steps."""
    state = _loop(max_carries, *args, **options)
    # Diffrax reads it once more, by a primitive that has no derivative.
    return eqx.tree_at(
        lambda state: state.progress_meter_state,
        state,
        jax.tree.map(lax.stop_gradient, state.progress_meter_state),
        is_leaf=lambda leaf: leaf is None,
    )


def _loop(
    max_carries: int,
    cond_fun: Callable[[PyTree], Any],
    body_fun: Callable[[PyTree], PyTree],
    init_val: PyTree,
    *,
    max_steps: int | None,
    **_: Any,
) -> PyTree:
    """A loop with the arguments of Equinox's, of which `buffers` are found, and
    `checkpoints` is `max_carries`.
    """
    # Diffrax's state has Python numbers.
    init_val = jax.tree.map(jnp.array, init_val)
    if max_steps is None:
        return while_loop(cond_fun, body_fun, init_val, max_carries=max_carries)

    def runs(counted: tuple[Any, PyTree]) -> Any:
        number, value = counted
        return (number < max_steps) & cond_fun(value)

    def step(counted: tuple[Any, PyTree]) -> tuple[Any, PyTree]:
        number, value = counted
        return number + 1, body_fun(value)

    counted = jnp.int32(0), init_val
    _, value = while_loop(runs, step, counted, max_carries=max_carries)
    return value
