"""Carries on disk: gradients, files and how long they live, and what is refused."""

import errno
import functools
import gc
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stacked_remat import (
    BlockSeq,
    LayerResult,
    ScanCheckpointPolicy,
    Stacked,
    StackedPattern,
    _carry_files as files,
    checkpoint_name,
    fold,
    lax_scan,
    memory,
    scan,
)
from stacked_remat._policy import FOLDER_VARIABLE

from .blocks import assert_close, assert_equal, quick_jit
from .jaxprs import equations_of
from .random_arrays import normal

N = 6
Layers = hax.Axis("layers", N)
WEIGHTS, X = 0.5 * normal(1, N, 3, 3), normal(0, 3)
# Cut into segments of one layer, as carries on disk are: equal to the last bit.
SAME = ScanCheckpointPolicy(nested=N)


@pytest.fixture
def folder(tmp_path):
    """A folder for carries, in which no file is left."""
    yield str(tmp_path)
    gc.collect()
    assert files.traffic.files == 0
    assert not os.listdir(tmp_path)


def on_disk(folder, **settings):
    return ScanCheckpointPolicy(save_carries="disk", carries_folder=folder, **settings)


def layer(x, weight):
    return jnp.sin(checkpoint_name(x @ weight, "hidden")) + 0.1 * x


def loss(weights, x, remat):
    return jnp.sum(fold(layer, Layers, remat=remat)(x, weights) ** 2)


def gradient_of(loss, remat):
    return jax.grad(functools.partial(loss, remat=remat), (0, 1))


@pytest.mark.parametrize(
    "settings, kept",
    [
        ({}, N),
        ({"nested": True}, 3),
        ({"nested": 2}, 2),
        ({"nested": 2, "max_carries": 2}, 2),
        ({"nested": 1, "max_carries": 3}, 1),
        ({"first_layers": 2}, N - 2),
        ({"nested": 2, "first_layers": 1}, 2),
        ({"nested": 2, "save_block_internals": ["hidden"]}, 2),
        ({"nested": 2, "max_carries": 2, "save_block_internals": ["hidden"]}, 2),
        ({"nested": 3, "save_block_internals": True}, 3),
    ],
)
def test_gradients_equal_those_of_carries_in_memory(folder, settings, kept):
    expected = gradient_of(loss, True)
    found = gradient_of(loss, on_disk(folder, **settings))
    written, read = files.traffic.written, files.traffic.read
    assert_close(quick_jit(found)(WEIGHTS, X), quick_jit(expected)(WEIGHTS, X))
    assert files.traffic.written - written == kept * X.nbytes
    assert files.traffic.read - read == kept * X.nbytes
    assert_close(found(WEIGHTS, X), expected(WEIGHTS, X))


def test_gradients_are_those_of_segments_of_one_layer_to_the_bit(folder):
    found, expected = gradient_of(loss, on_disk(folder)), gradient_of(loss, SAME)
    assert_equal(quick_jit(found)(WEIGHTS, X), quick_jit(expected)(WEIGHTS, X))


def test_carries_of_several_types_and_keys(folder):
    def step(carry, weight):
        narrow, key, count, mask, empty = carry
        key, noise_key = jax.random.split(key)
        noise = jax.random.normal(noise_key, narrow.shape, narrow.dtype)
        narrow = jnp.tanh(narrow * weight.astype(narrow.dtype) + noise)
        narrow = jnp.where(mask, narrow, count.astype(narrow.dtype))
        return narrow, key, count + jnp.int8(1), ~mask, empty

    def loss(weights, x, remat):
        rest = jax.random.key(0), jnp.int8(1), jnp.array([True, False, True])
        init = x.astype(jnp.bfloat16), *rest, jnp.zeros((0, 2))
        return jnp.sum(
            fold(step, Layers, remat=remat)(init, weights)[0], dtype="float32"
        )

    weights = jnp.linspace(0.5, 1, N)
    found, expected = gradient_of(loss, on_disk(folder)), gradient_of(loss, SAME)
    assert_equal(quick_jit(found)(weights, X), quick_jit(expected)(weights, X))
    many = functools.partial(jax.vmap, in_axes=(None, 0))
    xs = normal(2, 2, 3)
    assert_equal(quick_jit(many(found))(weights, xs), many(expected)(weights, xs))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    "transformed",
    {
        "vmap of grad": lambda f: jax.vmap(jax.grad(f, 1), (None, 0)),
        "vmap of vmap of grad": lambda f: jax.vmap(
            jax.vmap(jax.grad(f), (None, 0)), (0, None)
        ),
        "grad of vmap": lambda f: jax.grad(
            lambda weights, xs: jnp.sum(jax.vmap(f, (None, 0))(weights, xs))
        ),
        "jacobian": lambda f: jax.jacrev(
            lambda weights, xs: jax.vmap(f, (None, 0))(weights, xs)
        ),
        "grad of grad": lambda f: jax.grad(
            lambda weights, xs: jnp.sum(jax.grad(f, 1)(weights, xs[0]) ** 2)
        ),
        "checkpoint": lambda f: jax.grad(
            lambda weights, xs: jax.checkpoint(f)(weights, xs[0]) ** 2
        ),
        "jvp": lambda f: (
            lambda weights, xs: jax.jvp(
                functools.partial(f, weights), (xs[0],), (xs[1],)
            )
        ),
    }.items(),
    ids=lambda item: item[0],
)
def test_transformations(folder, transformed, compiled):
    name, transform = transformed
    arguments = WEIGHTS, normal(2, 2, 3)
    if "vmap of vmap" in name:
        arguments = jnp.stack([WEIGHTS, 2 * WEIGHTS]), arguments[1]
    results = []
    for remat in (on_disk(folder), True):
        fn = transform(functools.partial(loss, remat=remat))
        results.append((quick_jit(fn) if compiled else fn)(*arguments))
    assert_close(*results, rtol=1e-4)


