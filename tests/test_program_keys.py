"""Keys of programs are equal where an executable serves again, and unlike elsewhere."""

import dataclasses
import enum
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr
from jax.sharding import PartitionSpec as P

from stacked_remat._sweep.programs import description, structure


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Settings:
    """Without a hash."""

    size: Any
    note: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass
class Called:
    size: int

    def __call__(self) -> None: ...


def of_library(function: Any) -> Any:
    function.__module__ = "jax.numpy"
    return function


def closing_over(value: Any) -> Any:
    return lambda: value


def empty_cell() -> Any:
    code = closing_over(1).__code__
    return types.FunctionType(code, {}, closure=(types.CellType(),))


def with_default(value: Any) -> Any:
    def function(value: Any = value) -> Any:
        return value

    return function


def with_keyword(value: Any) -> Any:
    def function(*, value: Any = value) -> Any:
        return value

    return function


def calling_itself() -> Any:
    def function() -> Any:
        return function

    return of_library(function)


def jaxpr_of(fn: Any, *shape: int) -> Jaxpr:
    return jax.make_jaxpr(fn)(jnp.ones(shape)).jaxpr


# Values that mean the same each time that they are made, and no two the same.
VALUES = [
    lambda: None,
    lambda: True,
    lambda: 1,
    lambda: 1.0,
    lambda: -0.0,
    lambda: 0.0,
    lambda: 0,
    lambda: False,
    lambda: float("nan"),
    lambda: 1j,
    lambda: "a",
    lambda: b"a",
    lambda: Color.RED,
    lambda: Color.BLUE,
    lambda: np.zeros(2, np.float32),
    lambda: np.zeros(2, np.int32),
    lambda: np.zeros((1, 2), np.float32),
    lambda: np.ones(2, np.float32),
    lambda: np.float32(1),
    lambda: np.dtype("float32"),
    lambda: float,
    lambda: P("data"),
    lambda: P(None),
    lambda: jax.ShapeDtypeStruct((2,), jnp.float32),
    lambda: (1, 2),
    lambda: [1, 2],
    lambda: (2, 1),
    lambda: {"a": 1},
    lambda: {"b": 1},
    lambda: {1, 2},
    lambda: frozenset({1, 2}),
    lambda: Settings([1], "ignored"),
    lambda: Settings([2]),
    lambda: functools.partial(jnp.add, 1),
    lambda: functools.partial(jnp.add, 2),
    lambda: functools.partial(jnp.subtract, 1),
    lambda: functools.partial(jnp.clip, min=1),
    lambda: abs_of_one,
    lambda: of_library(closing_over(1)),
    lambda: of_library(closing_over(2)),
    lambda: of_library(with_default(1)),
    lambda: of_library(with_default(2)),
    lambda: of_library(with_keyword(1)),
    lambda: calling_itself(),
    lambda: jaxpr_of(jnp.sin),
    lambda: jaxpr_of(jnp.cos),
    lambda: jaxpr_of(jnp.sin, 2),
    lambda: jaxpr_of(lambda x: x * 2.0),
    lambda: jaxpr_of(lambda x: x * 3.0),
    lambda: jaxpr_of(lambda x: (x - 1.0, x)),
    lambda: jaxpr_of(lambda x: (x, x - 1.0)),
    lambda: jaxpr_of(lambda x: jnp.sin(x) * jnp.cos(x)),
    lambda: jaxpr_of(lambda x: jnp.sin(x) * jnp.sin(x)),
    lambda: jaxpr_of(jax.nn.relu),
    lambda: jaxpr_of(jax.nn.relu6),
]


def abs_of_one() -> float:
    return abs(1)


# What may change between two programs without a trace of it.
UNKNOWN = [
    lambda: closing_over(1),
    lambda: with_default(1),
    lambda: with_keyword(1),
    lambda: of_library(empty_cell()),
    lambda: functools.partial(abs_of_one),
    lambda: functools.partial(closing_over(1), 2),
    lambda: Called(1),
    lambda: np.array([object()]),
]


def test_keys_of_values() -> None:
    keys = [description(make()) for make in VALUES]
    assert keys == [description(make()) for make in VALUES]
    assert len({*keys}) == len(keys)


@pytest.mark.parametrize("make", UNKNOWN)
def test_what_is_not_looked_into_equals_itself(make) -> None:
    value, other = make(), make()
    assert description(value) == description(value)
    assert description(value) != description(other)


def test_what_has_no_weak_references_equals_nothing() -> None:
    value = object()
    key = description(value)
    assert key == key and key != description(value)


def test_programs_with_values_that_are_known() -> None:
    """Such a program alone may be taken for another."""

    def calling(callback: Any) -> Jaxpr:
        def fn(x: Any) -> Any:
            return jax.pure_callback(callback, x, x)

        return jaxpr_of(fn)

    assert structure(jaxpr_of(jnp.sin)).is_closed
    assert structure(calling(abs_of_one)).is_closed
    assert not structure(calling(closing_over(1))).is_closed
    # In the jaxpr of an equation too
    assert structure(jaxpr_of(jax.jit(jnp.sin))).is_closed
    inner = calling(closing_over(1))
    nested = jax.make_jaxpr(jax.jit(lambda x: eval_jaxpr(inner, (), x)))(1.0)
    assert not structure(nested.jaxpr).is_closed


def test_arrays_in_a_key() -> None:
    """They are compared by identity, and not kept alive."""
    one, other = jnp.ones(2), jnp.ones(2)
    assert description([one]) == description([one])
    assert description([one]) != description([other])
    del one
    key = description(other)
    del other
    assert key != description(jnp.ones(2))
