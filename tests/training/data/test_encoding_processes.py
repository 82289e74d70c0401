"""Tests of stacked_remat/training/data/encoding_processes.py."""

import json

import pytest

from stacked_remat.training import ByteTokenizer, DataError
from stacked_remat.training.data import encoding_processes

from .caches import CHAT, build, of_parts, texts, write_parts, written


@pytest.fixture
def parts(tmp_path, monkeypatch):
    return write_parts(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "options", [{}, {"train_on": "answers", "weight_key": "weight"}]
)
def test_processes_make_the_same_caches(parts, tmp_path, options):
    (parts / "12.jsonl").write_text(
        json.dumps({"messages": CHAT, "id": 1}) + '\n{"text": ""}\n{'
    )
    options |= {"on_malformed": "skip", "save_tokens": 100}
    one = build(parts, tmp_path / "one", **options)
    two = build(parts, tmp_path / "two", processes=2, **options)
    assert one.counts == two.counts
    assert (one.counts.num_malformed, [*one.counts.unread][-1:]) == (1, ["id"])
    assert one.documents.fingerprint == two.documents.fingerprint
    for own, other in zip(
        *(sorted(written(tmp_path / name)) for name in ("one", "two")), strict=True
    ):
        assert own.is_dir() or own.read_bytes() == other.read_bytes()


def test_an_error_in_a_process_is_that_of_the_record(parts, tmp_path):
    (parts / "12.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"12.jsonl:1 is not JSON .*on_malformed: skip"):
        build(parts, tmp_path / "cache", processes=2)
    (parts / "12.jsonl").write_text('{"text": "fixed"}')
    assert "fixed" in texts(build(parts, tmp_path / "cache", processes=2))


def test_a_process_that_is_killed_is_named(parts, tmp_path, monkeypatch):
    program = "import os; os.kill(os.getpid(), 9)"
    monkeypatch.setattr(encoding_processes, "_PROGRAM", program)
    with pytest.raises(DataError, match=r"has ended, with the status -9; .*to fewer"):
        build(parts, tmp_path / "cache", processes=2)
    monkeypatch.undo()
    assert len(texts(build(parts, tmp_path / "cache"))) == 640


def test_a_tokenizer_of_ones_own_encodes_in_this_process(parts, tmp_path, monkeypatch):
    """Another process can't import its class."""
    monkeypatch.setattr(ByteTokenizer, "__module__", "__main__")
    monkeypatch.setattr(encoding_processes, "_PROGRAM", "raise SystemExit")
    cached = build(parts, tmp_path / "cache", processes=2)
    assert texts(cached) == of_parts()
