"""The names of sequences, by the files and lines of their documents."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stacked_remat.training import (
    BatchStream,
    PackedDocuments,
    ProcessShare,
    TokenizedDocuments,
)

from .caches import TOKENIZER, build, write_parts


def text_of(documents, at):
    return TOKENIZER.decode(documents.tokens(at, 0, int(documents.lengths[at])))


def write(folder):
    """Lines, of which one is blank and one has no text; an array; a text."""
    folder.mkdir()
    lines = [
        json.dumps({"text": f"a {line} " + "x" * (line * 3)}) for line in range(1, 8)
    ]
    lines[2], lines[4] = "", json.dumps({"text": ""})
    (folder / "a.jsonl").write_text("\n".join(lines))
    items = [{"text": f"b {item} item"} for item in range(1, 4)]
    (folder / "b.json").write_text(json.dumps(items))
    (folder / "c.txt").write_text("c 1 text")
    return {"a": "a.jsonl", "b": "b.json", "c": "c.txt"}


@pytest.mark.parametrize("processes", [1, 2])
def test_every_document_has_the_line_that_it_came_from(tmp_path, processes):
    names = write(tmp_path / "texts")
    documents = build(
        tmp_path / "texts", tmp_path / "cache", processes=processes
    ).documents
    found = []
    for document in range(len(documents)):
        text = TOKENIZER.decode(documents.tokens(document, 0, 8))
        name, line = re.match(r"(\w) (\d)", text).groups()
        assert documents.place(document) == (
            f"{tmp_path}/texts/{names[name]}",
            int(line),
        )
        found.append(line)
    assert found == [*"12467", *"123", "1"]


def test_places_are_those_of_several_caches_and_of_chosen_documents(
    tmp_path, monkeypatch
):
    folder = write_parts(tmp_path, monkeypatch)
    documents = build(folder, tmp_path / "cache").documents
    chosen = documents.select(documents.lengths % 2 == 0)
    assert 20 < len(chosen) < len(documents)
    for text in (documents, chosen):
        for document in range(len(text)):
            place: Any = text.place(document)
            file, record = place
            line = Path(file).read_text().splitlines()[record - 1]
            assert json.loads(line)["text"] == text_of(text, document)


@pytest.mark.parametrize("packing", ["split", "whole"])
def test_a_sequence_is_named_by_its_documents_and_their_parts(tmp_path, packing):
    write(tmp_path / "texts")
    documents = build(tmp_path / "texts", tmp_path / "cache").documents
    packed = PackedDocuments(documents, 12, packing)
    covered = {}
    for index in range(len(packed)):
        row, name = packed[index], packed.name(index)
        pieces = []
        for of_file in name.split("; "):
            file, _, records = of_file.partition(":")
            pieces += [(file, record) for record in records.split(", ")]
        assert len(pieces) == row["documents"].max()
        for number, (file, record) in enumerate(pieces, 1):
            line, *span = re.fullmatch(r"(\d+)(?:\[(\d+):(\d+)\])?", record).groups()
            own = row["documents"] == number
            tokens = [*row["tokens"][own], row["targets"][own][-1]]
            before = covered.get((file, line), [])
            # Parts meet in a token, which is the target of one and an input of the next
            covered[file, line] = before[: int(span[0] or 0)] + tokens
            assert span[1] is None or int(span[1]) - int(span[0]) == own.sum() + 1
    expected = {}
    for document in range(len(documents)):
        place: Any = documents.place(document)
        file, record = place
        length = int(documents.lengths[document])
        expected[file, str(record)] = [*documents.tokens(document, 0, length)]
    assert covered == expected


@pytest.mark.parametrize("process", [None, ProcessShare(1, 2)])
def test_a_stream_names_the_rows_of_its_batches(tmp_path, process):
    folder = tmp_path / "texts"
    folder.mkdir()
    packed = {}
    for name, count in (("a", 9), ("b", 4)):
        lines = [
            json.dumps({"text": f"{name} {line} xyz"}) for line in range(1, count + 1)
        ]
        (folder / name).mkdir()
        (folder / name / f"{name}.jsonl").write_text("\n".join(lines))
        documents = build(folder / name, tmp_path / "cache").documents
        packed[name] = PackedDocuments(documents, 16, "whole")
    stream = BatchStream(
        packed, weights={"b": 2.0}, batch_size=4, seed=1, process=process
    )
    for _ in range(6):
        batch = stream.next()
        names = stream.names(stream.get_state())
        rows = batch.tokens.array
        assert len(names) == 4
        if process is not None:
            names = names[2:]
        for name, row in zip(names, rows, strict=True):
            file, records = name.rsplit(":", 1)
            text = TOKENIZER.decode(row)
            own = re.match(r"(\w) (\d)", text).groups()
            assert (file, records[0]) == (f"{folder}/{own[0]}/{own[0]}.jsonl", own[1])


def test_documents_in_memory_have_no_names():
    packed = PackedDocuments(
        TokenizedDocuments.of([TOKENIZER.encode("some text")] * 3), 8, "split"
    )
    assert packed.name(0) == ""
