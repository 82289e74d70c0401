"""Counts a program's FLOPs and transfers, loop bodies times the number of times they
run.

XLA's own cost analysis counts the body of a loop once, and a training step over scanned
layers is mostly loops. So the traced program, a jaxpr, is counted instead. `report` and
`plan` (`_call.py`) count each program before it is compiled; `training/throughput.py`
counts a forward pass with `trained=`, for model FLOPs.

Counted are matrix products, convolutions, ragged products of experts and cuDNN's fused
attention, a multiply-add as two; the bodies of Pallas kernels, times their grid; and
`jax.device_put` between host and device. Elementwise operations and reductions are not.
Nor are factorizations, FFTs and foreign calls, but each of these is named in `too_low`.

How often a body runs is read off the jaxpr for a `scan`. For `while` loops and
conditionals, that is said by named scopes around them (`_trips.py`). Where nothing says
it, that is reported, never silently taken as one.

What XLA changes (products that it merges, padding) is not seen, but dead code is
removed first as XLA would, since JAX traces many unused results in backward passes.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend import source_info_util
from jax.extend.core import Literal, jaxprs_in_params
from jax.interpreters import partial_eval

from .._activity import active_carry, active_variables, bytes_of, expansion, is_in
from .._memory_spaces import platform
from .._names import name_given_by
from .._trips import branches_in, products_in, trips_in


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs and transfers of one call of a program, summed over all the devices it runs
    on.

    Attributes:
        matmul: of matrix products and convolutions, a multiply-add being two.
        bytes_from_host: bytes moved from host memory to device memory (`jax.device_put`
            between the two, and policies that offload). Outside of `jax.shard_map`, an
            array counts once, however many devices have a copy of it.
        bytes_to_host: bytes moved from device memory to host memory.
        bytes_to_disk: bytes of carries written to disk, and read back
            (`save_carries="disk"`), which are in no memory.
        too_low: reasons why the true figures may be higher (empty when there are none),
            sorted.
        too_high: reasons why they may be lower, as where a conditional counts its most
            expensive branch.
        names: of values in the program (`checkpoint_name`), sorted; of those that a
            policy moves to the host there are none.
    """

    matmul: int = 0
    bytes_from_host: int = 0
    bytes_to_host: int = 0
    bytes_to_disk: int = 0
    too_low: tuple[str, ...] = ()
    too_high: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def moved(self) -> int:
        """Bytes moved between host and device, in both directions."""
        return self.bytes_from_host + self.bytes_to_host

    @property
    def exact(self) -> bool:
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the figures are not exact, as lines of a table."""
        at_least = map("FLOP at least: {}".format, self.too_low)
        at_most = map("FLOP at most: {}".format, self.too_high)
        return (*at_least, *at_most)


def count_flops(jaxpr: Any, *, trained: Sequence[bool] = ()) -> Flops:
    """Count the FLOPs of a traced program, and what it moves between host and device
    memory.

    Args:
        jaxpr: a closed jaxpr, as `jax.make_jaxpr(f)(*args)` or
            `jax.jit(f).trace(*args).jaxpr` return.
        trained: for each of its inputs whether its gradient is taken. With it, the
            products of the backward pass count too: one for each operand of a product
            that depends on such an input. Its transfers do not.

    Returns:
        The count. Equations whose results are never used are left out, as XLA leaves
        them out. Loops count body times trips: those of a `scan`, which `fori_loop`
        makes for bounds of Python integers, and of the loops of this package. Other
        `while` loops are counted once, those of divided experts (`over` of
        `grouped_experts`) as often as an even routing takes, and named in `too_low`.
    """
    cost = _Count().run(jaxpr, tuple(trained))
    # Mean trip counts are fractions, and so may the counts be that they multiply.
    figures = {name: round(cost[name]) for name in _FIGURES}
    texts: dict[str, Any] = {"too_low": (), "too_high": (), "names": ()}
    for field, text in sorted(cost.keys() - {*_FIGURES}):
        texts[field] += (text,)
    return Flops(**figures, **texts)


# A cost while it is counted, with two kinds of keys: the names of figures, and texts:
# reasons why these are not exact, as `("too_low", text)`, and names of values, whose
# counts say nothing. The sum of two adds figures, and their union (`|`) has the larger
# of each; both have all texts.
_Cost: TypeAlias = Counter[Any]
_FIGURES = ("matmul", "bytes_from_host", "bytes_to_host", "bytes_to_disk")


def _times(cost: _Cost, factor: Any) -> _Cost:
    return Counter({key: count * factor for key, count in cost.items()})


def _because(field: str, text: str) -> _Cost:
    return Counter([(field, text)])


class _Count:
    """Counts one program.

    JAX traces a function that is called several times into one jaxpr, and a sweep over
    layers contains its layer's several times: each is counted once, and remembered.
    """

    def __init__(self) -> None:
        self.run = functools.cache(self._run)
        self.expansion = functools.cache(expansion)

    def _run(
        self,
        jaxpr: Any,
        active: tuple[bool, ...] = (),
        *,
        kernel_flops: int | None = None,
        is_used: tuple[bool, ...] | None = None,
    ) -> _Cost:
        """The cost of a jaxpr, open or closed.

        Args:
            jaxpr: what is counted.
            active: for each of its inputs whether it depends on what is trained; `()`
                where no backward pass is counted.
            kernel_flops: of each kernel within it, from a named scope around it; None
                where no scope says them.
            is_used: for each of its outputs whether anything reads it; None for all.
        """
        live = _without_dead_code(jaxpr, is_used)
        active_vars = active_variables(live, itertools.compress(live.invars, active))
        read = _read(live)
        cost: _Cost = Counter()
        for eqn in live.eqns:
            name = eqn.primitive.name
            if value_name := name_given_by(eqn):
                cost["names", value_name] += 1
            operands = tuple(is_in(atom, active_vars) for atom in eqn.invars)
            # Names within a called jaxpr start anew, so what a scope around the call
            # says of kernels is handed down.
            of_kernel = products_in(_scopes(eqn)) or kernel_flops
            run = functools.partial(self.run, kernel_flops=of_kernel)
            expanded = self.expansion(eqn)
            if expanded is not None:
                # The dead code of the caller could not be removed within it.
                results = tuple(out in read for out in eqn.outvars)
                cost += run(expanded, operands, is_used=results)
            elif name in _RULES:
                cost += _RULES[name](run, eqn, operands)
            elif called := _called(eqn):
                cost += run(called, operands)
            else:
                forward = _leaf(run, eqn, of_kernel)
                cost += forward
                # The backward pass has one product for each active operand, of the size
                # of the forward one. A product has two factors; fused attention has
                # more operands.
                cost["matmul"] += forward["matmul"] * min(2, sum(operands))
        return cost


def _read(jaxpr: Any) -> set[Any]:
    """The variables that equations read, or that are outputs."""
    atoms = [*jaxpr.outvars]
    for eqn in jaxpr.eqns:
        atoms += eqn.invars
    return {atom for atom in atoms if not isinstance(atom, Literal)}


# Counts what is within an equation: `(jaxpr, active inputs) -> cost`.
_Run: TypeAlias = Callable[..., _Cost]


def _scan(run: _Run, eqn: Any, active: tuple[bool, ...]) -> _Cost:
    body = eqn.params["jaxpr"]
    # Found from shapes, since the parameters that say it differ between versions of
    # JAX: only what is split or stacked has a dimension more outside of the body.
    inner = _open(body)
    num_xs = _reshaped(eqn.invars, inner.invars)
    num_ys = _reshaped(eqn.outvars, inner.outvars)
    num_carry = len(eqn.outvars) - num_ys
    inside = _active_in_loop(body, active, num_carry, num_xs)
    return _times(run(body, inside), eqn.params["length"])


def _while(run: _Run, eqn: Any, active: tuple[bool, ...]) -> _Cost:
    body = eqn.params["body_jaxpr"]
    # Operands are the condition's constants, the body's, and the carry.
    operands = active[eqn.params["cond_nconsts"] :]
    inside = _active_in_loop(body, operands, len(eqn.outvars))
    cost = run(body, inside)
    condition = run(eqn.params["cond_jaxpr"])
    trips, is_exact = trips_in(_scopes(eqn))
    if trips is None:
        counted = "once"
        trips = 1
    elif is_exact:
        return _times(cost + condition, trips) + condition
    else:
        counted = f"{trips} times"
    return _times(cost + condition, trips) + _because(
        "too_low",
        f"a while loop{_where(eqn)} whose trip count is not known in advance is"
        f" counted {counted}",
    )


def _cond(run: _Run, eqn: Any, active: tuple[bool, ...]) -> _Cost:
    """By what is known of the index, best first: the platform or a constant
    decides; a named scope says how often each branch is taken; or nothing, and then
    the most expensive one counts, separately for each figure.
    """
    costs = []
    for branch in eqn.params["branches"]:  # whose operands come after the index
        costs.append(run(branch, active[1:]))
    # `lax.platform_dependent`: platforms of each branch, None for the default.
    platforms_of = eqn.params.get("branches_platforms") or ()
    for cost, platforms in zip(costs, platforms_of, strict=False):
        if platforms is None or platform() in platforms:
            return cost
    index = eqn.invars[0]
    if isinstance(index, Literal):
        # JAX clamps the index of a conditional.
        taken = max(int(index.val), 0)
        return costs[min(taken, len(costs) - 1)]
    shares = branches_in(_scopes(eqn))
    if len(shares) == len(costs):
        return sum(map(_times, costs, shares), Counter())
    most = functools.reduce(operator.or_, costs)
    least = functools.reduce(operator.and_, costs)
    if all(least[name] == most[name] for name in _FIGURES):
        return most
    return most | _because(
        "too_high",
        f"a conditional that depends on data{_where(eqn)} counts its most expensive"
        " branch",
    )


def _shard_map(run: _Run, eqn: Any, active: tuple[bool, ...]) -> _Cost:
    # The body is what each device runs, and costs are sums over devices. Over
    # axes that are not manual, the body is still of all their devices.
    sizes = eqn.params["mesh"].shape
    manual = eqn.params["newly_manual_axes"] or sizes
    devices = math.prod(sizes[axis] for axis in manual)
    return _times(run(eqn.params["jaxpr"], active), devices)


def _leaf(run: _Run, eqn: Any, of_kernel: int | None) -> _Cost:
    """The cost of an equation that calls nothing with its own operands."""
    # JAX binds cuDNN's attention as `dot_product_attention_fwd_wrapper`.
    name = eqn.primitive.name.removesuffix("_wrapper")
    if name == "device_put":
        return _transfers(eqn)
    if name == "write_carry":
        _, _, *leaves = eqn.invars
        return Counter(bytes_to_disk=sum(bytes_of(leaf.aval) for leaf in leaves))
    if name in _MATMULS:
        return Counter(matmul=_MATMULS[name](eqn))
    if name in _NOT_COUNTED:
        return _because("too_low", f"the arithmetic of {name!r} is not counted")
    # Where a kernel skips blocks, as for causal attention, its grid says too much.
    if name in _KERNELS and of_kernel is not None:
        return Counter(matmul=of_kernel)
    inside: _Cost = Counter()
    for jaxpr in jaxprs_in_params(eqn.params):
        inside += run(jaxpr)
    steps = getattr(eqn.params.get("grid_mapping"), "grid", [None])
    if all(isinstance(size, int) for size in steps):
        return _times(inside, math.prod(steps))
    if inside:
        text = f"what is inside {name!r}{_where(eqn)} is counted once"
        inside += _because("too_low", text)
    return inside


# What runs a jaxpr several times, or one of several.
_RULES = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}


def _called(eqn: Any) -> Any:
    """The jaxpr that an equation calls with its own operands; None for any other
    equation.
    """
    # The inputs of a kernel are references, to results too.
    if eqn.primitive.name in _KERNELS:
        return None
    # Calls, checkpoints and custom rules, whose parameters differ in name. One with
    # another number of inputs is no call of the operands.
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "call"):
        called = eqn.params.get(key)
        if called is None:
            continue
        if len(_open(called).invars) == len(eqn.invars):
            return called
    return None


def _active_in_loop(
    body: Any, active: tuple[bool, ...], num_carry: int, num_xs: int = 0
) -> tuple[bool, ...]:
    """Which inputs of a loop's body, `(consts, carry, xs)`, are active on some trip.

    The carry may become active on a later trip than the first.
    """
    end = len(active) - num_xs
    start = end - num_carry
    consts = active[:start]
    xs = active[end:]
    layer = _without_dead_code(body), consts, xs
    carry = active_carry([layer], active[start:end])
    return (*consts, *carry, *xs)


def _without_dead_code(jaxpr: Any, is_used: Sequence[bool] | None = None) -> Any:
    """An open jaxpr with all inputs and no equation that only unused outputs need."""
    jaxpr = _open(jaxpr)
    is_used = is_used or [True] * len(jaxpr.outvars)
    return partial_eval.dce_jaxpr(jaxpr, is_used, instantiate=True)[0]


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _reshaped(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """How many variables have another shape in a loop's body."""
    count = 0
    for outer, inner in zip(outside, inside, strict=True):
        count += outer.aval.shape != inner.aval.shape
    return count


