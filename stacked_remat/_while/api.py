"""`while_loop`: `jax.lax.while_loop` with a derivative in reverse mode."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import JaxprEqn

from .._activity import forwarded_inputs
from .._compat import without_constants
from .._schedule import whole_number
from .._sweep.gradient import merge, pick
from .._sweep.slots import Arrays, inverted
from .._sweep.store import varies_over, varying_over
from .._sweep.trace import weak_as
from .primitive import Loop
from .step import Step
from .written import read_leaves

T = TypeVar("T")


def while_loop(
    cond_fun: Callable[[T], Any],
    body_fun: Callable[[T], T],
    init_val: T,
    *,
    max_carries: int,
) -> T:
    """`jax.lax.while_loop` with reverse mode: a loop without a bound that keeps a given
    number of carries.

    Equals

    ```python
    carry = init_val
    while cond_fun(carry):
        carry = body_fun(carry)
    return carry
    ```

    The program does not grow with the number of steps, which need not be known. Reverse
    mode keeps `max_carries` carries of the forward pass and runs steps again for the
    others. All of JAX's transformations apply, in any order: forward mode, also of a
    gradient, reverse mode of reverse mode, `jax.vmap`, whose examples stop apart,
    `jax.checkpoint`, `jax.shard_map`, whose devices stop apart, and other loops around
    it or in it. Reverse mode of reverse mode takes forward mode of the steps, which a
    `jax.custom_vjp` in them does not have.

    Args:
        cond_fun: takes the carry; returns one bool, whether to run a step.
        body_fun: takes the carry and returns the next one, of the same types. Arrays
            that it or `cond_fun` closes over are differentiated too.
        init_val: the first carry, a tree of arrays. Integers, bools and random keys
            have no derivative.
        max_carries: how many carries are kept at a time, at least 1.

    Returns:
        The last carry, as `jax.lax.while_loop` returns it.

    Raises:
        TypeError: `max_carries` is no int, or as `jax.lax.while_loop`.
        ValueError: `max_carries` is less than 1.

    Memory: in reverse mode `max_carries` carries, and four more while it runs. An array
    in the carry that `body_fun` only adds to, or writes to at an index, is not kept, so
    a buffer of outputs is there once; a gradient of it, too.

    Cost of reverse mode, for `n` steps: `n` in the forward pass, the vector-Jacobian
    products of `n` steps, and, with `k` carries, a little more than
    `(r - 1) n - binomial(k + r, r - 1)` steps run again, for the least `r` with
    `binomial(k + r, r) >= n`: about `n` of them where `n <= (k + 1) (k + 2) / 2`.
    `stacked_remat/_while/kept_carries.py` says which carries are kept. Forward mode
    runs the loop, and the loop with tangents. Under `jax.vmap` or `jax.shard_map` steps
    run until all examples or devices are done. A finished one takes its first step
    again, whose result is dropped; only where that step has no finite derivative,
    gradients of what the body closes over become NaN.

    `fold(..., until=...)` is for loops with a bound, and has all policies.
    """
    max_carries = whole_number(
        "max_carries", max_carries, "how many carries the loop keeps"
    )

    for path, leaf in jax.tree_util.tree_leaves_with_path(init_val):
        if not eqx.is_array_like(leaf):
            raise TypeError(
                f"while_loop: the carry{jax.tree_util.keystr(path)} is {leaf!r}, which"
                " is no array. Close over it: it is the same in all steps."
            )

    def of_jax(init: T) -> T:
        return lax.while_loop(cond_fun, body_fun, init)

    init_val = _alike_on_devices(cond_fun, init_val)
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        # A Python loop, which has all derivatives
        return of_jax(init_val)
    # Traced by JAX, which also makes types of the carry agree and says where they can't
    closed, result = jax.make_jaxpr(of_jax, return_shape=True)(init_val)
    *conversions, loop = closed.jaxpr.eqns
    assert loop.primitive is lax.while_p
    # JAX takes out of the loop what its steps pass on: such results are no outputs of
    # the equation.
    numbers = {id(var): number for number, var in enumerate(loop.outvars)}
    of_loop = [numbers.get(id(atom)) for atom in closed.jaxpr.outvars]
    known = [atom for atom in closed.jaxpr.outvars if id(atom) not in numbers]
    outvars = [*loop.invars, *known]
    before = closed.jaxpr.replace(eqns=conversions, outvars=outvars)
    values = eval_jaxpr(before, closed.consts, *jax.tree.leaves(init_val))
    operands, others = values[: len(loop.invars)], iter(values[len(loop.invars) :])
    carry = _run(loop, operands, max_carries)
    leaves = [next(others) if n is None else carry[n] for n in of_loop]
    return jax.tree.unflatten(jax.tree.structure(result), leaves)


def _alike_on_devices(cond_fun: Callable[[T], Any], init: T) -> T:
    """The first carry, where devices of a `jax.shard_map` stop at different steps all
    leaves varying over these devices.
    """
    runs = jax.eval_shape(cond_fun, init)
    apart = frozenset[str]().union(*map(varies_over, jax.tree.leaves(runs)))
    if not apart:
        return init
    return jax.tree.map(lambda leaf: varying_over(jnp.asarray(leaf), apart), init)


def _run(loop: JaxprEqn, operands: Arrays, max_carries: int) -> Arrays:
    """The results of an equation of `jax.lax.while_loop`."""
    cond, body = loop.params["cond_jaxpr"], loop.params["body_jaxpr"]
    cond_count, body_count = loop.params["cond_nconsts"], loop.params["body_nconsts"]
    operands = [*map(_strong, operands)]
    cond_consts = operands[:cond_count]
    body_consts = operands[cond_count : cond_count + body_count]
    init = operands[cond_count + body_count :]

    def runs(cond_consts: Arrays, carry: Arrays) -> Any:
        return eval_jaxpr(cond.jaxpr, cond.consts, *cond_consts, *carry)[0]

    # What every step passes on needs no slot: it is a constant of the loop.
    sources = forwarded_inputs(body.jaxpr)
    passed_on = [source == body_count + i for i, source in enumerate(sources)]
    changes = inverted(passed_on)

    def run(consts: Any, carry: Arrays) -> Arrays:
        cond_consts, body_consts, constant = consts
        _, *changed = carry
        leaves = merge(merge([None] * len(init), constant, passed_on), changed, changes)
        new = eval_jaxpr(body.jaxpr, body.consts, *body_consts, *leaves)
        return [runs(cond_consts, new), *pick(new, changes)]

    consts = cond_consts, body_consts, pick(init, passed_on)
    carry = [runs(cond_consts, init), *pick(init, changes)]
    jaxpr, constants = without_constants(jax.make_jaxpr(run)(consts, carry))
    _, *read = read_leaves(jaxpr, len(carry))
    # Whether the loop runs on is read under `jax.vmap`.
    kept = True, *read
    step = Step(jaxpr, kept, max_carries)
    constants += jax.tree.leaves(consts)
    if varies_over(jax.typeof(carry[0])):
        # Devices run until all are done, since a step, or its derivative, may have
        # collectives.
        constants += map(lax.stop_gradient, pick(carry, kept))
        step = step.stopping()
    _, *changed = Loop(step, constants, carry)(constants, carry)
    results = merge(init, changed, changes)
    return [*map(weak_as, results, [var.aval for var in loop.outvars])]


def _strong(leaf: Any) -> Any:
    """The array, of a strong type: those of steps and of batches are."""
    array = jnp.asarray(leaf)
    if not jax.typeof(array).weak_type:
        return array
    return lax.convert_element_type(array, array.dtype)
