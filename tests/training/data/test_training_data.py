"""Tests of stacked_remat/training/data/training_data.py."""

import dataclasses
import json

import numpy as np
import pytest

from stacked_remat.training import (
    ByteTokenizer,
    DataConfig,
    DataError,
    SourceConfig,
    first_examples,
    load_tokenizer,
    open_training_data,
)

from .silent import Silent
from .word_tokenizer import save

TOKENIZER = ByteTokenizer()


def open_data(
    tmp_path, tokenizer=TOKENIZER, *, seed=0, progress=None, process=None, **config
):
    config = {
        "seq_len": 32,
        "batch_size": 4,
        "cache_dir": str(tmp_path / "cache"),
        **config,
    }
    progress = Silent() if progress is None else progress
    return open_training_data(
        DataConfig(**config), tokenizer, seed=seed, progress=progress, process=process
    )


def text_of(batches):
    """The documents that batches are made of, put together from the pieces of `whole`
    packing.
    """
    found = []
    for batch in batches:
        arrays = [
            np.asarray(x.array) for x in (batch.tokens, batch.targets, batch.documents)
        ]
        for tokens, targets, documents in zip(*arrays, strict=True):
            for piece in range(1, documents.max() + 1):
                found.append(
                    TOKENIZER.decode(
                        np.append(
                            tokens[documents == piece], targets[documents == piece][-1]
                        )
                    )
                )
    return sorted(found)


def held_out_text(held_out):
    return text_of(held_out.batch(index) for index in range(len(held_out)))


def training_text(data, epoch_batches):
    return text_of(data.training.next() for _ in range(epoch_batches))


@pytest.fixture
def folder(tmp_path):
    for number in range(40):
        file = tmp_path / "texts" / f"part{number % 3}" / f"{number:02d}.txt"
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(f"text {number}")
    return tmp_path / "texts"


