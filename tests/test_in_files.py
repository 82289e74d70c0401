"""Frozen arrays in files beside arrays in memory; errors; the memory of a process."""

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat import Stacked, _in_files, lora, streaming
from stacked_remat.ops import chunked_cross_entropy

from .blocks import (
    POLICIES,
    assert_close,
    assert_close_to_scale,
    assert_equal,
    quick_jit,
)
from .random_arrays import normal

Layers = hax.Axis("layers", 6)
Embed, Inner, Pos = hax.Axis("embed", 8), hax.Axis("inner", 12), hax.Axis("pos", 3)
X = normal(0, Pos, Embed)


class Block(eqx.Module):
    up: hnn.Linear
    down: hnn.Linear
    scale: jax.Array

    def __call__(self, x):
        layer = streaming.in_memory(self)
        return x + layer.down(hax.tanh(layer.up(x))) * layer.scale


class ProductBlock(Block):
    """Reads each weight in the product with it."""

    def __call__(self, x):
        return x + self.down(hax.tanh(self.up(x))) * self.scale


def stack_of(block, remat):
    up = hnn.Linear(
        normal(1, Layers, Inner, Embed) * 0.3, normal(2, Layers, Inner), Embed, Inner
    )
    down = hnn.Linear(normal(3, Layers, Embed, Inner) * 0.3, None, Inner, Embed)
    stack = Stacked(block(up, down, normal(4, Layers.size)), Layers, remat)
    config = lora.LoraConfig(rank=2, targets=("*",))
    adapted = lora.apply_lora(stack, config, key=jax.random.key(0))
    # B is zero at first, and A would have no gradient.
    trained, frozen = eqx.partition(adapted, lora.lora_filter(adapted))
    return eqx.combine(jax.tree.map(lambda leaf: leaf + 0.1, trained), frozen)


@pytest.fixture
def files(tmp_path):
    """A function that replaces the weights of linear maps by mapped files of layers."""

    def in_files(stack, kind=lambda linear: linear):
        def replaced(linear):
            names = []
            for number, entry in enumerate(np.asarray(linear.weight.array)):
                names.append(tmp_path / f"{len([*tmp_path.iterdir()])}_{number}.npy")
                np.save(names[-1], entry)

            def read(number):
                return np.load(names[number], mmap_mode="r")

            weight = streaming.from_files(linear.weight, read)
            return kind(dataclasses.replace(linear, weight=weight))

        def is_linear(node):
            return isinstance(node, hnn.Linear)

        return jax.tree.map(
            lambda node: replaced(node) if is_linear(node) else node,
            stack,
            is_leaf=is_linear,
        )

    return in_files


def loss_of(stack):
    trained, frozen = eqx.partition(stack, lora.lora_filter(stack))

    def loss(trained, x):
        y = eqx.combine(trained, frozen).fold(x)
        return hax.sum(y * y).scalar()

    return loss, trained


def gradients(stack, x=X):
    loss, trained = loss_of(stack)
    return quick_jit(jax.grad(loss, (0, 1)))(trained, x)


@pytest.mark.parametrize("remat", POLICIES.values(), ids=POLICIES)
def test_gradients_of_adapters_equal_those_with_weights_in_memory(files, remat):
    expected = gradients(stack_of(Block, remat))
    assert_close(gradients(files(stack_of(Block, remat))), expected)


@pytest.mark.parametrize("remat", [True, "nested"])
def test_products_read_their_weights_in_blocks(files, remat, monkeypatch):
    monkeypatch.setattr(_in_files, "_MOST_IN_BLOCK", 40)
    expected = gradients(stack_of(ProductBlock, remat))
    found = files(stack_of(ProductBlock, remat), streaming.LinearInFiles.of)
    assert _in_files._rows_of_block(Inner.size, Embed.size) == 4
    # Sums over blocks are in another order, and some of their terms cancel.
    assert_close_to_scale(gradients(found), expected)