@pytest.mark.parametrize(
    "outer", [True, False, "nested", "recompute", "disk", "nested on disk"]
)
def test_folds_in_folds(folder, outer):
    """Each run of the inner fold has a file of its own."""
    Inner = hax.Axis("inner", 3)
    on_disks = {"disk": on_disk(folder), "nested on disk": on_disk(folder, nested=2)}

    def loss(weights, x, remat):
        inner, outer = remat

        def block(x, weights):
            return fold(lambda x, w: jnp.sin(x * w), Inner, remat=inner)(x, weights)

        return jnp.sum(fold(block, Layers, remat=outer)(x, weights))

    remat = on_disk(folder), on_disks.get(outer, outer)
    found, expected = gradient_of(loss, remat), gradient_of(loss, (True, True))
    assert_close(quick_jit(found)(WEIGHTS, X), quick_jit(expected)(WEIGHTS, X))


def test_folds_of_one_program_and_programs_at_once_have_their_own_files(folder):
    def two(weights, x, remat):
        backwards = loss(weights[::-1], x, remat)
        return loss(weights, x, remat) + backwards

    gradient = quick_jit(gradient_of(two, on_disk(folder)))
    expected = quick_jit(gradient_of(two, SAME))(WEIGHTS, X)
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(lambda _: gradient(WEIGHTS, X), range(20)):
            assert_equal(found, expected)


def test_loops_and_stacks(folder):
    def run_lax(weights, x, remat):
        return jnp.sum(
            lax_scan(lambda c, w: (layer(c, w), c), x, weights, remat=remat)[1]
        )

    def run_backwards(weights, x, remat):
        step = functools.partial(scan, reverse=True, unroll=N)
        return step(lambda c, w: (layer(c, w), c), Layers, remat=remat)(x, weights)[0][
            0
        ]

    for run in (run_lax, run_backwards):
        found, expected = gradient_of(run, on_disk(folder)), gradient_of(run, SAME)
        assert_close(quick_jit(found)(WEIGHTS, X), quick_jit(expected)(WEIGHTS, X))


