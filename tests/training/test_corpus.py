import numpy as np
import pytest

from stacked_remat.training import ByteTokenizer, DataConfig, read_corpus

TOKENIZER = ByteTokenizer()


def documents(stream):
    """The texts between the separators of a stream."""
    places = np.flatnonzero(stream == TOKENIZER.separator)
    assert places[0] == 0 and places[-1] == len(stream) - 1
    return [
        TOKENIZER.decode(stream[first + 1 : last]) for first, last in zip(places, places[1:], strict=False)
    ]


@pytest.fixture
def folder(tmp_path):
    for number in range(40):
        file = tmp_path / f"part{number % 3}" / f"{number:02d}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"text {number}")
    (tmp_path / "other.md").write_text("not read")
    return tmp_path


def read(folder, fraction=0.3):
    return read_corpus(DataConfig(folder=str(folder), suffix=".txt", held_out_fraction=fraction), TOKENIZER)


def test_every_file_of_the_suffix_is_on_one_side_of_the_split(folder):
    corpus = read(folder)
    train, held_out = documents(corpus.train), documents(corpus.held_out)
    assert len(train) == corpus.num_train_files and len(held_out) == corpus.num_held_out_files
    assert 4 <= len(held_out) <= 20
    assert sorted(train + held_out) == sorted(f"text {number}" for number in range(40))


def test_the_split_is_by_name_and_survives_other_files(folder):
    before = set(documents(read(folder).held_out))
    for number in range(20, 40):
        next(folder.rglob(f"{number:02d}.txt")).unlink()
    after = set(documents(read(folder).held_out))
    assert after == {text for text in before if int(text.split()[1]) < 20}


def test_reading_twice_gives_the_same_streams_in_the_order_of_paths(folder):
    first, second = read(folder), read(folder)
    np.testing.assert_array_equal(first.train, second.train)
    parts = [int(text.split()[1]) for text in documents(first.train)]
    assert parts == sorted(parts, key=lambda number: (number % 3, number))


def test_a_larger_fraction_holds_out_more(folder):
    assert read(folder, 0.7).num_held_out_files > read(folder, 0.1).num_held_out_files


def test_the_standard_library_is_the_default_and_its_tests_are_not():
    corpus = read_corpus(DataConfig(), TOKENIZER)
    assert corpus.num_train_files > 300 and corpus.train.size > 3_000_000
    assert 0.01 < corpus.num_held_out_files / corpus.num_train_files < 0.12
    texts = documents(corpus.train) + documents(corpus.held_out)
    assert sum("class JSONDecoder" in text for text in texts) == 1
    assert not any("class TestPartial" in text for text in texts)  # of test/test_functools.py


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No files ending in '.txt'.*data.folder"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"No files"):
        read(tmp_path / "missing")


def test_a_folder_too_small_to_split_is_refused(tmp_path):
    (tmp_path / "only.txt").write_text("one file")
    with pytest.raises(ValueError, match=r"1 files ending in '.txt'.*Both need at least one"):
        read(tmp_path)
