"""Texts that errors are made of."""

import haliax as hax
import numpy as np
import optax
import pytest

from stacked_remat import _messages as messages


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("layer", "layers"),
        ("wight", "weight"),
        # Not close, but the only one that begins so
        ("w", "weight"),
        ("b", None),
        ("", None),
        ("embedding", None),
    ],
)
def test_did_you_mean(name, close):
    valid = ["layers", "weight", "bias_of_the_first", "bias_of_the_last"]
    expected = f" Did you mean `{close}`?" if close else ""
    assert messages.did_you_mean(name, valid) == expected


def test_lists_are_cut():
    assert messages.shortened(["a", "b"], most=2) == "a, b"
    assert messages.shortened(["a", "b", "c", "d"], " ", most=2) == "a b and 2 more"
    assert messages.shortened(["a"] * 51) == ", ".join(["a"] * 50 + ["and 1 more"])
    axes = hax.Axis("layers", 4), hax.Axis("embed", 2)
    assert messages.axes_text(axes) == "layers=4, embed=2"
    assert messages.axes_text(()) == "no axes"


def test_what_comes_from_files_is_cut():
    assert messages.printable("a" * 499) == "a" * 499
    for text in ("a" * 500, "\x1b[2J"):
        cut = messages.printable(text)
        assert cut != text and cut.isprintable() and len(cut) < 50
    assert messages.shown([[[[1]]]]) == "[[[[...]]]]"
    assert messages.shown("a" * 98) == repr("a" * 98)
    assert len(messages.shown("a" * 99)) == 100


def test_problems_of_the_entries_of_a_file():
    expected, found = {"a": 1, "b": 2, "c": 3}, {"b": 2, "c": 4, "d": 5}
    assert messages.entry_problems(expected, found) == [
        "missing: a 1",
        "unknown: d 5",
        "mismatched: c is 4, expected 3",
    ]
    assert messages.float_problems({"a": "BF16", "b": "I8"}) == [
        "not a float: b is I8, expected one of F64, F32, F16, BF16"
    ]


@pytest.mark.parametrize(
    ("size", "number"),
    [
        (0, 0),
        (np.int8(3), 3),
        ("12B", 12),
        (" 1.5 TiB ", 3 * 2**39),
        ("80GiB", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("2kB", 2000),
        ("2KiB", 2048),
        ("2MB", 2 * 10**6),
    ],
)
def test_numbers_of_bytes(size, number):
    assert messages.parse_bytes(size) == number


@pytest.mark.parametrize(
    "size", [-1, True, 1.5, None, "", "80", "-1GB", "1e3B", "2kiB"]
)
def test_what_is_no_number_of_bytes(size):
    with pytest.raises(ValueError, match="cannot read"):
        messages.parse_bytes(size)


def test_a_loss_and_an_optimizer_in_their_order():
    optimizer = optax.sgd(0.1)
    messages.check_loss_and_optimizer("step", abs, optimizer)
    for loss, other in ((optimizer, abs), (abs, abs), (optimizer, optimizer)):
        with pytest.raises(TypeError, match=r"step\(loss, optax.adamw"):
            messages.check_loss_and_optimizer("step", loss, other)
