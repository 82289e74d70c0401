"""Tests of targets: their names, their figures, their compilers and the errors without
them.
"""

import jax
import pytest

from stacked_remat import memory
from stacked_remat.memory import (
    TARGETS,
    CudaTarget,
    TargetError,
    TpuTarget,
    find_target,
)

CUDA, TPU = ["a100-80gb", "h100", "h200", "b200"], ["v5e", "v5p", "v6e"]
NAMES = ["local", *CUDA, *TPU]


def test_the_names():
    assert list(TARGETS) == NAMES
    assert all(find_target(name).name == name for name in NAMES)
    assert find_target(TARGETS["h200"]) is find_target("H200") is TARGETS["h200"]
    with pytest.raises(ValueError, match="unknown target 200.*" + ".*".join(NAMES)):
        find_target(200)


@pytest.mark.parametrize("name", NAMES[1:])
def test_figures_are_in_bytes_and_flops(name):
    target = TARGETS[name]
    assert target.memory is not None and 16e9 < target.memory < 300e9
    assert target.flops is not None and 1e14 < target.flops < 3e15
    assert target.link is not None and 1e10 < target.link < 1e11


@pytest.mark.parametrize("name", CUDA)
def test_the_description_for_xla_has_the_targets_figures(name):
    target = TARGETS[name]
    assert isinstance(target, CudaTarget)
    config = target.target_config()
    assert f"device_memory_size: {target.memory}\n" in config
    assert f"core_count: {target.core_count}\n" in config
    assert config.count("{") == config.count("}")
    assert ("ACCELERATED_FEATURES" in config) == (target.capability >= (9, 0))


def test_local_devices_are_those_of_the_process():
    assert find_target("local").devices(3) == tuple(jax.devices()[:3])
    with pytest.raises(TargetError, match="has 8 device.*9 were asked for"):
        find_target("local").devices(9)


@pytest.mark.parametrize(
    ("name", "extra"), [("h100", "cuda-report"), ("v6e", "tpu-report")]
)
def test_without_the_plugin_the_extra_is_named(name, extra, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TargetError, match=rf"pip install 'stacked_remat\[{extra}\]'"):
        TARGETS[name].devices(2)


@pytest.mark.target("tpu")
def test_no_slice_is_large_enough():
    target = TARGETS["v5p"]
    assert isinstance(target, TpuTarget)
    with pytest.raises(TargetError, match="has slices of 1, 4, 8.*300 were asked for"):
        target.devices(300)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.target("cuda")) for name in CUDA),
        *(pytest.param(name, marks=pytest.mark.target("tpu")) for name in TPU),
    ],
)
def test_programs_compile(name):
    assert [len(TARGETS[name].devices(count)) for count in (1, 4)] == [1, 4]
    x = jax.ShapeDtypeStruct((256, 256), "float32")
    found = memory.report(lambda x: x @ x, x, target=name)
    assert found.arguments == found.outputs == 4 * 256 * 256
    assert (found.target, found.capacity) == (name, TARGETS[name].memory)
