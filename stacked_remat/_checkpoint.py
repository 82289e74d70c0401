"""`checkpoint`: a region whose intermediate values are computed again, and names for those that are not."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.ad_checkpoint
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jaxtyping import Array, PRNGKeyArray

from ._compat import nothing_is_traced
from ._messages import shown
from ._policy import ScanCheckpointSpec, kept_internals, resolve_policy
from ._remat import EVERYTHING, JaxPolicy
from ._scan.marks import is_array
from ._schedule import Tree
from ._static import PyTree, Static
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
    """A function whose intermediate values are computed again in the backward pass, not kept for it.

    ```python
    y = checkpoint(block)(x, mask)
    y = checkpoint(block, save=["scores"])(x, mask)  # but for what checkpoint_name names "scores"
    y = checkpoint(block, save=jax.checkpoint_policies.dots_saveable)(x, mask)  # but for matrix products
    ```

    Values and derivatives are those of `fun`, of any order and in both modes; without derivatives it costs
    nothing more. It is `jax.checkpoint` for functions of anything: arguments and results are trees of plain
    and named arrays, modules, functions, strings and other Python values. Within transformations the arrays
    are traced, NumPy's too; the rest, Python numbers too, reaches `fun` as it is. No array is kept alive
    after the call.

    Args:
        fun: a function or a module. Arrays that it closes over, traced or not, get their gradients too.
        save: the intermediate values that are kept. As `save_block_internals` of a `ScanCheckpointPolicy`:
            names that `checkpoint_name` gives inside `fun`, one of `jax.checkpoint_policies`, or `True` for
            all that the backward pass reads.
        offload: names of those that are moved to host memory until then, as `offload_block_internals`.

    Raises:
        TypeError: for arguments of a wrong type; where values are offloaded and `fun` has ordered effects.
        ValueError: for settings that contradict each other, and for a policy of JAX that `JAX_REMAT3=1`
            does not support.

    Memory: the arguments and what is saved, from the forward to the backward pass; the intermediate values
    while the region itself is reversed. Cost: `fun` once more for each gradient, so 4/3 of forward and
    backward, less what is saved.
    """
    if not callable(fun):
        raise TypeError(
            f"checkpoint takes a function; got {type(fun).__name__}. Its arguments come after it: "
            "checkpoint(fun)(x)."
        )
    kept = kept_internals(save=save, offload=offload)

    @functools.wraps(fun, updated=())
    def checkpointed(*args: P.args, **kwargs: P.kwargs) -> R:
        if nothing_is_traced() or kept == EVERYTHING:
            return fun(*args, **kwargs)
        with saving_internals(kept.names):
            return recomputed(fun, kept.policy(), offloads=bool(kept.offloaded))(*args, **kwargs)

    return checkpointed


def checkpoint_sequential(
    layers: eqx.nn.Sequential | Sequence[Callable[..., Any]],
    x: PyTree,
    state: PyTree = None,
    *,
    remat: ScanCheckpointSpec = "nested",
    key: PRNGKeyArray | None = None,
) -> PyTree:
    """Apply layers one after the other, and keep for the backward pass what goes into some of them.

    ```python
    y = checkpoint_sequential(model.layers, x)
    y = checkpoint_sequential([stem, *blocks, head], x, remat=ScanCheckpointPolicy(max_carries=4))
    ```

    Each layer runs again in the backward pass, from its input, which is found again where it is not kept.
    What goes from layer to layer may change its shape and structure. Where layers are alike, a `Stacked`
    compiles one of them instead of all: `blocks.fold(x, remat="nested")`.

    Args:
        layers: an `eqx.nn.Sequential`, or functions and modules of one argument.
        x: what the first layer takes, any tree.
        state: of layers that keep some (`eqx.nn.BatchNorm`), as `eqx.nn.Sequential` takes it.
        remat: which inputs are kept, as in a `Stacked`: `"nested"`, `True` for all, or a policy with `nested`
            or `max_carries` alone.
        key: split over the layers, each of which then gets its own as `key`, as in `eqx.nn.Sequential`.

    Returns:
        What the last layer returns; with `state`, that and the new state.

    Raises:
        TypeError: for anything but a sequence of functions.
        ValueError: for another policy.

    Memory and cost: those of the policy, with the internals of one layer.
    """
    if not isinstance(layers, Sequence | eqx.nn.Sequential) or not all(map(callable, layers)):
        raise TypeError(
            f"checkpoint_sequential takes an eqx.nn.Sequential or a list of functions; got {shown(layers)}. "
            'Of a Stacked or a BlockSeq use the fold: blocks.fold(x, remat="nested").'
        )
    policy = resolve_policy(remat)
    if others := [name for name, _ in policy.settings() if name not in ("nested", "max_carries")]:
        raise ValueError(
            f"checkpoint_sequential keeps inputs of layers on the device and nothing else: {others[0]} has "
            'no effect. Use remat=True, "nested", or a policy with nested or max_carries.'
        )
    keys = [None] * len(layers) if key is None else jax.random.split(key, len(layers))

    def apply(number: int, x_and_state: tuple[PyTree, PyTree]) -> tuple[tuple[PyTree, PyTree], None]:
        (x, state), layer = x_and_state, layers[number]
        options = {"key": keys[number]} if key is not None or isinstance(layers, eqx.nn.Sequential) else {}
        if not (isinstance(layer, eqx.nn.StatefulLayer) and layer.is_stateful()):
            return (layer(x, **options), state), None
        if state is None:
            raise ValueError(
                f"checkpoint_sequential: layers[{number}] ({type(layer).__name__}) keeps state; "
                "pass state= of eqx.nn.make_with_state."
            )
        return layer(x, state=state, **options), None

    def layer(number: int, x_and_state: tuple[PyTree, PyTree]) -> PyTree:
        return checkpoint(functools.partial(apply, number))(x_and_state)

    tree = policy.schedule(len(layers)).tree if len(layers) else ()
    (found, new_state), _ = run_tree(tree, layer, checkpoint, (x, state))
    return found if state is None else (found, new_state)


def run_tree(
    tree: Tree, layer: Callable[[int, T], tuple[T, PyTree]], segment: Callable[[PyTree], PyTree], carry: T
) -> tuple[T, list[PyTree]]:
    """The last carry, and the output of each layer, of a schedule's tree; `segment` checkpoints its parts."""
    if isinstance(tree, int):
        carry, y = layer(tree, carry)
        return carry, [y]
    outputs = []
    for part in tree:
        run = functools.partial(run_tree, part, layer, segment)
        carry, ys = (run if isinstance(part, int) else segment(run))(carry)
        outputs += ys
    return carry, outputs