def test_every_document_is_trained_on_or_held_out(folder, tmp_path):
    source = {"all": SourceConfig((str(folder),))}
    data = open_data(
        tmp_path, sources=source, held_out_fraction=0.3, packing="whole", batch_size=1
    )
    held_out = held_out_text(data.held_out)
    assert 4 <= len(held_out) <= 20
    sequences = -(-(40 - len(held_out)) // 4)  # four of 7 or 8 places fit in 32
    assert sorted(held_out + training_text(data, sequences)) == sorted(
        f"text {n}" for n in range(40)
    )
    assert f"in {len(held_out)} held out" in data.summary
    fewer = open_data(tmp_path, sources=source, held_out_fraction=0.1, packing="whole")
    assert set(held_out_text(fewer.held_out)) < set(held_out)


def test_the_split_is_by_content_and_survives_other_files(folder, tmp_path):
    def held_out():
        source = {"all": SourceConfig((str(folder),))}
        data = open_data(
            tmp_path, sources=source, held_out_fraction=0.3, packing="whole"
        )
        return set(held_out_text(data.held_out))

    before = held_out()
    for number in range(20, 40):
        next(folder.rglob(f"{number:02d}.txt")).unlink()
    next(folder.rglob("01.txt")).rename(folder / "zz.txt")
    assert held_out() == {text for text in before if int(text.split()[1]) < 20}


def test_named_held_out_files_replace_the_fraction(folder, tmp_path):
    (tmp_path / "exam.jsonl").write_text('{"body": "exam"}')
    (tmp_path / "book.jsonl").write_text('{"body": "one"}\n{"body": "two"}')
    own = SourceConfig(
        (str(tmp_path / "book.jsonl"),),
        (str(tmp_path / "exam.jsonl"),),
        text_key="body",
    )
    data = open_data(
        tmp_path,
        sources={"own": own, "all": SourceConfig((str(folder),))},
        packing="whole",
        batch_size=1,
    )
    assert held_out_text(data.held_out_by_source["own"]) == ["exam"]
    assert len(held_out_text(data.held_out)) == 1 + len(
        held_out_text(data.held_out_by_source["all"])
    )
    alone = open_data(tmp_path, sources={"own": own}, packing="whole", batch_size=1)
    assert training_text(alone, 1) == ["one", "two"]


def test_skipped_records_are_reported_with_examples(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "\n".join([f'{{"text": "line {n}"}}' for n in range(40)] + ["{"] * 7)
    )
    progress = Silent()
    source = {"one": SourceConfig((str(tmp_path / "a.jsonl"),))}
    for _ in range(2):  # also when it comes from the cache
        open_data(
            tmp_path,
            sources=source,
            held_out_fraction=0.2,
            on_malformed="skip",
            progress=progress,
        )
    assert len(progress.messages) == 2
    assert progress.messages[1].startswith(
        "one: 7 records can't be read and were skipped, such as /"
    )
    assert progress.messages[1].count("a.jsonl:") == 5
    with pytest.raises(DataError, match=r"a.jsonl:41 is not JSON"):
        open_data(tmp_path, sources=source, held_out_fraction=0.2)


def test_documents_too_few_to_hold_any_out_are_all_trained_on(tmp_path):
    (tmp_path / "only.txt").write_text("one file")
    source = {"one": SourceConfig((str(tmp_path / "only.txt"),))}
    # The share of the document's hash, 0.63, is above the first and below the second.
    for fraction in (0.05, 0.99):
        progress = Silent()
        options = {"sources": source, "held_out_fraction": fraction, "batch_size": 1}
        data = open_data(tmp_path, progress=progress, packing="whole", **options)
        assert training_text(data, 1) == ["one file"] and len(data.held_out) == 0
        assert data.held_out_by_source == {}
        assert progress.messages == [
            f"one: none of its 1 documents is held out by data.held_out_fraction ="
            f" {fraction}; name some under data.sources.one.held_out to evaluate on"
        ]


def test_nothing_is_held_out_by_a_fraction_of_zero(folder, tmp_path):
    progress = Silent()
    data = open_data(
        tmp_path,
        sources={"all": SourceConfig((str(folder),))},
        held_out_fraction=0,
        packing="whole",
        batch_size=1,
        progress=progress,
    )
    assert training_text(data, 10) == sorted(f"text {n}" for n in range(40))
    assert len(data.held_out) == 0 and not progress.messages
    assert "0 in 0 held out" in data.summary


def test_a_source_without_text_to_train_on_is_refused(folder, tmp_path):
    (tmp_path / "none.txt").write_text("")
    none = {"one": SourceConfig((str(tmp_path / "none.txt"),))}
    with pytest.raises(DataError, match="no text in .*none.txt: 1 records have none"):
        open_data(tmp_path, sources=none)
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("\n")
    none = {"one": SourceConfig((str(tmp_path / "*.jsonl"),))}
    with pytest.raises(DataError, match="one: there is no text in its 2 files: no rec"):
        open_data(tmp_path, sources=none)
    exam = {"held_out": (str(folder),)}
    with pytest.raises(
        DataError, match=r"data.sources.one has 14 documents, and none to train on: all"
    ):
        sources = {"one": SourceConfig((str(folder / "part0"),), **exam)}
        open_data(tmp_path, sources=sources)


def chats(path, role):
    lines = [
        {
            "messages": [
                {"role": "user", "content": "who?"},
                {"role": role, "content": f"me {n}"},
            ]
        }
        for n in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return {"chats": SourceConfig((str(path),), train_on="answers")}


def test_a_source_without_targets_is_refused(tmp_path):
    tokenizer = load_tokenizer(str(save(tmp_path / "words")))
    with pytest.raises(
        DataError,
        match=r"data\.sources\.chats .* no token of it counts .* `assistant` do",
    ):
        open_data(
            tmp_path,
            tokenizer,
            sources=chats(tmp_path / "gpt.jsonl", "gpt"),
            held_out_fraction=0.3,
        )


def test_a_text_that_any_source_holds_out_is_trained_on_by_none(folder, tmp_path):
    """Whatever the file, its name and its format."""
    (tmp_path / "exam.jsonl").write_text('{"text": "text 0"}\n{"text": "text 3"}')
    texts = "\n".join(
        json.dumps({"text": f"text {number}"}) for number in range(0, 40, 2)
    )
    (tmp_path / "even.jsonl").write_text(texts)
    sources = {
        "named": SourceConfig(
            (str(folder / "part0"),), held_out=(str(tmp_path / "exam.jsonl"),)
        ),
        "fraction": SourceConfig((str(folder),)),
        "lines": SourceConfig((str(tmp_path / "even.jsonl"),)),
    }
    progress = Silent()
    options = {"packing": "whole", "held_out_fraction": 0.3, "progress": progress}
    data = open_data(tmp_path, sources=sources, **options)
    trained, held_out = set(training_text(data, 20)), set(held_out_text(data.held_out))
    assert {"text 0", "text 3"} < held_out and len(held_out) > 5
    equal = held_out & {f"text {number}" for number in range(0, 40, 2)}
    by_itself = equal & set(held_out_text(data.held_out_by_source["lines"]))
    number = len(equal) - len(by_itself)
    said = f"lines: {number} documents equal held-out ones and are left out"
    assert number and said in progress.messages
    assert trained == {f"text {number}" for number in range(40)} - held_out


def test_keys_that_nothing_reads_and_open_answers_are_said_once(tmp_path):
    progress = Silent()
    template = "{% for m in messages %}<turn>{{ m.content }}{% endfor %}"
    tokenizer = load_tokenizer(str(save(tmp_path / "words", template=template)))
    chat = [
        {"role": "user", "content": "odd"},
        {"role": "assistant", "content": "even", "thoughts": "hm"},
    ]
    record = {"messages": chat, "tools": [{"name": "f"}], "id": 1, "documents": None}
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps(record | {"id": n}) for n in range(40))
    )
    source = {
        "a": SourceConfig(
            (str(tmp_path / "a.jsonl"),), held_out=(str(tmp_path / "b.txt"),)
        )
    }
    (tmp_path / "b.txt").write_text("never odd")
    data = open_data(
        tmp_path,
        tokenizer,
        sources=source,
        progress=progress,
        packing="whole",
        batch_size=1,
    )
    unread = (
        "a: keys of records that are not read: id, tools, for the chat template, role"
        " of messages, thoughts"
    )
    assert (
        progress.messages[1].startswith(unread)
        and "end token ends 40 chats" in progress.messages[2]
    )
    batch = data.training.next()
    last = int(np.asarray(batch.documents.array[0] == 1).sum()) - 1
    assert (
        batch.targets.array[0][last] == tokenizer.end
        and batch.weights.array[0][last] == 1
    )


