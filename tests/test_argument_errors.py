"""What is said of arguments that a loop over layers can't take, and which it takes."""

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis

from stacked_remat import BlockSeq, Stacked, fold, per_layer, shared

Layers = Axis("layers", 2)
Three = Axis("layers", 3)
Width = Axis("width", 2)
OLD_KEY = jnp.zeros(2, jnp.uint32)
# Takes no such arguments, as a type checker says
init: Any = Stacked.init


class Block(eqx.Module):
    w: Any

    def __call__(self, x: Any) -> Any:
        return x


def unchanged(carry: Any, x: Any) -> Any:
    return carry


def variadic(carry: Any, *args: Any, **kwargs: Any) -> Any:
    return carry


def given(x: Any, axis: Any = Layers, fn: Callable = unchanged) -> Callable[[], Any]:
    return lambda: fold(fn, axis)(0.0, x)


def first_layer(stack: Any) -> Any:
    """What `jax.tree.map` makes of a stack: its axes still say two layers."""
    return jax.tree.map(lambda array: array[:1], stack)


def ensemble() -> Any:
    stack = Stacked(Block(jnp.ones((2, 4))), Layers)
    return jax.tree.map(lambda array: jnp.stack([array] * 5), stack)


LENGTHS = "over `layers` (size 2) was given inputs of different lengths: "


def of_plain(name: str) -> str:
    return (
        " Plain arrays are split along their first dimension; to give every step the"
        f" whole array write stacked_remat.shared({name})."
    )


