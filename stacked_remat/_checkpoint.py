"""`checkpoint`: a region whose intermediate values are computed again, and names for
those that are not.

`recomputed` is `jax.checkpoint` of functions of any trees, for `checkpoint` and for
the Python loop of `_scan/layers.py`. `checkpoint_name` tags values, and a *policy*
chooses by these names what is kept. A block may ask, while it is traced, what the
regions around it keep (`internals_are_saved`); loops and `checkpoint` say so by
`saving_internals`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from ._compat import nothing_is_traced
from ._messages import shown
from ._names import named
from ._places import Places
from ._policy import ALIASES
from ._remat import EVERYTHING, JaxPolicy, Kept
from ._scan.marks import is_array
from ._static import PyTree, Static, with_leaves
from ._sweep.trace import check_effects

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def checkpoint(
    fun: Callable[P, R],
    *,
    save: bool | Iterable[str] | JaxPolicy = False,
    offload: Iterable[str] = (),
) -> Callable[P, R]:
    """A function whose intermediate values are computed again in the backward pass, not
    kept for it.

    ```python
    y = checkpoint(block)(x, mask)
    y = checkpoint(block, save=["scores"])(x, mask)  # keeps checkpoint_name "scores"
    policy = jax.checkpoint_policies.dots_saveable
    y = checkpoint(block, save=policy)(x, mask)  # keeps matrix products
    ```

    Values and derivatives are those of `fun`, of any order and in both modes. It is
    `jax.checkpoint` for functions of anything: arguments and results are trees of plain
    and named arrays, modules, functions, strings and other Python values. Within
    transformations the arrays are traced, NumPy's too; the rest, Python numbers too,
    reaches `fun` as it is. No array is kept alive after the call.

    Args:
        fun: a function or a module. Arrays that it closes over, traced or not, get
            their gradients too.
        save: the intermediate values that are kept. As `save_block_internals` of a
            `ScanCheckpointPolicy`: names that `checkpoint_name` gives inside `fun`, one
            of `jax.checkpoint_policies`, or `True` for all that the backward pass
            reads.
        offload: names of those that are moved to host memory until then, as
            `offload_block_internals`.

    Raises:
        TypeError: for arguments of a wrong type; where values are offloaded and `fun`
            has ordered effects.
        ValueError: for settings that contradict each other, and for a policy of JAX
            that `JAX_REMAT3=1` does not support.

    Memory: the arguments and what is saved, from the forward to the backward pass; the
    intermediate values while the region itself is reversed. Cost: `fun` once more for
    each gradient, less what is saved; nothing without derivatives.
    """
    if not callable(fun):
        raise TypeError(
            f"checkpoint takes a function; got {type(fun).__name__}. Its arguments come"
            " after it: checkpoint(fun)(x)."
        )
    if isinstance(save, str) and save in ALIASES:
        raise TypeError(
            f"save={save!r} is a policy of loops, and checkpoint has one region. Write"
            f" save=[names], save=True or offload=[names]; a loop takes remat={save!r}."
        )
    kept = Kept.of(save, offload)

    # Not with the `__dict__` of a module, whose fields are no attributes of a function
    @functools.wraps(fun, updated=())
    def checkpointed(*args: P.args, **kwargs: P.kwargs) -> R:
        # With nothing traced there is nothing to differentiate, and values are known in
        # `fun`, which `jax.checkpoint` would trace.
        if nothing_is_traced() or kept == EVERYTHING:
            return fun(*args, **kwargs)
        places = Places(kept.names)
        offloads = bool(kept.offloaded)
        region = recomputed(fun, kept.policy(), offloads=offloads, places=places)
        with saving_internals(kept.names):
            results = region(*args, **kwargs)
        places.check()
        return results

    return checkpointed


# What the regions around a layer keep of its internals: True for everything, or a
# frozenset of names. A context of JAX, so part of the keys of its caches: a block that
# was traced for one policy is not taken for another.
_saved_internals = jax.make_user_context(default_value=True)


def saving_internals(
    names: Iterable[str] | Literal[True],
) -> contextlib.AbstractContextManager[None]:
    """A context in which a region is traced that keeps these internals, but for what
    those around it drop.
    """
    around = _saved_internals.value
    if names is True:
        return _saved_internals(around)
    # What a region around this one drops, it drops within this one too
    kept = frozenset(names)
    return _saved_internals(kept if around is True else kept & around)


def internals_are_saved(name: str | None = None) -> bool:
    """Whether the scans around a layer keep its internals for the backward pass; called
    while it is traced.

    A block may then choose what it computes: where layers are recomputed, a result that
    is computed early, to spare the backward pass work, is dropped. `False` within
    `checkpoint` too, unless it has `save=True`; a `jax.checkpoint` around a scan is not
    seen. With a `name` it asks for the internals of this checkpoint name, which may be
    kept where the rest is not; a policy of JAX (`dots_saveable`, ...) keeps none by
    name.
    """
    saved = _saved_internals.value
    return saved is True or (name is not None and name in saved)


def recomputed(
    fun: Callable[..., Any],
    policy: JaxPolicy | None,
    *,
    offloads: bool = False,
    places: Places | None = None,
) -> Callable[..., Any]:
    """`jax.checkpoint` of a function of trees with leaves of all kinds; keeps none
    alive after a call. Operations within it get the names of `places`.
    """

    def checkpointed(*args: PyTree, **kwargs: PyTree) -> PyTree:
        # The function too, since a module holds arrays. Others that it closes over are
        # found by `jax.checkpoint`.
        arrays, static = eqx.partition((fun, args, kwargs), eqx.is_array)

        def of_arrays(arrays: PyTree) -> tuple[PyTree, Static]:
            fun, args, kwargs = eqx.combine(arrays, static)
            results = fun(*args, **kwargs)
            results, rest = eqx.partition(results, eqx.is_array)
            return results, Static(rest)

        run = of_arrays if places is None else places.named_in(of_arrays)
        run = _without_ordered_effects(run, arrays) if offloads else run
        results, rest = jax.checkpoint(run, policy=policy)(arrays)
        # Outside of jit JAX gives constants among the results back as Python numbers.
        return eqx.combine(jax.tree.map(jnp.asarray, results), rest.value)

    return checkpointed


def _without_ordered_effects(
    fun: Callable[[PyTree], PyTree], arrays: PyTree
) -> Callable[[PyTree], PyTree]:
    """`fun` for arguments like `arrays`, which is traced here; refuses ordered
    effects.

    JAX fails to compile them beside host memory, with an error that doesn't name them.
    """
    closed, results = jax.make_jaxpr(fun, return_shape=True)(arrays)
    check_effects(closed.jaxpr, (), offloads=True)

    def evaluate(arrays: PyTree) -> PyTree:
        inputs = jax.tree.leaves(arrays)
        return with_leaves(results, eval_jaxpr(closed.jaxpr, closed.consts, *inputs))

    return evaluate


def checkpoint_name(tree: T, name: str) -> T:
    """Name the arrays of a tree, so that `save_block_internals=[name]` and the like can
    pick them.

    The identity in value and gradient; leaves that are not arrays pass through. What is
    kept is the value that comes out of here, so use it, not the argument. Several
    values may share a name.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"A checkpoint name is a string; got {shown(name)}. The tree comes first:"
            " checkpoint_name(tree, name)."
        )
    return jax.tree.map(
        lambda leaf: named(leaf, name) if is_array(leaf) else leaf, tree
    )
