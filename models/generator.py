"""Models that continue text: what a run trained, or a folder in Hugging Face's format."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from haliax import Axis

from models.export_hf import trained_model
from models.hub import model_folder
from models.lm import LanguageModel
from models.pretrained import pretrained_config, read_pretrained
from models.qwen3_moe import Qwen3MoeConfig
from models.safetensors_folder import WeightsError
from stacked_remat.lora import merge_lora
from stacked_remat.training import ConfigError, Tokenizer, cast_parameters, load_tokenizer

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Generator:
    """A model that continues text.

    Attributes:
        model: its weights in the dtype in which it computes.
        tokenizer: its tokens.
        ends: tokens that end a text, the tokenizer's own among them.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    ends: frozenset[int]

    def __post_init__(self) -> None:
        tokens, rows = self.tokenizer.vocab_size, self.model.Vocab.size
        if tokens > rows:
            raise ConfigError(
                f"The tokenizer has {tokens} tokens, and the model's embedding {rows} rows. Name the model's "
                f"own with --tokenizer."
            )


def generator_of_run(run_dir: Path, *, step: int | None = None, tokenizer: str | None = None) -> Generator:
    """What a run trained, adapters merged as `models.export_hf` merges them.

    Args:
        run_dir: the run folder.
        step: of the checkpoint; the latest if not given.
        tokenizer: another than the run's config names.

    Raises:
        FileNotFoundError: there is no such run or checkpoint.
        CheckpointMismatchError: it is of another model than its config says.
        DataError, ConfigError: there is no such tokenizer, or it is not the model's.
    """
    if not (run_dir / "checkpoints").is_dir():
        hint = " It is a model in Hugging Face's format: use --model." if _is_model(run_dir) else ""
        raise FileNotFoundError(
            f"{run_dir} is no run folder: it has no checkpoints/ in it. Name the one that models.train_lm "
            f"wrote to (trainer.run_dir).{hint}"
        )
    model, config = trained_model(run_dir, step=step)
    found = load_tokenizer(config.data.tokenizer if tokenizer is None else tokenizer)
    model = cast_parameters(merge_lora(model, donate=True), config.model.compute_dtype)
    return Generator(model, found, frozenset({found.end}))


def generator_of_folder(name: str, *, dtype: Dtype | None = None, tokenizer: str | None = None) -> Generator:
    """A model in Hugging Face's format.

    Args:
        name: a folder, or a name on the Hub.
        dtype: in which to compute; the one that the folder's `config.json` names if not given.
        tokenizer: another than the folder's.

    Raises:
        FileNotFoundError: there is no such folder, or weights are missing.
        WeightsError: they are not of a model that is known here.
        DataError, ConfigError: there is no such tokenizer, or it is not the model's.
    """
    root = model_folder(name)
    if not _is_model(root) and (root / "checkpoints").is_dir():
        raise FileNotFoundError(f"{root} has no config.json: it is a run folder. Use --checkpoint {root}.")
    if tokenizer is None and not (root / "tokenizer.json").is_file():
        raise FileNotFoundError(
            f"There is no tokenizer.json in {root}. Name a tokenizer with --tokenizer: a folder, a file, a "
            f"name on the Hugging Face Hub, or byte for UTF-8 bytes."
        )
    found = load_tokenizer(str(root) if tokenizer is None else tokenizer)
    dtype = _saved_dtype(root) if dtype is None else dtype
    config, rows = pretrained_config(Qwen3MoeConfig(compute_dtype=dtype), root)
    model = read_pretrained(config, root, Axis("vocab", rows), remat=False, dtype=dtype)
    return Generator(model, found, frozenset({found.end}) | _generation_ends(root))


def _is_model(root: Path) -> bool:
    return (root / "config.json").is_file()


def _saved_dtype(root: Path) -> Dtype:
    fields = _fields(root / "config.json")
    return "bfloat16" if "bfloat16" in (fields.get("dtype"), fields.get("torch_dtype")) else "float32"


def _generation_ends(root: Path) -> frozenset[int]:
    """The end tokens of `generation_config.json`, of which a chat model has several."""
    ends = _fields(root / "generation_config.json").get("eos_token_id")
    return frozenset(ends if isinstance(ends, list) else () if ends is None else (ends,))


def _fields(path: Path) -> dict[str, Any]:
    """What a file of JSON says; nothing where there is none.

    Raises:
        WeightsError: it is no JSON, or not of fields.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise WeightsError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise WeightsError(f"{path} is no mapping of fields, but {type(fields).__name__}.")
    return fields