OF_NAMED = " Give x `layers` of size 2, or rename that axis of it to share it."
OF_KEYS = " If x is a random key, give each step its own: jax.random.split(x, 2)."
OF_ONE_KEY = (
    "{0} is a single random key, from which every step of `layers` would draw the same"
    " numbers. Give each its own, {1}jax.random.split({0}, 2), or say that they share"
    " it, {1}stacked_remat.shared({0})."
)
OF_LIST = (
    "fold: x is a list of 2 values, one for each step of `layers`? Write jnp.stack(x)"
    " to give each step its own, or shared(x) to give every step the whole list."
)
NO_SIZE = "fold over 'layers' was given nothing to split over that axis, so its size is"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            given(jnp.ones(3)),
            f"fold {LENGTHS}x has leading dimension 3 (shape (3,)).{of_plain('x')}",
        ),
        (
            given(per_layer(jnp.ones(3))),
            f"fold {LENGTHS}x has leading dimension 3 (shape (3,)). Give x 2 parts"
            " along its first dimension, one for each step.",
        ),
        (
            given(hax.ones((Three, Width))),
            f"fold {LENGTHS}x has `layers` of size 3 (axes layers=3, width=2)."
            f"{OF_NAMED}",
        ),
        (
            given(per_layer(hax.ones(Width))),
            f"fold {LENGTHS}x has no axis `layers` (axes width=2).{OF_NAMED}",
        ),
        (
            given(first_layer(hax.ones(Layers))),
            f"fold {LENGTHS}x has an array of 1 along `layers` (axes layers=2)."
            f"{OF_NAMED}",
        ),
        (
            given(jax.random.split(jax.random.key(0), 3)),
            f"fold {LENGTHS}x has leading dimension 3 (shape (3,)).{OF_KEYS}",
        ),
        (
            given(jnp.zeros((3, 2), jnp.uint32)),
            f"fold {LENGTHS}x has leading dimension 3 (shape (3, 2)).{OF_KEYS}",
        ),
        (
            lambda: fold(variadic, Layers)(0.0, jnp.ones(2), k={"a": jnp.ones(3)}),
            f"fold {LENGTHS}k['a'] has leading dimension 3 (shape (3,))."
            + of_plain("k['a']"),
        ),
        (
            lambda: fold(variadic, Layers)(0.0, *map(jnp.ones, (2, 3, 4, 5, 6))),
            f"fold {LENGTHS}args[1] has leading dimension 3 (shape (3,)); args[2] has"
            " leading dimension 4 (shape (4,)); args[3] has leading dimension 5 (shape"
            f" (5,)); and 1 more.{of_plain('args[1]')}",
        ),
        # An axis without a size has that of named arrays, if there are any
        (
            given({"a": jnp.ones(3), "b": hax.ones(Layers)}, "layers"),
            f"fold {LENGTHS}x['a'] has leading dimension 3 (shape (3,))."
            + of_plain("x['a']"),
        ),
        (
            given(hax.ones((Axis("layer", 3), Width)), "layers"),
            f"{NO_SIZE} unknown. The inputs have `layer`, `width`. Did you mean"
            " `layer`? Pass an axis instead of a name: hax.Axis('layers', size).",
        ),
        (
            lambda: fold(lambda carry: carry, "layers")(0.0),
            f"{NO_SIZE} unknown. Pass an axis instead of a name: hax.Axis('layers',"
            " size).",
        ),
        (
            lambda: Stacked(Block(jnp.ones((3, 4))), Layers),
            f"Stacked {LENGTHS}stacked.w has leading dimension 3 (shape (3, 4)). If"
            " these are 3 layers, write Stacked.of(blocks.stacked, 3). Or build the"
            " stack by Stacked.init(Layers, Block)(...).",
        ),
        (
            lambda: first_layer(Stacked(Block(jnp.ones(2)), Layers)).fold(0.0),
            f"Stacked.fold {LENGTHS}stacked.w has leading dimension 1 (shape (1,)). If"
            " these are 1 layers, write Stacked.of(blocks.stacked, 1).",
        ),
        (
            lambda: first_layer(Stacked(Block(hax.ones(Layers)), Layers)).fold(0.0),
            f"Stacked.fold {LENGTHS}stacked.w has an array of 1 along `layers` (axes"
            " layers=2). A stack of other layers is Stacked.of([blocks[i] for i in"
            " indices]).",
        ),
        (
            lambda: ensemble().fold(0.0),
            f"Stacked.fold {LENGTHS}stacked.w has leading dimension 5 (shape (5, 2,"
            " 4)). If this is an ensemble of stacks, map over it: eqx.filter_vmap("
            "lambda stack: stack.fold(x))(stacks).",
        ),
        (
            lambda: init(Layers, Block, "nested"),
            "Stacked.init takes its policy by name. Write remat='nested'.",
        ),
        (
            lambda: init(Layers, Block, "small"),
            "Stacked.init takes the axis, the class of the blocks and remat=. Arguments"
            " of the blocks go to what it returns: Stacked.init(Layers, Block)(...).",
        ),
        (
            lambda: BlockSeq.of([jnp.sin, 3.0]),  # pyright: ignore[reportArgumentType]
            "layers[1] of BlockSeq.of is a value of type float. Let it be an"
            " eqx.Module.",
        ),
        (given([1.0, 2.0]), OF_LIST),
        (given([jnp.ones(3), "a"]), OF_LIST),
        (given(jax.random.key(0)), OF_ONE_KEY.format("x", "x=")),
        (given({"a": jax.random.key(0)}), OF_ONE_KEY.format("x['a']", "")),
        (
            given(OLD_KEY, fn=lambda carry, dropoutKey: carry),
            OF_ONE_KEY.format("dropoutKey", "dropoutKey="),
        ),
    ],
)
def test_arguments_that_are_refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert str(error.value) == text


@pytest.mark.parametrize(
    "call",
    [
        # A list of something else than a value for each layer
        given([1.0, 2.0, 3.0]),
        given([jnp.ones(2), 2.0]),
        given([jnp.ones(()), 2.0]),
        given({"a": [1.0, 2.0]}),
        given([1.0], Axis("layers", 1)),
        # A pair of integers whose name is no key's, more of them, and a key for each
        given(OLD_KEY),
        given(OLD_KEY.astype(jnp.int32), fn=lambda carry, key: carry),
        given(jnp.zeros((2, 2), jnp.uint32), fn=lambda carry, key: carry),
        given(jax.random.split(jax.random.key(0), 2)),
        given(shared(jax.random.key(0))),
        # Nearly the axis's name, and another size
        given(hax.ones(Axis("layer", 3))),
    ],
)
def test_arguments_that_are_taken(call: Callable[[], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(call()) == 0.0


def test_an_axis_of_nearly_the_same_name() -> None:
    with pytest.warns(UserWarning) as caught:
        given({"a": hax.ones((Width, Axis("layer", 2)))})()
    (warning,) = caught
    assert warning.filename == __file__
    assert str(warning.message) == (
        "fold over `layers`: no argument has this axis, and x['a'] has `layer`, so"
        " every step is given all of x['a']. Loop over `layer`, or write shared(x['a'])"
        " if that is meant."
    )
