"""Counts a program's FLOPs and transfers, loop bodies times the number of times they
run.

XLA's own cost analysis counts the body of a loop once, and a training step over scanned
layers is mostly loops, so the traced program is counted instead. The trips of `while`
loops are those that the names of `_trips.py` say; where nothing says them, that is
reported, never silently taken as one.
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

from .._activity import active_carry, active_variables, expansion, is_in
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
        reasons = (self.too_low, other.too_low), (self.too_high, other.too_high)
        too_low, too_high = (tuple(sorted({*own, *others})) for own, others in reasons)
        return Flops(
            *map(operator.add, self.counts, other.counts),
            too_low=too_low,
            too_high=too_high,
        )

    def __mul__(self, times: Any) -> "Flops":
        if times == 0:
            return Flops()
        return Flops(
            *(count * times for count in self.counts),
            too_low=self.too_low,
            too_high=self.too_high,
        )

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
        at_least = (f"FLOP at least: {reason}" for reason in self.too_low)
        return (*at_least, *(f"FLOP at most: {reason}" for reason in self.too_high))


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
    found = _Counter().run(jaxpr, tuple(trained))
    return Flops(
        *map(round, found.counts), too_low=found.too_low, too_high=found.too_high
    )


class _Counter:
    """Counts one program. What it contains several times is the same object, and is
    counted once.
    """

    def __init__(self) -> None:
        self.run = functools.cache(self._run)
        self._expansion = functools.cache(_expansion)

    def _run(
        self, jaxpr: Any, active: tuple[bool, ...] = (), products: int | None = None
    ) -> Flops:
        """Count a jaxpr, open or closed.

        `active` tells of its inputs which depend on what is trained, `products` the
        FLOPs of each kernel.
        """
        live, cost = _without_dead_code(jaxpr), Flops()
        known = active_variables(live, itertools.compress(live.invars, active))
        atoms = [*live.outvars, *(atom for eqn in live.eqns for atom in eqn.invars)]
        read = {atom for atom in atoms if not isinstance(atom, Literal)}
        for eqn in live.eqns:
            cost += self._eqn(
                eqn, tuple(is_in(atom, known) for atom in eqn.invars), products, read
            )
        return cost

    def _eqn(
        self, eqn: Any, active: tuple[bool, ...], products: int | None, read: set[Any]
    ) -> Flops:
        name, params, scopes = (
            eqn.primitive.name,
            eqn.params,
            str(eqn.source_info.name_stack),
        )
        products = products_in(scopes) or products
        if name == "scan":
            inside = _active_in_loop(params["jaxpr"], active, *_scan_parts(eqn))
            return self.run(params["jaxpr"], inside, products) * params["length"]
        if name == "while":
            return self._while(eqn, scopes, active, products)
        if name == "cond":
            costs = [
                self.run(branch, active[1:], products) for branch in params["branches"]
            ]
            return _of_branches(eqn, scopes, costs)
        if name == "shard_map":
            shape, manual = params["mesh"].shape, params.get("manual_axes")
            body = self.run(params["jaxpr"], active, products)
            return body * math.prod(shape[axis] for axis in manual or shape)
        if name in ("pallas_call", "mpmd_map"):
            cost = self._kernel(eqn, products)
        elif called := self._called(eqn, read):
            return self.run(called, active, products)
        else:
            cost = self._leaf(eqn, products)
        # A product has two factors; fused attention has more operands
        gradients = min(2, sum(active))
        return dataclasses.replace(cost, matmul=cost.matmul * (1 + gradients))

    def _called(self, eqn: Any, read: set[Any]) -> Any:
        """The jaxpr that an equation calls with its own operands; None for any other
        equation.
        """
        if eqn.primitive.name == "call_hi_primitive":  # of `jax.experimental.hijax`
            return self._expansion(eqn, tuple(out in read for out in eqn.outvars))
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "call"):
            found = eqn.params.get(key)
            if found is not None and len(getattr(found, "jaxpr", found).invars) == len(
                eqn.invars
            ):
                return found
        return None

    def _kernel(self, eqn: Any, products: int | None) -> Flops:
        """A Pallas kernel: what is known of it, or its body times the steps of its
        grid.
        """
        if products is not None:
            return Flops(matmul=products)
        if "grid_mapping" not in eqn.params:
            return self._leaf(eqn, products)
        grid, body = eqn.params["grid_mapping"].grid, self.run(eqn.params["jaxpr"])
        if not all(isinstance(size, int) for size in grid):
            return body + Flops(
                too_low=(f"a kernel with a dynamic grid{_where(eqn)} is counted once",)
            )
        return body * math.prod(grid)

    def _leaf(self, eqn: Any, products: int | None) -> Flops:
        """The cost of an equation that calls nothing with its own operands."""
        name = eqn.primitive.name.removesuffix("_wrapper")
        if name == "device_put":
            return _transfers(eqn)
        if name in _MATMULS:
            return Flops(matmul=_MATMULS[name](eqn))
        if name in _NOT_COUNTED:
            return Flops(too_low=(f"the arithmetic of {name!r} is not counted",))
        inside = sum(
            (self.run(each, (), products) for each in jaxprs_in_params(eqn.params)),
            Flops(),
        )
        reason = f"what is inside {name!r}{_where(eqn)} is counted once"
        return inside if inside == Flops() else inside + Flops(too_low=(reason,))

    def _while(
        self, eqn: Any, scopes: str, active: tuple[bool, ...], products: int | None
    ) -> Flops:
        params, num_carry = eqn.params, len(eqn.outvars)
        body, state = params["body_jaxpr"], active[params["cond_nconsts"] :]
        inside = _active_in_loop(body, state, len(state) - num_carry, num_carry)
        each, once = (
            self.run(body, inside, products),
            self.run(params["cond_jaxpr"], (), products),
        )
        trips, is_exact = trips_in(scopes)
        if is_exact and trips is not None:
            return each * trips + once * (trips + 1)
        counted = "once" if trips is None else f"{trips} times"
        reason = (
            f"a while loop{_where(eqn)} whose trip count is not known in advance is"
            f" counted {counted}"
        )
        return (each + once) * (1 if trips is None else trips) + Flops(
            too_low=(reason,)
        )


def _active_in_loop(
    body: Any, active: tuple[bool, ...], num_consts: int, num_carry: int
) -> tuple[bool, ...]:
    """Which inputs of a loop's body are active on some trip."""
    end = num_consts + num_carry
    consts, carry, xs = active[:num_consts], active[num_consts:end], active[end:]
    return (
        *consts,
        *active_carry([(_without_dead_code(body), consts, xs)], carry),
        *xs,
    )


