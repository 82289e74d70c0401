"""Turns what a run trained into a folder that Hugging Face's libraries load.

    python -m models.export_hf --run_dir runs/mine --out exported
    python -m models.export_hf --run_dir runs/mine --out adapters --adapters

The first writes a whole model, adapters merged, that `transformers` loads; the second the adapters alone, for
PEFT. The files of the run's tokenizer and what says where text ends go along with the whole model.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import draccus
import equinox as eqx
from rich.console import Console

from models.command import USER_ERRORS, run_command
from models.hub import model_folder
from models.lm import LanguageModel
from models.pretrained import GENERATION_CONFIG, end_tokens
from models.qwen3_moe import Qwen3Decoder
from models.qwen3_moe.hf import write_decoder
from models.qwen3_moe.peft import save_adapters
from models.run_state import ModelOfRun, initial_state, saved_arrays, state_shapes
from models.safetensors_folder import WeightsError, refuse_what_is_there
from models.text_stream import printable
from models.train_lm import TrainLmConfig
from stacked_remat.lora import merge_lora
from stacked_remat.training import (
    ConfigError,
    StopSignals,
    check_unsaved,
    checkpoint_config,
    lasting_console,
    load_checkpoint,
    load_tokenizer,
    read_tokenizer_files,
)


def trained_model(run_dir: Path, *, step: int | None = None) -> tuple[LanguageModel, TrainLmConfig]:
    """The model of a run's checkpoint with its adapters, if it has some, and the run's config.

    Args:
        run_dir: the run folder.
        step: of the checkpoint; the latest if not given.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointMismatchError: it is of another model than its config says.

    Cost: the model in memory; with adapters also what they were trained on, read or made again.
    """
    folder = run_dir / "checkpoints"
    config = run_config(run_dir, step)
    model = ModelOfRun.of(config)
    if config.lora is None:
        shapes = state_shapes(config, model)
        trained = load_checkpoint(folder, shapes.trained, step=step, part="trained")
        return eqx.combine(trained, shapes.frozen), config
    state = initial_state(config, model)
    check_unsaved(folder, eqx.filter(state, saved_arrays(state), inverse=True), step=step)
    trained = load_checkpoint(folder, state.trained, step=step, part="trained")
    return eqx.combine(trained, state.frozen), config


def export(run_dir: Path, out: Path, *, step: int | None = None, adapters: bool = False) -> None:
    """Writes the model of a run's checkpoint, or its adapters alone, to a new folder.

    Costs what `trained_model` does, and the host memory of one file; adapters are merged in place.

    Raises:
        FileNotFoundError, CheckpointMismatchError: as `trained_model`.
        FileExistsError: there is something in the folder.
        WeightsError: there are no adapters, the model has no such format, or what the folder that training
            began with says of its end tokens can't be read.
        DataError: the run's tokenizer is not where it was.
        ConfigError: the run's config can't be read.
    """
    refuse_what_is_there(out)
    texts, fields = ({}, {}) if adapters else beside_the_weights(run_config(run_dir, step))
    model, config = trained_model(run_dir, step=step)
    if not isinstance(model, Qwen3Decoder):
        raise WeightsError(f"A {type(model).__name__} has no format of Hugging Face's here.")
    if adapters:
        if config.lora is None:
            raise WeightsError(f"{run_dir} trained no adapters. Export the whole model, without --adapters.")
        save_adapters(out, model, base_model=config.initialize_from_hf)
        return
    write_decoder(out, merge_lora(model, donate=True), fields=fields, texts=texts)


def beside_the_weights(config: TrainLmConfig) -> tuple[dict[str, str], dict[str, Any]]:
    """Texts of files, and fields of `config.json`, that say how text is made with the model."""
    texts, end = read_tokenizer_files(config.data.tokenizer), load_tokenizer(config.data.tokenizer).end
    ends, root = ends_of_run(config, end), base_folder(config)
    file = None if root is None else root / GENERATION_CONFIG
    if file is not None and file.is_file():
        texts[file.name] = file.read_text(encoding="utf-8")
    return texts, {"eos_token_id": end if len(ends) == 1 else ends}


def ends_of_run(config: TrainLmConfig, end: int) -> list[int]:
    """The tokens that end a text of the trained model: `end`, the tokenizer's own, first.

    A chat model has more of them than its tokenizer: the folder of the weights that training began with
    names them.

    Raises:
        WeightsError: a file of that folder can't be read, or says something else than tokens of the model.
    """
    root = base_folder(config)
    found = () if root is None else end_tokens(root, ModelOfRun.of(config).vocab_size)
    return [end, *sorted({*found} - {end})]


def base_folder(config: TrainLmConfig) -> Path | None:
    """The folder of the weights that training began with; None where there was none, or it is gone."""
    if config.initialize_from_hf is not None:
        with contextlib.suppress(FileNotFoundError, WeightsError):
            return model_folder(config.initialize_from_hf, weights=False)
    return None


def run_config(run_dir: Path, step: int | None = None) -> TrainLmConfig:
    """The config of the run that wrote a checkpoint; the latest if no step is given.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ConfigError: what the checkpoint says of its run is no config of `models.train_lm`.
    """
    folder = run_dir / "checkpoints"
    try:
        saved = checkpoint_config(folder, step=step)
        if not isinstance(saved, dict) or saved.get("vocab_size") is None:
            raise ValueError("it is not that of a run, which has a vocab_size")
        return draccus.decode(TrainLmConfig, saved)
    except USER_ERRORS:
        raise
    except Exception as error:  # draccus and Orbax pass on whatever they meet
        raise ConfigError(
            f"The config in the checkpoint {folder} can't be used: {error}. It is damaged, or of another "
            f"version: choose another with --step, or train again."
        ) from error


def main(arguments: Sequence[str], console: Console | None = None) -> int:
    """The command: returns the exit status, after one message for anything that the user can mend."""
    console = lasting_console() if console is None else console
    parser = argparse.ArgumentParser(
        prog="python -m models.export_hf", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--run_dir", type=Path, required=True, help="the run folder")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--step", type=int, help="of the checkpoint; the latest if not given")
    parser.add_argument("--adapters", action="store_true", help="the adapters alone, for PEFT")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def show(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    def run(arguments: Sequence[str], _: StopSignals) -> int:
        options = parser.parse_args(arguments)
        export(options.run_dir, options.out, step=options.step, adapters=options.adapters)
        show(printable(f"wrote {options.out}"))
        return 0

    return run_command(run, arguments, show)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
