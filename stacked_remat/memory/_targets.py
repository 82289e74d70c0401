"""The accelerators that programs can be compiled for, attached or not.

A target returns the devices that JAX compiles for. For an accelerator that is not
attached these are compile-only: XLA's compiler for that chip runs in full, but no
program does.

`_call.py` asks a target for devices, `_report.py` for its peaks, and a training run for
the target that describes the device it is on (`target_of_device`).
"""

import dataclasses
import functools
import importlib
import importlib.util
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
from jax.experimental import topologies

_topology = functools.cache(topologies.get_topology_desc)


class TargetError(RuntimeError):
    """A target cannot do what was asked; the message says what to do instead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target(ABC):
    """A kind of device that programs are compiled for.

    Attributes:
        name: as in `report(..., target=name)`.
        memory: bytes of memory of one device, as its driver reports them; None where it
            is not known.
        flops: peak dense bfloat16 FLOP/s of one device, without sparsity; None where it
            is not known.
        link: peak bytes per second between the memory of one device and its host, in
            each direction; None where it is not known. With NVLink-C2C:
            `dataclasses.replace(TARGETS["h200"], link=450e9)`.
        device_kinds: names of such devices, as drivers give them
            (`jax.Device.device_kind`).
    """

    name: str
    memory: int | None = None
    flops: float | None = None
    link: float | None = None
    device_kinds: tuple[str, ...] = ()

    sizes_host_arguments: ClassVar[bool] = True
    """Whether arguments in host memory are counted as such."""

    @abstractmethod
    def devices(self, count: int = 1) -> tuple[Any, ...]:
        """Return `count` `jax.Device`s to compile for.

        Raises:
            TargetError: the plugin is not installed, or there is no topology with that
                many devices.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalTarget(Target):
    """The devices that JAX runs on in this process, CPU included."""

    name: str = "local"

    def devices(self, count: int = 1) -> tuple[Any, ...]:
        devices = tuple(jax.devices())
        if count > len(devices):
            raise TargetError(
                f"target 'local' has {len(devices)} device(s), {count} were asked for."
                " Name another target, or set"
                f" XLA_FLAGS=--xla_force_host_platform_device_count={count} for virtual"
                " CPU devices."
            )
        return devices[:count]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CudaTarget(Target):
    """An NVIDIA GPU, with figures that XLA's cost model and code generator take.

    A core is a streaming multiprocessor. Names but the first are XLA's.

    Attributes:
        capability: compute capability, (major, minor).
        core_count: number of cores.
        fpus_per_core: float32 units of a core.
        shared_memory_per_core: in bytes.
        l2_cache_size: in bytes.
        clock_rate_ghz: of the cores.
        memory_bandwidth: of the device's memory, in bytes per second.
    """

    capability: tuple[int, int]
    core_count: int
    fpus_per_core: int
    shared_memory_per_core: int
    l2_cache_size: int
    clock_rate_ghz: float
    memory_bandwidth: int

    # Compiled without the device attached, XLA:GPU drops the memory kind of entry
    # arguments. Offloading inside the program is honoured.
    sizes_host_arguments: ClassVar[bool] = False

    def devices(self, count: int = 1) -> tuple[Any, ...]:
        # The newer plugin, if both are installed.
        version = next(
            (v for v in (13, 12) if importlib.util.find_spec(f"jax_cuda{v}_plugin")),
            None,
        )
        if version is None:
            raise TargetError(
                f"target {self.name!r} needs JAX's CUDA plugin (no GPU is needed): "
                "pip install 'stacked_remat[cuda-report]'"
            )
        options = {"target_config": self.target_config(), "topology": f"1x1x{count}"}
        try:
            topology = _topology(self.name, "cuda", **options)
        except NotImplementedError:
            # JAX skipped the plugin because it found no driver; the compiler needs
            # none. The backends are initialised first, or JAX would treat the GPU as
            # attached.
            jax.devices()
            os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
            importlib.import_module(f"jax_plugins.xla_cuda{version}").initialize()
            topology = _topology(self.name, "cuda", **options)
        return tuple(topology.devices)

    def target_config(self) -> str:
        """The device as the text proto that XLA takes for a compile-only GPU."""
        major, minor = self.capability
        # Only Hopper and later have a feature set beyond the plain architecture
        # ("sm_90a").
        extension = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory_per_core}
  shared_memory_per_block_optin: {self.shared_memory_per_core - 1024}
  threads_per_core_limit: 2048
  core_count: {self.core_count}
  fpus_per_core: {self.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.memory_bandwidth}
  l2_cache_size: {self.l2_cache_size}
  clock_rate_ghz: {self.clock_rate_ghz}
  device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{self.device_kinds[0]}"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuTarget(Target):
    """A TPU generation.

    Attributes:
        slices: (number of devices, topology), smallest first.
    """

    slices: tuple[tuple[int, str], ...]

    def devices(self, count: int = 1) -> tuple[Any, ...]:
        if importlib.util.find_spec("libtpu") is None:
            raise TargetError(
                f"target {self.name!r} needs libtpu (no TPU is needed): "
                "pip install 'stacked_remat[tpu-report]'"
            )
        fitting = [name for size, name in self.slices if size >= count]
        if not fitting:
            sizes = ", ".join(str(size) for size, _ in self.slices)
            raise TargetError(
                f"target {self.name!r} has slices of {sizes} devices; {count} were"
                " asked for"
            )
        # An attached backend starts first, because it may need the metadata server.
        # Without a TPU, libtpu would wait minutes for that server to tell what these
        # variables say.
        if jax.default_backend() != "tpu":
            os.environ.update(_NO_TPU | os.environ)
        topology = _topology(fitting[0], "tpu")
        return tuple(topology.devices)[:count]


