"""Tests of stacked_remat/training/data/records.py."""

import bz2
import gzip
import json
import lzma
import re
from dataclasses import replace

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from stacked_remat.training import DataError, SourceConfig
from stacked_remat.training.data.files import find_files
from stacked_remat.training.data.records import read_records

PLAIN = SourceConfig(("-",))
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def read(path, how=PLAIN, start=0):
    (file,) = find_files([str(path)], "key")
    return list(read_records(file, how, start))


def contents(path, **how):
    return [record.content for record in read(path, replace(PLAIN, **how))]


def lines(path, *objects):
    path.write_text(
        "".join(
            one if isinstance(one, str) else json.dumps(one) + "\n" for one in objects
        )
    )
    return path


def test_a_text_file_is_one_document_unchanged(tmp_path):
    (tmp_path / "a.md").write_bytes("é\r\nb\n".encode())
    assert contents(tmp_path / "a.md") == ["é\r\nb\n"]
    assert read(tmp_path / "a.md", start=1) == []


def test_a_line_of_json_is_a_text_or_a_chat_under_its_key(tmp_path):
    path = lines(
        tmp_path / "a.jsonl",
        {"text": "one", "id": 3},
        "\n",
        {"messages": CHAT},
        {"text": ""},
    )
    assert contents(path) == ["one", CHAT, ""]
    assert [record.number for record in read(path)] == [0, 2, 3]
    path = lines(tmp_path / "b.jsonl", {"body": "one", "text": 1}, {"turns": CHAT})
    assert contents(path, text_key="body", messages_key="turns") == ["one", CHAT]


def test_a_row_of_parquet_is_a_text_or_a_chat(tmp_path):
    texts = [f"row {number}" for number in range(600)]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts, "n": range(600)}),
        tmp_path / "a.parquet",
        row_group_size=250,
    )
    assert contents(tmp_path / "a.parquet") == texts
    pyarrow.parquet.write_table(pyarrow.table({"turns": [CHAT]}), tmp_path / "b.pq")
    assert contents(tmp_path / "b.pq", messages_key="turns") == [CHAT]


@pytest.mark.parametrize("start", [0, 257, 599, 600])
def test_reading_starts_at_any_record(tmp_path, start):
    texts = [f"row {number}" for number in range(600)]
    path = lines(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=300
    )
    for file in (path, tmp_path / "a.parquet"):
        found = read(file, start=start)
        assert [record.content for record in found] == texts[start:]
        assert [record.number for record in found] == list(range(start, 600))


@pytest.mark.parametrize(
    ("ending", "codec"), [(".gz", gzip), (".bz2", bz2), (".xz", lzma)]
)
def test_compressed_files_are_decompressed(tmp_path, ending, codec):
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(codec.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    assert contents(path) == ["one", "two"]
    assert 0 < read(path)[-1].offset <= path.stat().st_size
    (tmp_path / f"b.txt{ending}").write_bytes(codec.compress(b"plain"))
    assert contents(tmp_path / f"b.txt{ending}") == ["plain"]


def test_a_url_is_read_like_a_file(tmp_path):
    filesystem, table = fsspec.filesystem("memory"), pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["far"]}), table)
    filesystem.pipe("/far/a.jsonl", b'{"text": "away"}')
    filesystem.pipe(
        {
            "/far/b.parquet": table.getvalue().to_pybytes(),
            "/far/c.txt.gz": gzip.compress(b"off"),
        }
    )
    found = [
        record.content for name in "abc" for record in read(f"memory://far/{name}.*")
    ]
    assert found == ["away", "far", "off"]
    (tmp_path / "x.txt").write_text("y")
    assert contents((tmp_path / "x.txt").as_uri()) == ["y"]
    filesystem.rm("/far", recursive=True)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": ', r"a.jsonl:2 is not JSON \(Expecting value"),
        ('{"text": "a", "text": "b"}', r"a.jsonl:2 has the key 'text' twice in one"),
        ("[" * 200_000, r"a.jsonl:2 is JSON that is nested too deeply"),
        (
            "[1]",
            r"a.jsonl:2 holds list, not an object with keys: write one object a line",
        ),
        ('{"txt": "a"}', r"a.jsonl:2 has neither 'text' nor 'messages', but 'txt'"),
        ('{"text": null}', r"a.jsonl:2 has null in 'text'"),
        ('{"text": 3}', r"a.jsonl:2 has int, not text, in 'text'"),
        ('{"messages": []}', r"a.jsonl:2 has no chat in 'messages': expected a list"),
        (
            '{"messages": [{"content": "x"}]}',
            r"a.jsonl:2 has no chat.*: message 0 lacks a `role`",
        ),
        (
            '{"messages": [{"from": "human", "value": "x"}]}',
            r"lacks a `role`. Turns with `from` and `value` are under `conversations`",
        ),
        (
            '{"messages": [{"role": "user"}]}',
            r"a.jsonl:2 has no chat.*: message 0 lacks its `content`",
        ),
    ],
)
def test_a_malformed_line_is_named_and_the_others_are_read(tmp_path, line, problem):
    path = lines(tmp_path / "a.jsonl", {"text": "one"}, line + "\n", {"text": "three"})
    one, two, three = read(path)
    assert (one.content, three.content, two.content) == ("one", "three", None)
    assert re.search(problem, str(two.problem)) and two.problem.startswith(
        str(tmp_path)
    )