def _without_dead_code(jaxpr: Any) -> Any:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[
        0
    ]


def _of_branches(eqn: Any, scopes: str, costs: Sequence[Flops]) -> Flops:
    shares, index = branches_in(scopes), eqn.invars[0]
    if by_platform := eqn.params.get(
        "branches_platforms"
    ):  # as `lax.platform_dependent` chooses
        takes = (names is None or platform() in names for names in by_platform)
        return costs[[*takes].index(True)]
    if isinstance(index, Literal):
        return costs[min(max(int(index.val), 0), len(costs) - 1)]
    if len(shares) == len(costs):
        return sum(map(operator.mul, costs, shares), Flops())
    counts = [cost.counts for cost in costs]
    most = Flops(*map(max, zip(*counts, strict=True)))
    if any(count != most.counts for count in counts):
        reason = (
            f"a conditional that depends on data{_where(eqn)} counts its most expensive"
            " branch"
        )
        most += Flops(too_high=(reason,))
    return sum(
        (Flops(too_low=cost.too_low, too_high=cost.too_high) for cost in costs), most
    )


def _scan_parts(eqn: Any) -> tuple[int, int]:
    """How many constants and how many carries a `scan` has, from shapes: parameters
    differ between JAXes.
    """
    body = eqn.params["jaxpr"]
    inner = getattr(body, "jaxpr", body)
    num_xs, num_ys = (
        sum(
            outer.aval.shape != own.aval.shape
            for outer, own in zip(outside, inside, strict=True)
        )
        for outside, inside in (
            (eqn.invars, inner.invars),
            (eqn.outvars, inner.outvars),
        )
    )
    num_carry = len(eqn.outvars) - num_ys
    return len(eqn.invars) - num_xs - num_carry, num_carry