# What libtpu would ask the metadata server of a TPU machine. The type is of any slice:
# the topology that is compiled for is named apart.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

# PCI Express of 16 lanes, in each direction; datasheets give the sum of both.
_PCIE_4 = 32e9
_PCIE_5 = 64e9

# Figures of GPUs are from NVIDIA's datasheets (SXM5 for H100 and H200, DGX for B200),
# and as XLA read them from devices (openxla/xla, xla/backends/gpu/target_config/specs).
# Those of TPUs are from cloud.google.com/tpu/docs, of their PCI Express from Austin et
# al. 2025, "How to Scale Your Model", part 2.

# Topologies of the generations whose chips are connected in two dimensions.
_SQUARES = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"


def _slices(name: str, topologies: str) -> tuple[tuple[int, str], ...]:
    slices = []
    for topology in topologies.split():
        devices = math.prod(map(int, topology.split("x")))
        slices.append((devices, f"{name}:{topology}"))
    return tuple(slices)


_H100 = CudaTarget(
    name="h100",
    memory=84_942_979_072,
    flops=989e12,
    link=_PCIE_5,
    device_kinds=("NVIDIA H100 80GB HBM3",),
    capability=(9, 0),
    core_count=132,
    fpus_per_core=128,
    shared_memory_per_core=233_472,
    l2_cache_size=52_428_800,
    clock_rate_ghz=1.98,
    memory_bandwidth=3_352_320_000_000,
)

_ALL: tuple[Target, ...] = (
    LocalTarget(),
    CudaTarget(
        name="a100-80gb",
        memory=85_100_068_864,
        flops=312e12,
        link=_PCIE_4,
        device_kinds=("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
        capability=(8, 0),
        core_count=108,
        fpus_per_core=64,
        shared_memory_per_core=167_936,
        l2_cache_size=41_943_040,
        clock_rate_ghz=1.41,
        memory_bandwidth=2_039_040_000_000,
    ),
    _H100,
    dataclasses.replace(
        _H100,
        name="h200",
        memory=150_000_000_000,  # rounded down to what drivers leave
        device_kinds=("NVIDIA H200",),
        memory_bandwidth=4_800_000_000_000,
    ),
    dataclasses.replace(
        _H100,
        name="b200",
        memory=191_514_411_008,
        flops=2250e12,
        device_kinds=("NVIDIA B200",),
        capability=(10, 0),
        core_count=148,
        l2_cache_size=132_644_864,
        clock_rate_ghz=1.965,
        memory_bandwidth=7_672_320_000_000,
    ),
    TpuTarget(
        name="v5e",
        memory=16 * 2**30,
        flops=197e12,
        link=16e9,
        device_kinds=("TPU v5 lite", "TPU v5e"),
        slices=_slices("v5e", _SQUARES),
    ),
    TpuTarget(
        name="v5p",
        memory=95 * 2**30,
        flops=459e12,
        link=16e9,
        device_kinds=("TPU v5", "TPU v5p"),
        slices=_slices("v5p", "1x1x1 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8"),
    ),
    TpuTarget(
        name="v6e",
        memory=32 * 2**30,
        flops=918e12,
        link=32e9,
        device_kinds=("TPU v6 lite", "TPU v6e"),
        slices=_slices("v6e", _SQUARES),
    ),
)

TARGETS: Mapping[str, Target] = MappingProxyType(
    {target.name: target for target in _ALL}
)
"""Every target by name. Wherever a name is taken, so is a `Target` of your own."""


def find_target(target: str | Target) -> Target:
    """Return the target of that name, in any case, or `target` itself.

    Raises:
        ValueError: no target has that name; lists all names.
    """
    if isinstance(target, Target):
        return target
    name = str(target).lower()
    if name not in TARGETS:
        raise ValueError(
            f"unknown target {target!r}: expected one of {', '.join(TARGETS)}."
        )
    return TARGETS[name]


def target_of_device(device: Any) -> Target | None:
    """Return the target that describes a device, by its `device_kind`; None if there is
    none.
    """
    return next(
        (target for target in _ALL if device.device_kind in target.device_kinds), None
    )
