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
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import Literal, jaxprs_in_params
from jax.interpreters import partial_eval

from .._activity import active_carry, active_variables, bytes_of, expansion, is_in
from .._hijax import primitive_of
from .._placement import platform
from .._static import PyTree
from .._trips import branches_in, products_in, trips_in


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs and transfers of one call of a program, summed over all the devices it runs
    on.

    Two of them add up, and one can be multiplied by a number of calls.

    Attributes:
        matmul: of matrix products and convolutions, a multiply-add being two.
        bytes_from_host: bytes moved from host memory to device memory (`jax.device_put`
            between the two, and policies that offload). Outside of `jax.shard_map`, an
            array counts once, however many devices have a copy of it.
        bytes_to_host: bytes moved from device memory to host memory.
        too_low: reasons why the true figures may be higher (empty when there are none),
            sorted.
        too_high: reasons why they may be lower, as where a conditional counts its most
            expensive branch.
    """

    matmul: int = 0
    bytes_from_host: int = 0
    bytes_to_host: int = 0
    too_low: tuple[str, ...] = ()
    too_high: tuple[str, ...] = ()

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            *map(operator.add, self.counts, other.counts),
            too_low=tuple(sorted({*self.too_low, *other.too_low})),
            too_high=tuple(sorted({*self.too_high, *other.too_high})),
        )

    def __mul__(self, times: Any) -> "Flops":
        if times == 0:
            return Flops()
        counts = (count * times for count in self.counts)
        return Flops(*counts, too_low=self.too_low, too_high=self.too_high)

    @property
    def counts(self) -> tuple[int, int, int]:
        """`matmul`, `bytes_from_host` and `bytes_to_host`."""
        return self.matmul, self.bytes_from_host, self.bytes_to_host

    @property
    def moved(self) -> int:
        """Bytes moved between host and device, in both directions."""
        return self.bytes_from_host + self.bytes_to_host

    @property
    def exact(self) -> bool:
        return not self.too_low and not self.too_high

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
    cost = _Counter().run(jaxpr, tuple(trained))
    # Mean trip counts are fractions, and so may the counts be that they multiply.
    counts = map(round, cost.counts)
    return Flops(*counts, too_low=cost.too_low, too_high=cost.too_high)


class _Counter:
    """Counts one program.

    JAX traces a function that is called several times into one jaxpr, and a sweep over
    layers contains its layer's several times: each is counted once, and remembered.
    """

    def __init__(self) -> None:
        self.run = functools.cache(self._run)
        self._expansion = functools.cache(_expansion)

    def _run(
        self, jaxpr: Any, active: tuple[bool, ...] = (), products: int | None = None
    ) -> Flops:
        """The cost of a jaxpr, open or closed.

        Args:
            jaxpr: what is counted.
            active: for each of its inputs whether it depends on what is trained; `()`
                where no backward pass is counted.
            products: FLOPs of each kernel within it, from a named scope around it; None
                where no scope says them.
        """
        live = _without_dead_code(jaxpr)
        active_vars = active_variables(live, itertools.compress(live.invars, active))
        used = set(_variables(live.outvars))
        for eqn in live.eqns:
            used.update(_variables(eqn.invars))
        cost = Flops()
        for eqn in live.eqns:
            operands = tuple(is_in(atom, active_vars) for atom in eqn.invars)
            cost += self._eqn(eqn, operands, products, used)
        return cost

    def _eqn(
        self, eqn: Any, active: tuple[bool, ...], products: int | None, used: set[Any]
    ) -> Flops:
        """The cost of one equation; `active` is of its operands, and `used` has the
        variables that anything reads.
        """
        name = eqn.primitive.name
        params = eqn.params
        scopes = str(eqn.source_info.name_stack)
        # Names within a called jaxpr start anew, so what a scope around the call says
        # of kernels is handed down.
        products = products_in(scopes) or products
        if name == "scan":
            body = params["jaxpr"]
            inside = _active_in_loop(body, active, *_scan_parts(eqn))
            return self.run(body, inside, products) * params["length"]
        if name == "while":
            return self._while(eqn, scopes, active, products)
        if name == "cond":
            costs = []
            for branch in params["branches"]:  # whose operands come after the index
                costs.append(self.run(branch, active[1:], products))
            return _of_branches(eqn, scopes, costs)
        if name == "shard_map":
            # The body is what each device runs, and costs are sums over devices. Over
            # axes that are not manual, the body is still of all their devices.
            sizes = params["mesh"].shape
            manual = params.get("manual_axes") or sizes
            devices = math.prod(sizes[axis] for axis in manual)
            return self.run(params["jaxpr"], active, products) * devices
        if name in ("pallas_call", "mpmd_map"):
            cost = self._kernel(eqn, products)
        elif called := self._called(eqn, used):
            return self.run(called, active, products)
        else:
            cost = self._leaf(eqn, products)
        # The backward pass has one product for each active operand, of the size of the
        # forward one. A product has two factors; fused attention has more operands.
        gradients = min(2, sum(active))
        return dataclasses.replace(cost, matmul=cost.matmul * (1 + gradients))

    def _called(self, eqn: Any, used: set[Any]) -> Any:
        """The jaxpr that an equation calls with its own operands; None for any other
        equation.
        """
        if primitive_of(eqn) is not None:
            return self._expansion(eqn, tuple(out in used for out in eqn.outvars))
        # Calls, checkpoints and custom rules, whose parameters differ in name. One with
        # another number of inputs is no call of the operands.
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "call"):
            called = eqn.params.get(key)
            if called is not None:
                inputs = getattr(called, "jaxpr", called).invars
                if len(inputs) == len(eqn.invars):
                    return called
        return None

    def _kernel(self, eqn: Any, products: int | None) -> Flops:
        """A Pallas kernel: what a named scope says, or its body times the steps of its
        grid.
        """
        # Where a kernel skips blocks, as for causal attention, the grid says too much.
        if products is not None:
            return Flops(matmul=products)
        if "grid_mapping" not in eqn.params:
            return self._leaf(eqn, products)
        grid = eqn.params["grid_mapping"].grid
        body = self.run(eqn.params["jaxpr"])
        if not all(isinstance(size, int) for size in grid):
            reason = f"a kernel with a dynamic grid{_where(eqn)} is counted once"
            return body + Flops(too_low=(reason,))
        return body * math.prod(grid)

    def _leaf(self, eqn: Any, products: int | None) -> Flops:
        """The cost of an equation that calls nothing with its own operands."""
        # JAX binds cuDNN's attention as `dot_product_attention_fwd_wrapper`.
        name = eqn.primitive.name.removesuffix("_wrapper")
        if name == "device_put":
            return _transfers(eqn)
        if name in _MATMULS:
            return Flops(matmul=_MATMULS[name](eqn))
        if name in _NOT_COUNTED:
            return Flops(too_low=(f"the arithmetic of {name!r} is not counted",))
        inside = Flops()
        for jaxpr in jaxprs_in_params(eqn.params):
            inside += self.run(jaxpr, (), products)
        if inside == Flops():
            return inside
        reason = f"what is inside {name!r}{_where(eqn)} is counted once"
        return inside + Flops(too_low=(reason,))

    def _while(
        self, eqn: Any, scopes: str, active: tuple[bool, ...], products: int | None
    ) -> Flops:
        params = eqn.params
        num_carry = len(eqn.outvars)
        body = params["body_jaxpr"]
        # Operands are the condition's constants, the body's, and the carry.
        operands = active[params["cond_nconsts"] :]
        inside = _active_in_loop(body, operands, len(operands) - num_carry, num_carry)
        cost = self.run(body, inside, products)
        condition = self.run(params["cond_jaxpr"], (), products)
        trips, is_exact = trips_in(scopes)
        if is_exact and trips is not None:
            return cost * trips + condition * (trips + 1)
        counted = "once" if trips is None else f"{trips} times"
        reason = (
            f"a while loop{_where(eqn)} whose trip count is not known in advance is"
            f" counted {counted}"
        )
        repeated = (cost + condition) * (1 if trips is None else trips)
        return repeated + Flops(too_low=(reason,))


def _active_in_loop(
    body: Any, active: tuple[bool, ...], num_consts: int, num_carry: int
) -> tuple[bool, ...]:
    """Which inputs of a loop's body, `(consts, carry, xs)`, are active on some trip.

    The carry may become active on a later trip than the first.
    """
    end = num_consts + num_carry
    consts = active[:num_consts]
    carry = active[num_consts:end]
    xs = active[end:]
    carry = active_carry([(_without_dead_code(body), consts, xs)], carry)
    return (*consts, *carry, *xs)


def _without_dead_code(jaxpr: Any) -> Any:
    """An open jaxpr with all inputs and no unused equation."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    all_outputs = [True] * len(jaxpr.outvars)
    return partial_eval.dce_jaxpr(jaxpr, all_outputs, instantiate=True)[0]


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _of_branches(eqn: Any, scopes: str, costs: Sequence[Flops]) -> Flops:
    """The cost of a conditional, by what is known of its index, best first: the
    platform or a constant decides; a named scope says how often each is taken; or
    nothing, and then the most expensive branch counts, separately for each figure.
    """
    shares = branches_in(scopes)
    index = eqn.invars[0]
    # `lax.platform_dependent`: platforms of each branch, None for the default.
    for cost, platforms in zip(
        costs, eqn.params.get("branches_platforms") or (), strict=False
    ):
        if platforms is None or platform() in platforms:
            return cost
    if isinstance(index, Literal):
        # JAX clamps the index of a conditional.
        taken = max(int(index.val), 0)
        return costs[min(taken, len(costs) - 1)]
    if len(shares) == len(costs):
        return sum(map(operator.mul, costs, shares), Flops())
    counts = [cost.counts for cost in costs]
    most = Flops(*map(max, zip(*counts, strict=True)))
    if len(set(counts)) > 1:
        reason = (
            f"a conditional that depends on data{_where(eqn)} counts its most expensive"
            " branch"
        )
        most += Flops(too_high=(reason,))
    for cost in costs:
        most += Flops(too_low=cost.too_low, too_high=cost.too_high)
    return most


