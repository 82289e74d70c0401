"""The `data` section of a config: sources of text, tokenizer, and the shape of
batches.
"""

from dataclasses import dataclass, field
from typing import Literal

from .config_checks import Count, Share, check_date, check_fields, check_folder
from .config_sections import Natural

RESERVED_VARIABLES = ("messages", "add_generation_prompt")
"""Variables of chat templates that no `chat_template_kwargs` may have."""


@dataclass(frozen=True)
class SourceConfig:
    """Files of one format, and their share of the mixture.

    Attributes:
        paths: files, globs, or folders with all files below them but hidden ones;
            local, or URLs of any file system that fsspec knows (`s3://`, `gs://`,
            `hf://`, `https://`), whose package has to be installed (`s3fs`, `gcsfs`).
            Compressed files (`.gz`, `.bz2`, `.xz`) are decompressed.
        held_out: files to evaluate on, written like `paths`; without them,
            `data.held_out_fraction` of `paths` is held out.
        format: `text` is one document per file, `jsonl` one object per line or an array
            of them, `parquet` one document per row; `auto` goes by the ending of each
            file's name: `.jsonl`, `.ndjson`, `.json`, `.parquet`, `.pq`, and text
            otherwise.
        text_key: key, or column, of a document's text.
        messages_key: key, or column, of a chat: a list of messages with `role` and
            `content`, formatted with the tokenizer's chat template. Used for records
            without text. Beside it, `tools`, `documents` and `chat_template_kwargs` are
            variables of the template, for that chat. Records with neither may have
            `prompt` and `completion`, `conversations` (ShareGPT), or `instruction` and
            `output` (Alpaca).
        weight_key: key, or column, of a number from 0.01 to 100 that multiplies the
            weight of a record's tokens in the loss; 0 leaves the record out, and one
            without the key has 1. Null for records that all count the same.
        train_on: in chats, whether all tokens are targets (`all`) or only those of the
            assistant's turns (`answers`), and of a prompt with its completion those of
            the completion; in other documents all tokens are.
        chat_template_kwargs: variables of the chat template, such as `{enable_thinking:
            false}`; a record's own `chat_template_kwargs` come first.
        weight: share of the training sequences that come from this source, relative to
            the other weights.
    """

    paths: tuple[str, ...]
    held_out: tuple[str, ...] = ()
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    text_key: str = "text"
    messages_key: str = "messages"
    weight_key: str | None = None
    train_on: Literal["all", "answers"] = "all"
    chat_template_kwargs: dict[str, Natural] = field(default_factory=dict)
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.paths or not all(self.paths):
            raise ValueError(
                "A data source needs paths: files, globs, folders or URLs; got"
                f" {list(self.paths)}. Write data.sources.NAME.paths: [my-texts/]."
            )
        if taken := [
            name for name in self.chat_template_kwargs if name in RESERVED_VARIABLES
        ]:
            raise ValueError(
                f"chat_template_kwargs has {taken[0]!r}, which no variable may be"
                " called."
            )
        if not 0 < self.weight < float("inf"):
            raise ValueError(
                "The weight of a data source is positive and finite, got"
                f" {self.weight}. To leave a source out, delete it from data.sources."
            )


@dataclass(frozen=True)
class DataConfig:
    """The text to train on, and the shape of batches.

    Attributes:
        sources: where the text is, each under a name of your own; without any, the
            source code of the running interpreter's standard library, so that nothing
            needs to be downloaded.
        tokenizer: `byte` for UTF-8 bytes; or a Hugging Face tokenizer: a folder, a
            `tokenizer.json`, or a name on the hub such as `owner/name` or
            `owner/name@revision`. If null, that of the model that a run begins with, or
            `byte` for a new model.
        chat_date: the day that the tokenizer's chat template takes for today, such as
            2025-06-30, where it writes one (`strftime_now`, as gpt-oss' does); so runs
            repeat. Null for other templates.
        cache_dir: local folder for the tokens, so that text is tokenized once.
        tokenizing_processes: processes that tokenize at the same time; null for one on
            each core where that is worth it, for 32 MiB of text.
        held_out_fraction: share of the documents, chosen by a hash of their text, that
            is held out from each source without `held_out` files; 0 for none. A text
            held out by one source is never trained on.
        seq_len: tokens in a sequence.
        batch_size: sequences in a step, over all processes.
        packing: `split` joins the documents and cuts them into sequences without
            padding; `whole` cuts only documents longer than a sequence, fits the others
            in and pads the rest.
        separate_documents: whether tokens attend only within their document. If false,
            each sequence is treated as one document, as kernels without document
            boundaries need it.
        on_malformed: whether a record that can't be read ends the run (`error`) or is
            counted (`skip`).
    """

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    tokenizer: str | None = None
    chat_date: str | None = None
    cache_dir: str = "runs/token-cache"
    tokenizing_processes: Count | None = None
    held_out_fraction: Share = 0.05
    seq_len: Count = 256
    batch_size: Count = 16
    packing: Literal["split", "whole"] = "split"
    separate_documents: bool = True
    on_malformed: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        check_fields("data.", self)
        for name in self.sources:
            if not name.strip(" .") or not name.isprintable() or len(name) > 100:
                raise ValueError(
                    f"data.sources has the name {name!r}; write 1 to 100 printable"
                    " letters."
                )
        check_folder("data.cache_dir", self.cache_dir)
        check_date("data.chat_date", self.chat_date)