def _scopes(eqn: Any) -> str:
    return str(eqn.source_info.name_stack)


def _where(eqn: Any) -> str:
    """The user's line of source, as ` (file.py:12 (function))`."""
    place = source_info_util.summarize(eqn.source_info)
    return f" ({place.rpartition('/')[2]})"


def _transfers(eqn: Any) -> _Cost:
    cost: _Cost = Counter()
    figures = {
        jax.memory.Space.Host: "bytes_to_host",
        jax.memory.Space.Device: "bytes_from_host",
    }
    for source, result in zip(eqn.invars, eqn.outvars, strict=True):
        memory = result.aval.memory_space
        if memory != source.aval.memory_space and memory in figures:
            cost[figures[memory]] += bytes_of(result.aval)
    return cost


def _size(atom: Any) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))


def _dot_general(eqn: Any) -> int:
    """Each entry of the result is a sum over the contracted axes."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    terms = math.prod(shape[axis] for axis in contracted)
    return 2 * _size(eqn.outvars[0]) * terms


def _conv(eqn: Any) -> int:
    """Each entry of the result is a sum over the kernel of one output feature."""
    kernel = eqn.invars[1].aval
    # The first of `rhs_spec` is the dimension of output features.
    features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    total = 2 * _size(eqn.outvars[0]) * kernel.size
    return total // max(features, 1)


def _ragged_dot(eqn: Any) -> int:
    """Each row times its own group's matrix, though some backends compute more.

    So each entry on the left is used once for each of the matrix's free indices.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    not_free = {*contracted, *batch, *numbers.rhs_group_dimensions}
    free = 1
    for axis, size in enumerate(eqn.invars[1].aval.shape):
        if axis not in not_free:
            free *= size
    return 2 * _size(eqn.invars[0]) * free


