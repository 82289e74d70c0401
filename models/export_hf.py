"""Writes a model to a folder that Hugging Face's libraries load, and to its Hub.

    python -m models.export_hf --run_dir runs/mine --out exported
    python -m models.export_hf --run_dir runs/mine --out adapters --adapters
        --push_to_hub me/adapters

The first writes a whole model, adapters merged, that `transformers` loads; the second
the adapters alone, for PEFT. The whole model comes with the files of its tokenizer and
the tokens that end a text. Both have a model card, with the base, the data, the config
and the losses of the run.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from models.command import command_parser, escaped, local_path, run_command, shown_on
from models.hf_io.adapters import save_adapters
from models.hf_io.decoder_weights import write_decoder
from models.hf_io.formats import GENERATION_CONFIG
from models.hf_io.hub import ADAPTER_CONFIG, REPOSITORY, push_folder
from models.hf_io.safetensors_folder import WeightsError, check_new_folder, read_json
from models.loading import add_model_arguments, model_of_arguments
from models.run_config import FoundModel
from models.run_state import Placement
from stacked_remat.lora import merge_lora
from stacked_remat.training import ConfigError, config_as_dict, read_tokenizer_files
from stacked_remat.training.config_sections import config_yaml
from stacked_remat.training.errors import without_credentials
from stacked_remat.training.progress import lasting_console


def export(
    found: FoundModel, out: Path, *, adapters: bool = False, public: bool = False
) -> None:
    """Writes a model, or its adapters alone, to a new folder, with a model card.

    Adapters name their base, unless that is a folder here and they are for the public.

    Cost: that of reading it, and the host memory of one file; adapters are merged in
    place.
    """
    if adapters and not found.has_adapters:
        raise WeightsError(
            "There are no adapters. Export the whole model, without --adapters."
        )
    texts, fields = ({}, {}) if adapters else generation_files(found)
    model = Placement.of(found.run).read_model(found, found.config.compute_dtype)
    card = model_card(found, out.name, "adapter" if adapters else "finetune")
    if adapters:
        # A path of this machine says nothing to others, and may say too much.
        hidden = public and _is_local(found.base_name or "")
        save_adapters(out, model, base_model=None if hidden else found.base_name)
        (out / "README.md").write_text(card, encoding="utf-8")
    else:
        write_decoder(
            out,
            merge_lora(model, donate=True),
            fields=fields,
            texts={**texts, "README.md": card},
        )


def generation_files(found: FoundModel) -> tuple[dict[str, str], dict[str, Any]]:
    """Texts of files, and fields of `config.json`, that generation with the model
    needs.
    """
    texts = read_tokenizer_files(found.tokenizer_name)
    root = found.published
    if root is not None and (file := root / GENERATION_CONFIG).is_file():
        texts[file.name] = file.read_text(encoding="utf-8")
    return texts, {
        "eos_token_id": found.ends[0] if len(found.ends) == 1 else [*found.ends]
    }


def model_card(found: FoundModel, title: str, relation: str) -> str:
    """The text of a `README.md`: the base, the data, the config and the losses."""
    fields: dict[str, Any] = {
        "pipeline_tag": "text-generation",
        "tags": ["stacked_remat"],
    }
    # The Hub shows how to load the model by it.
    fields["library_name"] = "peft" if relation == "adapter" else "transformers"
    base = found.base_name or "none, from random weights"
    if found.base_name is not None and _is_local(found.base_name):
        base = f"a local folder, {Path(found.base_name).name}"
    elif found.base_name is not None:
        fields |= {
            "base_model": found.base_name.partition("@")[0],
            "base_model_relation": relation,
        }
    lines = [
        "---",
        yaml.safe_dump(fields).rstrip(),
        "---",
        f"# {title}",
        "",
        f"- base: {base}",
    ]
    tokenizer = found.tokenizer_name or "none"
    if tokenizer != "byte" and _is_local(tokenizer):
        tokenizer = f"a local one, {Path(tokenizer).name}"
    lines += [f"- tokenizer: {tokenizer}"]
    run = found.run
    result = found.root / "result.json"
    if run is None:
        return "\n".join([*lines, ""])
    config = config_as_dict(run)
    # Paths of this machine are of no use in a card.
    local = [("trainer", "run_dir"), ("data", "cache_dir"), ("data", "sources")]
    for section, key in (
        [*local, ("data", "tokenizer")] if _is_local(run.tokenizer_name) else local
    ):
        config.get(section, {}).pop(key, None)
    if base != found.base_name:
        config.pop("initialize_from_hf", None)
    lines += [f"- data: {', '.join(run.data.sources) or 'the default text'}"]
    # The losses are of the end of the run, not of an earlier checkpoint.
    if found.step is None and result.is_file():
        lines += [
            f"- {name}: {json.dumps(value)}"
            for name, value in read_json(result).items()
        ]
    lines += ["", "Trained with stacked_remat by this config:", "", "```yaml"]
    return without_credentials("\n".join([*lines, config_yaml(config) + "```", ""]))


def _is_local(name: str) -> bool:
    return not REPOSITORY.fullmatch(name.partition("@")[0]) or Path(name).exists()


def main(arguments: Sequence[str], console: Console | None = None) -> int:
    """The command: returns the exit status."""
    show = shown_on(lasting_console() if console is None else console)
    parser = command_parser("export_hf", __doc__)
    add_model_arguments(parser)
    parser.add_argument("--out", type=local_path, required=True, help="a new folder")
    parser.add_argument(
        "--adapters", action="store_true", help="the adapters alone, for PEFT"
    )
    parser.add_argument(
        "--push_to_hub", metavar="OWNER/NAME", help="also to this repository on the Hub"
    )
    parser.add_argument(
        "--private", action="store_true", help="the repository, if it is new"
    )

    def run(arguments: Sequence[str], _: object) -> int:
        options = parser.parse_args(arguments)
        if options.private and options.push_to_hub is None:
            raise ConfigError("--private has no effect without --push_to_hub.")
        name = options.push_to_hub
        if name is not None and (
            not REPOSITORY.fullmatch(name) or "--" in name or ".." in name
        ):
            raise ConfigError(f"--push_to_hub {name!r} is no OWNER/NAME of the Hub.")
        # Before the model is read, which takes minutes
        check_new_folder(options.out)
        found = model_of_arguments(options)
        export(found, options.out, adapters=options.adapters, public=name is not None)
        show(
            escaped(
                f"wrote {options.out}, whose tokenizer is"
                f" {found.tokenizer_name or found.root}"
            )
        )
        if options.adapters and found.base is not None and found.base.run is not None:
            show(
                escaped(
                    f"for PEFT, export {found.base.name} too, and name that folder in"
                    f" {ADAPTER_CONFIG}"
                )
            )
        if name is not None:
            show(
                escaped(
                    f"pushed {push_folder(options.out, name, private=options.private)}"
                )
            )
        return 0

    return run_command(run, arguments, show)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
