"""The config of a run, resolved once into what is trained; and the models that names
stand for, runs too.
"""

import contextlib
import dataclasses
import datetime
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from haliax import Axis

from models.architectures import Qwen3MoeConfig
from models.hf_io.decoder_weights import with_own_head
from models.hf_io.formats import (
    end_tokens,
    pretrained_config,
    read_hf_config,
    says_nothing,
    unlike_folder,
    written_out,
)
from models.hf_io.hub import adapted_model, model_folder
from models.hf_io.safetensors_folder import WeightsError, read_json
from models.lm import auxiliary_of_sums, loss_and_sums, next_token_loss
from models.parts.config import DecoderConfig
from models.parts.remat_presets import check_remat_names
from stacked_remat import ScanCheckpointPolicy
from stacked_remat.lora import LoraConfig
from stacked_remat.training import (
    AdamWConfig,
    ConfigError,
    DataConfig,
    GhostConfig,
    LossFunction,
    LossWithSums,
    OptimizerConfig,
    Tokenizer,
    TrainerConfig,
    check_remat,
    checkpoint_run,
    config_as_dict,
    learning_rate_schedule,
    load_tokenizer,
)
from stacked_remat.training.config_checks import Count, NotNegative, check_fields
from stacked_remat.training.config_file import decode_config
from stacked_remat.training.config_sections import Switch

