"""How a run goes on, whatever it trains: length, updates, precision, checkpoints, reports."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .config_value import check_folder

_MOST_STEPS = 2**31 - 1
_MOST_HOURS = 10**6  # a century; Orbax's times overflow far above

FloatName: TypeAlias = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class UpdateConfig:
    """From a batch to one update of the weights.

    Attributes:
        microbatches: parts of a batch whose gradients are computed one after the other and added up. The
            update is that of the whole batch; the memory for activations that of a part.
        on_nonfinite: what happens when the loss or the gradient's norm is NaN or infinite: `stop` ends the
            run and leaves the step's data in the run folder, `skip` leaves weights and optimizer as they were
            and goes on.
        max_consecutive_skips: skipped steps in a row after which `skip` stops too.
    """

    microbatches: int = 1
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_consecutive_skips: int = 10

    def __post_init__(self) -> None:
        _require_at_least(
            1,
            "trainer.update",
            microbatches=self.microbatches,
            max_consecutive_skips=self.max_consecutive_skips,
        )
        _require_one_of("trainer.update", on_nonfinite=(self.on_nonfinite, ("stop", "skip")))


@dataclass(frozen=True)
class PrecisionConfig:
    """In which dtypes the training state is kept; in which it computes is the model's to say.

    Sums and the optimizer's arithmetic are in float32 whatever is kept.

    Attributes:
        parameters: the weights.
        gradients: gradients as they are added up over microbatches and handed to the optimizer.
        optimizer_state: the optimizer's arrays in the shape of a parameter.
    """

    parameters: FloatName = "float32"
    gradients: FloatName = "float32"
    optimizer_state: FloatName = "float32"

    def __post_init__(self) -> None:
        _require_one_of(
            "trainer.precision",
            **{
                name: (getattr(self, name), ("float32", "bfloat16"))
                for name in ("parameters", "gradients", "optimizer_state")
            },
        )


def _data_parallel() -> dict[str, int]:
    return {"data": -1}


def _batch_over_data() -> dict[str, list[str] | str]:
    return {"batch": "data"}


def _embed_over_data() -> dict[str, list[str] | str]:
    return {"embed": "data"}


@dataclass(frozen=True)
class MeshConfig:
    """The devices of a run, and what is divided over them.

    Attributes:
        axes: the axes of the mesh and their sizes; one may be -1 for all devices that are left. Sizes that
            take fewer than there are leave the rest idle.
        compute_mapping: for the axes of activations, by name, the axis of the mesh that divides them, or a
            list of several. `batch: data` is data parallelism.
        param_mapping: the same for weights, gradients and the optimizer's state. `embed: data` is FSDP: a
            layer's weights are gathered when it is their turn. `{}` leaves all of them on every device.
    """

    axes: dict[str, int] = field(default_factory=_data_parallel)
    compute_mapping: dict[str, list[str] | str] = field(default_factory=_batch_over_data)
    param_mapping: dict[str, list[str] | str] = field(default_factory=_embed_over_data)

    def __post_init__(self) -> None:
        if not self.axes:
            raise ValueError("trainer.mesh.axes has no axis; write {data: -1} for all devices in one.")
        for name, size in self.axes.items():
            if size != -1 and size < 1:
                raise ValueError(
                    f"trainer.mesh.axes.{name} must be at least 1, or -1 for the rest; got {size}."
                )
        if list(self.axes.values()).count(-1) > 1:
            raise ValueError(f"trainer.mesh.axes can have one -1, got {self.axes}.")
        for table in ("compute_mapping", "param_mapping"):
            for name, physical in getattr(self, table).items():
                over = [physical] if isinstance(physical, str) else physical
                strange = [one for one in over if one not in self.axes]
                if strange:
                    raise ValueError(
                        f"trainer.mesh.{table}.{name} names the mesh axis {strange[0]!r}; those in "
                        f"trainer.mesh.axes are {', '.join(self.axes)}."
                    )


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written, besides the one at the end, which of them stay, and what may go on.

    Attributes:
        every_steps: steps between checkpoints; null for none by step.
        every_minutes: minutes between checkpoints; null for none by time.
        keep_last: how many of the latest stay.
        keep_every_steps: those at multiples of this stay for good.
        keep_every_hours: one in this many hours stays for good.
        asynchronous: whether training goes on while a checkpoint is written.
        overwrite: whether to start anew where `run_dir` holds an earlier run, whose results are deleted.
        accept_changes: whether a run may be continued with a config that would give other results.
        on_damaged: what happens where the latest checkpoint is damaged or half deleted: `stop` ends the run,
            `go_back` says so and goes on from the latest whole one.
    """

    every_steps: int | None = None
    every_minutes: float | None = 10.0
    keep_last: int = 2
    keep_every_steps: int | None = None
    keep_every_hours: float | None = None
    asynchronous: bool = True
    overwrite: bool = False
    accept_changes: bool = False
    on_damaged: Literal["stop", "go_back"] = "stop"

    def __post_init__(self) -> None:
        _require_at_least(1, "trainer.checkpoint", keep_last=self.keep_last)
        _require_one_of("trainer.checkpoint", on_damaged=(self.on_damaged, ("stop", "go_back")))
        for name in ("every_steps", "every_minutes", "keep_every_steps", "keep_every_hours"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"trainer.checkpoint.{name} must be positive, got {value}; null for none.")
        if self.keep_every_hours is not None and self.keep_every_hours > _MOST_HOURS:
            raise ValueError(
                f"trainer.checkpoint.keep_every_hours must be at most {_MOST_HOURS:,}, got "
                f"{self.keep_every_hours}; null for none."
            )