@pytest.mark.parametrize(
    "kind",
    [lambda linear: linear, streaming.LinearInFiles.of],
    ids=["layer", "product"],
)
def test_second_derivatives_eager_calls_and_several_folds(files, kind):
    block = Block if kind is not streaming.LinearInFiles.of else ProductBlock

    def derivatives(stack):
        loss, trained = loss_of(stack)

        def twice(trained, x):
            return loss(trained, stack.fold(x))

        def along(trained, x):
            gradient = functools.partial(jax.grad(loss, 1), trained)
            return jax.jvp(gradient, (x,), (x,))[1]

        def of_gradient(x):
            return jnp.sum(jax.grad(loss, 1)(trained, x).array)

        compiled = quick_jit(jax.grad(twice)), quick_jit(along)
        of_both = [function(trained, X) for function in compiled]
        return *of_both, jax.grad(of_gradient)(X), loss(trained, X)

    expected = derivatives(stack_of(block, "nested"))
    found = derivatives(files(stack_of(block, "nested"), kind))
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_vmap_of_examples_and_of_layers(files):
    in_files = files(stack_of(Block, True))
    loss, trained = loss_of(in_files)
    expected, resident = loss_of(stack_of(Block, True))
    Batch = hax.Axis("batch", 2)
    xs = normal(7, Batch, Pos, Embed)
    many = hax.vmap(jax.grad(loss, 1), Batch)
    of_resident = hax.vmap(jax.grad(expected, 1), Batch)(resident, xs)
    assert_close(many(trained, xs), of_resident)
    whole = stack_of(Block, True).stacked.up.wrapped.weight
    weight = in_files.stacked.up.wrapped.weight
    of_layers = hax.vmap(streaming.in_memory, Layers)(weight)
    assert_equal(of_layers.array, whole.array)
    assert_equal(streaming.in_memory(weight).array, whole.array)
    cast = streaming.in_memory(weight, jnp.bfloat16)
    assert_equal(cast.array, whole.array.astype(jnp.bfloat16))
    product = files(stack_of(ProductBlock, True), streaming.LinearInFiles.of)
    with pytest.raises(NotImplementedError, match="linear_call"):
        loss, trained = loss_of(product)
        hax.vmap(loss, Batch)(trained, xs)


def test_rows_of_a_table_for_each_example():
    table = normal(5, Inner, Embed)
    in_files = streaming.from_files(
        table, lambda number: np.asarray(table.array), stacked=0
    )
    indices = jnp.array([[1, 2, 11], [0, 5, 5]])

    def rows(source, index, scale):
        tokens = hax.named(index, ("text", "token")[-index.ndim :])
        return source.take(Inner, tokens).array * scale

    for axes in ((0, None), (1, 0), (None, 0)):
        scale = jnp.arange(1.0, 4.0)[: indices.shape[axes[0] or 0]]
        args = indices, scale if axes[1] == 0 else jnp.float32(2)
        found, expected = (
            jax.vmap(functools.partial(rows, source), axes)(*args)
            for source in (in_files, table)
        )
        assert_equal(found, expected)


def test_entries_of_two_axes_under_vmap():
    table = normal(5, Layers.size, Inner.size, Embed.size)
    entries = np.asarray(table)
    in_files = streaming.from_files(
        table, lambda number: entries[divmod(number, Inner.size)], stacked=2
    )
    for axis in (0, 1):
        assert_equal(
            jax.vmap(streaming.in_memory, axis)(in_files), jnp.moveaxis(table, axis, 0)
        )


def test_a_product_in_another_dtype():
    weight = normal(1, Inner, Embed)
    in_files = streaming.from_files(
        weight, lambda number: np.asarray(weight.array), stacked=0
    )
    for bias in (None, normal(2, Inner)):
        linear = streaming.LinearInFiles.of(hnn.Linear(in_files, bias, Embed, Inner))
        found = linear.cast_to(jnp.bfloat16)(X.astype(jnp.bfloat16))
        expected = hnn.Linear(weight, bias, Embed, Inner)(X)
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            found.rearrange((Pos, Inner)).array.astype(jnp.float32),
            expected.rearrange((Pos, Inner)).array,
            rtol=0.05,
            atol=0.05,
        )


def test_adapters_on_weights_in_files_are_merged_in_memory(files):
    for kind in (lambda linear: linear, streaming.LinearInFiles.of):
        merged = lora.merge_lora(files(stack_of(Block, True), kind))
        expected = lora.merge_lora(stack_of(Block, True))
        assert_close(merged.fold(X), expected.fold(X), rtol=1e-4)


def test_what_is_not_the_array_is_refused():
    like = jax.ShapeDtypeStruct((3, 2, 4), jnp.float32)
    with pytest.raises(ValueError, match=r"entry 0 is float64\[2, 4\] in the files"):
        streaming.from_files(like, lambda number: np.zeros((2, 4)))
    with pytest.raises(ValueError, match="change stacked="):
        streaming.from_files(like, lambda number: np.zeros(()), stacked=4)

    def read(number):
        if number == 2:
            raise OSError("the disk is gone")
        return np.zeros((2 + number, 4), np.float32)

    array = streaming.from_files(like, read)
    for number, text in ((1, "entry 1 is float32"), (2, "the disk is gone")):
        one = dataclasses.replace(array, numbers=jnp.int32(number))
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(jax.jit(streaming.in_memory)(one))
    stacked = streaming.from_files(
        hax.zeros((Inner, Embed)), lambda number: np.zeros(8, np.float32)
    )
    with pytest.raises(ValueError, match="entries along 1 axes"):
        hnn.Embedding(stacked, Inner, Embed)(hax.arange(Pos))
    with pytest.raises(ValueError, match="entries of inner=12, embed=8; got embed=8"):
        chunked_cross_entropy(X, stacked, hax.arange(Pos), Embed, Inner)
    table = normal(0, Inner, Embed)
    whole = streaming.from_files(table, lambda number: table.array, stacked=0)
    with pytest.raises(ValueError, match="its first axis, .*inner.*; asked for some"):
        whole.take(Embed, hax.arange(Pos))
    linear = hnn.Linear(normal(0, Embed, Inner), None, Embed, Inner)
    with pytest.raises(ValueError, match="of inner=12, embed=8"):
        streaming.LinearInFiles.of(linear)