BYTES = "byte"
"""The tokenizer of a model that has none."""
CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in that of a run."""


@dataclass(frozen=True)
class LmRunConfig:
    """Trains a language model, or resumes its run, by a config of everything that a run
    depends on.

        python -m models.train_lm --config_path FILE --trainer.num_steps 500

    `--show_example` prints the first example of each source, with what of it is trained
    on, and trains nothing. `--debug` shows the traceback of an error.

    Attributes:
        model: the architecture, by `type`.
        initialize_from_hf: the model to begin with: a folder in Hugging Face's format
            or a name on its Hub (`owner/model`, `owner/model@revision`), a run folder,
            whose latest checkpoint is read, or adapters of PEFT. Adapters are merged,
            and don't go with `lora`. null for random weights. The architecture is that
            model's where `model` says nothing of it, and has to be equal otherwise; its
            `type` always has to, if it is written.
        vocab_size: rows of the embedding; if null, those in that folder, or one for
            each of the tokenizer's.
        lora: adapters to train instead of the model's own weights, which then get
            neither gradients nor optimizer state; null to train these.
        freeze: patterns of paths of parameters that are not trained, such as
            `"*router*"`: they get neither gradients nor optimizer state. A path has
            the names of attributes, `*` for the number of a layer, and the
            parameter's own: `layers.*.attention.q_proj.weight`, or with `lora`
            `layers.*.attention.q_proj.a`. A pattern that matches nothing is an error
            that names near paths.
        remat: memory policy of the model's stack of layers: an alias (true, false,
            nested, offload, ...), a preset of the model (attention_saved, ...), the
            fields of a `ScanCheckpointPolicy`, or `auto` for the one with the fewest
            FLOPs that fits `budget` (`models.plan_lm` shows what is tried), found by
            compiling the step before the first one. Where none fits, `auto` tries them
            with `trainer.streaming` too, if the run trains adapters or has
            `trainer.update.fused`.
        budget: device memory for `remat: auto`, such as 72GiB, or in bytes; leave a
            tenth of the device free.
        host_budget: the same for the host; null for no limit.
        data: the text.
        z_loss: factor of the squared log-sum-exp of the logits in the loss of training,
            which keeps them from drifting; that of held-out text lacks it.
        ghost: scores of training sequences against held-out text; null for none.
        distributed: how the processes of a run on several hosts connect: `auto` where
            JAX or MPI started several (Slurm, Kubernetes, Cloud TPU), `off`, or the
            arguments of `jax.distributed.initialize`.
        optimizer: the optimizer, by `type` (AdamW if none is named), and its schedule.
        trainer: length, updates, precision, checkpoints, reports and the run folder.
    """

    model: DecoderConfig = field(
        default_factory=lambda: decode_config(Qwen3MoeConfig, {}, "by default")
    )
    initialize_from_hf: str | None = None
    vocab_size: Count | None = None
    lora: LoraConfig | None = None
    freeze: list[str] = field(default_factory=list)
    remat: Switch = True
    budget: int | str | None = None
    host_budget: int | str | None = None
    data: DataConfig = field(default_factory=DataConfig)
    z_loss: NotNegative = 0.0
    ghost: GhostConfig | None = None
    distributed: Switch = "auto"
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        check_fields("", self)
        # An alias or a preset is named with what it stands for.
        key = f"remat ({self.remat})" if isinstance(self.remat, str) else "remat"
        check_remat_names(self.model.remat_names, self.policy, key)
        self._check_streaming()
        self._check_quantized()
        self._check_ghost()
        self._check_further_tokens()
        self._check_pipeline()
        if self.model.balances_by_bias and (self.lora or self.trainer.update.fused):
            raise ValueError(
                "model.bias: by_load goes with neither lora, under which biases are"
                " frozen, nor trainer.update.fused. Write model.bias: frozen."
            )
        learning_rate_schedule(self.optimizer, self.trainer.num_steps)
        if self.data.batch_size % self.trainer.update.microbatches:
            raise ValueError(
                f"data.batch_size = {self.data.batch_size} can't be cut into"
                f" trainer.update.microbatches = {self.trainer.update.microbatches}"
                " equal parts; make batch_size a multiple of microbatches."
            )

    @staticmethod
    def remark_without_type(key: str, tree: dict[str, Any]) -> str:
        """What an error says of a section without a `type`: of `model`, where a folder
        has the architecture; else an empty text.
        """
        begun = tree.get("initialize_from_hf")
        if key != "model" or not isinstance(begun, str):
            return ""
        folder = {}
        with contextlib.suppress(OSError, ValueError):  # a run, or on the Hub
            folder = read_json(Path(begun).expanduser() / "config.json")
        return (
            f"The architecture is that of {begun}: leave out its keys, or write its"
            f" type too, `type: {folder.get('model_type', 'NAME')}`."
        )

    @property
    def reads_files(self) -> bool:
        """Whether frozen weights stay in their files while the run trains adapters."""
        return self.trainer.streaming == "files"

    def _check_files(self) -> None:
        if not self.reads_files:
            return
        if self.lora is None or self.initialize_from_hf is None:
            raise ValueError(
                "trainer.streaming: files reads the frozen weights under adapters from"
                " the files of a model. Give lora, and initialize_from_hf."
            )
        if self.trainer.update.fused or self.ghost is not None:
            raise ValueError(
                "trainer.streaming: files goes with neither trainer.update.fused nor"
                " ghost. Leave them out, or write trainer.streaming: true."
            )
        policy = self.policy
        if policy is None or (policy.saves_everything and not policy.has_cut):
            raise ValueError(
                "With trainer.streaming: files, remat is true, nested or offload: auto"
                " may find a policy like false, which would keep what was read of every"
                " layer in memory."
            )

    def _check_streaming(self) -> None:
        self._check_files()
        if not self.trainer.streaming:
            return
        if self.lora is None and not self.trainer.update.fused:
            raise ValueError(
                "trainer.streaming keeps the layers on the host, and without"
                " trainer.update.fused the optimizer would need the gradients, the"
                " weights and the state of all of them on the device. Give"
                " trainer.update.fused: true, or train adapters (lora)."
            )
        if self.policy is None:
            return
        unread = [
            f"{name}={value!r}"
            for name, value in self.policy.settings()
            if (name, value) == ("save_carries", False)
            or name == "offload_block_internals"
        ]
        if unread:
            raise ValueError(
                "With trainer.streaming the backward pass reads each layer again, and"
                f" remat with {' and '.join(unread)} would keep all of them on the"
                " device. Use true, offload, nested or max_carries."
            )

    def _check_quantized(self) -> None:
        form = self.trainer.precision.frozen
        if form is None:
            return
        if self.lora is None:
            raise ValueError(
                f"trainer.precision.frozen = {form!r} is of weights under adapters."
                " Train some (lora), or leave it out."
            )
        if self.trainer.streaming:
            raise ValueError(
                f"trainer.precision.frozen = {form!r} does not go with"
                " trainer.streaming: quantized weights are on the device. Leave out"
                " one of them."
            )

    def _check_further_tokens(self) -> None:
        further = self.model.further_tokens
        if further.depths and not further.weight:
            raise ValueError(
                f"model.mtp.depths = {further.depths} has no effect where"
                " model.mtp.weight is 0. Give a weight, such as 0.3."
            )
        if further.weight and not further.depths and self.initialize_from_hf is None:
            raise ValueError(
                f"model.mtp.weight = {further.weight} has no effect where"
                " model.mtp.depths is 0. Give the number of further tokens, such as 1."
            )

    def _check_pipeline(self) -> None:
        if self.trainer.pipeline is None:
            return
        if len(self.model.kinds) > 1:
            raise ValueError(
                "trainer.pipeline divides layers that are all of one kind, and those of"
                f" this model are of {len(self.model.kinds)}:"
                f" {', '.join(self.model.kinds)}. Leave it out, and divide the weights"
                " by trainer.mesh.param_mapping."
            )
        if self.model.balances_by_bias:
            raise ValueError(
                "trainer.pipeline does not go with model.bias: by_load, whose loss has"
                " the biases of all layers. Write model.bias: frozen, or leave out"
                " trainer.pipeline."
            )
        if self.ghost is not None:
            raise ValueError(
                "ghost takes gradients of layers that are not divided over devices:"
                " leave it out, or leave out trainer.pipeline."
            )
        # XLA has all devices of the mesh take part in a collective-permute, which these
        # have within a layer or the loss: a stage would wait for others, which run
        # another microbatch's part or none.
        if self.trainer.precision.frozen is not None:
            raise ValueError(
                f"trainer.precision.frozen = {self.trainer.precision.frozen!r} does not"
                " go with trainer.pipeline: leave out one of them."
            )
        is_cut = "position" in self.trainer.mesh.compute_mapping
        if is_cut and self.model.further_tokens.trained_depths:
            raise ValueError(
                "model.mtp with trainer.pipeline needs whole sequences: leave position"
                " out of trainer.mesh.compute_mapping, or leave out model.mtp."
            )
        if self.policy is not None and not self.policy.save_carries:
            raise ValueError(
                f"remat = {self.remat!r} keeps no carries, and each stage of"
                " trainer.pipeline sweeps back over those of its layers. Use true,"
                " nested or offload."
            )

    def _check_ghost(self) -> None:
        if self.ghost is None:
            return
        steps = self.trainer.num_steps
        if self.trainer.update.fused:
            raise ValueError(
                "ghost takes the gradient of held-out text for the whole model, and"
                " trainer.update.fused keeps no gradient of the whole model: leave out"
                " one of them."
            )
        if self.policy is None:
            raise ValueError(
                "remat: auto finds the policy by the memory of a step without scores,"
                " and ghost takes more: name a policy, such as nested, or leave out"
                " ghost."
            )
        if self.ghost.every > steps:
            raise ValueError(
                f"ghost.every = {self.ghost.every} is never reached with"
                f" trainer.num_steps = {steps}."
            )
        unknown = [
            name
            for name in self.ghost.validation.sources
            if name not in self.data.sources
        ]
        if unknown:
            valid = ", ".join(self.data.sources) or "none, since data.sources is empty"
            raise ValueError(
                f"ghost.validation.sources names {unknown[0]!r}, which data.sources"
                f" lacks. Valid: {valid}."
            )

    @functools.cached_property
    def policy(self) -> ScanCheckpointPolicy | None:
        """The policy that `remat` stands for; None for `auto`."""
        return check_remat(
            self.remat, self.budget, self.host_budget, self.model.remat_presets
        )

    @functools.cached_property
    def loss(self) -> LossFunction:
        """The loss to minimise."""
        if self.model.has_auxiliary_losses:
            return LossWithSums(
                functools.partial(loss_and_sums, z_loss=self.z_loss), auxiliary_of_sums
            )
        return functools.partial(next_token_loss, z_loss=self.z_loss)

    @functools.cached_property
    def entries(self) -> dict[str, Any]:
        """The config as a tree of plain values, for files and for trackers."""
        return config_as_dict(self)

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer of a resolved config."""
        return self.data.tokenizer or BYTES

    @property
    def Vocab(self) -> Axis:
        """The rows of the embedding; only of a config whose `vocab_size` is given or
        resolved.
        """
        assert self.vocab_size is not None
        return Axis("vocab", self.vocab_size)

    def resolved(self, *, check_folder: bool = True) -> Self:
        """The config with the architecture, the rows of the embedding and the tokenizer
        that the run has.

        With `check_folder`, the folder of `initialize_from_hf` and the tokenizer are
        also read where they don't decide it.
        """
        model = self.model
        rows = self.vocab_size
        tokenizer = self.data.tokenizer
        needs_folder = says_nothing(model) or (tokenizer is None and rows is None)
        # Random weights: nothing is read.
        if self.initialize_from_hf is None:
            tokenizer = tokenizer or BYTES
        # A folder is read only where it decides something, or to compare.
        elif check_folder or needs_folder:
            begun = find_model(self.initialize_from_hf)
            self._check_begun(begun)
            tokenizer = tokenizer or _own_tokenizer(begun)
            # The folder's architecture, with what is the run's to decide
            found = pretrained_config(model, begun.config)
            found_rows = begun.Vocab.size
            differing = unlike_folder(model, found)
            if rows is not None and rows != found_rows:
                differing.append(
                    f"vocab_size: {rows} in the config, {found_rows} in the folder"
                )
            if differing:
                raise ConfigError(
                    f"The model of the config is not the one in {begun.root}:\n  "
                    + "\n  ".join(differing)
                    + "\nCorrect it, or leave out all of `model` that a folder has, to"
                    " take the folder's."
                )
            model = found
            rows = found_rows
            if model.further_tokens.weight and not model.further_tokens.depths:
                raise ConfigError(
                    f"model.mtp.weight is given, and {begun.root} has no layers that"
                    " predict further tokens. Leave it out."
                )
        if tokenizer is not None and (
            rows is None or check_folder or tokenizer == BYTES
        ):  # needs no file
            tokens = load_tokenizer(tokenizer, rows=rows)
            rows = tokens.vocab_size if rows is None else rows
        data = dataclasses.replace(self.data, tokenizer=tokenizer)
        return dataclasses.replace(
            self, model=written_out(model), vocab_size=rows, data=data
        )

    def _check_begun(self, begun: "FoundModel") -> None:
        run_dir = self.trainer.run_dir
        if (
            run_dir is not None
            and Path(run_dir).expanduser().resolve() == begun.root.resolve()
        ):
            raise ConfigError(
                f"{run_dir} is trainer.run_dir and initialize_from_hf. Give this run"
                " another folder."
            )
        if self.lora is not None and begun.has_adapters:
            # Merging again on other devices changes the low-order bits, and so the
            # frozen weights.
            raise ConfigError(
                "lora trains no adapters on top of those of initialize_from_hf"
                f" ({begun.name}). Export that whole with models.export_hf, and begin"
                " with the export."
            )