@dataclass(frozen=True)
class ProfilerConfig:
    """What is measured of the device.

    Attributes:
        start_step: first step of a trace by JAX's profiler; null for no trace.
        num_steps: steps in the trace.
        peak_flops: FLOP/s of one device, for the model FLOPs utilisation; if null, that of the device where
            it is known (dense bfloat16), and otherwise no utilisation is reported.
    """

    start_step: int | None = None
    num_steps: int = 3
    peak_flops: float | None = None

    def __post_init__(self) -> None:
        _require_at_least(1, "trainer.profiler", num_steps=self.num_steps)
        if self.start_step is not None:
            _require_at_least(1, "trainer.profiler", start_step=self.start_step)
        if self.peak_flops is not None and self.peak_flops <= 0:
            raise ValueError(f"trainer.profiler.peak_flops must be positive, got {self.peak_flops}.")


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases; off without a project.

    Attributes:
        project: project to log to.
        entity: user or team; your default one if null.
        name: shown name of the run; that of the run folder if null.
        mode: `offline` keeps everything in the run folder.
    """

    project: str | None = None
    entity: str | None = None
    name: str | None = None
    mode: Literal["online", "offline"] = "online"

    def __post_init__(self) -> None:
        _require_one_of("trainer.trackers.wandb", mode=(self.mode, ("online", "offline")))


@dataclass(frozen=True)
class TrackioConfig:
    """Trackio; off without a project.

    Attributes:
        project: project to log to.
        name: name of the run; that of the run folder if null.
        space_id: Hugging Face Space to log to; on this machine if null.
    """

    project: str | None = None
    name: str | None = None
    space_id: str | None = None


@dataclass(frozen=True)
class TrackersConfig:
    """Where metrics go besides the JSON lines of the run folder.

    Attributes:
        tensorboard: whether to write event files into the run folder; takes the package tensorboardX.
        wandb: Weights & Biases; takes the package wandb.
        trackio: Trackio; takes the package trackio.
    """

    tensorboard: bool = False
    wandb: WandbConfig = field(default_factory=WandbConfig)
    trackio: TrackioConfig = field(default_factory=TrackioConfig)


@dataclass(frozen=True)
class TrainerConfig:
    """How long to train, what to report, and where to.

    Attributes:
        num_steps: optimizer steps.
        seed: of the initial weights and of the order of the batches.
        log_every: steps between lines in the metrics file.
        eval_every: steps between evaluations on held-out text, besides those at the start and the end; null
            for those two alone.
        eval_batches: batches in an evaluation, always the same ones; of several sources, as many of each too.
        run_dir: folder for config, metrics and checkpoints; `runs/DATE-TIME` if not given. A run that was
            interrupted is continued by the same command with the same folder.
        mesh: the devices, and what is divided over them.
        update: microbatches, and what happens to steps that are not finite.
        precision: dtypes of weights, gradients and optimizer.
        checkpoint: when checkpoints are written and which stay.
        profiler: traces, and the device's peak.
        trackers: where metrics go besides the metrics file.
    """

    num_steps: int = 100
    seed: int = 0
    log_every: int = 10
    eval_every: int | None = None
    eval_batches: int = 8
    run_dir: str | None = None
    mesh: MeshConfig = field(default_factory=MeshConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    trackers: TrackersConfig = field(default_factory=TrackersConfig)

    def __post_init__(self) -> None:
        _require_at_least(
            1, "trainer", num_steps=self.num_steps, log_every=self.log_every, eval_batches=self.eval_batches
        )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"trainer.seed must be at least 0 and below 2**63, got {self.seed}.")
        if self.num_steps > _MOST_STEPS:
            raise ValueError(
                f"trainer.num_steps must be at most {_MOST_STEPS:,}, because steps are counted by 32-bit "
                f"integers; got {self.num_steps:,}."
            )
        if self.run_dir is not None:
            check_folder("trainer.run_dir", self.run_dir)
        if self.eval_every is not None:
            _require_at_least(1, "trainer", eval_every=self.eval_every)
        start = self.profiler.start_step
        if start is not None and start > self.num_steps:
            raise ValueError(
                f"trainer.profiler.start_step = {start} is never reached with trainer.num_steps = "
                f"{self.num_steps}."
            )


def _require_at_least(lowest: int, section: str, **values: float) -> None:
    for name, value in values.items():
        if value < lowest:
            raise ValueError(f"{section}.{name} must be at least {lowest}, got {value}.")


def _require_one_of(section: str, **values: tuple[str, tuple[str, ...]]) -> None:
    for name, (value, valid) in values.items():
        if value not in valid:
            raise ValueError(f"{section}.{name} must be one of {', '.join(valid)}, got {value!r}.")
