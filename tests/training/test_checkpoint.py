"""Tests of stacked_remat/training/checkpoint.py."""

import errno
import json
import shutil

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stacked_remat.training import (
    CheckpointConfig,
    CheckpointDamagedError,
    CheckpointMismatchError,
    Checkpoints,
    ConfigError,
    TrainState,
    checkpoint as checkpoint_module,
    checkpoint_run,
    load_checkpoint,
)
from stacked_remat.training.array_layout import digests
from stacked_remat.training.local_checkpoints import (
    LocalFiles,
    check_not_left,
    forget,
)

Embed, Out = hax.make_axes(embed=8, out=2)


class Model(eqx.Module):
    linear: hax.nn.Linear
    half: jax.Array
    empty: jax.Array
    nothing: None
    activation: object
    name: str = eqx.field(static=True)


def state(out=Out, seed=0):
    linear = hax.nn.Linear.init(Embed, out, key=jax.random.key(seed))
    model = Model(
        linear,
        jnp.arange(4, dtype=jnp.bfloat16),
        jnp.zeros((0, 3)),
        None,
        jax.nn.silu,
        "x",
    )
    return TrainState.init(model, optax.adam(1e-3), key=jax.random.key(seed))


def shapes(**options):
    return eqx.filter_eval_shape(lambda: state(**options))


def opened(folder, config=None, **options):
    return Checkpoints(
        folder / "checkpoints",
        config or CheckpointConfig(),
        run_config={"n": 1},
        **options,
    )


def saved_at(folder, *steps, config=None, one=None):
    checkpoints = opened(folder, config)
    for step in steps:
        checkpoints.save(
            step, one if one is not None else state(seed=step), {"step": step}
        )
    checkpoints.close()


def steps_in(folder):
    return sorted(
        int(path.name)
        for path in (folder / "checkpoints").iterdir()
        if path.name.isdigit()
    )


def test_a_state_is_restored_bit_by_bit_with_its_position(tmp_path):
    saved_at(tmp_path, 3)
    checkpoints = opened(tmp_path)
    assert checkpoints.latest() == 3
    for like in (shapes(), state(seed=9)):
        restored, position = checkpoints.restore(like)
        assert eqx.tree_equal(restored, state(seed=3)) and position == {"step": 3}
    assert eqx.tree_equal(restored.key, jax.random.key_data(jax.random.key(3)))
    checkpoints.close()


@pytest.mark.parametrize("local", [False, True])
def test_arrays_in_host_memory_are_restored_to_it(tmp_path, local):
    """Also for JAX, which else ends the process where a program returns them."""
    like = {"weight": jax.device_put(jnp.arange(3.0), jax.memory.Space.Host)}
    checkpoints = opened(tmp_path, local=near_files(tmp_path))
    checkpoints.save(1, like, {}, local=local)
    checkpoints.wait()
    assert (checkpoints.local.steps() == [1]) == local
    restored, _ = checkpoints.restore(like)
    checkpoints.close()
    found = restored["weight"]
    assert jax.typeof(found).memory_space == jax.memory.Space.Host
    assert found.sharding.memory_kind == like["weight"].sharding.memory_kind
    np.testing.assert_array_equal(jax.jit(lambda x: x)(found), [0, 1, 2])


def test_the_arrays_of_another_model_are_named(tmp_path):
    saved_at(tmp_path, 3)
    checkpoints = opened(tmp_path)
    expected = (
        r"3 does not fit this run's model.*\n  mismatched: trained.linear.weight is "
    )
    expected += r"float32\[out 2, embed 8\], expected float32\[out 5, embed 8\]"
    with pytest.raises(CheckpointMismatchError, match=expected):
        checkpoints.restore(shapes(out=Out.resize(5)))
    checkpoints.close()


def test_an_unfinished_save_is_not_a_checkpoint(tmp_path):
    saved_at(tmp_path, 1, 2)
    folder = tmp_path / "checkpoints"
    # The rename back would have been the last thing
    (folder / "2").rename(folder / "2.orbax-checkpoint-tmp")
    checkpoints = opened(tmp_path)
    assert checkpoints.latest() == 1 and checkpoints.restore(shapes())[1] == {"step": 1}
    checkpoints.save(2, state(seed=5), {})
    checkpoints.close()
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