def test_a_program_for_several_devices_or_a_tpu_is_refused():
    like = jax.ShapeDtypeStruct((3, 2, 4), jnp.float32)
    array = streaming.from_files(like, lambda number: np.zeros((2, 4), np.float32))
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    sharding = jax.NamedSharding(mesh, jax.P())
    with pytest.raises(ValueError, match=r"is for 2\. Read the arrays to memory"):
        jax.jit(lambda x: x + streaming.in_memory(array), out_shardings=sharding)(1.0)
    with pytest.raises(ValueError, match="this program is for TPUs"):
        jax.jit(lambda: streaming.in_memory(array)).trace().lower(
            lowering_platforms=("tpu",)
        )


@pytest.mark.parametrize(
    "options",
    [{}, {"z_loss": 0.1, "softcap": 3.0, "scale": 1.5}],
    ids=["plain", "options"],
)
@pytest.mark.parametrize("rows", [3, 100])
def test_the_cross_entropy_of_a_head_in_files(options, rows, monkeypatch):
    monkeypatch.setattr("stacked_remat.ops.cross_entropy._MOST_ROWS_IN_FILES", rows)
    Vocab, Batch = hax.Axis("vocab", 11), hax.Axis("batch", 2)
    weight = normal(0, Vocab, Embed)
    table = np.asarray(weight.array)
    in_files = streaming.from_files(weight, lambda number: table, stacked=0)
    hidden = normal(1, Batch, Pos, Embed)
    weights = hax.named(jnp.asarray([[1, 0.5, 0], [1, 1, 2.0]]), (Batch, Pos))
    targets = hax.named(jnp.asarray([[0, 10, 11], [-100, 5, 9]]), (Batch, Pos))

    def losses(hidden, head, weights=weights):
        return chunked_cross_entropy(
            hidden, head, targets, Embed, Vocab, weights=weights, **options
        )

    def both(head):
        def loss(hidden):
            return hax.sum(losses(hidden, head)).scalar()

        return losses(hidden, head), jax.grad(loss)(hidden)

    linear = hnn.Linear(weight, None, Embed, Vocab)
    expected = quick_jit(both)(weight)
    for head in (in_files, dataclasses.replace(linear, weight=in_files)):
        assert_close(quick_jit(both)(head), expected, rtol=1e-4)
    assert np.isnan(losses(hidden, in_files, None).array[0, 2])
    taken = hnn.Embedding(in_files, Vocab, Embed)(targets["batch", 1]["pos", 1:3])
    assert_equal(taken.array, table[[5, 9]])
    biased = hnn.Linear(in_files, hax.zeros(Vocab), Embed, Vocab)
    with pytest.raises(ValueError, match="without a bias or an adapter"):
        losses(hidden, biased)


_MEASURED = """
import json, sys
from pathlib import Path
import equinox as eqx, haliax as hax, jax, jax.numpy as jnp, numpy as np
from stacked_remat import Stacked, streaming

class Block(eqx.Module):
    weight: jax.Array
    scale: jax.Array

    def __call__(self, x):
        layer = streaming.in_memory(self)
        return x + jnp.tanh(x @ layer.weight) * layer.scale

folder, layers, width = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
files = []
for number in range(layers):
    file = np.lib.format.open_memmap(
        folder / f"{number}.npy", "w+", np.float32, (width, width)
    )
    file[:] = 0.01
    del file
    files.append(folder / f"{number}.npy")

def read(number):
    return np.load(files[number], mmap_mode="r")

like = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
weight = streaming.from_files(like, read)
stack = Stacked(Block(weight, jnp.ones(layers)), hax.Axis("layers", layers), "nested")

def loss(scale, x):
    model = eqx.tree_at(lambda stack: stack.stacked.scale, stack, scale)
    return jnp.mean(model.fold(x) ** 2)

def peak():
    fields = dict(
        line.split(":") for line in Path("/proc/self/status").read_text().splitlines()
    )
    return int(fields["VmHWM"].split()[0]) * 1024

step = jax.jit(jax.grad(loss)).lower(jnp.ones(layers), jnp.ones((4, width))).compile()
before = peak()
gradient = step(jnp.ones(layers), jnp.ones((4, width)))
assert jnp.all(jnp.isfinite(gradient))
print(json.dumps(peak() - before))
"""


def test_a_step_takes_a_small_part_of_the_weights_memory(tmp_path):
    layers, width = 64, 1024
    arguments = [sys.executable, "-c", _MEASURED, tmp_path, layers, width]
    found = subprocess.run(
        [*map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    # Of 256 MiB; a layer has 4, and is mapped and in an array of the program.
    assert json.loads(found.stdout) < 40 * 2**20