def test_roles_that_the_template_does_not_name_are_said_once(tmp_path):
    template = (
        "{% for m in messages %}{% if m.role == 'expert' %}!{% endif %}<turn>"
        "{{ m.role }} {{ m.content }}</turn>{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant {% endif %}"
    )
    tokenizer = load_tokenizer(str(save(tmp_path / "words", template=template)))
    lines = []
    for role in ("asistant", "assistant", "assistant"):
        roles = ["system", "developer", "user", "tool", "expert", role]
        turns = [{"role": one, "content": "odd"} for one in roles]
        lines.append(json.dumps({"messages": turns}))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    own = SourceConfig((str(tmp_path / "a.jsonl"),), train_on="answers")
    line = (
        "roles of messages that the chat template does not name: 'asistant'. Did you"
        " mean `assistant`? Only turns of the role `assistant` are answers."
    )
    progress = Silent()
    options = {"held_out_fraction": 0, "packing": "whole", "seq_len": 64}
    options |= {"sources": {"c": own}, "progress": progress}
    open_data(tmp_path, tokenizer, **options)
    assert progress.messages.count(f"c: {line}") == 1
    # The first example that has targets is the second record, or the first.
    for records, number in ((lines, 2), (lines[::-1], 1)):
        (tmp_path / "a.jsonl").write_text("\n".join(records))
        (example,) = first_examples(DataConfig({"c": own}), tokenizer)
        assert example.place.endswith(f":{number}") and example.remarks == (line,)
    (tmp_path / "a.jsonl").write_text(lines[0])
    (example,) = first_examples(DataConfig({"c": own}), tokenizer)
    assert (example.num_targets, example.remarks) == (0, (line,))
    assert str(example).endswith(f"0 of {example.num_tokens} tokens are targets")
    (tmp_path / "a.jsonl").write_text("\n".join([lines[1], *lines[:1] * 3]))
    with pytest.raises(DataError, match="3 of 4 sequences .* no turn of the role `as"):
        open_data(tmp_path, tokenizer, **options)