def test_invalid_utf8_is_named_with_its_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthr\xffee")
    assert "a.txt:3 is not UTF-8" in str(read(tmp_path / "a.txt")[0].problem)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert "a.jsonl:2 is not UTF-8" in str(read(tmp_path / "a.jsonl")[1].problem)


def test_the_format_can_be_given(tmp_path):
    path = lines(tmp_path / "a.log", {"text": "one"})
    assert (
        contents(path, format="jsonl")
        == ["one"]
        == contents(path.rename(tmp_path / "a.json"))
    )
    path = lines(tmp_path / "a.log", {"text": "one"})
    assert contents(path) == ['{"text": "one"}\n']


def test_unreadable_files_are_refused(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(DataError, match=r"a.parquet is not a Parquet file"):
        read(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(
        pyarrow.table({"body": ["a"], "n": [1]}), tmp_path / "b.parquet"
    )
    with pytest.raises(
        DataError,
        match=r"neither a column 'text' nor 'messages'; it has body, n.*text_key",
    ):
        read(tmp_path / "b.parquet")
    (tmp_path / "c.txt.gz").write_bytes(b"not compressed")
    with pytest.raises(DataError, match=r"Can't read .*c.txt.gz: .*gzip"):
        read(tmp_path / "c.txt.gz")
    for codec, ending in ((gzip, "gz"), (lzma, "xz"), (bz2, "bz2")):
        packed = bytearray(codec.compress(bytes(range(256)) * 40))
        packed[len(packed) // 2] ^= 0xFF
        (tmp_path / f"broken.txt.{ending}").write_bytes(packed)
        with pytest.raises(DataError, match=f"Can't read .*broken.txt.{ending}"):
            read(tmp_path / f"broken.txt.{ending}")
    for broken in ('[{"text": "a"}', "[" * 200_000, "[1] 2"):
        (tmp_path / "e.json").write_text(broken)
        with pytest.raises(DataError, match=r"e.json begins with `\[` and is no array"):
            read(tmp_path / "e.json")
    (tmp_path / "f.json").write_text(
        '[{"text": "a"}, {"text": "b", "x": {"y": 1, "y": 2}}]'
    )
    good, bad = read(tmp_path / "f.json")
    assert good.content == "a"
    assert "f.json, item 2, has the key 'y' twice in one object" in str(bad.problem)
    (tmp_path / "d.jsonl.zst").write_bytes(b"x")
    with pytest.raises(DataError, match=r"d.jsonl.zst is compressed with zstd"):
        read(tmp_path / "d.jsonl.zst")


def test_invalid_rows_of_parquet_are_problems(tmp_path):
    raw = pyarrow.array([b"good", b"\xff\xfe", b"fine"], pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    found = read(tmp_path / "a.parquet")
    assert [record.content for record in found] == ["good", None, "fine"]
    assert "a.parquet:2 is not UTF-8" in str(found[1].problem)


def test_damaged_parquet_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"text": [f"row {n}" * 9 for n in range(999)]}), path
    )
    written = path.read_bytes()
    path.write_bytes(written[:99] + b"\xff" * 999 + written[1098:])
    with pytest.raises(DataError, match="a.parquet"):
        read(path)


TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"a": {"type": "int"}}},
    }
]


