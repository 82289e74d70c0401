"""Applies each expert of a mixture to the tokens that chose it, block by block or by
grouped products.

No token is dropped for any routing, and memory grows with tokens, not with tokens x
experts.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from haliax import Axis
from jaxtyping import Array, Float, Int

from .._memory_spaces import compiled_for, is_on_host
from .._messages import axes_text
from .._noted import noted
from .._static import is_array
from ._backends import (
    HALVES,
    Backend,
    Call,
    choose_backend,
    devices_left_to_the_compiler,
    first_supported,
)
from ._expert_blocks import BlockLoop, block_plan, of_layer
from ._expert_exchange import Exchange, devices_along
from ._expert_loop import ChunkLoop, Expert, Inputs, Saved, apply_experts, chunk_plan
from ._expert_weights import WeightsLayout
from ._grouped_linear import Kernels, megablox_kernels
from ._padding import pad_axis
from ._row_calls import call_on_rows
from ._tokamax import PRODUCTS, why_not_tokamax
from .per_device import align_varying_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsFacts(Call):
    """See `Call`."""

    on_host: bool = False  # whether some weights are in host memory
    # whether types say over which devices values vary, as with `check_vma=True`
    is_varying: bool = False
    # Whether the expert applies its maps by a function that it is given
    takes_linear: bool = True


def _why_not_products(call: ExpertsFacts) -> str | None:
    """Why no kernels of grouped products support a call."""
    if not call.takes_linear:
        return (
            "its expert has no argument `linear`, by which it would map the rows of all"
            " experts at once"
        )
    if call.on_host:
        return (
            "weights are in host memory, from which blocks of rows alone read the"
            " experts that are chosen"
        )
    if call.is_varying:
        return (
            "its kernels do not say over which devices results vary: use shard_map with"
            " check_vma=False"
        )
    return None


def _why_not_tokamax(call: ExpertsFacts) -> str | None:
    return _why_not_products(call) or why_not_tokamax(
        "all of its products", {9.0: "Hopper"}
    )


EXPERT_BACKENDS: dict[str, Backend[Kernels | None]] = {
    "megablox": Backend(
        megablox_kernels(), "tpu", (jnp.bfloat16, jnp.float32), _why_not_products
    ),
    "tokamax": Backend(PRODUCTS, "cuda", HALVES, _why_not_tokamax),
    "block": Backend(None),  # rows in blocks of one expert each
}
"""By name, in the order in which `"auto"` tries them."""


def expert_backend(dtype: Any, device: Any) -> str:
    """The backend of `grouped_experts` that `"auto"` is for tokens of a dtype on a
    device, attached or not.

    It may be one of `stacked_remat.memory.find_target(...).devices()`.
    """
    with compiled_for(device):
        return first_supported(EXPERT_BACKENDS, ExpertsFacts(dtype=jnp.dtype(dtype)))[0]


def grouped_experts(
    expert: Expert,
    weights: Any,
    Experts: Axis,
    x: Float[Array, "token embed"],
    choices: Int[Array, "token choice"],
    gates: Float[Array, "token choice"],
    *,
    saved: Saved | None = None,
    backend: str = "auto",
    over: Sequence[str] = (),
) -> Float[Array, "token out"]:
    """The sum over each token's chosen experts, weighted by their gates.

    Equals

    ```python
    rows = [sum(expert(weights[Experts, e], x[t : t + 1], gates[t, c : c + 1])
                for c, e in enumerate(choices[t])) for t in range(len(x))]
    jnp.concatenate(rows)
    ```

    Args:
        expert: applies one expert to some rows and multiplies them by their gates. It
            may not close over traced values. Multiply before the last linear map,
            `(hidden * gate) @ down`: then the backward pass does not recompute that
            map. Adapters can be part of the weights. With an argument
            `linear=apply_linear` that it applies all its maps by, grouped products can
            compute it too.
        weights: a tree whose named arrays have the axis `Experts` and whose plain
            arrays have it first. Of those in host memory only the blocks' experts come
            to the device; they have no gradient. May be in a `LayerStack`: `"block"`
            then reads the stack and makes no copy of the layer's, but on TPUs.
        Experts: the axis of the experts.
        x: tokens.
        choices: the experts of each token; none twice for one token. An out-of-range
            number chooses no expert.
        gates: their factors.
        saved: the part of `expert` that the backward pass does not recompute: for a
            gated MLP one of its first two maps, or both. Its result for every pair, an
            array or a tree, is kept for the backward pass, and `expert` may take it as
            a fourth argument. Its checkpoint name, and that of the order of the pairs,
            is `expert_internals`: it helps only where these are saved
            (`internals_are_saved`). Like `expert`, it may not close over traced values.
        backend: `"block"`, which runs anywhere; or grouped products, of all rows of a
            chunk of tokens each with the matrix of its expert: `"megablox"`, by JAX's
            kernels for TPUs, compiled and not yet run on one, and `"tokamax"`, by its
            kernels for Hopper GPUs. `"auto"` is the one that supports the call, or
            `"block"`.
        over: inside `jax.shard_map`, the axes of the mesh over which the experts are
            divided, in order. `weights` then have this device's part of `Experts`,
            `choices` are numbers of all, and tokens go to the devices of their experts
            and back. Nothing is `saved` then.

    Returns:
        In the dtype of `x`; sums are in float32.

    Raises:
        ValueError: an argument does not fit, or the backend does not support the call;
            the gradient of weights in host memory; `over` does not divide `Experts`, or
            is not of a `jax.shard_map` around the call.

    Cost: with `n` pairs, `expert` on at most `n + experts * block` rows, once forward,
    and once and its two products backward; a block has 8 to 256 rows, so that padding
    is at most an eighth, on a CPU a quarter, where there are enough. Inputs that are
    not differentiated cost neither FLOPs nor memory. A gated MLP whose gates come
    before its last map has 3 products forward and 8 backward, 5 where weights are
    frozen, and one less for each of the first two maps that is saved.

    Memory beside the arguments: the result and the gradients in float32, five integers
    per pair, a few blocks, and what is saved. Grouped products have chunks whose widest
    rows, of tokens or of what a matrix makes of them, are at most 0.125 GiB, and add
    the gradients of a chunk, as large as the trained weights, to those of all. On
    several devices call them inside `jax.shard_map(..., check_vma=False)`, with or
    without `over`.

    With `over`, each pair's row of `x` is sent to its expert and a result comes back;
    in the backward pass it is sent again with its cotangent, and a cotangent comes
    back. Padding adds about an eighth to an even routing. Memory: up to 0.5 GiB for the
    rows of a round. Weights stay where they are.
    """
    if Experts.size == 0:
        raise ValueError(
            f"{axes_text([Experts])} has no experts; there must be at least one."
        )
    if over:
        Experts = _of_device(Experts, over)
        saved = None
    # Two views of the same weights: the layer's own arrays, which get the gradients,
    # and where blocks read them.
    weights, in_stack = of_layer(weights, Experts)
    layout, arrays = WeightsLayout.of(weights, Experts)
    _check_tokens(x, choices, gates)
    given = jax.tree.map(jnp.asarray, (x, choices, gates, arrays))
    x, choices, gates, arrays = align_varying_axes("grouped_experts", given)
    count = x.shape[0]
    if count == 0:  # a token of zeros, whose result is dropped
        x, choices, gates = (pad_axis(some, 0, 1) for some in (x, choices, gates))
    facts = _facts(x, arrays, expert, saved or expert)
    kernels = choose_backend("experts", EXPERT_BACKENDS, backend, facts)
    call = ExpertsCall(expert, saved, layout.of_one, Experts, kernels, layout.of_all)
    if over:
        # In each round `call.run` is given the rows that arrived, one choice each.
        row_bytes = x.shape[1] * x.dtype.itemsize
        run = Exchange.of(over, choices.size, row_bytes, Experts.size, call.run).run
    else:  # gradient dot products read the layer's own weights
        otherwise = functools.partial(call.run, in_stack=in_stack)
        run = noted(call, call.run, otherwise=otherwise)
    return run(x, choices, gates, arrays)[:count]


def _of_device(Experts: Axis, over: Sequence[str]) -> Axis:
    """The experts of one device, if they are divided over these axes of the mesh."""
    devices = devices_along(over)
    if Experts.size % devices:
        raise ValueError(
            f"{axes_text([Experts])} can't be divided evenly over {tuple(over)},"
            f" {devices} devices; take axes of the mesh that divide it."
        )
    return Experts.resize(Experts.size // devices)


def _facts(x: Array, arrays: Sequence[Array], *parts: Any) -> ExpertsFacts:
    """What a backend is chosen by; `parts` are the functions that it is to apply."""
    signatures = [inspect.signature(part).parameters for part in parts]
    return ExpertsFacts(
        dtype=x.dtype,
        devices=devices_left_to_the_compiler(x),
        on_host=any(map(is_on_host, arrays)),
        is_varying=bool(jax.typeof(x).manual_axis_type.varying),
        takes_linear=all("linear" in parameters for parameters in signatures),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertsCall:
    """A call of `grouped_experts`, on raw arrays."""

    expert: Expert
    saved: Saved | None
    # Makes one expert's tree of weights from a slice of each array
    rebuild: Callable[[Any], Any]
    Experts: Axis
    # Of grouped products; None for rows in blocks of one expert each
    kernels: Kernels | None = None
    # Makes the tree of all experts' weights, for these
    whole: Callable[[Any], Any] | None = None

    def run(
        self,
        x: Array,
        choices: Array,
        gates: Any,
        arrays: Sequence[Array],
        in_stack: Any = (),
    ) -> Array:
        """The result; `gates` may be a tree of factors, of which the expert gets those
        of its rows.

        `in_stack` has what is read in place of arrays, None for the array itself.
        """

        def of_rows(rows: Any, weights: Any) -> Array:
            x, choices, gates = rows
            arrays, in_stack = weights
            read = arrays
            if self.kernels is None or self.whole is None:
                loop = BlockLoop(self.expert, self.saved, self.rebuild)
                plan: Any = block_plan(choices, self.Experts.size)
                pairs = zip(arrays, in_stack or arrays, strict=True)
                read = tuple(own if other is None else other for own, other in pairs)
            else:
                loop = ChunkLoop(
                    self.expert, self.saved, self.whole, self.kernels, self.Experts.name
                )
                plan = chunk_plan(
                    choices, self.Experts.size, self.kernels.rows_of, x, arrays
                )
            return apply_experts(loop, Inputs(x, gates, arrays), (plan, read))

        return call_on_rows(of_rows, (x, choices, gates), (tuple(arrays), in_stack))


def _check_tokens(x: Any, choices: Any, gates: Any) -> None:
    for what, some in (("x", x), ("choices", choices), ("gates", gates)):
        if not is_array(some) or some.ndim != 2 or some.shape[1] == 0:
            got = f"the shape {some.shape}" if hasattr(some, "shape") else repr(some)
            raise ValueError(
                f"{what} must be a plain array with columns, a row for each token; got"
                f" {got}."
            )
    if choices.shape != gates.shape or choices.shape[0] != x.shape[0]:
        raise ValueError(
            f"choices {choices.shape} and gates {gates.shape} must have the same shape,"
            f" with a row for each of the {x.shape[0]} tokens."
        )
    if not jnp.issubdtype(choices.dtype, jnp.integer):
        raise ValueError(f"choices must be integers; got {choices.dtype}.")