def _attention(eqn: Any) -> int:
    """Fused attention of cuDNN on (batch, sequence, heads, head size): 2 products
    forward, 5 backward, which computes the scores again.

    Causal attention has half of the pairs of query and key, and a window at most its
    length of keys for each query.
    """
    batch, queries, heads, head_size = eqn.invars[0].aval.shape
    keys = eqn.invars[1].aval.shape[1]
    pairs = queries * keys
    if "CAUSAL" in str(eqn.params["mask_type"]):
        pairs //= 2
    if window := eqn.params["sliding_window_length"]:
        pairs = min(pairs, queries * window)
    products = 5 if "bwd" in eqn.primitive.name else 2
    return products * 2 * batch * heads * head_size * pairs


# FLOPs of each primitive that is a matrix product.
_MATMULS = {
    "dot_general": _dot_general,
    "scaled_dot": _dot_general,
    "conv_general_dilated": _conv,
    "conv": _conv,
    "ragged_dot_general": _ragged_dot,
    "dot_product_attention_fwd": _attention,
    "dot_product_attention_bwd": _attention,
}

# Primitives of Pallas.
_KERNELS = ("pallas_call", "mpmd_map")
# Primitives with more than elementwise work, of unknown or other cost than a product.
_NOT_COUNTED = frozenset(
    "cholesky cholesky_update eig eigh fft geqp3 geqrf hessenberg householder_product"
    " lu ormqr qr schur svd symmetric_product triangular_solve tridiagonal"
    " tridiagonal_solve custom_call tpu_custom_call ffi_call pure_callback"
    " io_callback".split()
)