def _expansion(eqn: Any, is_used: tuple[bool, ...]) -> Any:
    """What a primitive expands into, with 0 in place of each result that is not
    used.
    """
    primitive = eqn.params["_prim"]

    def expand(*operands: PyTree) -> PyTree:
        flat = primitive.out_tree.flatten_up_to(primitive.expand(*operands))
        return [
            result if used else 0 for result, used in zip(flat, is_used, strict=True)
        ]

    return expansion(eqn, expand)


def _where(eqn: Any) -> str:
    place = source_info_util.summarize(eqn.source_info)
    return f" ({place.rpartition('/')[2]})"


def _transfers(eqn: Any) -> Flops:
    def moved(to: Any) -> int:
        pairs = [
            (source.aval, out.aval)
            for source, out in zip(eqn.invars, eqn.outvars, strict=True)
        ]
        results = [
            out
            for source, out in pairs
            if source.memory_space != to == out.memory_space
        ]
        return sum(out.size * out.dtype.itemsize for out in results)

    return Flops(0, moved(jax.memory.Space.Device), moved(jax.memory.Space.Host))


def _size(atom: Any) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))


def _dot_general(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return 2 * _size(eqn.outvars[0]) * math.prod(shape[axis] for axis in contracted)


def _conv(eqn: Any) -> int:
    kernel = eqn.invars[1].aval.shape
    features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * _size(eqn.outvars[0]) * math.prod(kernel) // max(features, 1)


def _ragged_dot(eqn: Any) -> int:
    """Each row times its own group's matrix, though some backends compute more."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    skipped = {*contracted, *batch, *numbers.rhs_group_dimensions}
    free = math.prod(
        size
        for axis, size in enumerate(eqn.invars[1].aval.shape)
        if axis not in skipped
    )
    return 2 * _size(eqn.invars[0]) * free


def _attention(eqn: Any) -> int:
    """Fused attention on (batch, sequence, heads, head size): 2 products forward, 5
    backward.
    """
    (batch, queries, heads, head_size), keys = (
        eqn.invars[0].aval.shape,
        eqn.invars[1].aval.shape[1],
    )
    mask, window = eqn.params.get("mask_type"), eqn.params.get("sliding_window_length")
    is_causal = "CAUSAL" in str(getattr(mask, "name", mask)).upper()
    pairs = min(queries * keys // (2 if is_causal else 1), queries * (window or keys))
    products = 5 if "bwd" in eqn.primitive.name else 2
    return products * 2 * batch * heads * head_size * pairs


_MATMULS = {
    "dot_general": _dot_general,
    "scaled_dot": _dot_general,
    "conv_general_dilated": _conv,
    "conv": _conv,
    "ragged_dot_general": _ragged_dot,
    "dot_product_attention_fwd": _attention,
    "dot_product_attention_bwd": _attention,
}

_NOT_COUNTED = frozenset(
    "cholesky cholesky_update eig eigh fft geqp3 geqrf hessenberg householder_product"
    " lu ormqr qr schur svd symmetric_product triangular_solve tridiagonal"
    " tridiagonal_solve custom_call tpu_custom_call ffi_call pure_callback"
    " io_callback".split()
)
