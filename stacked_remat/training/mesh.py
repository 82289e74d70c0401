"""Sharding: a mesh of devices, and which named axes of arrays are divided over its
axes.

Data parallel training maps `batch` in `compute_mapping`; fully sharded training (FSDP,
ZeRO-3: Rajbhandari et al. 2020) also maps an axis of the weights in `param_mapping`,
which shards the optimizer's state too.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

import equinox as eqx
import jax
import jax.core
import numpy as np
from haliax import Axis, NamedArray, axis_mapping
from haliax.util import ensure_tuple, is_named_array
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from .._block_seq import BlockSeq
from .._compat import no_axis_mapping
from .._memory_spaces import is_on_host, on_one_device
from .._messages import axes_text, did_you_mean
from .._pipeline.model_parts import rows_of_stage
from .._stacked import Stacked
from .batches import BATCH_AXIS, POSITION_AXIS, TokenBatch
from .data.batch_stream import ProcessShare
from .errors import ConfigError
from .trainer_config import MeshConfig

T = TypeVar("T")
_HOST = "pinned_host"
# The partitioning whose activations are sharded. Part of the keys of JAX's caches, so
# that what was traced for one is not reused for another.
_in_use = jax.make_user_context(default_value=None)


@final
@dataclass(frozen=True, eq=False)
class Partitioning:
    """A mesh of devices and the named axes that are sharded over it. Does nothing on a
    single device.

    Its methods raise a `ConfigError` where an axis does not divide evenly.

    Attributes:
        mesh: the devices.
        compute_mapping: from axes of activations to axes of the mesh.
        param_mapping: from axes of weights to axes of the mesh.
        stages_of: for a pipeline, from the axis of the layers to that of the mesh which
            divides them; also in `param_mapping`.
    """

    mesh: Mesh
    compute_mapping: Mapping[str, tuple[str, ...]]
    param_mapping: Mapping[str, tuple[str, ...]]
    stages_of: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(
        config: MeshConfig,
        devices: Sequence[Any] | None = None,
        *,
        stages_of: Mapping[str, str] | None = None,
    ) -> "Partitioning":
        """The partitioning of a config on the first of these devices, or of all that
        JAX has.

        Args:
            stages_of: of a pipeline, such as `{"layers": "stage"}`.

        Raises:
            ConfigError: the devices can't be arranged in this mesh.
        """
        available = list(jax.devices() if devices is None else devices)
        sizes = mesh_sizes(config, len(available))
        used = math.prod(sizes.values())
        if used < len(available) and jax.process_count() > 1:
            raise ConfigError(
                f"trainer.mesh.axes {config.axes} takes {used} of {len(available)}"
                " devices; with several processes all must be in the mesh."
            )
        grid = np.array(available[:used], dtype=object).reshape(tuple(sizes.values()))
        # Auto: the compiler divides what no constraint names.
        mesh = Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
        stages_of = stages_of or {}
        tables = (config.compute_mapping, {**stages_of, **config.param_mapping})
        tuples = (
            {name: tuple(ensure_tuple(over)) for name, over in table.items()}
            for table in tables
        )
        return Partitioning(mesh, *tuples, stages_of=stages_of)

    @staticmethod
    def one_device() -> "Partitioning":
        """The partitioning of this process's first device, which changes nothing."""
        return Partitioning.of(MeshConfig({"data": 1}, {}, {}), jax.local_devices()[:1])

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """A context in which programs are traced for this mesh. Not to be entered
        inside `jax.jit`.
        """
        with (
            jax.set_mesh(self.mesh) if self.mesh.size > 1 else contextlib.nullcontext(),
            self.activations(),
        ):
            yield

    @contextlib.contextmanager
    def activations(self) -> Iterator[None]:
        """A context in which Haliax shards activations by `compute_mapping` over the
        mesh in use, and `gathered` gathers weights.
        """
        if self.mesh.size == 1:
            yield
            return
        with axis_mapping(self.compute_mapping), _in_use(self):
            yield

    def init_sharded(self, make: Callable[..., T], *args: Any) -> T:
        """The state `make(*args)`, with every array created sharded, never whole.
        Donates `args`.

        Cost: on several devices, a compilation.
        """
        if self.mesh.size == 1:
            # Given one committed array, such as a weight that was read, a step returns
            # all arrays committed. Were the others not committed before, the second
            # step would be compiled again.
            def commit(leaf: Any) -> Any:
                is_made = eqx.is_array(leaf) and not isinstance(leaf, jax.core.Tracer)
                return jax.device_put(leaf, leaf.sharding) if is_made else leaf

            return jax.tree.map(commit, make(*args))

        def made(*args: Any) -> T:
            with (
                no_axis_mapping()
            ):  # that of activations would divide weights otherwise, or make them whole
                return self.shard_weights(make(*args))

        return eqx.filter_jit(made, donate="all")(*args)

    def weight_sharding(self, weight: Any, *, on_host: bool = False) -> Sharding:
        """The sharding of a weight: a named array, or its shape; a plain array is
        copied to every device.

        Args:
            weight: the array or its shape.
            on_host: whether it is in host memory.
        """
        if self.mesh.size == 1:
            device = self.mesh.devices.flat[0]
            return (
                self._on_host(PartitionSpec())
                if on_host
                else SingleDeviceSharding(device)
            )
        axes = weight.axes if is_named_array(weight) else ()
        shapes = []
        for possible in (axes, self.axes_in_stages(axes)):
            if not axes or weight.array.shape == tuple(axis.size for axis in possible):
                shapes.append(possible)
        # None of an optimizer's statistics, without some of the weight's axes
        axes = shapes[0] if shapes else ()
        spec = self._spec(axes, "param_mapping")
        return self._on_host(spec) if on_host else NamedSharding(self.mesh, spec)

    def shapes_of(self, make: Callable[[], T]) -> T:
        """The shapes of the state `make()`, with the shardings of `init_sharded`; makes
        nothing.
        """

        def with_memory() -> tuple[T, Any]:
            tree = make()
            return tree, jax.tree.map(is_on_host, tree)

        shapes, on_host = eqx.filter_eval_shape(with_memory)  # which forgets the memory
        self.check_names(shapes)

        def marked(leaf: Any, is_: bool) -> Any:
            if not is_:
                return leaf
            return jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=self._on_host(PartitionSpec())
            )

        return self.weight_shapes(jax.tree.map(marked, shapes, on_host))

    def weight_shapes(self, tree: T) -> T:
        """The shapes of a state's arrays, with their shardings, in the memory that they
        are in.
        """
        return self._map(
            lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
            tree,
        )

    def shard_weights(self, tree: T) -> T:
        """A state with every array moved to its sharding, in the memory that it is in.

        Inside `jax.jit` it is a sharding constraint.
        """
        if self.mesh.size == 1:
            return tree

        def put(array: Any, sharding: Sharding) -> Any:
            traced = isinstance(array, jax.core.Tracer)
            return (jax.lax.with_sharding_constraint if traced else jax.device_put)(
                array, sharding
            )

        return self._map(put, tree)

    def replicated(self, tree: T) -> T:
        """A tree within `jax.jit` with every array whole on each device, where each
        process can read it.
        """
        if self.mesh.size == 1:
            return tree
        return jax.lax.with_sharding_constraint(
            tree, NamedSharding(self.mesh, PartitionSpec())
        )

    def check_names(self, state: Any) -> None:
        """Checks that the mappings name axes of a state (or of its shapes) or of
        batches.

        Raises:
            ConfigError: no array has an axis of that name, or it is one of layers.
        """
        leaves = jax.tree.leaves(state, is_leaf=is_named_array)
        names = {
            axis.name for leaf in leaves if is_named_array(leaf) for axis in leaf.axes
        }
        # A stack in a layer is one of experts.
        stacks = jax.tree.leaves(
            state, is_leaf=lambda node: isinstance(node, Stacked | BlockSeq)
        )
        layers = {node.Layers.name for node in stacks if isinstance(node, Stacked)}
        valid = sorted(names - layers | {BATCH_AXIS, POSITION_AXIS})
        for table in ("compute_mapping", "param_mapping"):
            for name, over in getattr(self, table).items():
                if over == (self.stages_of.get(name),):
                    continue
                if name in layers:
                    raise ConfigError(
                        f"trainer.mesh.{table}.{name}: layers can't be divided over"
                        " devices: every one would gather all of them. Divide another"
                        " axis, such as `embed`, or name one of trainer.mesh.axes in"
                        " trainer.pipeline.axis."
                    )
                if name not in valid:
                    raise ConfigError(
                        f"trainer.mesh.{table}.{name}: no array of this model has an"
                        f" axis `{name}`.{did_you_mean(name, valid)} Valid:"
                        f" {', '.join(valid)}."
                    )

    def check_batch(self, rows: int, positions: int, microbatches: int = 1) -> None:
        """Checks that a batch of so many sequences and positions, in microbatches,
        divides evenly.

        Raises:
            ConfigError: it does not.
        """
        sizes = (
            ("batch_size", rows, microbatches, BATCH_AXIS),
            ("seq_len", positions, 1, POSITION_AXIS),
        )
        for name, size, cut, axis in sizes:
            parts = self.parts_of(axis)
            of = f" in {cut} microbatches" if cut > 1 else ""
            if size % (parts * cut):
                raise ConfigError(
                    f"data.{name} = {size}{of} can't be divided evenly over the {parts}"
                    f" devices that trainer.mesh.compute_mapping.{axis} gives it: make"
                    f" it a multiple of {parts * cut}, or divide it over fewer devices"
                    " (trainer.mesh.axes)."
                )

    def parts_of(self, axis: str) -> int:
        """Over how many parts of the mesh a named axis of activations is divided."""
        return self._parts(self.compute_mapping.get(axis, ()))

    def process_share(self, rows: int) -> ProcessShare:
        """The rows of each batch that this process's devices have; other processes may
        have the same.

        Raises:
            ConfigError: they are not one of equal parts of the batch.
        """
        if self.mesh.size == 1:
            return ProcessShare()
        sharding = self._batch_sharding((Axis(BATCH_AXIS, rows),))
        # Two devices may have the same rows, where batches are not divided over all
        # axes.
        parts = filter(None, sharding.addressable_devices_indices_map((rows,)).values())
        own = sorted({part.indices(rows)[:2] for (part,) in parts})
        start, _ = own[0]
        _, stop = own[-1]
        size = sum(last - first for first, last in own)
        if size != stop - start or start % size or rows % size:
            raise ConfigError(
                f"trainer.mesh gives process {jax.process_index()} rows {own} of a"
                f" batch of {rows}, and a process reads one of equal parts. Put the"
                " axes that `batch` is mapped to first in trainer.mesh.axes."
            )
        return ProcessShare(start // size, rows // size)

    def shard_batch(self, batch: TokenBatch) -> TokenBatch:
        """The batch of all processes, sharded over the devices, from this process's
        rows.
        """
        if self.mesh.size == 1:
            return jax.device_put(batch)
        # A process has its own rows alone; the array of all of them has no copy
        # anywhere.
        processes = self.process_share(self.parts_of(BATCH_AXIS)).count

        def share(named: NamedArray) -> NamedArray:
            axes = [
                a.resize(a.size * processes) if a.name == BATCH_AXIS else a
                for a in named.axes
            ]
            local = np.asarray(named.array)
            shape = tuple(axis.size for axis in axes)
            sharding = self._batch_sharding(axes)
            return NamedArray(
                jax.make_array_from_process_local_data(sharding, local, shape),
                tuple(axes),
            )

        return jax.tree.map(share, batch, is_leaf=is_named_array)

    def batch_shapes(self, batch: TokenBatch) -> TokenBatch:
        """The shapes of a batch of all processes, with their shardings."""
        if self.mesh.size == 1:
            return batch

        def shape(named: NamedArray) -> NamedArray:
            array = named.array
            at = self._batch_sharding(named.axes)
            placed: Any = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=at)
            return NamedArray(placed, named.axes)

        return jax.tree.map(shape, batch, is_leaf=is_named_array)

    def axes_in_stages(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """The axes of a weight, where that of a pipeline's layers, the first, is the
        next multiple of the number of stages.
        """
        if not axes or axes[0].name not in self.stages_of:
            return axes
        Layers, *others = axes
        stages = self.mesh.shape[self.stages_of[Layers.name]]
        rows = stages * rows_of_stage(Layers.size, stages)
        return Layers.resize(rows), *others

    def _batch_sharding(self, axes: Sequence[Axis]) -> NamedSharding:
        return NamedSharding(self.mesh, self._spec(axes, "compute_mapping"))

    def _map(self, fn: Any, tree: T) -> T:
        """Applies `fn(array, sharding)` to every array of a state."""

        def each(leaf: Any) -> Any:
            array = leaf.array if is_named_array(leaf) else leaf
            if not hasattr(array, "shape") or not hasattr(array, "dtype"):
                return leaf
            mapped = fn(array, self.weight_sharding(leaf, on_host=is_on_host(array)))
            # Its axes may not be those of the array
            return jax.tree.map(lambda _: mapped, leaf)

        return jax.tree.map(each, tree, is_leaf=is_named_array)

    def _spec(self, axes: Sequence[Axis], table: str) -> PartitionSpec:
        """Over what each axis is divided. An axis of the mesh goes to the first axis
        mapped to it; that of a pipeline's stages, where the layers don't divide over
        them, to another axis that does.
        """
        mapping: Mapping[str, tuple[str, ...]] = getattr(self, table)
        sizes = {axis.name: axis.size for axis in axes}
        physical: dict[str, tuple[str, ...]] = {}
        stages: tuple[str, ...] = ()
        for name in filter(sizes.__contains__, mapping):
            # JAX refuses an axis of the mesh twice in one array, as `embed` and `mlp`
            # may both name it; the first in the mapping gets it.
            used = set(itertools.chain(*physical.values()))
            over = tuple(one for one in mapping[name] if one not in used)
            if sizes[name] % self._parts(over) == 0:
                physical[name] = over
            elif over == (self.stages_of.get(name),):
                stages = over
            else:
                raise ConfigError(
                    f"trainer.mesh.{table} divides `{name}` over {self._parts(over)}"
                    f" devices, but an array ({axes_text(axes)}) has {sizes[name]} of"
                    " it. Map another axis, or change trainer.mesh.axes."
                )
        if stages:
            self._divide_another_axis(physical, sizes, stages)
        return PartitionSpec(*(physical.get(axis.name) or None for axis in axes))

    def _divide_another_axis(
        self,
        physical: dict[str, tuple[str, ...]],
        sizes: Mapping[str, int],
        stages: tuple[str, ...],
    ) -> None:
        """Divide the first axis that divides over the axis of stages too, one that is
        divided already before others: between steps an array need not be whole in each
        stage. An array without such an axis stays as it is.
        """
        undivided = [name for name in sizes if name not in physical]
        for name in (*physical, *undivided):
            over = (*physical.get(name, ()), *stages)
            if sizes[name] % self._parts(over) == 0:
                physical[name] = over
                return

    def _on_host(self, spec: PartitionSpec) -> NamedSharding:
        """A sharding in host memory; JAX sees the memory in no sharding without a
        mesh.
        """
        found = NamedSharding(self.mesh, spec, memory_kind=_HOST)
        if (
            found.memory_kind is None and self.mesh.size == 1
        ):  # a GPU that is not attached
            return on_one_device(jax.local_devices()[0], _HOST)
        return found

    def _parts(self, physical: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[name] for name in physical)


def gathered(layer: T, *, leave: Sequence[str] = (), whole: Sequence[str] = ()) -> T:
    """A layer with its weights divided as activations are, in a program of a
    `Partitioning`; elsewhere the layer itself.

    A block that begins with it says that its weights are gathered, and the loop over
    layers gathers them one layer ahead.

    ```python
    def __call__(self, x):
        layer = training.gathered(self)
        return x + layer.mlp(x)
    ```

    Args:
        layer: a tree with named arrays; others stay as they are.
        leave: names of axes. Arrays that have one stay as they are too.
        whole: names of axes that no array stays divided along, though activations are,
            as that of experts in a router.

    Returns:
        The tree, with a sharding constraint on each array that `param_mapping` divides
        otherwise than `compute_mapping`.
    """
    partitioning = _in_use.value
    if partitioning is None:
        return layer

    # Within the `jax.shard_map` of a pipeline its axis is Manual, and the arrays know
    mesh: Any = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        mesh = partitioning.mesh

    def gather(leaf: Any) -> Any:
        if not is_named_array(leaf) or not eqx.is_array(leaf.array):
            return leaf
        if any(axis.name in leave for axis in leaf.axes):
            return leaf
        # Of weights, activations' mapping leaves what only `param_mapping` divides
        # whole: that is the gathering.
        of_activations = partitioning._spec(leaf.axes, "compute_mapping")
        divided_over = []
        for axis, mesh_axes in zip(leaf.axes, of_activations, strict=True):
            divided_over.append(None if axis.name in whole else mesh_axes)
        spec = PartitionSpec(*divided_over)
        if spec == partitioning._spec(leaf.axes, "param_mapping"):
            return leaf
        array = jax.lax.with_sharding_constraint(leaf.array, NamedSharding(mesh, spec))
        return NamedArray(array, leaf.axes)

    return jax.tree.map(gather, layer, is_leaf=is_named_array)


def mesh_sizes(config: MeshConfig, devices: int) -> dict[str, int]:
    """The axes of the mesh and their sizes on this many devices.

    Raises:
        ConfigError: the devices can't be arranged in this mesh.
    """
    fixed = math.prod(size for size in config.axes.values() if size != -1)
    if fixed > devices or (-1 in config.axes.values() and devices % fixed):
        has_rest = -1 in config.axes.values()
        multiple = " or a multiple of that" if has_rest else ""
        other = "" if has_rest else ", or give one axis -1 for all remaining devices"
        raise ConfigError(
            f"trainer.mesh.axes {config.axes} takes {fixed} devices{multiple}; there"
            f" are {devices}. Change a size{other}."
        )
    return {
        name: devices // fixed if size == -1 else size
        for name, size in config.axes.items()
    }