@pytest.mark.parametrize("failing", ["save", "wait_until_finished"])
@pytest.mark.parametrize(
    ("error", "number", "reason"),
    [
        (OSError(errno.EROFS, "read only", "x"), errno.EROFS, "Read-only file system"),
        (
            ValueError("EXHAUSTED: d/12: [os_error_code='28']"),
            errno.ENOSPC,
            "No space left on device",
        ),
    ],
)
def test_the_error_of_a_failed_save_names_the_step_and_the_reason(
    tmp_path, monkeypatch, failing, error, number, reason
):
    def fail(*_, **__):
        raise error

    checkpoints = opened(tmp_path)
    with pytest.raises(
        OSError, match=rf"checkpoint of step 2: {reason}\. Earlier ones are"
    ) as raised:
        checkpoints._saving = 2
        monkeypatch.setattr(checkpoints._manager, failing, fail)
        checkpoints.save(2, {"w": jnp.ones(2)}, {})
    assert (raised.value.errno, raised.value.filename) == (
        number,
        str(tmp_path / "checkpoints"),
    )
    monkeypatch.undo()
    checkpoints.close()


def test_arrays_that_are_not_those_that_were_written_are_found(tmp_path):
    saved_at(tmp_path, 1)
    folder, run = (
        tmp_path / "checkpoints",
        tmp_path / "checkpoints" / "1" / "run" / "metadata",
    )
    written = json.loads(run.read_text())
    for name in ("trained.linear.weight", "optimizer_state.0.mu.half", "key"):
        first, second = written["saved"][name]
        changed = {**written["saved"], name: [first, second ^ 1]}
        run.write_text(json.dumps({**written, "saved": changed}))
        with pytest.raises(
            CheckpointDamagedError,
            match=rf"1 is damaged .* not those .*: {name}\. Restore it",
        ):
            load_checkpoint(folder, shapes())
    for damaged in ("{}", "{", None):
        run.unlink() if damaged is None else run.write_text(damaged)
        with pytest.raises(CheckpointDamagedError, match=r"run/metadata"):
            checkpoint_run(folder)
    run.write_text(json.dumps(written))
    shutil.rmtree(folder / "1" / "state")
    with pytest.raises(CheckpointDamagedError, match="1 is damaged or incomplete"):
        load_checkpoint(folder, shapes())


def test_a_damaged_checkpoint_names_those_to_resume_from(tmp_path):
    saved_at(tmp_path, 1, 2)
    shutil.copytree(tmp_path / "checkpoints" / "2", tmp_path / "checkpoints" / "3")
    (
        tmp_path / "checkpoints" / "3" / "commit_success.txt"
    ).unlink()  # half deleted: Orbax hides it
    (tmp_path / "checkpoints" / "3" / "run" / "metadata").unlink()
    checkpoints = opened(tmp_path)
    with pytest.raises(
        CheckpointDamagedError,
        match=r"3 is damaged .* is missing.* delete it.* \(of step 1, 2",
    ):
        checkpoints.restore(shapes())
    checkpoints.close()
    shutil.rmtree(tmp_path / "checkpoints" / "3")
    for path in (tmp_path / "checkpoints" / "1").rglob(
        "*"
    ):  # an older one that is half deleted is ignored
        if path.is_file():
            path.unlink()
    checkpoints = opened(tmp_path)
    assert checkpoints.restore(shapes())[1] == {"step": 2}
    checkpoints.save(3, state(), {})
    checkpoints.close()
    assert steps_in(tmp_path)[-1] == 3


def test_the_latest_checkpoints_are_kept_and_some_of_the_others(tmp_path):
    config = CheckpointConfig(keep_last=2, keep_every_steps=2)
    saved_at(tmp_path, *range(1, 6), config=config, one={"w": jnp.ones(2)})
    assert steps_in(tmp_path) == [2, 4, 5]


