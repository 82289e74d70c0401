"""How a run scores its training sequences: what the `ghost` section of its config
says.
"""

import functools
import math
from collections.abc import Mapping

import jax
from haliax import NamedArray

from models.lm import losses_by_token
from models.parts.decoder import Decoder
from models.run_config import LmRunConfig
from stacked_remat.ghost import ScoreLog
from stacked_remat.ghost.log import import_pyarrow
from stacked_remat.training import (
    ConfigError,
    Metrics,
    Partitioning,
    RunFolder,
    Scoring,
    TokenBatch,
    Tokenizer,
    TrainingData,
    ValidationBatch,
    mesh_sizes,
    validation_batches,
)


def check_scoring(config: LmRunConfig) -> None:
    """Raises ConfigError for a `ghost` section that this machine doesn't support."""
    if config.ghost is None:
        return
    if config.model.tiles > 1:
        raise ConfigError(
            "ghost scores layers that are not cut: leave out model.tiles, or leave out"
            " ghost."
        )
    if "experts" in config.trainer.mesh.compute_mapping:
        raise ConfigError(
            "ghost scores experts that are whole on each device: leave out experts in"
            " both mappings of trainer.mesh, or leave out ghost."
        )
    try:
        import_pyarrow()
    except ImportError as error:
        raise ConfigError(f"ghost: {error}") from error
    if (
        config.ghost.norms
        and math.prod(mesh_sizes(config.trainer.mesh, jax.device_count()).values()) > 1
    ):
        raise ConfigError(
            "ghost.norms takes one device: leave it out, or name one in"
            " trainer.mesh.axes."
        )


# Backends whose kernels have no derivative in forward mode
_KERNELS = ("cudnn", "tokamax", "splash", "megablox")


def check_backends(config: LmRunConfig, taken: Mapping[str, str]) -> None:
    """Raises ConfigError where tokens are scored and an operation has no derivative in
    forward mode; `taken` is what `stacked_remat.ops.backends_taken` yields.
    """
    if config.ghost is None or not config.ghost.by_token:
        return
    for what, backends in taken.items():
        operation = what.partition(",")[0]
        for backend in backends.split(" | "):
            name = backend.split()[0]
            if name not in _KERNELS:
                continue
            other = "block" if operation == "experts" else "blockwise"
            raise ConfigError(
                "ghost.by_token takes derivatives in forward mode, and the backend"
                f" {name} of {operation} has none. Set model.{operation}.backend:"
                f" {other}, or leave out ghost.by_token."
            )


def scored_against(
    config: LmRunConfig, data: TrainingData, partitioning: Partitioning
) -> tuple[ValidationBatch, ...]:
    """The held-out batches that sequences are scored against; none without a `ghost`
    section.
    """
    if config.ghost is None:
        return ()
    return validation_batches(
        config.ghost.validation, data.held_out, data.held_out_by_source, partitioning
    )


def run_scoring(
    config: LmRunConfig,
    data: TrainingData,
    validation: tuple[ValidationBatch, ...],
    tokenizer: Tokenizer,
    folder: RunFolder,
    done: int,
) -> Scoring | None:
    """The scoring of a run that has done so many steps; None without a `ghost`
    section.
    """
    if config.ghost is None:
        return None
    log = None
    if jax.process_index() == 0:
        log = ScoreLog(folder.scores, resumed_after=done)
    return Scoring(
        config.ghost,
        losses=functools.partial(_token_losses, z_loss=config.z_loss),
        is_whole=not config.model.has_auxiliary_losses,
        validation=validation,
        decode=tokenizer.decode,
        log=log,
        names=data.training.names,
    )


def _token_losses(
    model: Decoder, batch: TokenBatch, z_loss: float
) -> tuple[NamedArray, Metrics]:
    (losses, _), metrics = losses_by_token(model, batch, z_loss)
    return losses, metrics
