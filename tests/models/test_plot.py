"""Curves of metrics in the terminal and as pictures."""

import json

import pytest

from models.plot import Curve, main, read_metrics, text_curve

from .tiny_run import printed


def write_run(folder, lines, end="\n"):
    folder.mkdir()
    text = "\n".join(
        line if isinstance(line, str) else json.dumps(line) for line in lines
    )
    (folder / "metrics.jsonl").write_text(text + end if lines else "")
    return folder


LINES = [
    {"step": 0, "held_out_loss": 5.0},
    *(
        {"step": step, "loss": 4.0 - step / 2, "per_layer": [1.0], "mfu": None}
        for step in range(1, 5)
    ),
    {"step": 4, "held_out_loss": 3.0},
]


def test_metrics_are_numbers_by_step_and_an_unfinished_line_is_left(tmp_path):
    run = write_run(tmp_path / "run", [*LINES, '{"step": 5, "lo'], end="")
    assert read_metrics(run) == {
        "held_out_loss": Curve([0, 4], [5.0, 3.0]),
        "loss": Curve([1, 2, 3, 4], [3.5, 3.0, 2.5, 2.0]),
    }


def test_bars_are_means_from_the_least_to_the_largest():
    assert "3.5 █▆▃▁ 2  (steps 1 to 4)" in text_curve(
        "loss", Curve([1, 2, 3, 4], [3.5, 3.0, 2.5, 2.0])
    )
    steps = [*range(600)]
    line = text_curve("loss", Curve(steps, [float(step % 2) for step in steps]))
    assert "▁" * 60 in line  # all means are equal
    gaps = text_curve("loss", Curve([0, 1, 100], [0.0, 7.0, 3.5]))
    assert " 0 ▁▁▁ 3.5" in gaps  # a part without values is as the one before


def test_the_command_draws_and_writes(tmp_path):
    runs = [write_run(tmp_path / name, LINES) for name in ("one", "two")]
    status, text = printed(main, *runs)
    assert status == 0
    assert text.count("held_out_loss") == text.count(" loss ") == 2
    status, text = printed(
        main, *runs, "--metrics", "loss", "--out", tmp_path / "a.svg"
    )
    assert status == 0
    picture = (tmp_path / "a.svg").read_text()
    assert "<svg" in picture and ">loss<" in picture and "held_out" not in picture
    assert printed(main, runs[0], "--out", tmp_path / "a.png")[0] == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("lines", "arguments", "message"),
    [
        (None, [], "has no metrics.jsonl. Name the folder of a run"),
        ([], [], "no metrics were logged yet"),
        ([*LINES, "{}", LINES[0]], [], "line 7 is no line of metrics"),
        (
            LINES,
            ["--metrics", "los"],
            "no run has 'los'. There are held_out_loss, loss",
        ),
        (LINES, ["--out", "a.pdf"], "--out is written as .png or .svg"),
    ],
)
def test_what_can_not_be_drawn_is_said(tmp_path, lines, arguments, message):
    run = tmp_path / "run"
    if lines is not None:
        write_run(run, lines)
    status, text = printed(main, run, *arguments)
    assert status == 1 and message in " ".join(text.split())