# True for everything, or a frozenset of names.
_saved_internals = jax.make_user_context(default_value=True)


def saving_internals(names: Iterable[str] | Literal[True]) -> contextlib.AbstractContextManager[None]:
    """A context in which a region is traced that keeps these internals, but for what those around it drop."""
    around = _saved_internals.value
    if names is True:
        return _saved_internals(around)
    own = frozenset(names)
    return _saved_internals(own if around is True else own & around)


def internals_are_saved(name: str | None = None) -> bool:
    """Whether the scans around a layer keep its internals for the backward pass; called while it is traced.

    A block may then choose what it computes: where layers are recomputed, a result that would save the
    backward pass work is not kept. `False` within `checkpoint` too, unless it has `save=True`; a
    `jax.checkpoint` around a scan is not seen. With a `name` it asks for the internals of this checkpoint
    name, which may be kept where the rest is not; a policy of JAX (`dots_saveable`, ...) keeps none by name.
    """
    saved = _saved_internals.value
    return saved is True or (name is not None and name in saved)


def recomputed(
    fun: Callable[..., Any], policy: JaxPolicy | None, *, offloads: bool = False
) -> Callable[..., Any]:
    """`jax.checkpoint` of a function of trees with leaves of all kinds; keeps none alive after a call."""

    def checkpointed(*args: PyTree, **kwargs: PyTree) -> PyTree:
        arrays, static = eqx.partition((fun, args, kwargs), eqx.is_array)

        def of_arrays(arrays: PyTree) -> tuple[PyTree, Static]:
            fun, args, kwargs = eqx.combine(arrays, static)
            found, rest = eqx.partition(fun(*args, **kwargs), eqx.is_array)
            return found, Static(rest)

        run = _without_ordered_effects(of_arrays, arrays) if offloads else of_arrays
        found, rest = jax.checkpoint(run, policy=policy)(arrays)
        # Outside of jit JAX gives constants among the results back as Python numbers.
        return eqx.combine(jax.tree.map(jnp.asarray, found), rest.value)

    return checkpointed


def _without_ordered_effects(fun: Callable[[PyTree], PyTree], arrays: PyTree) -> Callable[[PyTree], PyTree]:
    """`fun` for arguments like `arrays`, which is traced here."""
    closed, found = jax.make_jaxpr(fun, return_shape=True)(arrays)
    check_effects(closed.jaxpr, (), offloads=True)
    structure = jax.tree.structure(found)

    def evaluate(arrays: PyTree) -> PyTree:
        leaves = eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(arrays))
        return jax.tree.unflatten(structure, leaves)

    return evaluate


def checkpoint_name(tree: T, name: str) -> T:
    """Name the arrays of a tree, so that `save_block_internals=[name]` and the like can pick them.

    The identity in value and gradient; leaves that are not arrays pass through. What is kept is the value
    that comes out of here, so use it, not the argument. Several values may share a name.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"A checkpoint name is a string; got {shown(name)}. The tree comes first: checkpoint_name(tree, "
            "name)."
        )
    return jax.tree.map(lambda leaf: _named(leaf, name) if is_array(leaf) else leaf, tree)


def _named(leaf: Array, name: str) -> Array:
    if jnp.iscomplexobj(leaf):  # JAX keeps named values as real numbers
        return lax.complex(_named(jnp.real(leaf), name), _named(jnp.imag(leaf), name))
    return jax.ad_checkpoint.checkpoint_name(leaf, name)