def documents(path, **how):
    return [record.document for record in read(path, replace(PLAIN, **how))]


def test_a_chat_has_variables_and_other_keys_are_named(tmp_path):
    path = lines(
        tmp_path / "a.jsonl",
        {"id": 1, "text": "one", "tools": TOOLS, "note": None},
        {
            "messages": CHAT,
            "tools": TOOLS,
            "chat_template_kwargs": {"think": False},
            "score": 0.5,
            "text": None,
        },
        {
            "messages": CHAT,
            "tools": json.dumps(TOOLS),
            "documents": [{"title": "t"}],
            "id": None,
        },
    )
    text, with_tools, from_json = documents(path)
    assert (text.variables, text.unread) == ({}, ("id", "tools"))
    assert with_tools.variables == {
        "tools": TOOLS,
        "think": False,
    } and with_tools.unread == ("score",)
    assert (
        from_json.variables == {"tools": TOOLS, "documents": [{"title": "t"}]}
        and from_json.unread == ()
    )


def test_what_a_row_of_parquet_lacks_is_no_null_of_the_chat(tmp_path):
    calls = [
        {"function": {"name": "g", "arguments": {"a": 1}}},
        {"function": {"name": "h", "arguments": {"b": "2"}}},
    ]
    chat = [*CHAT, {"role": "assistant", "tool_calls": calls}]
    table = pyarrow.table(
        {"messages": [chat], "tools": [TOOLS], "when": [7], "documents": [None]}
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (found,) = documents(tmp_path / "a.parquet")
    assert (
        found.content == chat
        and found.variables == {"tools": TOOLS}
        and found.unread == ("when",)
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tools": {"name": "f"}}, "has no list of objects in 'tools'"),
        ({"tools": "[f"}, r"has a text in 'tools' that is not JSON"),
        ({"documents": ["d"]}, "has no list of objects in 'documents'"),
        ({"chat_template_kwargs": [1]}, "has no object in 'chat_template_kwargs'"),
        (
            {"chat_template_kwargs": {"messages": []}},
            "has 'messages' in 'chat_template_kwargs'",
        ),
        (
            {"tools": TOOLS, "chat_template_kwargs": {"tools": []}},
            "has 'tools' in 'chat_template_kwargs'",
        ),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "message 0 has int, not text, as `content`",
        ),
        (
            {"messages": [{"role": "user", "content": True}]},
            "message 0 has bool, not text, as `content`",
        ),
        (
            {"messages": [{"role": "user", "content": None}]},
            "message 0 lacks its `content`",
        ),
    ]
    + [
        (
            {"messages": [*CHAT, {"role": "user", "content": ["a", part]}]},
            rf"message 2 has a part .*{name}",
        )
        for part, name in [
            ({"type": "image_url", "image_url": {"url": "x"}}, "'image_url'"),
            ({"type": "input_audio", "text": "x"}, "'input_audio'"),
            ({"image": "x"}, "'text'"),
            (None, "'text'"),
        ]
    ],
)
def test_a_chat_that_is_no_text_is_malformed(tmp_path, changes, problem):
    (record,) = read(lines(tmp_path / "a.jsonl", {"messages": CHAT} | changes))
    assert record.document is None and re.search(
        rf"a.jsonl:1 .*{problem}", str(record.problem)
    )
