"""Trainer settings: length, devices, updates, precision, checkpoints, reports."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .config_checks import Count, Positive, check_fields, check_folder

FloatName: TypeAlias = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class UpdateConfig:
    """How a batch updates the weights.

    Attributes:
        microbatches: equal parts of a batch whose gradients are computed one after the
            other and added up. The update is that of the whole batch; activations take
            the memory of one part. For the losses of experts, which are of the whole
            batch too, it takes one more forward pass.
        on_nonfinite: what to do when the loss or the gradient norm is NaN or infinite:
            `stop` ends the run, `skip` leaves weights and optimizer unchanged.
        max_consecutive_skips: skipped steps in a row after which `skip` stops too.
        fused: whether each layer is updated within the backward pass, as soon as its
            gradient exists, so that no gradient of the whole model takes memory.
    """

    microbatches: Count = 1
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_consecutive_skips: Count = 10
    fused: bool = False

    def __post_init__(self) -> None:
        check_fields("trainer.update.", self)
        if self.fused and (self.microbatches > 1 or self.on_nonfinite == "skip"):
            raise ValueError(
                "trainer.update.fused changes weights before all gradients are known:"
                " leave it out, or both trainer.update.microbatches and on_nonfinite:"
                " skip."
            )


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes in which the training state is stored; the dtype of computation belongs to
    the model's config.

    Losses and the optimizer's arithmetic are float32 in any case.

    Attributes:
        parameters: the weights, but for those of modules whose class has `keeps_dtype =
            True`, such as decays of states and biases of routers.
        gradients: gradients as they are added up over microbatches and passed to the
            optimizer.
        optimizer_state: the optimizer's arrays that have the shape of a parameter.
        frozen: the weights of linear maps under adapters (`lora`), but for routers,
            embedding and head: `int8` or `nf4` (QLoRA, arXiv:2305.14314), 8.5 and 4.5
            bits a weight, of which a layer at a time is computed in the model's
            dtype; null for `parameters`.
    """

    parameters: FloatName = "float32"
    gradients: FloatName = "float32"
    optimizer_state: FloatName = "float32"
    frozen: Literal["int8", "nf4"] | None = None


@dataclass(frozen=True)
class MeshConfig:
    """The mesh of devices, and the named axes that are sharded over it.

    Attributes:
        axes: the axes of the mesh and their sizes; one may be -1 for all remaining
            devices. Where the sizes need fewer devices than there are, the first ones
            are used.
        compute_mapping: for each named axis of activations that is sharded, the mesh
            axis, or a list of several. `batch: data` is data parallelism.
        param_mapping: the same for weights, gradients and the optimizer's state.
            `embed: data` is FSDP: a layer's weights are gathered when the layer runs.
            `{}` copies all of them to every device. In an array with several of these
            axes, a mesh axis divides the first listed.
    """

    axes: dict[str, int] = field(default_factory=lambda: {"data": -1})
    compute_mapping: dict[str, list[str] | str] = field(
        default_factory=lambda: {"batch": "data"}
    )
    param_mapping: dict[str, list[str] | str] = field(
        default_factory=lambda: {"embed": "data"}
    )

    def __post_init__(self) -> None:
        for name, size in self.axes.items():
            if size != -1 and size < 1:
                raise ValueError(
                    f"trainer.mesh.axes.{name} must be at least 1, or -1 for the rest;"
                    f" got {size}."
                )
        if list(self.axes.values()).count(-1) > 1:
            raise ValueError(f"trainer.mesh.axes can have one -1, got {self.axes}.")
        for table in ("compute_mapping", "param_mapping"):
            for name, physical in getattr(self, table).items():
                over = [physical] if isinstance(physical, str) else physical
                strange = [one for one in over if one not in self.axes]
                if strange:
                    raise ValueError(
                        f"trainer.mesh.{table}.{name} names the mesh axis"
                        f" {strange[0]!r}; those in trainer.mesh.axes are"
                        f" {', '.join(self.axes)}. Where you did not write that, it is"
                        f" the default: map {name} to one of them, or write"
                        f" trainer.mesh.{table}: {{}}."
                    )


@dataclass(frozen=True)
class PipelineConfig:
    """Pipeline parallelism: layers are divided over devices, through which the
    `update.microbatches` of a batch pass (`stacked_remat.pipeline`).

    Attributes:
        axis: the axis of the mesh whose devices, or groups of devices, have a
            contiguous part of the layers each, with its optimizer state. The number of
            layers must be a multiple of its size. Nothing else is mapped to it.
        schedule: `1f1b`, or `zero_bubble`, with which devices wait less and keep more
            of the backward pass in memory.
    """

    axis: str
    schedule: Literal["1f1b", "zero_bubble"] = "1f1b"


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written besides the one at the end, which are kept, and how
    a run resumes.

    Attributes:
        every_steps: steps between checkpoints; null for none by step.
        every_minutes: minutes between checkpoints; null for none by time.
        keep_last: how many of the latest are kept.
        keep_every_steps: checkpoints at multiples of this are kept forever; null for
            none.
        keep_best: whether one is written after each evaluation with the lowest loss on
            held-out text so far, and the best of these is kept.
        local_dir: a folder of each host, on its disk or in its memory (`/dev/shm`), to
            which each process writes its own part between checkpoints, so that a run
            that is killed loses few steps; null for none. At most three copies of the
            part are there.
        local_every_steps: steps between those.
        overwrite: whether to delete the results of an earlier run in `run_dir` and
            start again.
        accept_changes: whether a run may resume with a config that would give other
            results.
    """

    every_steps: Count | None = None
    every_minutes: Positive | None = 10.0
    keep_last: Count = 2
    keep_every_steps: Count | None = None
    keep_best: bool = False
    local_dir: str | None = None
    local_every_steps: Count = 1
    overwrite: bool = False
    accept_changes: bool = False

    def __post_init__(self) -> None:
        check_fields("trainer.checkpoint.", self)
        if self.local_dir is not None:
            check_folder("trainer.checkpoint.local_dir", self.local_dir)


@dataclass(frozen=True)
class ProfilerConfig:
    """Traces, and the peak that utilisation is measured against.

    Attributes:
        start_step: first step of a trace by JAX's profiler; null for no trace.
        num_steps: steps in the trace.
        peak_flops: peak FLOP/s of one device, for the model FLOPs utilisation; null
            takes the device's known dense bfloat16 peak, or reports no utilisation
            where it is not known.
    """

    start_step: Count | None = None
    num_steps: Count = 3
    peak_flops: Positive | None = None

    def __post_init__(self) -> None:
        check_fields("trainer.profiler.", self)

    @property
    def last_step(self) -> int | None:
        """The last step of the trace."""
        return None if self.start_step is None else self.start_step + self.num_steps - 1


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases; off without a project.

    Attributes:
        project: project to log to.
        entity: user or team; your default one if null.
        name: display name of the run; the run folder's name if null.
        mode: `offline` keeps everything in the run folder.
    """

    project: str | None = None
    entity: str | None = None
    name: str | None = None
    mode: Literal["online", "offline"] = "online"


