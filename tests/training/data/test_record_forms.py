"""Tests of stacked_remat/training/data/record_forms.py."""

import dataclasses
import json

import pyarrow
import pyarrow.parquet
import pytest

from stacked_remat.training import SourceConfig
from stacked_remat.training.data.files import find_files
from stacked_remat.training.data.record_forms import (
    Completion,
    MalformedRecord,
    document_of,
)
from stacked_remat.training.data.records import read_records

HOW = SourceConfig(("-",))


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


CHAT = [user("hi"), assistant("ho")]
SYSTEM = {"role": "system", "content": "be brief"}
TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]


@pytest.mark.parametrize(
    ("fields", "content", "unread"),
    [
        ({"prompt": "2+2=", "completion": "4"}, Completion("2+2=", "4"), ()),
        ({"prompt": CHAT[:1], "completion": CHAT[1:], "id": 1}, CHAT, ("id",)),
        ({"conversations": TURNS}, CHAT, ()),
        ({"conversations": CHAT, "system": "be brief"}, [SYSTEM, *CHAT], ()),
        ({"conversations": TURNS, "system": "", "tools": []}, CHAT, ()),
        (
            {"conversations": [{"from": "system", "value": "be brief"}, *TURNS]},
            [SYSTEM, *CHAT],
            (),
        ),
        (
            {"conversations": [{**TURNS[0], "weight": 0}, TURNS[1]]},
            [{**CHAT[0], "weight": 0}, CHAT[1]],
            (),
        ),
        ({"instruction": "hi", "input": "", "output": "ho"}, CHAT, ()),
        (
            {"instruction": "add", "input": "1 2", "output": "3", "topic": "sums"},
            [user("add\n1 2"), assistant("3")],
            ("topic",),
        ),
        (
            {
                "instruction": "add",
                "input": None,
                "output": "3",
                "system": "be brief",
                "history": [["hi", "ho"]],
            },
            [SYSTEM, *CHAT, user("add"), assistant("3")],
            (),
        ),
        ({"text": "one", "prompt": "a", "completion": "b"}, "one", ...),
        ({"messages": CHAT, "conversations": TURNS}, CHAT, ("conversations",)),
    ],
)
def test_a_record_is_known_by_its_keys(fields, content, unread):
    document = document_of(fields, HOW)
    assert document.content == content
    assert document.unread == (("prompt", "completion") if unread is ... else unread)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"prompt": "a", "completion": 3}, "has int, not text, in 'completion'"),
        ({"prompt": "a", "completion": CHAT}, "has list, not text, in 'completion'"),
        ({"prompt": [{}], "completion": CHAT}, "no chat in 'prompt': message 0 lacks"),
        ({"prompt": "a"}, "neither 'text' nor 'messages', but 'prompt': name its key"),
        ({"prompt": "a", "chosen": "b"}, "or write prompt and completion; conversati"),
        ({"conversations": "a"}, "has no chat in 'conversations': expected a list"),
        (
            {"conversations": [{"from": "god", "value": "a"}]},
            "has a turn from 'god' in 'conversations'; known are system, human, ",
        ),
        ({"conversations": [{"from": "gpt"}]}, "message 0 lacks its `content`"),
        ({"instruction": "a", "output": 1}, "has int, not text, in 'output'"),
        ({"instruction": "a", "output": "b", "input": 1}, "not text, in 'input'"),
        (
            {"instruction": "a", "output": "b", "history": ["a"]},
            "has no list of pairs of texts in 'history'",
        ),
    ],
)
def test_a_form_that_is_not_kept_is_named(fields, problem):
    with pytest.raises(MalformedRecord) as raised:
        document_of(fields, HOW)
    assert problem in str(raised.value)


def test_a_record_has_a_weight_under_the_key_of_its_source():
    how = dataclasses.replace(HOW, weight_key="quality")
    assert document_of({"text": "a", "weight": 3}, HOW).unread == ("weight",)
    assert document_of({"text": "a", "quality": 3}, how).weight == 3.0
    assert document_of({"text": "a", "quality": 0}, how).weight == 0.0
    missing = document_of({"text": "a", "weight": 3}, how)
    assert (missing.weight, missing.unread) == (1.0, ("weight",))
    for wrong in (-1, 1e-4, 101, float("nan"), True, "1", None):
        with pytest.raises(MalformedRecord, match="in 'quality'; a weight is 0, or a"):
            document_of({"text": "a", "quality": wrong}, how)


def read(path, how=HOW):
    (file,) = find_files([str(path)], "key")
    return list(read_records(file, how))


def test_rows_of_parquet_have_these_forms(tmp_path):
    rows = [{"conversations": TURNS, "weight": 2.0, "id": 7}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (record,) = read(
        tmp_path / "a.parquet", dataclasses.replace(HOW, weight_key="weight")
    )
    assert record.content == CHAT and record.document.weight == 2.0
    assert record.document.unread == ("id",)


def test_the_items_of_an_array_are_records(tmp_path):
    items = [{"text": "one"}, {"instruction": "hi", "output": "ho"}, 3, {"text": "x"}]
    for indent in (None, 2):
        (tmp_path / "a.json").write_text(json.dumps(items, indent=indent))
        one, two, three, four = read(tmp_path / "a.json")
        assert (one.content, two.content, four.content) == ("one", CHAT, "x")
        assert "a.json, item 3, holds int, not an object" in str(three.problem)
        assert [record.number for record in (one, two, three, four)] == [0, 1, 2, 3]
        assert one.offset < four.offset == (tmp_path / "a.json").stat().st_size
    (tmp_path / "b.json").write_bytes(b"\xef\xbb\xbf[]")
    assert read(tmp_path / "b.json") == []