CALL = [{"type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize("content", [None, "odd"])
def test_calls_of_tools_that_the_template_does_not_write_are_refused(tmp_path, content):
    turns = "{% for m in messages %}<turn>{{ m.role }} {{ m.content }}"
    # A template with the word may still write them only where there are some.
    with_calls = (
        turns + "{{ m.tool_calls | tojson if m.tool_calls }}</turn>{% endfor %}"
    )
    whole = "{% for m in messages %}<turn>{{ m | tojson }}</turn>{% endfor %}"
    user = {"role": "user", "content": "odd"}
    call = {"role": "assistant", "content": content, "tool_calls": CALL}
    plain = {"role": "assistant", "content": "even", "tool_calls": []}
    chats = [[user, plain], [user, call, plain]]
    lines = [json.dumps({"messages": chat}) for chat in chats]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = {"c": SourceConfig((str(tmp_path / "a.jsonl"),))}
    options = {"sources": source, "held_out_fraction": 0, "packing": "whole"}

    def opened(template, **more):
        folder = save(tmp_path / str(hash(template)), template=template)
        return open_data(tmp_path, load_tokenizer(str(folder)), **options, **more)

    for template in (with_calls, whole):
        opened(template)
    without_calls = turns + "</turn>{% endfor %}"
    with pytest.raises(
        DataError,
        match=r"a\.jsonl:2 calls tools in message 1, and the tokenizer's chat template"
        r" does not read tool_calls: .* in `content`\. Fix it, or skip such records",
    ):
        opened(without_calls)
    progress = Silent()
    opened(without_calls, on_malformed="skip", progress=progress)
    assert "c: 1 records can't be read and were skipped" in progress.messages[1]


def test_the_targets_of_the_first_example_are_said_before_anything_is_tokenized(
    tmp_path,
):
    (tmp_path / "b.txt").write_text("never odd")
    named = {"held_out": (str(tmp_path / "b.txt"),)}
    answers = chats(tmp_path / "a.jsonl", "assistant")["chats"]
    answers = dataclasses.replace(answers, **named)
    first = f"in the first example, {tmp_path}/a.jsonl:1, "
    told = {
        "answers": f"{first}15 of 71 tokens are targets: 'me 0<|im_end|>\\n'",
        "all": f"{first}71 of 71 tokens are targets, those of prompts too",
    }
    for train_on, line in told.items():
        progress = Silent()
        source = dataclasses.replace(answers, train_on=train_on)
        open_data(tmp_path, sources={"c": source}, progress=progress)
        assert progress.messages[0] == f"c: {line}"
    plain = SourceConfig((str(tmp_path / "b.txt"),))
    config = DataConfig({"c": answers, "plain": plain})
    one, other = first_examples(config, TOKENIZER)
    prompt = "<|end|><|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n"
    assert one.runs == (
        (prompt, False),
        ("me 0<|im_end|>\n", True),
        ("<|end|>", False),
    )
    assert other.runs == (("<|end|>never odd<|end|>", True),) and other.is_text
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 100)
    empty = DataConfig({"c": SourceConfig((str(tmp_path / "empty.jsonl"),))})
    assert list(first_examples(empty, TOKENIZER)) == []


def test_an_answer_whose_targets_do_not_end_it_is_said_at_the_start(tmp_path):
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "</turn>{% endfor %}"
    )
    tokenizer = load_tokenizer(str(save(tmp_path / "words", template=template)))
    chat = {"messages": [{"role": "assistant", "content": "even"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(chat))
    source = SourceConfig((str(tmp_path / "a.jsonl"),), train_on="answers")
    (example,) = first_examples(DataConfig({"a": source}), tokenizer)
    assert str(example).endswith(" targets: 'even'; none of them ends an answer")
    assert example.runs[-1] == ("</turn>", False)


def test_answers_whose_ends_are_not_marked_are_said_once(tmp_path):
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "</turn>{% endfor %}"
    )
    tokenizer = load_tokenizer(str(save(tmp_path / "words", template=template)))
    chat = [{"role": "assistant", "content": "even"}]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"messages": chat, "n": n}) + "\n" for n in range(20))
    )
    (tmp_path / "b.txt").write_text("never odd")
    source = SourceConfig(
        (str(tmp_path / "a.jsonl"),),
        held_out=(str(tmp_path / "b.txt"),),
        train_on="answers",
    )
    progress = Silent()
    open_data(tmp_path, tokenizer, sources={"a": source}, progress=progress)
    said = [text for text in progress.messages if "endgeneration" in text]
    assert len(said) == 1 and "20 chats do not teach the model to end" in said[0]


