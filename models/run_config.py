"""The config of a language-model run: read by every command, and resolved once into what is trained."""

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import Any, Self

from haliax import Axis

from models.architectures import Qwen3MoeConfig
from models.decoder.config import DecoderConfig
from models.decoder.remat_presets import check_remat_names
from models.hf_io.formats import differing_fields, pretrained_config, says_nothing, written_out
from models.hf_io.hub import model_folder
from models.lm import next_token_loss
from stacked_remat import ScanCheckpointPolicy
from stacked_remat.lora import LoraConfig
from stacked_remat.training import (
    AdamWConfig,
    ConfigError,
    DataConfig,
    GhostConfig,
    LossFunction,
    OptimizerConfig,
    TrainerConfig,
    check_remat,
    config_as_dict,
    learning_rate_schedule,
    load_tokenizer,
)


@dataclass(frozen=True)
class LmRunConfig:
    """Trains a language model, or resumes its run, by a config of everything that a run depends on.

        python -m models.train_lm --config_path FILE --trainer.num_steps 500

    `--debug` shows the traceback of an error.

    Attributes:
        model: the architecture, by `type`.
        initialize_from_hf: weights to begin with, a folder in Hugging Face's format or a name on its Hub
            (`owner/model`, `owner/model@revision`); null for random ones. The architecture is the folder's
            where `model` says nothing of it, and has to be equal otherwise.
        vocab_size: rows of the embedding; if null, those in that folder, or one for each of the tokenizer's.
        lora: adapters to train instead of the model's own weights, which then get neither gradients nor
            optimizer state; null to train these.
        remat: memory policy of the model's stack of layers: an alias (true, false, nested, offload, ...), a
            preset of the model (attention_saved, ...), the fields of a `ScanCheckpointPolicy`, or `auto` for
            the one with the fewest FLOPs that fits `budget` (`models.plan_lm` shows what is tried),
            found by compiling the step before the first one. Where none fits, `auto` tries them with
            `trainer.streaming` too, if the run trains adapters or has `trainer.update.fused`.
        budget: device memory for `remat: auto`, such as 72GiB; leave a tenth of the device free.
        host_budget: the same for the host; null for no limit.
        data: the text.
        z_loss: factor of the squared log-sum-exp of the logits in the loss of training, which keeps them from
            drifting; that of held-out text lacks it.
        ghost: scores of training sequences against held-out text; null for none.
        distributed: how the processes of a run on several hosts connect: `auto` where JAX finds a cluster
            (Slurm, Open MPI, Kubernetes, Cloud TPU), `off`, or the arguments of `jax.distributed.initialize`.
        optimizer: the optimizer, by `type` (AdamW if none is named), and its schedule.
        trainer: length, updates, precision, checkpoints, reports and the run folder.
    """

    model: DecoderConfig = field(default_factory=Qwen3MoeConfig)
    initialize_from_hf: str | None = None
    vocab_size: int | None = None
    lora: LoraConfig | None = None
    remat: bool | dict[str, Any] | str = True
    budget: str | None = None
    host_budget: str | None = None
    data: DataConfig = field(default_factory=DataConfig)
    z_loss: float = 0.0
    ghost: GhostConfig | None = None
    distributed: bool | str | dict[str, Any] = "auto"
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {self.vocab_size}.")
        key = f"remat ({self.remat})" if isinstance(self.remat, str) else "remat"
        check_remat_names(self.model.remat_names, self.policy, key)
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss must not be negative or infinite, got {self.z_loss}; 0 turns it off.")
        self._check_streaming()
        self._check_ghost()
        if self.model.balances_by_bias and (self.lora or self.trainer.update.fused):
            raise ValueError(
                "model.bias: by_load goes with neither lora, under which biases are frozen, nor "
                "trainer.update.fused. Write model.bias: frozen."
            )
        learning_rate_schedule(self.optimizer, self.trainer.num_steps)
        if self.data.batch_size % self.trainer.update.microbatches:
            raise ValueError(
                f"data.batch_size = {self.data.batch_size} can't be cut into trainer.update.microbatches = "
                f"{self.trainer.update.microbatches} equal parts; make batch_size a multiple of microbatches."
            )

    def _check_streaming(self) -> None:
        if not self.trainer.streaming:
            return
        if self.lora is None and not self.trainer.update.fused:
            raise ValueError(
                "trainer.streaming keeps the layers on the host, and without trainer.update.fused the "
                "optimizer would need the gradients, the weights and the state of all of them on the device. "
                "Give trainer.update.fused: true, or train adapters (lora)."
            )
        if self.policy is None:
            return
        unread = [
            f"{name}={value!r}"
            for name, value in self.policy.settings()
            if (name, value) == ("save_carries", False) or name == "offload_block_internals"
        ]
        if unread:
            raise ValueError(
                f"With trainer.streaming the backward pass reads each layer from the host again, and remat "
                f"with {' and '.join(unread)} would keep all of them on the device. Use true, offload, "
                f"nested or max_carries."
            )

    def _check_ghost(self) -> None:
        if self.ghost is None:
            return
        steps = self.trainer.num_steps
        if self.trainer.update.fused:
            raise ValueError(
                "ghost takes the gradient of held-out text for the whole model, and trainer.update.fused "
                "keeps no gradient of the whole model: leave out one of them."
            )
        if self.policy is None:
            raise ValueError(
                "remat: auto finds the policy by the memory of a step without scores, and ghost takes more: "
                "name a policy, such as nested, or leave out ghost."
            )
        if self.ghost.every > steps:
            raise ValueError(
                f"ghost.every = {self.ghost.every} is never reached with trainer.num_steps = {steps}."
            )
        unknown = [name for name in self.ghost.validation.sources if name not in self.data.sources]
        if unknown:
            valid = ", ".join(self.data.sources) or "none, since data.sources is empty"
            raise ValueError(
                f"ghost.validation.sources names {unknown[0]!r}, which data.sources lacks. Valid: {valid}."
            )

    @functools.cached_property
    def policy(self) -> ScanCheckpointPolicy | None:
        """The policy that `remat` stands for; None for `auto`."""
        return check_remat(self.remat, self.budget, self.host_budget, self.model.remat_presets)

    @functools.cached_property
    def loss(self) -> LossFunction:
        """The loss to minimise."""
        return functools.partial(next_token_loss, z_loss=self.z_loss)

    @functools.cached_property
    def entries(self) -> dict[str, Any]:
        """The config as a tree of plain values, for files and for trackers."""
        return config_as_dict(self)

    @property
    def Vocab(self) -> Axis:
        """The rows of the embedding; only of a config whose `vocab_size` is given or resolved."""
        assert self.vocab_size is not None
        return Axis("vocab", self.vocab_size)

    def resolved(self, *, check_folder: bool = True) -> Self:
        """The config with the architecture and the rows of the embedding that the run has.

        With `check_folder`, the folder of `initialize_from_hf` and the tokenizer are also read where they
        don't decide it.
        """
        model, rows = self.model, self.vocab_size
        of_folder = says_nothing(model)
        if self.initialize_from_hf is not None and (check_folder or of_folder):
            root = model_folder(self.initialize_from_hf, weights=False)
            found, found_rows = pretrained_config(model, root)
            differing = [] if of_folder else differing_fields("model", written_out(model), written_out(found))
            if rows is not None and rows != found_rows:
                differing.append(f"vocab_size: {rows} in the config, {found_rows} in the folder")
            if differing:
                raise ConfigError(
                    f"The model of the config is not the one in {root}:\n  "
                    + "\n  ".join(differing)
                    + "\nCorrect it, or leave out all of `model` that a folder has, to take the folder's."
                )
            model, rows = written_out(found), found_rows
        if rows is None or check_folder or self.data.tokenizer == "byte":  # which needs no file
            tokens = load_tokenizer(self.data.tokenizer).vocab_size
            rows = tokens if rows is None else rows
            if tokens > rows:
                raise ConfigError(
                    f"The tokenizer {self.data.tokenizer!r} has {tokens} tokens, and the model's embedding "
                    f"{rows} rows. Use the model's own tokenizer, or a larger vocab_size."
                )
        return dataclasses.replace(self, model=model, vocab_size=rows)