@dataclass(frozen=True)
class TrackersConfig:
    """Where metrics are logged besides `metrics.jsonl` in the run folder.

    Attributes:
        tensorboard: whether to write event files to the run folder; needs the package
            tensorboardX.
        wandb: Weights & Biases; needs the package wandb.
    """

    tensorboard: bool = False
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass(frozen=True)
class TrainerConfig:
    """Trainer settings: how long to train, on which devices, and what to report and
    save.

    Attributes:
        num_steps: optimizer steps.
        seed: of the initial weights and of the order of the batches.
        log_every: steps between lines in the metrics file.
        eval_every: steps between evaluations on held-out text; null for those before
            the first and after the last step only.
        eval_batches: batches in an evaluation, always the same ones; with several
            sources, also for each.
        patience: evaluations in a row without a lower loss on held-out text after which
            the run ends; null for all steps.
        best_source: the source whose held-out text `patience` and
            `checkpoint.keep_best` go by; null for that of all sources together, in
            which a source counts by its tokens.
        run_dir: folder for config, metrics and checkpoints; `runs/DATE-TIME` if null.
            The same command with the same folder resumes an interrupted run.
        mesh: the mesh of devices, and the axes that are sharded over it.
        pipeline: an axis of the mesh that divides the layers; null for none.
        update: microbatches, and what to do with steps that are not finite.
        streaming: whether the weights of the layers are in host memory, and come to the
            device while their layer runs: frozen weights, or with `update.fused` those
            that are trained, with their optimizer state. With `files`, frozen weights
            under adapters stay in the files of `initialize_from_hf`, from which each
            step reads them: for runs on one CPU or GPU.
        precision: dtypes of weights, gradients and optimizer state.
        checkpoint: when checkpoints are written, and which are kept.
        profiler: traces, and the device's peak.
        trackers: where metrics are logged besides the metrics file.
    """

    num_steps: Count = 100
    seed: int = 0
    log_every: Count = 10
    eval_every: Count | None = None
    eval_batches: Count = 8
    patience: Count | None = None
    best_source: str | None = None
    run_dir: str | None = None
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig | None = None
    update: UpdateConfig = field(default_factory=UpdateConfig)
    streaming: bool | Literal["files"] = False
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    trackers: TrackersConfig = field(default_factory=TrackersConfig)

    def __post_init__(self) -> None:
        check_fields("trainer.", self)
        if self.by_held_out_loss and self.eval_every is None:
            raise ValueError(
                f"{self.by_held_out_loss} goes by the loss on held-out text: give"
                " trainer.eval_every too."
            )
        if self.best_source is not None and not self.by_held_out_loss:
            raise ValueError(
                "trainer.best_source is the source that trainer.patience and"
                " trainer.checkpoint.keep_best go by: give one of them too."
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(
                f"trainer.seed must be at least 0 and below 2**63, got {self.seed}."
            )
        if self.run_dir is not None:
            check_folder("trainer.run_dir", self.run_dir)
        if self.pipeline is not None:
            self._check_pipeline(self.pipeline.axis)

    def _check_pipeline(self, axis: str) -> None:
        if axis not in self.mesh.axes:
            raise ValueError(
                f"trainer.pipeline.axis names the mesh axis {axis!r}; those in"
                f" trainer.mesh.axes are {', '.join(self.mesh.axes)}. Add it there,"
                f" such as trainer.mesh.axes: {{{axis}: 4, data: -1}}."
            )
        for table in ("compute_mapping", "param_mapping"):
            for name, physical in getattr(self.mesh, table).items():
                if axis in ([physical] if isinstance(physical, str) else physical):
                    raise ValueError(
                        f"trainer.mesh.{table}.{name} maps to {axis!r}, which"
                        " trainer.pipeline divides the layers over, and nothing else."
                        " Leave it out, or map it to another axis of the mesh."
                    )
        for key, is_given in (
            ("update.fused", self.update.fused),
            ("streaming", self.streaming),
        ):
            if is_given:
                raise ValueError(
                    f"trainer.{key} does not go with trainer.pipeline: leave out one of"
                    " them."
                )

    @property
    def by_held_out_loss(self) -> str | None:
        """The key of what depends on the loss on held-out text, if anything does."""
        if self.patience is not None:
            return "trainer.patience"
        return "trainer.checkpoint.keep_best" if self.checkpoint.keep_best else None
