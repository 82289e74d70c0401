"""What is in a program, or is decided, only because of what XLA does with it.

The values are those of a program without any of this. What differs is memory, and which
transfers go on while something else is computed. Each function says for which targets
it is there. One that calls `lax.optimization_barrier` is in programs for the others
too, where a comment says what it costs if that is known.

Where a hint was measured, a comment has the case that was compiled, as "with / without
GiB" of temporaries on the device, and the test in `tests/benchmarks/` if one compares
it. All are of jax, jaxlib and the CUDA plugin 0.10.2 and of libtpu 0.0.51, for an H200
and a TPU v5p. Unless said otherwise the layers are 48 times `x + silu(x @ up) @ down`
in bfloat16, of 65,536 tokens, width 2,048 and inner width 16,384.
`tests/test_xla_hints.py` removes one hint after the other, and finds each in programs
of its platforms and in no others'. XLA for CPUs drops barriers.

A program may be lowered for another platform than the one that traces it, or for
several: `jax.export` does. So what only one platform needs is a primitive with a
lowering rule of that platform. Three decisions can't wait for that, and are made as a
program is traced: see the end of the file.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, Primitive, Var
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from ._memory_spaces import has_host_arrays, platform
from ._static import PyTree
from ._trips import known_trips

T = TypeVar("T")

# --- A layer's internals, which XLA would hold for longer than they are read


def visit_after_carry_and_cotangents(
    carry: PyTree, cotangents: PyTree
) -> tuple[PyTree, PyTree]:
    """A layer's input, which comes from the host, and its cotangents, for a visit that
    begins once both are there.

    GPUs: otherwise a layer's internals are kept twice.
    """
    # H200, `fold_vjp` with "offload": 4.63 / 6.56 GiB. `test_visitor_memory`.
    return _barrier_on(("cuda",), (carry, cotangents))


def gradients_before_writes(gradients: list[Array]) -> list[Array]:
    """The gradients of one layer, all there before any is written to its stack.

    TPUs: otherwise the layer's internals are held until all are written.
    """
    # v5p, "nested": 5.00 / 7.00 GiB. `test_stack_memory`.
    return _barrier_on(("tpu",), gradients)


def gradient_for_visitor(
    gradient: PyTree, carry_cotangent: PyTree, *, carry_from_host: bool
) -> PyTree:
    """A part of a layer's gradient, as a user's visitor is given it, there once the
    cotangent of the layer's input is.

    TPUs, and GPUs where carries come from the host: otherwise the layer's internals are
    held until the visitor has used the gradient. One barrier for all parts would keep
    those that the visitor does not use.
    """
    # H200, SGD as a visitor, carries from the host: 6.38 / 6.44 GiB. v5p, the same,
    # "nested": 5.00 / 7.13, where `results_before_writes` is missing too.
    platforms = ("cuda", "tpu") if carry_from_host else ("tpu",)
    return _barrier_on(platforms, (gradient, carry_cotangent))[0]


def results_before_writes(results: T) -> T:
    """What a user's visitor returned, all there before any of it is written.

    GPUs and TPUs: otherwise the layer's internals are held until all is written.
    """
    # H200, SGD as a visitor, carries from the host: 6.38 / 6.44 GiB; `fused_update`
    # with AdamW: 7.13 / 7.19. v5p: see `gradient_for_visitor`, one of which suffices.
    return _barrier_on(("cuda", "tpu"), results)


def gradients_before_update(gradients: list[Array]) -> list[Array]:
    """The gradients of one layer, all there before the optimizer takes any.

    GPUs: otherwise the layer's internals are held until it is done.
    """
    # H200, AdamW: 7.13 / 7.44 GiB. v5p, AdamW: no difference.
    return _barrier_on(("cuda", "tpu"), gradients)


def score_after(cotangents: list[Array], arrays: list[Array]) -> tuple[Any, Any]:
    """The cotangents of an operation's results, and what its part of a score is
    computed from, which begins once all of it is there.

    GPUs: otherwise its products are merged with those of the forward pass, and their
    results stay in memory.
    """
    # H200, a small decoder, all trained: 271 / 332 MB (`benchmarks/ghost.py`).
    return lax.optimization_barrier((cotangents, arrays))


def score_before(cotangents: list[Array], score: Array) -> tuple[Any, Any]:
    """The cotangents, for what comes after the operation, once its part of a score is
    there.

    GPUs: otherwise scores are computed later, and what they need stays in memory.
    """
    # H200, the same: 271 / 319 MB.
    return lax.optimization_barrier((cotangents, score))


def eval_product_tangents_apart(jaxpr: Jaxpr, _: tuple[()], *inputs: Any) -> list[Any]:
    """`eval_jaxpr`, where the tangent of a product, a sum of two, is there before what
    reads it.

    GPUs: otherwise the parts of all such sums are held at once.
    """
    # H200, a product with the Hessian, "nested": 14.00 / 17.94 GiB.
    # `test_stack_memory`.
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    for equation in jaxpr.eqns:
        # Each operand once: an equation may read a variable twice.
        operands = []
        for var in equation.invars:
            if isinstance(var, Var) and var not in operands:
                operands.append(var)
        program = jaxpr.replace(
            invars=operands, eqns=[equation], outvars=equation.outvars
        )
        is_product = equation.primitive.name == "dot_general"
        values = [known[var] for var in operands]
        if is_product:
            values = [*map(_with_tangent_apart, values)]
        results = eval_jaxpr(program, (), *values)
        if is_product:
            results = [*map(_with_tangent_apart, results)]
        known |= zip(equation.outvars, results, strict=True)
    outputs = []
    for out in jaxpr.outvars:
        outputs.append(known[out] if isinstance(out, Var) else out.val)
    return outputs


@jax.custom_jvp
def _with_tangent_apart(x: Any) -> Any:
    return x


_with_tangent_apart.defjvp(
    lambda primals, tangents: (
        _with_tangent_apart(*primals),
        lax.optimization_barrier(*tangents),
    )
)


# --- Loops: buffers, values that nothing reads, and branches


def zero_after(done: PyTree, zero: Array) -> Array:
    """The zero, from which a loop's buffers are made, there once `done` is.

    TPUs: otherwise the buffers are filled early, and held while what the loop reads is
    computed.
    """
    # v5p, "nested", then cross entropy with the gradient of its head: 5.00 / 6.16 GiB.
    # `test_visitor_memory`. H200: no difference.
    return lax.optimization_barrier((done, zero))[1]


@jax.custom_jvp
def unread(old: PyTree, new: PyTree) -> PyTree:
    """`old`, with derivatives of `new`, for a carry of a loop whose values nothing
    reads.

    GPUs, before JAX 0.12: a value that a loop only passes on is removed; a sum is not,
    though nothing reads it.
    """
    # H200, a product with the Hessian, "nested": 14.00 / 20.06 GiB; of inner width
    # 2,048: 7.02 / 7.78. v5p: no difference. `test_stack_memory`.
    # Not `old` itself: `jax.vmap` must find it mapped where `new` is.
    return jax.tree.map(lambda x, y: lax.select_n(False, x, y), old, new)


unread.defjvp(lambda primals, tangents: (unread(*primals), tangents[1]))


def run_if(is_run: Array, body: Callable[[Any, T], T], index: Array, state: T) -> T:
    """`body(index, state)` if `is_run`, else the state: a loop that runs once or not at
    all, which updates the state in place.

    The branches of a conditional copy stacks (GPUs) and carries (TPUs). And without the
    loop's counter, which is 0, in the index, XLA for TPUs reads what is at the index
    ahead of the loop, also where it does not run.
    """

    # H200, two kinds of layers and a remainder, against a conditional: "nested" 6.88 /
    # 7.61 GiB, "offload" 4.38 / 5.11. v5p, against an index without the counter:
    # "nested" 5.00 / 5.14, "offload" 4.38 / 4.52. `test_pattern`. The state of a
    # pipeline's stages goes through it too.
    def run(zero: Array, state: T) -> T:
        return body(index + zero, state)

    return lax.fori_loop(0, is_run.astype(np.int32), run, state)


# --- Transfers between host and device


def read_after(number: Any, arrays: PyTree) -> tuple[Any, PyTree]:
    """The number of a layer that is read ahead, known once these arrays are there.

    GPUs and TPUs: the first layer of a reverse sweep would be read before the forward
    sweep, and held meanwhile. And the next one would be gathered while a visit waits
    for its carry from the host, with no product beside it.
    """
    # H200, layers on the host updated by a visitor, "nested": 7.19 / 7.44 GiB.
    # JAX's own barrier would make the number vary over the devices of a
    # `jax.shard_map` as the cotangent does, and so the layer.
    return _barrier_on(("cuda", "tpu"), (jnp.int32(number), arrays))


def copy_fetched(fetched: list[Array], index: Any) -> tuple[list[Array], Any]:
    """What was read ahead, and the layer's number, from which the next one that is to
    be read is computed.

    GPUs and TPUs: a loop's carry has one buffer, and XLA would begin the next transfer
    into it only after the last use of what is there; so that is first copied to another
    buffer, in a way that XLA does not remove.
    """
    # v5p, layers on the host updated by a visitor, "nested": of the forward sweep's two
    # products both run during a transfer / none. `test_visitor_memory`.
    if not fetched:
        return fetched, index
    copies = []
    for leaf in fetched:
        copies.append(jnp.where(index >= 0, leaf, jnp.zeros_like(leaf)))
    # JAX's own barrier would make the number vary over the devices of a
    # `jax.shard_map` as what was read does.
    return _barrier_on(("cuda", "tpu"), (copies, index))


def read_before_updates(ahead: list[Array], state: T) -> tuple[list[Array], T]:
    """What the next layer reads from the host, and a state whose stacks on the host are
    written then.

    GPUs: otherwise a stack that is read and written in one iteration is copied.
    """
    # H200, layers on the host updated by a visitor, "nested": 6 / 9 GiB on the host,
    # and visits have a product / none during a transfer. `test_visitor_memory`.
    if ahead and has_host_arrays(state):
        return _barrier_on(("cuda",), (ahead, state))
    return ahead, state


def apart_from_transfers(compute: Callable[[], T], zeros: T) -> T:
    """What `compute` returns, of the types of `zeros`; in the body of a loop that XLA
    does not know to run once.

    GPUs: what is computed beside transfers is reordered, and more of it held at a time.
    On other platforms XLA sees that the loop runs once, and removes it.
    """
    # H200, layers on the host updated by a visitor, "nested": 7.19 / 9.13 GiB.
    # `test_visitor_memory`.
    once = _barrier_on(("cuda",), jnp.int32(1))
    with known_trips(1):
        return lax.fori_loop(0, once, lambda *_: compute(), zeros)


def refused_offload(problem: str, inputs: T) -> T:
    """The inputs of layers, in a program that is refused with a `ValueError` as it is
    lowered for a GPU or a TPU.

    For a name that is to be offloaded and that a layer gives in a scan of its own: each
    step would write to a stack on the host, for which XLA ends in an INTERNAL error
    that names nothing. On a CPU nothing moves.
    """
    return _barrier_on(("cuda", "tpu"), inputs, problem)


# --- Collectives beside products


def weight_after_gathers(weight: Any, gathered: list[Array]) -> Any:
    """A weight that the transpose of a layer reads, there once that weight of the layer
    that is visited next is gathered.

    GPUs: one collective runs at a time, and gathers would run beside the last products
    of a visit, which are all that is left to run beside the sum of gradients.
    """
    # It isn't for layers that exchange rows: H200, `benchmarks.gathered_ahead --experts
    # all_to_all --experts_first`, "nested": 0.83 / 0.77 GiB, and of 7 collectives 2 / 0
    # are waited for. `test_gathered_ahead`.
    return _barrier_on(("cuda",), (weight, gathered))[0]


def exchange_after_gathers(values: T, gathered: Sequence[Any]) -> T:
    """What the exchange of rows that ends a layer begins with, there once weights of
    the next layer are gathered; None for weights that aren't.

    GPUs: one collective runs at a time, and gathers would come after the exchange, with
    nothing left to run beside them.
    """
    # H200, `benchmarks.gathered_ahead --experts`, "nested": of 6 gathers 0 / 2 are
    # waited for with a plain exchange, and 0 / 5 with `grouped_experts`.
    return _barrier_on(("cuda",), (values, gathered))[0]


def whole_cotangent(
    transpose: Callable[[Array], Sequence[Array]], cotangent: Array
) -> Array:
    """The cotangent of a weight before a sharding constraint that gathers it:
    `transpose` is that constraint, and says that the whole sum is on all devices.

    TPUs: there it is summed so (all-reduce), and each device takes its part. Without
    the constraint XLA finds that it is divided as the stack that it is written to, and
    each device gets its part alone.
    """
    # v5p, `benchmarks.gathered_ahead`. It has no all-reduce then; GPUs have none
    # either, but might gather activations instead.
    return lax.platform_dependent(
        cotangent,
        tpu=lambda cotangent: cotangent,
        default=lambda cotangent: transpose(cotangent)[0],
    )


def gradients_after_collectives(gradients: list[Array], done: PyTree) -> list[Array]:
    """The gradients of one layer, summed over devices, once the cotangent of its input
    is there and what the next visit reads is gathered.

    GPUs: otherwise the optimizer may come before both, and no product be left to run
    beside the sum and the gathers.
    """
    return _barrier_on(("cuda", "tpu"), (gradients, done))[0]


# --- Barriers for some platforms, chosen as a program is lowered

_barrier_p = Primitive("barrier_on")
_barrier_p.multiple_results = True

BARRIERS = ("optimization_barrier", _barrier_p.name)
"""Equations whose results are their operands, by the names of their primitives."""


def _barrier_on(platforms: tuple[str, ...], tree: Any, problem: str = "") -> Any:
    """`lax.optimization_barrier` in programs for these platforms (`"cuda"`, `"tpu"`),
    nothing in others. `"cuda"` stands for all GPUs, as in `_memory_spaces.platform`.

    With a problem, such programs are refused with that text instead.
    """
    leaves, structure = jax.tree.flatten(tree)
    results = _barrier_p.bind(*leaves, platforms=platforms, problem=problem)
    return jax.tree.unflatten(structure, results)


def _lowered_for(platform: str) -> Callable[..., Any]:
    def barrier(
        *arrays: Any, platforms: tuple[str, ...], problem: str
    ) -> tuple[Any, ...]:
        if platform not in platforms:
            return arrays
        if problem:
            raise ValueError(problem)
        return lax.optimization_barrier(arrays)

    return mlir.lower_fun(barrier, multiple_results=True)


def _differentiated(primals: Any, tangents: Any, **where: Any) -> tuple[Any, Any]:
    tangents = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return _barrier_p.bind(*primals, **where), _barrier_p.bind(*tangents, **where)


def _transposed(cotangents: Any, *_: Any, **where: Any) -> Any:
    cotangents = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    return _barrier_p.bind(*cotangents, **where)


def _batched(arrays: Any, dims: Any, **where: Any) -> tuple[Any, Any]:
    return _barrier_p.bind(*arrays, **where), dims


# One operation by itself has nothing to hold
_barrier_p.def_impl(lambda *arrays, **where: [*arrays])
_barrier_p.def_abstract_eval(lambda *types, **where: types)
ad.primitive_jvps[_barrier_p] = _differentiated
ad.primitive_transposes[_barrier_p] = _transposed
batching.primitive_batchers[_barrier_p] = _batched
mlir.register_lowering(_barrier_p, _lowered_for("any other"))
mlir.register_lowering(_barrier_p, _lowered_for("tpu"), platform="tpu")
# Of ROCm too, which JAX calls a GPU as well and compiles by the same XLA:GPU
mlir.register_lowering(_barrier_p, _lowered_for("cuda"), platform="gpu")


# --- Decisions by the platform that traces
#
# Values are the same on all platforms. `lax.platform_dependent` would trace all layers
# for each platform, and trace time is that of the layers.


def write_takes_long(carry_bytes: int | None) -> bool:
    """Whether the write of a carry of this size, if it is known, takes as long as a
    step: on a CPU, of a small one.

    `lax.platform_dependent` took the trace of a transformer block from 1.17 to 1.34
    times that of `lax.scan`. Large carries, which GPUs and TPUs have, are written alike
    everywhere, so what is exported from a CPU suits them.
    """
    return platform() == "cpu" and carry_bytes is not None and carry_bytes <= 2**20


def layers_in_order(layers: int, array_bytes: Sequence[int]) -> int:
    """How many layers, at most, a segment has whose internals are kept in stacks;
    `array_bytes` are those of one layer's.

    CPUs: a loop's operations run one after the other if none reads or writes an array
    of more than 512 bytes; otherwise they are given to threads, and loops over 200
    scalars took four times as long. Only segments of such layers are shorter, by up to
    half; what is exported from a CPU takes up to a quarter more memory.
    """
    in_order = 512 // max(array_bytes)
    if platform() == "cpu" and layers // 2 <= in_order < layers:
        return in_order
    return layers


def needs_checkpoint_barriers(*, is_rolled: bool, offloads_carry: bool) -> bool:
    """Whether `jax.checkpoint` of a layer in a loop puts barriers around what runs
    again (`prevent_cse`).

    All platforms where the loop is unrolled, and the layers are in one program: XLA
    would merge the recomputation with the forward pass. GPUs also where carries come
    from the host, as in `visit_after_carry_and_cotangents`: "offload" takes 4.38 / 6.31
    GiB on an H200. For TPUs such barriers cost memory: 814 MB in place of 805 (inner
    width 2,048).

    It is a parameter of JAX's checkpoint, the same for all platforms. What is traced on
    a CPU has them, to no effect there, since it may be exported.
    """
    return not is_rolled or (offloads_carry and platform() != "tpu")