def _scan_parts(eqn: Any) -> tuple[int, int]:
    """How many constants and how many carries a `scan` has.

    Found from shapes, since the parameters that say it differ between versions of JAX:
    only what is split or stacked has a dimension more outside of the body.
    """
    body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
    num_xs = _reshaped(eqn.invars, body.invars)
    num_carry = len(eqn.outvars) - _reshaped(eqn.outvars, body.outvars)
    return len(eqn.invars) - num_xs - num_carry, num_carry


def _reshaped(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(outer.aval.shape != inner.aval.shape for outer, inner in pairs)


def _expansion(eqn: Any, is_used: tuple[bool, ...]) -> Any:
    """The jaxpr that a hijax primitive expands into, with 0 in place of each unused
    result.

    What only that result needs is dead code then, as it is for XLA: the dead code of
    the caller's jaxpr cannot be removed within a primitive that is not expanded yet.
    """
    primitive = primitive_of(eqn)

    def expand(*operands: PyTree) -> PyTree:
        results = primitive.out_tree.flatten_up_to(primitive.expand(*operands))
        pairs = zip(results, is_used, strict=True)
        return [result if used else 0 for result, used in pairs]

    return expansion(eqn, expand)


def _where(eqn: Any) -> str:
    """The user's line of source, as ` (file.py:12 (function))`."""
    place = source_info_util.summarize(eqn.source_info)
    return f" ({place.rpartition('/')[2]})"


def _transfers(eqn: Any) -> Flops:
    from_host = to_host = 0
    for source, result in zip(eqn.invars, eqn.outvars, strict=True):
        memory = result.aval.memory_space
        if memory == source.aval.memory_space:
            continue
        if memory == jax.memory.Space.Host:
            to_host += bytes_of(result.aval)
        elif memory == jax.memory.Space.Device:
            from_host += bytes_of(result.aval)
    return Flops(0, from_host, to_host)


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
    return 2 * _size(eqn.outvars[0]) * kernel.size // max(features, 1)


def _ragged_dot(eqn: Any) -> int:
    """Each row times its own group's matrix, though some backends compute more.

    So each entry on the left is used once for each of the matrix's free indices.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    not_free = {*contracted, *batch, *numbers.rhs_group_dimensions}
    free = 1
    for axis, size in enumerate(eqn.invars[1].aval.shape):
        free *= 1 if axis in not_free else size
    return 2 * _size(eqn.invars[0]) * free


def _attention(eqn: Any) -> int:
    """Fused attention of cuDNN on (batch, sequence, heads, head size): 2 products
    forward, 5 backward, which computes the scores again.

    Causal attention has half of the pairs of query and key, and a window at most its
    length of keys for each query.
    """
    batch, queries, heads, head_size = eqn.invars[0].aval.shape
    keys = eqn.invars[1].aval.shape[1]
    mask, window = eqn.params.get("mask_type"), eqn.params.get("sliding_window_length")
    is_causal = "CAUSAL" in str(getattr(mask, "name", mask)).upper()
    pairs = queries * keys
    if is_causal:
        pairs //= 2
    if window:
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

# Primitives with more than elementwise work, of unknown or other cost than a product.
_NOT_COUNTED = frozenset(
    "cholesky cholesky_update eig eigh fft geqp3 geqrf hessenberg householder_product"
    " lu ormqr qr schur svd symmetric_product triangular_solve tridiagonal"
    " tridiagonal_solve custom_call tpu_custom_call ffi_call pure_callback"
    " io_callback".split()
)
