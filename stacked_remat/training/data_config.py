"""What to train on and how it is cut, as the `data` section of a config file says it."""

from dataclasses import dataclass, field
from typing import Literal

from .config_value import check_folder

_LONGEST = 2**31 - 1


@dataclass(frozen=True)
class SourceConfig:
    """Files of one kind, and their share of the mixture.

    Attributes:
        paths: files, globs, or folders read with all that is below them; local, or URLs of any file system
            that fsspec knows (`s3://`, `gs://`, `hf://`, `https://`). Compressed files (`.gz`, `.bz2`, `.xz`)
            are read as what they hold.
        held_out: files to evaluate on, written like `paths`; where there are none, a part of `paths` is held
            out, as `data.held_out_fraction` says.
        format: `text` is a document a file, `jsonl` an object a line, `parquet` a document a row; `auto` goes
            by the ending of each file's name.
        text_key: key, or column, of a document's text.
        messages_key: key, or column, of a chat: a list of messages with `role` and `content`, written out
            with the tokenizer's chat template. Read where there is no text.
        train_on: of chats, whether all tokens are targets (`all`) or those of the assistant's turns alone
            (`answers`); other documents are always trained on whole.
        weight: share of the training sequences that come from here, relative to the other sources' weights.
    """

    paths: tuple[str, ...]
    held_out: tuple[str, ...] = ()
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    text_key: str = "text"
    messages_key: str = "messages"
    train_on: Literal["all", "answers"] = "all"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.paths or not all(self.paths):
            raise ValueError(
                f"A data source needs paths: files, globs, folders or URLs; got {list(self.paths)}. Write "
                f"data.sources.NAME.paths: [my-texts/]."
            )
        if not 0 < self.weight < float("inf"):
            raise ValueError(
                f"The weight of a data source is positive and finite, got {self.weight}. To leave a source "
                f"out, delete it from data.sources."
            )


@dataclass(frozen=True)
class DataConfig:
    """What text to train on, and how it is cut.

    Attributes:
        sources: where the text is, each under a name of your own; the Python standard library of the running
            interpreter if there are none, so that nothing need be downloaded.
        tokenizer: `byte` for UTF-8 bytes; or a Hugging Face tokenizer: a folder, a `tokenizer.json`, or a
            name on the hub such as `owner/name` or `owner/name@revision`.
        cache_dir: local folder for the tokens, so that text is tokenized once.
        held_out_fraction: share of the documents, chosen by their names, that is never trained on; of sources
            that have no `held_out` files of their own. What one source holds out, no other trains on.
        seq_len: tokens in a sequence.
        batch_size: sequences in a step, over all processes.
        packing: `split` cuts the documents, one after the other, into sequences without a gap; `whole` cuts
            only documents longer than a sequence, fits the others in and pads what is left.
        separate_documents: whether a document sees no other in its sequence. If false, sequences are like one
            document each, which kernels that know no boundaries between documents can serve.
        on_malformed: whether a record that can't be read ends the run (`error`) or is counted (`skip`).
        max_record_bytes: bytes of a text, a line or a row, decompressed, above which it is a record that
            can't be read; such a record is never read whole into memory.
        prefetch: batches that are made in advance, in a thread; 0 for none.
    """

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    tokenizer: str = "byte"
    cache_dir: str = "runs/token-cache"
    held_out_fraction: float = 0.05
    seq_len: int = 256
    batch_size: int = 16
    packing: Literal["split", "whole"] = "split"
    separate_documents: bool = True
    on_malformed: Literal["error", "skip"] = "error"
    max_record_bytes: int = 2**28
    prefetch: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(
                f"data.held_out_fraction must lie between 0 and 1, got {self.held_out_fraction}; 0.05 holds "
                f"out about one document in twenty."
            )
        for name, lowest in {"seq_len": 1, "batch_size": 1, "max_record_bytes": 1, "prefetch": 0}.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"data.{name} must be at least {lowest}, got {getattr(self, name)}.")
        if self.seq_len > _LONGEST:
            raise ValueError(
                f"data.seq_len must be at most {_LONGEST:,}, because positions are 32-bit integers; got "
                f"{self.seq_len:,}."
            )
        check_folder("data.cache_dir", self.cache_dir)
        for name in self.sources:
            if not name or not all(letter.isalnum() or letter in "-_" for letter in name):
                raise ValueError(
                    f"data.sources: the name {name!r} of a source has to be made of letters, digits, `-` and "
                    f"`_`; it becomes part of a folder's name."
                )