def test_a_checkpoint_is_due_by_step_and_by_time(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(checkpoint_module.time, "monotonic", lambda: now[0])
    by_step = opened(tmp_path, CheckpointConfig(every_steps=5, every_minutes=None))
    assert [step for step in range(1, 16) if by_step.is_due(step)] == [5, 10, 15]
    by_time = opened(tmp_path / "other", CheckpointConfig(every_minutes=2.0))
    assert not by_time.is_due(1)
    now[0] += 120
    assert by_time.is_due(1)
    by_time.save(1, state(), {})
    assert not by_time.is_due(2)
    by_step.close()
    by_time.close()


def test_frozen_arrays_need_not_be_saved(tmp_path):
    def initial():
        linear = hax.nn.Linear.init(Embed, Out, key=jax.random.key(0))
        return TrainState.init(
            linear, optax.sgd(0.1, momentum=0.9), hax.nn.Linear(True, False, Embed, Out)
        )

    def without_frozen(state):
        return eqx.tree_at(
            lambda s: s.frozen, jax.tree.map(lambda _: True, state), False
        )

    checkpoints = opened(tmp_path, saved=without_frozen)
    moved = eqx.tree_at(
        lambda s: s.trained.weight.array, initial(), jnp.full((2, 8), 7.0)
    )
    checkpoints.save(1, moved, {})
    checkpoints.wait()
    restored, _ = checkpoints.restore(initial())
    assert eqx.tree_equal(restored, moved)
    checkpoints.close()
    run = (tmp_path / "checkpoints" / "1" / "run" / "metadata").read_text()
    assert list(json.loads(run)["layout"]) == [
        "step",
        "trained.weight",
        "optimizer_state.0.trace.weight",
        "skips",
    ]
    assert list(json.loads(run)["unsaved"]) == ["frozen.bias"]
    other = eqx.tree_at(
        lambda tree: tree.frozen.bias.array, initial(), jnp.full(2, 9.0)
    )
    with pytest.raises(
        CheckpointMismatchError, match=r"other frozen weights: frozen\.bias\."
    ):
        opened(tmp_path, saved=without_frozen).restore(other)


def test_a_part_of_a_checkpoint_and_its_config_can_be_read(tmp_path):
    saved_at(tmp_path, 1, 2)
    folder = tmp_path / "checkpoints"
    assert eqx.tree_equal(load_checkpoint(folder, shapes()), state(seed=2))
    model = load_checkpoint(folder, shapes().trained, step=1, part="trained")
    assert eqx.tree_equal(model, state(seed=1).trained)
    assert checkpoint_run(folder)["config"] == {"n": 1}
    with pytest.raises(FileNotFoundError, match=r"of step 7 in .* It has steps 1, 2"):
        load_checkpoint(folder, shapes(), step=7)
    with pytest.raises(FileNotFoundError, match="No checkpoint in .*no such folder"):
        load_checkpoint(tmp_path / "elsewhere", state())


BITS = {
    "bool": 1,
    "int4": 4,
    "float8_e4m3fn": 8,
    "bfloat16": 16,
    "float32": 32,
    "int32": 32,
    "complex64": 32,
}


def of_bits(words, dtype):
    """The array whose elements, or their real and imaginary parts, have these bits."""
    if dtype == "bool":
        return jnp.asarray(words == 1)
    if dtype == "complex64":
        return jnp.asarray(np.ascontiguousarray(words).view(np.complex64))
    return jax.lax.bitcast_convert_type(
        jnp.asarray(words).astype(f"uint{BITS[dtype]}"), dtype
    )


@pytest.mark.parametrize("dtype", BITS)
def test_digests_differ_with_bits_and_places_and_not_with_sharding(dtype):
    """Elements have few values, and their opposites, so a sum of bits often stays as it
    is.
    """
    generator, sign = np.random.default_rng(0), np.uint32(1 << (BITS[dtype] - 1))
    words = generator.choice(
        np.array([0, 1, sign, sign | np.uint32(1)], np.uint32), (4, 12)
    )
    two_signs, swapped, turned = words.copy(), words.copy(), words.T.reshape(4, 12)
    two_signs[0, 0], two_signs[3, 5] = words[0, 0] ^ sign, words[3, 5] ^ sign
    swapped[[1, 2]] = words[[2, 1]]
    others = [
        words ^ sign,
        two_signs,
        swapped,
        words[::-1],
        words[:, ::-1],
        np.roll(words, 1),
        turned,
    ]
    others += [generator.permutation(words.ravel()).reshape(4, 12) for _ in range(8)]
    for _ in range(8):
        one_bit = words.copy()
        one_bit[*generator.integers((4, 12))] ^= np.uint32(
            1 << generator.integers(BITS[dtype])
        )
        others.append(one_bit)
    different = {other.tobytes(): other for other in (words, *others)}.values()
    found = {tuple(digests({"a": of_bits(other, dtype)})["a"]) for other in different}
    assert len(found) == len(different) > 20
    mesh, array = (
        Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y")),
        of_bits(words, dtype),
    )
    divided = jax.device_put(array, NamedSharding(mesh, PartitionSpec("x", "y")))
    assert digests({"a": divided}) == digests({"a": array}) and list(
        digests({"a": array})
    ) == ["a"]


def test_digests_of_nan_payloads_layers_and_keys_differ():
    quiet, other = (
        of_bits(np.array([bits], np.uint32), "float32")
        for bits in (0x7FC00000, 0x7FC00001)
    )
    assert digests({"a": quiet}) != digests({"a": other})
    layers = jax.random.normal(jax.random.key(0), (6, 32, 32), jnp.bfloat16).astype(
        jnp.float32
    )
    orders = [
        layers,
        layers[::-1],
        layers[jnp.array([1, 0, 2, 3, 5, 4])],
        -layers,
        layers.swapaxes(1, 2),
    ]
    assert len({tuple(digests({"a": order})["a"]) for order in orders}) == 5
    keys = jax.random.split(jax.random.key(0), 4)
    assert digests({"a": keys}) != digests({"a": keys[::-1]})
    one, two = layers[0], layers[1]
    assert digests({"a": one, "b": two}) != digests({"a": two, "b": one})


def test_a_scalar_in_host_memory_has_the_digest_of_one_on_the_device():
    number = jnp.float32(3)
    on_host = jax.device_put(number, jax.memory.Space.Host)
    assert digests({"a": on_host}) == digests({"a": number})


def test_a_checkpoint_with_digests_of_an_earlier_version_is_refused_by_name(tmp_path):
    saved_at(tmp_path, 3)
    file = tmp_path / "checkpoints" / "3" / "run" / "metadata"
    run = json.loads(file.read_text())
    del run["format"]
    file.write_text(json.dumps(run))
    with pytest.raises(
        CheckpointMismatchError,
        match=r"An earlier version .* wrote the checkpoint .*/3: its",
    ):
        load_checkpoint(tmp_path / "checkpoints", shapes())


def divided(tree, *shape):
    """A tree whose arrays are divided over a mesh of this shape as far as they go."""
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    mesh = Mesh(devices, ("x", "y")[: len(shape)])

    def put(array):
        over = [
            name if array.shape[axis] % mesh.shape[name] == 0 else None
            for axis, name in enumerate(mesh.axis_names)
            if axis < array.ndim
        ]
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*over)))

    return jax.tree.map(lambda a: put(a) if eqx.is_array(a) else a, tree)