def test_a_limit_of_the_chat_template_names_the_record(tmp_path):
    template = (
        "{% if messages[0].content == 'me 3' %}{{ 'x' * 3000000000 }}{% endif %}{{"
        " messages[0].role }}"
    )
    tokenizer = load_tokenizer(str(save(tmp_path / "words", template=template)))
    chat = [
        json.dumps({"messages": [{"role": "user", "content": f"me {n}"}]})
        for n in range(40)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(chat))
    with pytest.raises(
        DataError,
        match=r"a\.jsonl:4: .*chat template takes more than 512 MiB of memory",
    ):
        sources = {"a": SourceConfig((str(tmp_path / "a.jsonl"),))}
        open_data(tmp_path, tokenizer, sources=sources, on_malformed="skip")


@pytest.mark.parametrize("prompt", [10, 60, 300])
def test_a_source_most_of_whose_sequences_have_no_target_is_refused(tmp_path, prompt):
    chat = [
        {"role": "user", "content": "q" * prompt},
        {"role": "assistant", "content": "answer"},
    ]
    chats = [
        json.dumps({"messages": [*chat, {"role": "user", "content": str(n)}]})
        for n in range(20)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(chats))
    (tmp_path / "b.txt").write_text("held out")
    own = SourceConfig(
        (str(tmp_path / "a.jsonl"),), (str(tmp_path / "b.txt"),), train_on="answers"
    )
    progress = Silent()
    options = {
        "sources": {"chats": own},
        "packing": "whole",
        "seq_len": 100,
        "progress": progress,
    }
    if prompt == 300:
        with pytest.raises(
            DataError,
            match=r"sources\.chats: 60 of 80 sequences have no target.*seq_len = 100",
        ):
            open_data(tmp_path, **options)
        return
    data = open_data(tmp_path, **options)
    assert [data.training.next().weights.array.any(axis=1).all() for _ in range(9)] == [
        True
    ] * 9
    left_out = {10: "2 of 22", 60: "20 of 40"}[prompt]
    longest = {10: 108, 60: 158}[prompt]
    assert progress.messages[1:] == [
        (
            "chats: 20 of 20 documents to train on are longer than data.seq_len = 100"
            " and are cut into parts that do not see each other; data.seq_len:"
            f" {longest} would cut none"
        ),
        f"chats: {left_out} sequences have no target and are left out",
    ]
    for changes in ({"seq_len": longest}, {"packing": "split"}):
        progress = Silent()
        open_data(tmp_path, **options | changes | {"progress": progress})
        assert not [line for line in progress.messages if "are cut" in line]
