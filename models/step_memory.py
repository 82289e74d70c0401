"""The memory that a training step needs, found by compiling it, and the policy that fits a budget."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from models.decoder.config import DecoderConfig, ExpertsConfig, SparseDecoderConfig
from models.lm import next_token_loss
from models.run_config import LmRunConfig
from models.run_state import batch_shapes, run_optimizer, state_shapes
from stacked_remat import ScanCheckpointSpec
from stacked_remat.memory import (
    MemoryReport,
    Plan,
    Target,
    Trial,
    find_target,
    plan,
    report,
)
from stacked_remat.ops import expert_backend
from stacked_remat.training import (
    BATCH_AXIS,
    POSITION_AXIS,
    ConfigError,
    Partitioning,
    TokenBatch,
    TrainState,
    build_step,
    check_fits,
    check_host_fits,
)


@dataclass(frozen=True)
class StepMemory:
    """Compiles one training step of a config, its state updated in place, under any policy.

    Attributes:
        config: of the run, resolved.
        target: the device to compile for.
        devices: how many of them; all of `local`, one of another target, if not given.
        cache: folder for what compilations find, as `stacked_remat.memory.report` takes it.

    Raises:
        ConfigError: the mesh does not fit the devices, or the model or the batch the mesh.
    """

    config: LmRunConfig
    target: str | Target = "local"
    devices: int | None = None
    cache: Path | None = None

    @property
    def can_stream(self) -> bool:
        """Whether the step could run, and be sized here, with its layers' weights on the host too.

        False with `trainer.streaming`, where they are.
        """
        trainer = self.config.trainer
        combines = self.config.lora is not None or trainer.update.fused
        return not trainer.streaming and combines and self._sizes_host(self._partitioning())

    @property
    def tiles(self) -> int:
        """In how many tiles a layer runs."""
        return self.config.model.tiles if isinstance(self.config.model, DecoderConfig) else 1

    @property
    def settings(self) -> dict[str, Any]:
        """What `leaner` changes: keys of the config, and their values."""
        experts = _experts(self.config.model)
        blocks = {} if experts is None else {"model.experts.backend": experts.backend}
        return {"model.tiles": self.tiles, **blocks}

    @property
    def label(self) -> str:
        """The settings with which the step takes less memory, to be written after a policy."""
        experts = _experts(self.config.model)
        tiles = f", {self.tiles} tiles" if self.tiles > 1 else ""
        return tiles if experts is None or experts.backend != "block" else f"{tiles}, experts in blocks"

    @property
    def leaner(self) -> "list[StepMemory]":
        """The step with settings that take less memory and more time, the fastest first.

        Experts block by block where `auto` takes kernels, layers in as many tiles as attention can have, and
        both.
        """
        model = self.config.model
        if not isinstance(model, DecoderConfig):
            return []
        experts, blocks, tiles = _experts(model), {}, {}
        if experts is not None and experts.backend == "auto" and self._has_expert_kernels(model):
            blocks = {"experts": replace(experts, backend="block")}
        if model.tiles == 1:
            tiles = {"tiles": max(2, model.num_kv_heads)}
        changes = [blocks, tiles, blocks | tiles if blocks and tiles else {}]
        return [replace(self, config=self._altered(model=replace(model, **new))) for new in changes if new]

    def mesh_size(self) -> int:
        """How many devices the mesh has.

        Raises:
            ConfigError: the mesh does not fit the devices, or the model or the batch the mesh.
        """
        partitioning = self._partitioning()
        self._shapes(partitioning)
        return partitioning.mesh.size

    def check_batch(self) -> None:
        """Look whether the mesh divides the batch, and each of its microbatches.

        Raises:
            ConfigError: it does not.
        """
        data, update = self.config.data, self.config.trainer.update
        self._partitioning().check_batch(data.batch_size, data.seq_len, update.microbatches)

    def parts_of(self, what: str) -> int:
        """What the length of the context (`"context"`) or the rows of the batch are a multiple of."""
        partitioning = self._partitioning()
        if what == "context":
            return partitioning.parts_of(POSITION_AXIS)
        return partitioning.parts_of(BATCH_AXIS) * self.config.trainer.update.microbatches

    def report(self, remat: ScanCheckpointSpec, *, streamed: bool = False) -> MemoryReport:
        """The memory of the step under a policy; costs one compilation.

        Args:
            remat: the policy.
            streamed: whether the layers' weights are on the host; see `can_stream`.
        """
        partitioning = self._partitioning()
        with partitioning.activations():
            return report(
                self._step(partitioning, remat),
                *self._shapes(partitioning, streamed),
                donate="state",
                target=self.target,
                cache=self.cache,
            )

    def plan(
        self,
        *,
        budget: int | str,
        host_budget: int | str | None = None,
        streamed: bool = False,
        show: Callable[[Trial], None] | None = None,
    ) -> Plan:
        """The policy with the least arithmetic under which the step fits, as `stacked_remat.memory.plan`.

        Args:
            budget: memory of each device for the whole step, as `stacked_remat.memory.plan` takes it.
            host_budget: the same for the host.
            streamed: whether to try with the layers' weights on the host if none fits; see `can_stream`.
            show: called with each policy that was compiled.

        Raises:
            BudgetError: no policy fits.
        """
        partitioning = self._partitioning()
        with partitioning.activations():
            return plan(
                lambda remat: self._step(partitioning, remat),
                *self._shapes(partitioning),
                budget=budget,
                host_budget=host_budget,
                target=self.target,
                donate="state",
                layers=self.config.model.num_layers,
                streamed=(lambda *_: self._shapes(partitioning, True)) if streamed else None,
                cache=self.cache,
                show=show,
            )

    def check(self, *, streamed: bool = False) -> None:
        """Refuses a config whose weights, optimizer state and one batch are larger than a device's memory.

        With `trainer.streaming`, where the device is attached, also what is in host memory and larger than
        what is left of that. All of it is there under every policy. Costs one tracing of how the model is
        made, whatever its size.

        Args:
            streamed: whether the layers' weights are on the host, and not counted.

        Raises:
            ConfigError: with the size of each and the memory.
        """
        batch, state = self._shapes(self._partitioning(), streamed)
        stream = ", or keep the layers on the host (trainer.streaming: true)"
        data, target = self.config.data, find_target(self.target)
        weights = {
            "trained weights": state.trained,
            "frozen weights": state.frozen,
            "optimizer state": state.optimizer_state,
        }
        if self.config.trainer.streaming and target.name == "local":
            saved = {"a checkpoint that is being written": (state.trained, state.optimizer_state)}
            check_host_fits(
                weights | saved,
                "Give the process more, store less (trainer.precision, or optimizer.type: adafactor), train "
                "adapters (lora), or divide the arrays over more hosts (trainer.mesh).",
            )
        check_fits(
            weights | {"a batch": batch},
            f"Now model.num_layers = {self.config.model.num_layers:,}, vocab_size = "
            f"{self.config.Vocab.size:,}, data.batch_size = {data.batch_size:,} and data.seq_len = "
            f"{data.seq_len:,}: lower what is too large, divide the arrays over more devices "
            f"(trainer.mesh){stream if self.can_stream and not streamed else ''}.",
            limit=target.memory,
        )

    def _has_expert_kernels(self, model: DecoderConfig) -> bool:
        """Whether `auto` applies experts by kernels on this target."""
        return expert_backend(model.compute_dtype, find_target(self.target).devices()[0]) != "block"

    def _sizes_host(self, partitioning: Partitioning) -> bool:
        """Whether what is on the host can be sized for these devices."""
        return find_target(self.target).sizes_host_arguments or partitioning.mesh.size == 1

    def _partitioning(self) -> Partitioning:
        chosen, devices = find_target(self.target), self.devices
        if devices is None:
            devices = jax.device_count() if chosen.name == "local" else 1
        return Partitioning.of(self.config.trainer.mesh, chosen.devices(devices))

    def _step(self, partitioning: Partitioning, remat: ScanCheckpointSpec) -> Callable[..., Any]:
        train_step = build_step(
            self.config.trainer,
            loss_function=next_token_loss,
            optimizer=run_optimizer(self.config),
            partitioning=partitioning,
        )
        structure = jax.tree.structure(state_shapes(self.config, partitioning, remat=remat))

        def step(batch: TokenBatch, state: TrainState) -> Any:
            state = jax.tree.unflatten(structure, jax.tree.leaves(state))  # the same arrays under this policy
            return train_step(batch, state)

        return step

    def _shapes(self, partitioning: Partitioning, streamed: bool = False) -> tuple[TokenBatch, TrainState]:
        """The shapes of the step's arguments."""
        data, trainer = self.config.data, self.config.trainer
        partitioning.check_batch(data.batch_size, data.seq_len, trainer.update.microbatches)
        if streamed:
            trainer = replace(trainer, streaming=True)
        if trainer.streaming and not self._sizes_host(partitioning):
            raise ConfigError(
                f"Layers on the host can't be sized for {partitioning.mesh.size} devices of target "
                f"{find_target(self.target).name!r} that are not attached. Give devices: 1, with a "
                f"trainer.mesh for one, or a TPU target."
            )
        state = state_shapes(self._altered(trainer=trainer), partitioning, remat=True)
        return batch_shapes(data, partitioning), state

    def _altered(self, **fields: Any) -> LmRunConfig:
        """The config with other fields, and without its policy, which may not go with them."""
        policy = {} if self.config.policy is None else {"remat": True}
        return replace(self.config, **policy, **fields)


def _experts(model: Any) -> ExpertsConfig | None:
    return model.experts if isinstance(model, SparseDecoderConfig) else None
