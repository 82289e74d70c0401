"""The FLOPs and the transfers of one equation of a traced program that holds no other program."""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs and transfers of one call of a program, summed over all the devices it runs on.

    Two of them add up, and one can be multiplied by a number of calls.

    Attributes:
        matmul: of matrix products and convolutions, a multiply-add being two.
        bytes_from_host: bytes moved from host memory to device memory (`jax.device_put` between the two, and
            policies that offload). Outside of `jax.shard_map`, an array counts once, however many devices
            have a copy of it.
        bytes_to_host: bytes moved from device memory to host memory.
        too_low: reasons why the true figures may be higher (empty when there are none), sorted.
        too_high: reasons why they may be lower, as where a conditional counts its most expensive branch.
    """

    matmul: int = 0
    bytes_from_host: int = 0
    bytes_to_host: int = 0
    too_low: tuple[str, ...] = ()
    too_high: tuple[str, ...] = ()

    def __add__(self, other: "Flops") -> "Flops":
        too_low, too_high = _union(self.too_low, other.too_low), _union(self.too_high, other.too_high)
        return Flops(*map(operator.add, self.counts, other.counts), too_low=too_low, too_high=too_high)

    def __mul__(self, times: Any) -> "Flops":
        if times == 0:
            return Flops()
        return Flops(*(count * times for count in self.counts), too_low=self.too_low, too_high=self.too_high)

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


def _union(some: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({*some, *others})) if others else some


def leaf_cost(eqn: Any) -> Flops:
    """Return the cost of an equation that holds no jaxpr.

    An operation that is neither known nor elementwise is named in `too_low`.
    """
    name = eqn.primitive.name
    if name == "device_put":
        return _transfers(eqn)
    if name in _MATMULS:
        return Flops(matmul=_MATMULS[name](eqn))
    if name in _NO_PRODUCTS or name.startswith("scatter") or _is_elementwise(eqn):
        return Flops()
    return Flops(too_low=(f"the arithmetic of {name!r} is not counted",))


def _transfers(eqn: Any) -> Flops:
    moved = {jax.memory.Space.Host: 0, jax.memory.Space.Device: 0}
    for source, result in zip(eqn.invars, eqn.outvars, strict=True):
        if source.aval.memory_space != result.aval.memory_space and result.aval.memory_space in moved:
            moved[result.aval.memory_space] += _size(result) * result.aval.dtype.itemsize
    return Flops(bytes_from_host=moved[jax.memory.Space.Device], bytes_to_host=moved[jax.memory.Space.Host])


def _size(atom: Any) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))


def _is_elementwise(eqn: Any) -> bool:
    if len(eqn.outvars) != 1 or eqn.primitive.name in _OPAQUE:
        return False
    shape = getattr(eqn.outvars[0].aval, "shape", None)
    return shape is not None and all(_broadcasts(getattr(v.aval, "shape", None), shape) for v in eqn.invars)


def _broadcasts(shape: tuple[int, ...] | None, to: tuple[int, ...]) -> bool:
    if shape is None or shape == () or shape == to:
        return shape is not None
    return len(shape) == len(to) and all(a in (1, b) for a, b in zip(shape, to, strict=True))


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
    free = math.prod(size for axis, size in enumerate(eqn.invars[1].aval.shape) if axis not in skipped)
    return 2 * _size(eqn.invars[0]) * free


def _attention(products: int) -> Callable:
    """Fused attention on (batch, sequence, heads, head size): `products` matmuls of T x S x H each."""

    def count(eqn: Any) -> int:
        (batch, queries, heads, head_size), keys = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape[1]
        mask, window = eqn.params.get("mask_type"), eqn.params.get("sliding_window_length")
        is_causal = "CAUSAL" in str(getattr(mask, "name", mask)).upper()
        pairs = min(queries * keys // (2 if is_causal else 1), queries * (window or keys))
        return products * 2 * batch * heads * head_size * pairs

    return count


_MATMULS = {
    "dot_general": _dot_general,
    "scaled_dot": _dot_general,
    "conv_general_dilated": _conv,
    "conv": _conv,
    "ragged_dot_general": _ragged_dot,
    "dot_product_attention_fwd": _attention(2),
    "dot_product_attention_fwd_wrapper": _attention(2),
    "dot_product_attention_bwd": _attention(5),
    "dot_product_attention_bwd_wrapper": _attention(5),
}

_NO_PRODUCTS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor reduce "
    "top_k approx_top_k argmax argmin cumsum cumprod cummax cummin cumlogsumexp reduce_window_sum "
    "reduce_window_max reduce_window_min sort "
    "threefry2x32 threefry4x32 philox2x32 philox4x32 random_bits random_split random_fold_in rng_uniform "
    "rng_bit_generator iota_2x32_shape clamp "
    "reshape broadcast_in_dim broadcast_to broadcast stack unstack roll transpose squeeze expand_dims slice "
    "dynamic_slice entry dynamic_update_slice gather concatenate pad rev copy copy_p convert_element_type "
    "bitcast_convert_type iota stop_gradient optimization_barrier name select_n split tile "
    "sharding_constraint mesh_cast reshard reduce_precision create_token layout_constraint empty empty2 "
    "random_wrap random_unwrap random_seed random_clone axis_index program_id num_programs get swap "
    "addupdate ref_get ref_set new_ref freeze free_ref masked_load masked_swap multiple_of pvary pcast "
    "psum psum2 psum_invariant pmax pmin ppermute all_gather all_gather_invariant all_to_all "
    "reduce_scatter pbroadcast after_all add_dependency pin unpin tie trace_value platform_index "
    "debug_callback debug_print zeros_like accum_grad_in_ref".split()
)

# One output of the input's shape, but not elementwise.
_OPAQUE = frozenset(
    "cholesky eigh eig qr lu svd triangular_solve fft ffi_call custom_call pure_callback io_callback "
    "tpu_custom_call tridiagonal_solve schur hessenberg householder_product".split()
)
