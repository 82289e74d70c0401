"""Writes what a run trained to a folder that Hugging Face's libraries load.

    python -m models.export_hf --run_dir runs/mine --out exported
    python -m models.export_hf --run_dir runs/mine --out adapters --adapters

The first writes a whole model, adapters merged, that `transformers` loads; the second the adapters alone, for
PEFT. The whole model comes with the files of the run's tokenizer and the tokens that end a text.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from models.command import escaped, local_path, run_command, shown_on
from models.decoder.decoder import Decoder
from models.hf_io.adapters import save_adapters
from models.hf_io.decoder_weights import write_decoder
from models.hf_io.pretrained import GENERATION_CONFIG
from models.hf_io.safetensors_folder import WeightsError, check_new_folder
from models.run_config import LmRunConfig
from models.trained_run import base_folder, ends_of_run, read_run_config, trained_model
from stacked_remat.lora import merge_lora
from stacked_remat.training import lasting_console, load_tokenizer, read_tokenizer_files


def export(run_dir: Path, out: Path, *, step: int | None = None, adapters: bool = False) -> None:
    """Writes the model of a run's checkpoint, or its adapters alone, to a new folder.

    Raises:
        FileNotFoundError, CheckpointMismatchError, ConfigError: as `read_run_config` and `trained_model`.
        FileExistsError: there is something in the folder.
        WeightsError: there are no adapters, the model has no such format, or the folder that training began
            with names end tokens that can't be read.
        DataError: the run's tokenizer is not where it was.

    Cost: that of `trained_model`, and the host memory of one file; adapters are merged in place.
    """
    check_new_folder(out)
    config = read_run_config(run_dir, step)
    texts, fields = ({}, {}) if adapters else generation_files(config)
    model = trained_model(run_dir, config, step=step)
    if not isinstance(model, Decoder):
        raise WeightsError(
            f"A {type(model).__name__} can't be exported: only decoders have a Hugging Face format."
        )
    if adapters:
        if config.lora is None:
            raise WeightsError(f"{run_dir} trained no adapters. Export the whole model, without --adapters.")
        save_adapters(out, model, base_model=config.initialize_from_hf)
        return
    write_decoder(out, merge_lora(model, donate=True), fields=fields, texts=texts)


def generation_files(config: LmRunConfig) -> tuple[dict[str, str], dict[str, Any]]:
    """Texts of files, and fields of `config.json`, that generation with the model needs."""
    texts, end = read_tokenizer_files(config.data.tokenizer), load_tokenizer(config.data.tokenizer).end
    ends, root = ends_of_run(config, end), base_folder(config)
    file = None if root is None else root / GENERATION_CONFIG
    if file is not None and file.is_file():
        texts[file.name] = file.read_text(encoding="utf-8")
    return texts, {"eos_token_id": end if len(ends) == 1 else ends}


def main(arguments: Sequence[str], console: Console | None = None) -> int:
    """The command: returns the exit status."""
    console = lasting_console() if console is None else console
    parser = argparse.ArgumentParser(
        prog="python -m models.export_hf", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--run_dir", type=local_path, required=True, help="the run folder")
    parser.add_argument("--out", type=local_path, required=True, help="a new folder")
    parser.add_argument("--step", type=int, help="of the checkpoint; the latest if not given")
    parser.add_argument("--adapters", action="store_true", help="the adapters alone, for PEFT")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")

    show = shown_on(console)

    def run(arguments: Sequence[str], _: object) -> int:
        options = parser.parse_args(arguments)
        export(options.run_dir, options.out, step=options.step, adapters=options.adapters)
        show(escaped(f"wrote {options.out}"))
        return 0

    return run_command(run, arguments, show)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