class Block(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return layer(x, self.weight)


class Other(Block):
    def __call__(self, x):
        return x * self.weight[0]


def test_stacks_and_patterns(folder):
    kinds = {"a": Block, "b": Other}
    for stack in (
        Stacked.init(Layers, Block)(WEIGHTS),
        StackedPattern.init(Layers, kinds, ("a", "b", "b", "a", "a", "b"))(WEIGHTS),
    ):

        def loss(stack, remat):
            return jnp.sum(stack.with_remat(remat).fold(X))

        found, expected = (
            quick_jit(jax.grad(functools.partial(loss, remat=remat)))(stack)
            for remat in (on_disk(folder), SAME)
        )
        assert_close(found, expected)


def test_visitors_may_come_back(folder):
    """Outside of `jax.jit` carries stay for as long as what reads them."""
    stack = Stacked.init(Layers, Block)(WEIGHTS)

    def add(visit, total):
        found = visit.vjp()
        return LayerResult(found.carry, state=total + found.layer.weight)

    totals = []
    for remat in (on_disk(folder), SAME):
        y, sweep_back = stack.fold_vjp(X, remat=remat)
        for _ in range(2):
            totals.append(sweep_back(y, add, jnp.zeros((3, 3))).state)
        del sweep_back
    for total in totals:
        assert_equal(total, totals[0])


def test_a_pullback_outside_of_jit_may_be_called_again_and_its_file_ends_with_it(
    folder,
):
    _, pullback = jax.vjp(functools.partial(loss, x=X, remat=on_disk(folder)), WEIGHTS)
    assert files.traffic.files == 1
    assert_equal(pullback(jnp.float32(1)), pullback(jnp.float32(1)))
    del pullback


def test_a_compiled_pullback_is_called_once(folder):
    compiled = jax.jit(functools.partial(loss, x=X, remat=on_disk(folder)))
    _, pullback = jax.vjp(compiled, WEIGHTS)
    pullback(jnp.float32(1))
    with pytest.raises(Exception, match="a reverse sweep has read them before"):
        jax.block_until_ready(pullback(jnp.float32(1)))


def test_places_may_be_read_in_any_order(folder):
    """The one before the last that was read is read ahead."""
    tickets = files.open_file(folder, ())
    carries = [np.full(3, number, np.float32) for number in range(5)]
    for place, carry in enumerate(carries):
        files.write(tickets, place, [carry])
    files.write(tickets, 3, [carries[0]])
    for place, carry in [(4, 4), (3, 0), (1, 1), (2, 2), (2, 2), (1, 1), (0, 0)]:
        (found,) = files.read(tickets, place, [carries[0]])
        assert_equal(found, carries[carry])


def test_what_is_not_read_is_not_written(folder):
    before = files.traffic.written
    quick_jit(functools.partial(loss, remat=on_disk(folder)))(WEIGHTS, X)
    value_and_grad = jax.value_and_grad(functools.partial(loss, remat=on_disk(folder)))
    quick_jit(lambda *args: value_and_grad(*args)[0])(WEIGHTS, X)
    assert files.traffic.written == before


def test_the_environment_names_the_folder(folder, monkeypatch):
    gradient = quick_jit(gradient_of(loss, ScanCheckpointPolicy(save_carries="disk")))
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=f"needs a folder.*{FOLDER_VARIABLE}"):
        gradient(WEIGHTS, X)
    monkeypatch.setenv(FOLDER_VARIABLE, folder)
    assert_close(gradient(WEIGHTS, X), gradient_of(loss, True)(WEIGHTS, X))


def test_a_folder_that_takes_no_files(tmp_path):
    missing = str(tmp_path / "missing")
    with pytest.raises(OSError, match=f"{missing}: No such file.*carries_folder"):
        quick_jit(gradient_of(loss, on_disk(missing)))(WEIGHTS, X)
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    if os.access(locked, os.W_OK):
        pytest.skip("the user may write everywhere")
    with pytest.raises(OSError, match=f"{locked}: Permission denied"):
        quick_jit(gradient_of(loss, on_disk(str(locked))))(WEIGHTS, X)


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_an_error_of_the_disk_ends_the_program(folder, monkeypatch, call):
    gradient = quick_jit(gradient_of(loss, on_disk(folder)))
    expected = gradient(WEIGHTS, X)
    real = getattr(os, call)

    def full(descriptor, data, offset):
        if offset >= 2 * X.nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        message = f"a carry of 12 bytes in the folder {folder}: No space left"
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(gradient(WEIGHTS, X))
    assert files.traffic.files == 0
    assert_equal(gradient(WEIGHTS, X), expected)


def test_a_short_write_goes_on(folder, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:5], at))
    found = quick_jit(gradient_of(loss, on_disk(folder)))(WEIGHTS, X)
    assert_equal(found, quick_jit(gradient_of(loss, SAME))(WEIGHTS, X))


_KILLED = """
import os, sys, signal
import jax, jax.numpy as jnp
from stacked_remat import ScanCheckpointPolicy, lax_scan

def step(x, i):
    jax.debug.callback(lambda i: i == 5 and os.kill(os.getpid(), signal.SIGKILL), i)
    return jnp.sin(x), None

remat = ScanCheckpointPolicy(save_carries="disk", carries_folder=sys.argv[1])
run = lambda x: lax_scan(step, x, jnp.arange(8), remat=remat)[0].sum()
jax.block_until_ready(jax.jit(jax.grad(run))(jnp.ones(1000)))
"""


def test_a_file_that_ends_too_early_is_closed(folder):
    ticket = files.open_file(folder, ())
    files.write(ticket, 0, [np.ones(3)])
    # Which closes it again
    files.keep_until_garbage(ticket)
    with pytest.raises(OSError, match="the file ends before the carry does"):
        files.read(ticket, 1, [jax.typeof(np.ones(3))])
    assert files.traffic.files == 0
    del ticket