@dataclass(frozen=True)
class FoundModel:
    """A model before its weights are read.

    Attributes:
        name: of its folder, or on the Hub.
        root: that folder: in Hugging Face's format, of adapters, or of a run. Weights
            of the Hub come later.
        config: its architecture, with the dtype in which to compute.
        tokenizer_name: names its tokenizer; empty if it has none.
        published: the folder in Hugging Face's format that it is, or began with; None
            if there is none.
        base_name: names the model that it began with or adapts; None if there is none.
        base: that model, if its weights are read with adapters.
        run: the config of the run that trained it, if one did.
        step: of the run's checkpoint; the latest if None.
    """

    name: str
    root: Path
    config: DecoderConfig
    Vocab: Axis
    tokenizer_name: str
    published: Path | None
    base_name: str | None = None
    base: "FoundModel | None" = None
    run: LmRunConfig | None = None
    step: int | None = None

    @property
    def has_adapters(self) -> bool:
        """Whether its weights are those of another model with adapters."""
        return (self.run.lora if self.run else self.base) is not None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer, with the date of the run, or of today, in chats."""
        date = (self.run and self.run.data.chat_date) or str(datetime.date.today())
        return load_tokenizer(
            self.tokenizer_name or str(self.root), date, rows=self.Vocab.size
        )

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text: the tokenizer's, then others that the folder of a
        chat model names.
        """
        found = (
            ()
            if self.published is None
            else end_tokens(self.published, self.Vocab.size)
        )
        return (self.tokenizer.end, *sorted({*found} - {self.tokenizer.end}))


