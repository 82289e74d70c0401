"""Tests of stacked_remat/training/data/tokenizer_files.py."""

import json

import huggingface_hub
import pytest

from stacked_remat.training import (
    ByteTokenizer,
    DataError,
    load_tokenizer,
    read_tokenizer_files,
)

from .word_tokenizer import save


def test_byte_is_built_in():
    assert isinstance(load_tokenizer("byte"), ByteTokenizer)


def test_a_folder_and_a_file_in_it_are_the_same_tokenizer(tmp_path):
    folder = save(tmp_path / "words")
    by_folder, by_file = (
        load_tokenizer(str(folder)),
        load_tokenizer(str(folder / "tokenizer.json")),
    )
    assert by_folder.fingerprint == by_file.fingerprint
    assert by_folder.decode(by_folder.encode("never")) == "never"
    (folder / "tokenizer.json").rename(tmp_path / "words.json")
    alone = load_tokenizer(str(tmp_path / "words.json"))
    assert alone.end == by_folder.end and alone.fingerprint != by_folder.fingerprint


def test_a_template_in_a_file_of_its_own_or_in_a_list_is_found(tmp_path):
    folder = save(tmp_path, template=None)
    (folder / "chat_template.jinja").write_text("own file")
    assert load_tokenizer(str(folder)).chat_template.render([]) == "own file"
    (folder / "chat_template.jinja").unlink()
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "by default"},
    ]
    save(tmp_path, template=named)
    assert load_tokenizer(str(folder)).chat_template.render([]) == "by default"


def test_further_templates_are_files_in_a_folder_of_their_own(tmp_path):
    folder = save(tmp_path, template="of the config")
    (folder / "chat_template.jinja").write_text("own file")
    alone = load_tokenizer(str(folder)).fingerprint
    further = folder / "additional_chat_templates"
    further.mkdir()
    (further / "tool_use.jinja").write_text("tools")
    template = load_tokenizer(str(folder)).chat_template
    assert template.sources == {"default": "own file", "tool_use": "tools"}
    assert load_tokenizer(str(folder)).fingerprint != alone
    texts = read_tokenizer_files(str(folder))
    assert texts["additional_chat_templates/tool_use.jinja"] == "tools"


def test_special_tokens_in_a_file_of_their_own_are_found(tmp_path):
    folder = save(tmp_path, config={})
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "</turn>"}})
    )
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.end == tokenizer.encode("</turn>")[0]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with the repository `someone/words`; remembers what was asked for."""
    folder, asked = save(tmp_path / "hub"), []

    def download(repository, *, revision, allow_patterns):
        asked.append((repository, revision))
        assert allow_patterns[0] == "tokenizer.json" and len(allow_patterns) == 5
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_a_name_on_the_hub_is_fetched_at_its_revision(hub, tmp_path):
    fetched = load_tokenizer("someone/words@v2")
    assert fetched.fingerprint == load_tokenizer(str(tmp_path / "hub")).fingerprint
    load_tokenizer("someone/words")
    assert hub == [("someone/words", "v2"), ("someone/words", None)]


def test_cached_files_are_used_offline_and_what_is_not_there_is_named(
    tmp_path, monkeypatch
):
    """With the real client, on a cache laid out as it lays it out."""
    repository = tmp_path / "hub" / "models--someone--words"
    snapshot = save(repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(
        huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub")
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert (
        load_tokenizer("someone/words").fingerprint
        == load_tokenizer(str(snapshot)).fingerprint
    )
    for name in ("someone/else", "a--b/c"):
        with pytest.raises(
            DataError,
            match=rf"'{name}' is not a local folder or file, and could not be fetch",
        ):
            load_tokenizer(name)


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"has no tokenizer.json.*save_pretrained"):
        load_tokenizer(str(tmp_path))
    for name in (str(tmp_path / "missing.json"), "a/b/c", "missing.json"):
        with pytest.raises(
            DataError,
            match=r"is neither `byte`, nor a folder or tokenizer.json that exists",
        ):
            load_tokenizer(name)


def test_its_files_have_the_names_that_other_libraries_look_for(tmp_path, hub):
    folder = save(tmp_path / "words")
    texts = {file.name: file.read_text() for file in folder.iterdir()}
    assert read_tokenizer_files(str(folder)) == texts
    (folder / "tokenizer.json").rename(folder / "mine.json")
    assert read_tokenizer_files(str(folder / "mine.json")) == texts
    assert read_tokenizer_files("someone/words") == texts
    assert read_tokenizer_files("byte") == {}
    with pytest.raises(DataError, match="has no tokenizer.json"):
        read_tokenizer_files(str(folder))


@pytest.mark.parametrize(
    ("file", "written", "message"),
    [
        (
            "tokenizer.json",
            b"",
            r"tokenizer.json of data.tokenizer = .* can't be read: EOF",
        ),
        (
            "tokenizer.json",
            b"\xff\xfe",
            r"tokenizer.json of data.tokenizer is not UTF-8 text",
        ),
        (
            "tokenizer_config.json",
            b"{",
            r"data.tokenizer = .*/tokenizer_config.json is not valid JSON",
        ),
        (
            "tokenizer_config.json",
            b"[1]",
            r"tokenizer_config.json holds a list; a JSON object was expected",
        ),
        (
            "chat_template.jinja",
            b"\x80",
            r"chat_template.jinja of data.tokenizer is not UTF-8",
        ),
    ],
)
def test_damaged_files_are_named(tmp_path, file, written, message):
    (save(tmp_path) / file).write_bytes(written)
    with pytest.raises(DataError, match=message):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "template", [["a"], [{"name": "default"}], [{"template": "x"}], 5, {"default": 3}]
)
def test_chat_templates_of_another_form_are_refused(tmp_path, template):
    save(tmp_path, template=template)
    with pytest.raises(
        DataError,
        match="`chat_template` in its tokenizer_config.json is neither a text nor a",
    ):
        load_tokenizer(str(tmp_path))