def test_a_killed_process_leaves_no_file(folder):
    command = [sys.executable, "-c", _KILLED, folder]
    root = Path(__file__).parents[1]
    killed = subprocess.run(command, cwd=root, capture_output=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()


def test_flops_are_those_of_true_and_no_stack_is_kept(folder):
    found, expected = (
        memory.report(gradient_of(loss, remat), WEIGHTS, X)
        for remat in (on_disk(folder), True)
    )
    assert found.flops.matmul == expected.flops.matmul
    assert found.flops.bytes_to_disk == N * X.nbytes
    assert found.host.total == expected.host.total == 0
    assert "72 B of carries written to disk, and read back" in str(found)
    assert "written to disk" not in str(expected)
    shapes = set()
    for equation in equations_of(gradient_of(loss, on_disk(folder)), WEIGHTS, X):
        shapes |= {var.aval.shape for var in equation.outvars}
    assert (N, *X.shape) not in shapes


def test_max_carries_bounds_those_of_a_segment(folder):
    weights, x = jnp.ones(16), jnp.ones((64, 64))

    def carries(**settings):
        run = fold(
            lambda x, weight: jnp.sin(x * weight), 16, remat=on_disk(folder, **settings)
        )
        compiled = jax.jit(jax.grad(lambda x: jnp.sum(run(x, weights)))).lower(x)
        memory = compiled.compile().memory_analysis()
        return memory.temp_size_in_bytes / x.nbytes

    whole = carries(nested=2)
    for most in (2, 3, 5):
        fewer = whole - carries(nested=2, max_carries=most)
        assert fewer == pytest.approx(8 - most, abs=0.2)


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: jax.jvp(jax.grad(f), (X,), (X,)),
        lambda f: jax.hessian(f)(X),
    ],
)
def test_gradients_have_no_forward_mode(folder, derivative):
    with pytest.raises(TypeError, match="no forward mode.*jax.grad of jax.grad"):
        derivative(functools.partial(loss, WEIGHTS, remat=on_disk(folder)))


def test_layers_one_by_one_and_loops_that_stop_are_refused(folder):
    blocks = BlockSeq.init(Layers, Block)(WEIGHTS)
    with pytest.raises(ValueError, match="compiled one by one.*Stacked"):
        blocks.fold(X, remat=on_disk(folder))
    two_levels = ScanCheckpointPolicy(nested=2, save_carries="offload", max_carries=2)
    with pytest.raises(ValueError, match="compiled one by one.*Leave out max_carries"):
        blocks.fold(X, remat=two_levels)
    with pytest.raises(ValueError, match="With until="):
        fold(layer, Layers, remat=on_disk(folder), until=lambda x: x[0] > 9)(X, WEIGHTS)


def test_carries_of_examples_that_differ_inside_of_layers_alone_are_refused(folder):
    def own(x, weight):
        return layer(x * jax.lax.axis_index("examples").astype(x.dtype), weight)

    def value(x):
        return jnp.sum(fold(own, Layers, remat=on_disk(folder))(x, WEIGHTS))

    run = jax.vmap(lambda _, x: jax.grad(value)(x), (0, None), axis_name="examples")
    with pytest.raises(NotImplementedError, match="carries differ between examples"):
        quick_jit(run)(jnp.arange(2), X)


def test_several_devices_are_refused(folder):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    xs = jax.device_put(normal(2, 2, 3), jax.NamedSharding(mesh, jax.P("data")))
    gradient = gradient_of(loss, on_disk(folder))

    def each(x):
        return gradient(WEIGHTS, x[0])[1][None]

    spec = jax.P("data")
    mapped = jax.shard_map(each, mesh=mesh, in_specs=spec, out_specs=spec)
    for run in (mapped, lambda xs: gradient(WEIGHTS, xs.sum(0))):
        with pytest.raises(
            ValueError, match="programs on one device.* for (2|several)"
        ):
            quick_jit(run)(xs)


@pytest.mark.parametrize(
    "platform, message",
    [("tpu", "for CPUs and GPUs.*for TPUs"), ("cuda", "attached; not for cuda")],
)
def test_other_devices_are_refused(folder, platform, message):
    traced = jax.jit(gradient_of(loss, on_disk(folder))).trace(WEIGHTS, X)
    with pytest.raises(ValueError, match=message):
        traced.lower(lowering_platforms=(platform,))


def test_settings_that_have_no_effect_or_contradict(folder):
    with pytest.raises(ValueError, match="carries_folder='x' has no effect beside"):
        ScanCheckpointPolicy(carries_folder="x")
    for settings in ({"save_block_internals": ["a"]}, {"save_block_internals": True}):
        with pytest.raises(ValueError, match="contradict each other: on disk are"):
            on_disk(folder, **settings)
    with pytest.raises(ValueError, match="Give the number of segments"):
        on_disk(folder, max_carries=3)
    policy = on_disk(Path(folder))
    assert policy == on_disk(folder) != on_disk("elsewhere")
    assert policy.for_layers(1).carries == "device"