def find_model(
    name: str,
    step: int | None = None,
    dtype: str | None = None,
    tokenizer: str | None = None,
) -> FoundModel:
    """The model that a name stands for, of which no weights are read.

    Args:
        name: a run folder, a folder in Hugging Face's format or of PEFT's adapters, or
            a name on the Hub.
        step: of the run's checkpoint; the latest if not given.
        dtype: in which to compute; the one that the run or the folder's `config.json`
            names if not given.
        tokenizer: replaces the model's own.
    """
    found = _found(name, step, ())
    config = (
        found.config
        if dtype is None
        else dataclasses.replace(found.config, compute_dtype=dtype)
    )
    return dataclasses.replace(
        found, config=config, tokenizer_name=tokenizer or found.tokenizer_name
    )


def _found(name: str, step: int | None, within: tuple[Path, ...]) -> FoundModel:
    """What the name stands for in the models of these folders, which begin with it."""
    # Configs and tokenizers; weights are fetched when they are read.
    root = model_folder(name, weights=False)
    if root in within:
        raise WeightsError(
            f"The model in {root} begins with itself. Name another base there."
        )
    within = (*within, root)
    base = None
    if (root / CHECKPOINTS).is_dir():
        run = read_run_config(root, step)
        if (begun := run.initialize_from_hf) is not None:
            # Only a run of adapters still needs what it began with.
            with contextlib.suppress(
                *([] if run.lora else [OSError, ValueError])
            ):  # it may be gone
                base = _found(begun, None, within)
        own = (
            name,
            root,
            run.model,
            run.Vocab,
            run.tokenizer_name,
            base and base.published,
            begun,
        )
        return FoundModel(*own, base=base if run.lora else None, run=run, step=step)
    if step is not None:
        raise ConfigError(
            f"--step has no effect with {name}, which is no run folder. Leave it out."
        )
    tokenizer = name if (root / "tokenizer.json").is_file() else ""
    if (adapted := adapted_model(root, name)) is not None:
        base = _found(adapted, None, within)
        tokenizer = tokenizer or base.tokenizer_name
        return FoundModel(
            name,
            root,
            base.config,
            base.Vocab,
            tokenizer,
            base.published,
            adapted,
            base,
        )
    config, rows = read_hf_config(root)
    fields = read_json(root / "config.json")
    config = with_own_head(config, root)
    # All others, float16 among them, are computed in float32.
    is_bfloat16 = "bfloat16" in (fields.get("dtype"), fields.get("torch_dtype"))
    config = dataclasses.replace(
        config, compute_dtype="bfloat16" if is_bfloat16 else "float32"
    )
    return FoundModel(name, root, config, Axis("vocab", rows), tokenizer, root)