def test_a_run_resumes_from_files_of_its_host_where_those_are_later(tmp_path):
    config = CheckpointConfig(local_every_steps=2)

    def opened_near():
        return opened(tmp_path, config, local=near_files(tmp_path))

    checkpoints = opened_near()
    near = checkpoints.local.folder
    assert [step for step in range(1, 7) if checkpoints.is_local_due(step)] == [2, 4, 6]
    assert checkpoints.latest() is None
    for step in range(2, 10):
        of_all = step == 4
        checkpoints.save(step, divided(state(seed=step), 2, 2), {}, local=not of_all)
    checkpoints.wait()
    assert checkpoints.latest() == 9 and checkpoints.local.steps() == [8, 9]

    # Each part of an array is there once, be it on two devices.
    like = divided(state(), 2, 2)
    restored, _ = opened_near().restore(like)
    assert eqx.tree_equal(restored, state(seed=9))
    weight, there = (
        one.trained.linear.weight.array.sharding for one in (restored, like)
    )
    assert weight == there and not weight.is_fully_replicated
    with np.load(near / "9.npz") as archive:
        assert sum(name.startswith("step:") for name in archive) == 1
    # Another model
    with pytest.raises(CheckpointMismatchError, match=r"9\.npz does not fit"):
        opened_near().restore(shapes(out=Out.resize(5)))
    # Damage, and a file that was not finished
    content = bytearray((near / "9.npz").read_bytes())
    content[len(content) // 2] ^= 1
    (near / "9.npz").write_bytes(content)
    (near / ".10.npz.unfinished").touch()
    with pytest.raises(CheckpointDamagedError, match=r"9\.npz is damaged .* Delete"):
        opened_near().restore(divided(state(), 2, 2))
    assert not (near / ".10.npz.unfinished").exists()
    (near / "9.npz").unlink()
    checkpoints = opened_near()
    restored, _ = checkpoints.restore(divided(state(), 2, 2))
    assert eqx.tree_equal(restored, state(seed=8))
    # Another division, as of other devices: the checkpoint for all, and what is near is
    # of no use from here on
    with pytest.warns(UserWarning, match=r"/process-0 divide .* of step 4\."):
        restored, _ = checkpoints.restore(divided(state(), 4))
    assert eqx.tree_equal(restored, state(seed=4)) and not near.exists()
    assert opened_near().latest() == 4
    # Nothing is left near it once all is in the checkpoint for all.
    checkpoints.save(5, divided(state(), 4), {}, local=True)
    checkpoints.save(6, state(), {})
    checkpoints.close()
    assert not [*(tmp_path / "memory").iterdir()]
    shutil.rmtree(tmp_path / "checkpoints")
    checkpoints = opened_near()
    checkpoints.save(2, divided(state(), 2, 2), {}, local=True)
    with pytest.raises(CheckpointMismatchError, match="and there are no others"):
        checkpoints.restore(divided(state(), 4))
    checkpoints.close()


def near_files(folder):
    return LocalFiles(folder / "local_id", folder / "memory")


def test_local_files_are_those_from_which_a_run_went_on(tmp_path):
    first = near_files(tmp_path)
    # Of another run of the same name, which neither removes
    (tmp_path / "other" / tmp_path.name).mkdir(parents=True)
    other = LocalFiles(
        tmp_path / "other" / tmp_path.name / "local_id", tmp_path / "memory"
    )
    kept = tmp_path / "memory" / "of another program"
    kept.mkdir()
    arrays = {"a": jnp.arange(4.0)}
    for step in (3, 5):
        first.save(step, arrays, {})
    first.wait()
    # A process that resumes from an earlier step than its last
    again = near_files(tmp_path)
    assert again.steps() == [3, 5] and again.folder == first.folder
    again.keep(last=3)
    again.save(4, arrays, {})
    again.wait()
    assert again.steps() == [3, 4]
    again.renew()
    assert again.steps() == [] and not first.folder.exists()
    assert near_files(tmp_path).folder == again.folder
    check_not_left(tmp_path / "local_id", None, -1)
    again.save(7, arrays, {})
    again.wait()
    for parent, last in ((tmp_path / "memory", -1), (None, 7)):
        check_not_left(tmp_path / "local_id", parent, last)
    for parent in (None, tmp_path / "elsewhere"):
        with pytest.raises(ConfigError, match=r"memory and has .* step 7 .*or delete"):
            check_not_left(tmp_path / "local_id", parent, 6)
    forget(tmp_path / "local_id")
    assert not again.folder.exists() and not (tmp_path / "local_id").exists()
    names = '{"id": "../..", "parent": "/"}', '{"id": "01234567", "parent": "a"}'
    for damaged in ("", "[]", "{}", *names):
        (tmp_path / "local_id").write_text(damaged)
        with pytest.raises(ConfigError, match="local_id is damaged.* Delete it"):
            near_files(tmp_path)
    assert kept.exists() and other.folder.exists()


def test_a_local_checkpoint_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "no space")

    checkpoints = opened(tmp_path, local=near_files(tmp_path))
    monkeypatch.setattr(np, "savez", full)
    checkpoints.save(3, state(), {}, local=True)
    with pytest.warns(UserWarning, match="of step 3: No space left .* goes on without"):
        checkpoints.wait()
    assert not checkpoints.is_local_due(4) and checkpoints.latest() is None
    checkpoints.save(4, state(), {})
    checkpoints.close()
    assert steps_in(tmp_path) == [4]
