"""A training step as a run could take it, and the memory that it needs, found by
compiling it.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import equinox as eqx
import jax

from models.run_config import LmRunConfig
from models.run_state import batch_shapes, run_optimizer, state_shapes
from stacked_remat import ScanCheckpointPolicy, ScanCheckpointSpec
from stacked_remat.memory import (
    CANDIDATES,
    Frontier,
    MemoryReport,
    PlaceError,
    Plan,
    Target,
    Trial,
    find_target,
    frontier,
    plan,
    report,
)
from stacked_remat.ops import UnsupportedCallError, expert_backend
from stacked_remat.training import (
    ConfigError,
    Partitioning,
    TokenBatch,
    TrainState,
    TrainStep,
)
from stacked_remat.training.memory_check import check_fits, check_host_fits
from stacked_remat.training.remat import remat_entry
from stacked_remat.training.stage_rows import shapes_with_stage_rows

_Begin: TypeAlias = Callable[[str], None]
_Show: TypeAlias = Callable[[Trial], None]
STREAMED = {"trainer.streaming": True}
"""The setting with which the layers' weights are on the host."""


@dataclass(frozen=True)
class Candidate:
    """One training step of a resolved config, its state updated in place.

    Attributes:
        target: the device to compile for.
        devices: how many of them; all of `local`, one of another target, if not given.
        cache: folder for what compilations find, as `stacked_remat.memory.report` takes
            it.
    """

    config: LmRunConfig
    target: str | Target = "local"
    devices: int | None = None
    cache: Path | None = None

    def having(
        self, settings: Mapping[str, Any], remat: ScanCheckpointSpec = True
    ) -> "Candidate":
        """The step under a policy, with other values of some keys of the config."""
        # Without the config's own policy, which may not go with the settings.
        config = replace(
            self.config, remat=remat_entry(remat), budget=None, host_budget=None
        )
        for key, value in settings.items():
            config = _replaced(config, key.split("."), value)
        return replace(self, config=config)

    @property
    def policy(self) -> ScanCheckpointPolicy:
        """The policy, if it is not `auto`."""
        assert self.config.policy is not None
        return self.config.policy

    @property
    def settings(self) -> dict[str, Any]:
        """What `leaner` changes: keys of the config, and their values."""
        experts = self.config.model.sparse
        # A dense model has no such key.
        blocks = {} if experts is None else {"model.experts.backend": experts.backend}
        return {"model.tiles": self.config.model.tiles, **blocks}

    @property
    def label(self) -> str:
        """Where the weights are, and the settings, to be written after a policy: `,
        streamed, 2 tiles`.
        """
        places = {False: "", True: ", streamed", "files": ", weights in files"}
        streamed = places[self.config.trainer.streaming]
        tiles, *backend = self.settings.values()
        named = f"{streamed}, {tiles} tiles" if tiles > 1 else streamed
        return f"{named}, experts in blocks" if backend == ["block"] else named

    @property
    def can_stream(self) -> bool:
        """Whether the step could also run, and be sized here, with its layers' weights
        on the host.
        """
        trainer = self.config.trainer
        combines = self.config.lora is not None or trainer.update.fused
        # Otherwise the optimizer needs all layers on the device: see `LmRunConfig`.
        may_stream = combines and trainer.precision.frozen is None
        may_stream = may_stream and trainer.pipeline is None
        return not trainer.streaming and may_stream and self._sizes_host

    @property
    def leaner(self) -> list[dict[str, Any]]:
        """Settings that take less memory and more time, the fastest first: experts in
        blocks, tiles, both.
        """
        model = self.config.model
        blocks = {}
        tiles = {}
        if self.settings.get("model.experts.backend") == "auto":
            device = find_target(self.target).devices()[0]
            if expert_backend(model.compute_dtype, device) != "block":
                blocks = {"model.experts.backend": "block"}
        # One head at a time, or two halves where there is one
        if model.tiles == 1:
            tiles = {"model.tiles": max(2, model.num_kv_heads)}
        return [
            one
            for one in (blocks, tiles, blocks | tiles if blocks and tiles else {})
            if one
        ]

    @functools.cached_property
    def partitioning(self) -> Partitioning:
        """The mesh; raises ConfigError or TargetError if it does not fit the
        devices.
        """
        chosen = find_target(self.target)
        devices = self.devices
        if devices is None:
            devices = jax.device_count() if chosen.name == "local" else 1
        trainer = self.config.trainer
        stages_of = {}
        if trainer.pipeline is not None:
            stages_of = {self.config.model.Layers.name: trainer.pipeline.axis}
        return Partitioning.of(
            trainer.mesh, chosen.devices(devices), stages_of=stages_of
        )

    @functools.cached_property
    def shapes(self) -> tuple[TokenBatch, TrainState]:
        """The shapes of the step's arguments; raises ConfigError if the mesh can't
        divide them.
        """
        self.check_batch()
        self._check_stages()
        target = find_target(self.target).name
        if self.config.reads_files and target != "local":
            raise ConfigError(
                "A program that reads weights from files is compiled for the device"
                f" at hand alone, not for {target!r}. Give target: local, or"
                " trainer.streaming: true."
            )
        if self.config.trainer.streaming and not self._sizes_host:
            raise ConfigError(
                f"Layers on the host can't be sized for {self.partitioning.mesh.size}"
                f" devices of target {find_target(self.target).name!r} that are not"
                " attached. Give devices: 1, with a trainer.mesh for one, or a TPU"
                " target."
            )
        state = state_shapes(self.config, self.partitioning)
        state = shapes_with_stage_rows(state, self.partitioning)
        return batch_shapes(self.config.data, self.partitioning), state

    def check_batch(self) -> None:
        """Raises ConfigError unless the mesh divides the batch, and each of its
        microbatches.
        """
        data = self.config.data
        update = self.config.trainer.update
        self.partitioning.check_batch(
            data.batch_size, data.seq_len, update.microbatches
        )

    @property
    def stages(self) -> int:
        """Over how many devices, or groups of devices, the layers are divided."""
        pipeline = self.config.trainer.pipeline
        return 1 if pipeline is None else self.partitioning.mesh.shape[pipeline.axis]

    @property
    def idle(self) -> float:
        """Which part of the time a stage of a pipeline waits, under `1f1b`; one with as
        many layers as any.
        """
        layers = self._layers_of_stage
        # A microbatch goes through the layers of the others, before or after.
        waiting = self.config.model.num_layers - layers
        busy = self.config.trainer.update.microbatches * layers
        return waiting / (busy + waiting)

    @property
    def _layers_of_stage(self) -> int:
        """How many layers a stage has; the last one may have fewer."""
        return -(-self.config.model.num_layers // self.stages)

    def _check_stages(self) -> None:
        pipeline = self.config.trainer.pipeline
        if pipeline is None:
            return
        others = []
        for name, size in self.partitioning.mesh.shape.items():
            if name != pipeline.axis and size > 1:
                others.append(f"{name}: {size}")
        # XLA (of JAX 0.10.2) ends the process where arrays of a stage are divided over
        # two axes, by a check in its partitioner.
        if len(others) > 1:
            raise ConfigError(
                "trainer.pipeline goes beside one more axis of trainer.mesh.axes, and"
                f" there are {len(others)} of more than one device"
                f" ({', '.join(others)}). Give all but one of them the size 1."
            )
        layers = self.config.model.num_layers
        most = self._layers_of_stage
        with_layers = -(-layers // most)
        if with_layers < self.stages:
            raise ConfigError(
                f"trainer.pipeline divides model.num_layers = {layers} over"
                f" {self.stages} devices, or groups of devices, {most} for each: that"
                f" leaves {self.stages - with_layers} without layers. Give its axis in"
                f" trainer.mesh.axes the size {with_layers}."
            )

    def report(self) -> MemoryReport:
        """The memory of the step; costs one compilation."""
        with self.partitioning.activations():
            return report(
                self.train_step,
                *self.shapes,
                donate="state",
                target=self.target,
                cache=self.cache,
            )

    def plan(
        self,
        *,
        budget: int | str,
        host_budget: int | str | None = None,
        begin: _Begin = lambda _: None,
        show: _Show = lambda _: None,
    ) -> Plan:
        """The policy with the fewest FLOPs under which the step fits, as
        `stacked_remat.memory.plan`.

        Where none fits, with the layers' weights on the host, if they can be there.
        """
        with self.partitioning.activations():
            return plan(
                self._step_of_policy,
                *self.having({}).shapes,
                budget=budget,
                host_budget=host_budget,
                streamed=self.having(STREAMED).shapes if self.can_stream else None,
                begin=begin,
                show=show,
                **self._options,
            )

    def frontier(
        self,
        *,
        host_budget: int | str | None = None,
        begin: _Begin = lambda _: None,
        show: _Show = lambda _: None,
    ) -> Frontier:
        """The curve of memory against FLOPs, as `stacked_remat.memory.frontier`."""
        with self.partitioning.activations():
            return frontier(
                self._step_of_policy,
                *self.having({}).shapes,
                host_budget=host_budget,
                begin=begin,
                show=show,
                **self._options,
            )

    @property
    def _options(self) -> dict[str, Any]:
        """What `plan` and `frontier` are given."""
        model = self.config.model
        presets = model.remat_presets.values() if model.remat_names else ()
        return {
            "candidates": [*CANDIDATES, *presets],
            "target": self.target,
            "donate": "state",
            "cache": self.cache,
        }

    def _step_of_policy(self, remat: ScanCheckpointSpec) -> Callable[..., Any]:
        # The policy is a static field of the model, so the arrays are the same.
        structure = jax.tree.structure(
            state_shapes(self.config, self.partitioning, remat=remat)
        )

        def step(batch: TokenBatch, state: TrainState) -> Any:
            # The same arrays under this policy.
            return self.train_step(
                batch, jax.tree.unflatten(structure, jax.tree.leaves(state))
            )

        return step

    def check(self, *, at_least: bool = False) -> None:
        """Raises ConfigError for a step whose state and batch, which every policy has,
        can't fit in memory.

        With `trainer.streaming`, where the device is attached, nor in that of the host.
        Costs one tracing of how the model is made, whatever its size. `at_least` leaves
        out layers that could be on the host.
        """
        config = self.config
        target = find_target(self.target)
        can_stream = self.can_stream
        # With the layers on the host where that is possible: the least there can be
        at_least = at_least and can_stream
        batch, state = self.having(STREAMED if at_least else {}).shapes
        stream = ", or keep the layers on the host (trainer.streaming: true)"
        weights = {
            "trained weights": state.trained,
            "frozen weights": state.frozen,
            "optimizer state": state.optimizer_state,
        }
        if config.trainer.streaming and target.name == "local":
            # Written while the next steps change the state, so it is there twice.
            saved = {
                "a checkpoint that is being written": (
                    state.trained,
                    state.optimizer_state,
                )
            }
            check_host_fits(
                weights | saved,
                "Give the process more, store less (trainer.precision, or"
                " optimizer.type: adafactor), train adapters (lora), or divide the"
                " arrays over more hosts (trainer.mesh).",
            )
        check_fits(
            weights | {"a batch": batch},
            f"Now model.num_layers = {config.model.num_layers:,}, vocab_size ="
            f" {config.Vocab.size:,}, data.batch_size = {config.data.batch_size:,} and"
            f" data.seq_len = {config.data.seq_len:,}: lower what is too large, divide"
            " the arrays over more devices"
            f" (trainer.mesh){stream if can_stream and not at_least else ''}.",
            limit=target.memory,
        )

    def check_applies(self) -> None:
        """Raises ConfigError for a model that can't be applied here, such as with a
        GPU's kernel on a CPU, or whose layers have not the places that `remat` names.
        """
        batch, state = self.shapes
        try:
            with self.partitioning.active():
                # Which have rules of their own for the loss
                trainer = self.config.trainer
                has_rules = trainer.update.fused or trainer.pipeline is not None
                loss = (self.config.loss, state.model, batch)
                eqx.filter_eval_shape(
                    *((self.train_step, batch, state) if has_rules else loss)
                )
        # Other errors are the model's, whose traceback is wanted
        except UnsupportedCallError as error:
            raise ConfigError(
                f"The model of this config can't be applied here: {error}"
            ) from error
        except PlaceError as error:
            raise ConfigError(f"remat: {error}") from error

    @property
    def _sizes_host(self) -> bool:
        """Whether what is on the host can be sized for these devices."""
        return (
            find_target(self.target).sizes_host_arguments
            or self.partitioning.mesh.size == 1
        )

    @functools.cached_property
    def train_step(self) -> TrainStep:
        """The step itself."""
        return TrainStep.of(
            self.config.trainer,
            loss_function=self.config.loss,
            optimizer=run_optimizer(self.config),
            partitioning=self.partitioning,
        )


def _replaced(section: Any, keys: Sequence[str], value: Any) -> Any:
    own, *below = keys
    return replace(
        section,
        **{own: _replaced(getattr(section, own), below, value) if below else value},
    )
