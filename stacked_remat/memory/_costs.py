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
        reasons = (self.too_low, other.too_low), (self.too_high, other.too_high)
        too_low, too_high = (tuple(sorted({*own, *others})) for own, others in reasons)
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


def leaf_cost(eqn: Any) -> Flops:
    """Return the cost of an equation that holds no jaxpr; one with products of its own is in `too_low`."""
    name = eqn.primitive.name
    if name == "device_put":
        return _transfers(eqn)
    if name in _MATMULS:
        return Flops(matmul=_MATMULS[name](eqn))
    return Flops(too_low=(f"the arithmetic of {name!r} is not counted",)) if name in _NOT_COUNTED else Flops()


def _transfers(eqn: Any) -> Flops:
    moved = {jax.memory.Space.Host: 0, jax.memory.Space.Device: 0}
    for source, result in zip(eqn.invars, eqn.outvars, strict=True):
        if source.aval.memory_space != result.aval.memory_space and result.aval.memory_space in moved:
            moved[result.aval.memory_space] += _size(result) * result.aval.dtype.itemsize
    return Flops(bytes_from_host=moved[jax.memory.Space.Device], bytes_to_host=moved[jax.memory.Space.Host])


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

_NOT_COUNTED = frozenset(
    "cholesky cholesky_update eig eigh fft geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd "
    "symmetric_product triangular_solve tridiagonal tridiagonal_solve custom_call tpu_custom_call ffi_call "
    "pure_callback io_callback".split()
)