# Files of tokenizers that have no tokenizer.json.
_OTHER_TOKENIZERS = ("tokenizer*", "*.model", "tekken.json", "vocab.*", "merges.txt")


def _own_tokenizer(begun: FoundModel) -> str:
    """The name of a model's own tokenizer; `byte` if it has none."""
    if begun.tokenizer_name:
        return begun.tokenizer_name
    # Bytes in place of a tokenizer that could not be read would train nonsense.
    for pattern in _OTHER_TOKENIZERS:
        for other in begun.root.glob(pattern):
            raise ConfigError(
                f"{begun.name} has no tokenizer.json, but {other.name}, which is not"
                " read. Convert it with transformers,"
                f" AutoTokenizer.from_pretrained({begun.name!r})"
                ".save_pretrained(FOLDER),"
                " and name that folder as data.tokenizer."
            )
    return BYTES


def read_run_config(run_dir: Path, step: int | None = None) -> LmRunConfig:
    """The resolved config of the run that wrote a checkpoint."""
    folder = run_dir / CHECKPOINTS
    saved = checkpoint_run(folder, step=step)["config"]
    try:
        config = decode_config(LmRunConfig, saved, "there")
        if config.vocab_size is None:
            raise ConfigError("it has no vocab_size")
    except Exception as error:  # a damaged checkpoint may raise anything
        raise ConfigError(
            f"The config in the checkpoint {folder} can't be used:"
            f" {str(error).rstrip('.')}. It is damaged, or of another version: choose"
            " another with --step, or train again."
        ) from error
    return config
