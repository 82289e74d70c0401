"""Reads what a run trained: its config, its model and the tokens that end its texts, from a checkpoint."""

import contextlib
from pathlib import Path

import equinox as eqx
import yaml

from models.hf_io.hub import model_folder
from models.hf_io.pretrained import end_tokens
from models.hf_io.safetensors_folder import WeightsError
from models.lm import LanguageModel
from models.run_config import LmRunConfig
from models.run_state import initial_state, present_name, present_target, saved_arrays, state_shapes
from stacked_remat.training import (
    CheckpointDamagedError,
    ConfigError,
    check_unsaved,
    checkpoint_run,
    load_checkpoint,
    parse_config,
)


def read_run_config(run_dir: Path, step: int | None = None) -> LmRunConfig:
    """The resolved config of the run that wrote a checkpoint.

    Args:
        run_dir: the run folder.
        step: of the checkpoint; the latest if not given.

    Raises:
        FileNotFoundError: there is no such run or checkpoint.
        ConfigError: the config in the checkpoint is not one of `models.train_lm`.
    """
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        is_model = (run_dir / "config.json").is_file()
        hint = " It is a Hugging Face model: use models.generate --model." if is_model else ""
        raise FileNotFoundError(
            f"{run_dir} is not a run folder: it has no checkpoints/ in it. Name the one that models.train_lm "
            f"wrote to (trainer.run_dir).{hint}"
        )
    try:
        saved = checkpoint_run(folder, step=step)["config"]
        if not isinstance(saved, dict) or saved.get("vocab_size") is None:
            raise ConfigError("it has no vocab_size")
        for section, key in (("checkpoint", "on_damaged"), ("trackers", "trackio")):  # of earlier versions
            saved.get("trainer", {}).get(section, {}).pop(key, None)
        saved.get("data", {}).pop("max_record_bytes", None)
        if saved.get("lora"):
            saved["lora"]["targets"] = [present_target(target) for target in saved["lora"]["targets"]]
        entries = [f"--{key}={yaml.safe_dump(value)}" for key, value in saved.items()]
        return parse_config(LmRunConfig, entries)
    except (OSError, CheckpointDamagedError):
        raise
    except Exception as error:  # a damaged checkpoint may raise anything
        problem = str(error).replace(" on the command line", "").rstrip(".")
        raise ConfigError(
            f"The config in the checkpoint {folder} can't be used: {problem}. It is damaged, or of another "
            f"version: choose another with --step, or train again."
        ) from error


def trained_model(run_dir: Path, config: LmRunConfig, *, step: int | None = None) -> LanguageModel:
    """The model of a run's checkpoint, with its adapters if it has some.

    Args:
        run_dir: the run folder.
        config: what `read_run_config` found there.
        step: of the checkpoint; the latest if not given.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointMismatchError: it is of another model than its config says, or of an earlier version that
            can't be read.

    Cost: the model in memory; with adapters also the weights under them, which are read or made again.
    """
    folder = run_dir / "checkpoints"
    if config.lora is None:
        state = state_shapes(config)
    else:
        state = initial_state(config)
        rest = eqx.filter(state, saved_arrays(state), inverse=True)
        check_unsaved(folder, rest, step=step, present_name=present_name)
    trained = load_checkpoint(folder, state.trained, step=step, part="trained", present_name=present_name)
    return eqx.combine(trained, state.frozen)


def base_folder(config: LmRunConfig) -> Path | None:
    """The folder of the weights that training began with; None where there was none, or it is gone."""
    if config.initialize_from_hf is not None:
        with contextlib.suppress(FileNotFoundError, WeightsError):
            return model_folder(config.initialize_from_hf, weights=False)
    return None


def ends_of_run(config: LmRunConfig, end: int) -> list[int]:
    """The tokens that end a text of the trained model: `end`, the tokenizer's own, first.

    A chat model has more of them than its tokenizer: the folder of the weights that training began with
    names them.

    Raises:
        WeightsError: a file of that folder can't be read, or names something other than tokens of the model.
    """
    root = base_folder(config)
    found = () if root is None else end_tokens(root, config.Vocab.size)
    return [end, *sorted({*found} - {end})]
