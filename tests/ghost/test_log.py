"""The log of scores: its rows, runs that resume, and what its command prints and
refuses.
"""

import csv
import re
import sys

import numpy as np
import pytest

from stacked_remat.ghost import ScoreLog, ScoreLogError, StepScores, TokenScores
from stacked_remat.ghost.__main__ import main
from stacked_remat.ghost.log import read_scores
from stacked_remat.ghost.ranking import extreme_examples, rank_examples

LAYERS, BATCH, EXAMPLES = 3, 4, 10


def step_scores(step, *, norms=True):
    """Scores that depend on the step alone; example 7 has the highest in every step,
    example 2 the lowest.
    """
    generator = np.random.default_rng(step)
    examples = np.concatenate(
        [[7, 2], generator.choice([0, 1, 3, 4, 5, 6, 8, 9], BATCH - 2, replace=False)]
    )
    scores = {
        "head.weight": generator.normal(size=BATCH),
        "stack.*.up": generator.normal(size=(LAYERS, BATCH)),
    }
    for sign, at in ((5, 0), (-5, 1)):
        scores["head.weight"][at] += sign * 5 / step
    return StepScores(
        step,
        [f"id{one}" for one in examples],
        generator.random(BATCH),
        scores,
        {path: np.abs(array) + 1 for path, array in scores.items()} if norms else None,
        [f"text {one}\x1b[31m [bold]of it[/bold]\n" for one in examples],
    )


def rows_of(folder):
    names = ["step", "example", "layer", "leaf", "score", "norm", "loss", "text"]
    return read_scores(folder, names).to_pylist()


def written(folder, steps, *, resumed_after=None, flush_every=2, **options):
    log = ScoreLog(folder, resumed_after)
    for number, step in enumerate(steps, 1):
        log.append(step_scores(step, **options))
        if number % flush_every == 0:
            log.flush()
    log.flush()
    return folder


def test_every_score_is_a_row_with_its_loss_and_text(tmp_path):
    rows = rows_of(written(tmp_path, [3, 6]))
    assert len(rows) == 2 * BATCH * (1 + LAYERS)
    found = {
        (row["step"], row["example"], row["leaf"], row["layer"]): row for row in rows
    }
    for step in (3, 6):
        expected = step_scores(step)
        for at, example in enumerate(expected.examples):
            for layer, leaf in (
                (None, "head.weight"),
                *((layer, "stack.*.up") for layer in range(LAYERS)),
            ):
                row = found[step, example, leaf, layer]
                place = (at,) if layer is None else (layer, at)
                values = [
                    expected.scores[leaf][place],
                    expected.norms[leaf][place],
                    expected.losses[at],
                ]
                np.testing.assert_allclose(
                    [row["score"], row["norm"], row["loss"]], values, rtol=1e-6
                )
                assert row["text"] == expected.texts[at]


@pytest.mark.parametrize("resumed_after", [0, 4, 8])
def test_a_run_that_resumes_leaves_the_rows_of_one_that_was_not_interrupted(
    tmp_path, resumed_after
):
    expected = rows_of(written(tmp_path / "whole", range(1, 11)))
    folder = written(tmp_path / "resumed", range(1, 9), flush_every=3)
    written(folder, range(resumed_after + 1, 11), resumed_after=resumed_after)
    assert rows_of(folder) == expected


def test_what_does_not_fit_the_log_is_refused(tmp_path):
    log = ScoreLog(tmp_path)
    log.append(step_scores(5))
    with pytest.raises(ValueError, match="step 5 come after those of step 5"):
        log.append(step_scores(5))
    log.flush()
    with pytest.raises(
        ScoreLogError, match="has scores of an earlier run .*Give resumed_after"
    ):
        ScoreLog(tmp_path)
    zeros = np.zeros(2)
    with pytest.raises(
        ValueError,
        match=r"scores\['a'\] has the shape \(3,\), and there are 2 examples",
    ):
        StepScores(1, ["x", "y"], zeros, {"a": np.zeros(3)})
    with pytest.raises(
        ValueError, match=r"norms\['a'\] has the shape \(3, 2\), unlike its scores"
    ):
        StepScores(1, ["x", "y"], zeros, {"a": zeros}, {"a": np.zeros((3, 2))})
    (tmp_path / "scores-from-000000000007.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        ScoreLogError,
        match=r"scores-from-000000000007.parquet can't be read .* Delete it",
    ):
        rows_of(tmp_path)


def test_a_ranking_takes_the_folder_of_a_run_and_refuses_what_has_no_scores(tmp_path):
    written(tmp_path / "run" / "ghost", [1, 2])
    of_log = rank_examples(tmp_path / "run" / "ghost", "none")
    of_run = rank_examples(str(tmp_path / "run"), "none")
    np.testing.assert_array_equal(of_run.scores, of_log.scores)
    with pytest.raises(ValueError, match="normalize is one of 'step', .*got 'nrm'"):
        rank_examples(tmp_path / "run", "nrm")
    with pytest.raises(ScoreLogError, match="has no scores of examples"):
        rank_examples(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder .*nowhere"):
        rank_examples(tmp_path / "nowhere")


def test_scores_that_are_not_finite_are_not_ranked(tmp_path):
    log = ScoreLog(tmp_path)
    scores = np.array([1.0, np.nan, -2.0], np.float32)
    log.append(
        StepScores(1, ["a", "b", "c"], np.zeros(3, np.float32), {"head.weight": scores})
    )
    log.flush()
    ranked = rank_examples(tmp_path)
    assert list(ranked.ids) == ["a", "c"]
    np.testing.assert_allclose(ranked.scores, [1 / 3, -2 / 3], rtol=1e-6)


@pytest.mark.parametrize("normalize", ["none", "step", "norm"])
def test_the_ranking_is_that_of_a_loop_over_steps(tmp_path, normalize):
    ranked = rank_examples(written(tmp_path, [1, 2, 3]), normalize)
    found: dict[str, list[float]] = {}
    for step in (1, 2, 3):
        scores = step_scores(step)
        totals = scores.scores["head.weight"] + scores.scores["stack.*.up"].sum(0)
        if normalize == "step":
            totals = totals / np.abs(totals).sum()
        elif normalize == "norm":
            squares = scores.norms["head.weight"] ** 2 + (
                scores.norms["stack.*.up"] ** 2
            ).sum(0)
            totals = totals / np.sqrt(squares)
        for example, total in zip(scores.examples, totals, strict=True):
            found.setdefault(example, []).append(total)
    means = {example: np.mean(totals) for example, totals in found.items()}
    assert list(ranked.ids) == sorted(means, key=lambda name: -means[name])
    np.testing.assert_allclose(
        ranked.scores, sorted(means.values(), reverse=True), rtol=1e-5
    )
    assert dict(zip(ranked.ids, ranked.steps, strict=True)) == {
        name: len(all_) for name, all_ in found.items()
    }


def test_the_command_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # whatever the terminal has
    written(tmp_path / "run" / "ghost", [1, 2, 3])
    run = str(tmp_path / "run")
    first = {}
    for command in ("top", "bottom", "by-layer"):
        assert main([command, run, "--count", "2"]) == 0
        shown = capsys.readouterr().out
        lines = shown.splitlines()
        assert max(map(len, lines)) <= 80
        assert "\x1b[31m" not in shown
        first[command] = next(
            line for line in shown.splitlines() if re.match(r" +([-+]0|0 )", line)
        )
    assert re.search(r"\+\d.* id7 +text 7.* \[bold\]of it\[/bold\]", first["top"])
    assert re.search(r"-\d.* id2 +text 2", first["bottom"])
    assert re.search(r"0 +\d+\.\d% +[-+]0\.\d+ +stack\.\*\.up", first["by-layer"])
    file = tmp_path / "worst.csv"
    assert main(["bottom", run, "--count", "3", "--csv", str(file)]) == 0
    wrote = capsys.readouterr().out
    assert wrote.startswith(f"wrote {file}. The 3 lowest scores of ")
    assert "above zero where training on" in wrote
    with file.open(newline="") as lines:
        header, *rows = csv.reader(lines)
    assert header == ["score", "steps", "example", "place", "text"] and len(rows) == 3
    ranked = rank_examples(tmp_path / "run" / "ghost")
    np.testing.assert_allclose(
        [float(row[0]) for row in rows], ranked.scores[:-4:-1], rtol=1e-6
    )
    assert [row[2] for row in rows] == [str(name) for name in ranked.ids[:-4:-1]]


def test_examples_are_shown_by_their_places(tmp_path, capsys, monkeypatch):
    """An example in two places has both; of one without, the id is shown."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    log = ScoreLog(tmp_path / "run")
    for step, line in ((1, 17), (2, 40)):
        places = [f"{tmp_path}/texts/a.jsonl:{line}", ""]
        scores = {"head": np.array([1.0, -1.0])}
        found = StepScores(step, ["a", "b"], np.zeros(2), scores, places=places)
        log.append(found)
    log.flush()
    assert main(["top", "run"]) == 0
    shown = capsys.readouterr().out.strip().rsplit("\n", 6)
    title, header, _, first, second, _, bars = shown
    assert bars == "All 2 scores: -0.500 ██ +0.500"
    assert "above zero where training on the" in title
    assert header.split() == ["score", "steps", "place", "text"]
    assert first.split()[2:5] == ["texts/a.jsonl:17", "=", "texts/a.jsonl:40"]
    assert second.split()[2] == "b"
    assert main(["top", "run", "--csv", "all.csv"]) == 0
    rows = [*csv.reader((tmp_path / "all.csv").read_text().splitlines())]
    whole = f"{tmp_path}/texts/a.jsonl:17 = {tmp_path}/texts/a.jsonl:40"
    assert [row[3] for row in rows[1:]] == [whole, ""]
    assert main(["by-layer", "run"]) == 0
    assert "These scores are not of layers" in capsys.readouterr().out


def test_layers_of_several_stacks_are_shown_apart(tmp_path, capsys):
    log = ScoreLog(tmp_path / "run")
    scores = {
        "layers.dense.*.up": np.array([[1.0], [2.0]]),
        "layers.dense.*.down": np.array([[0.0], [1.0]]),
        "layers.linear.*.up": np.array([[-4.0], [0.0]]),
        "head": np.array([2.0]),
    }
    log.append(StepScores(1, ["a"], np.zeros(1), scores))
    log.flush()
    assert main(["by-layer", str(tmp_path / "run")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:4] for row in rows if row[:1] in (["dense"], ["linear"])] == [
        ["dense", "0", "10.0%", "+0.100"],
        ["dense", "1", "30.0%", "+0.300"],
        ["linear", "0", "40.0%", "-0.400"],
        ["linear", "1", "0.0%", "+0.000"],
    ]


def test_examples_are_drawn(tmp_path, capsys):
    written(tmp_path / "run" / "ghost", [1, 2, 3])
    for name in ("scores.svg", "scores.png"):
        file = tmp_path / name
        run = str(tmp_path / "run")
        assert main(["top", run, "--count", "3", "--plot", str(file)]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"wrote {file}. The 3 highest scores of ")
    drawn = (tmp_path / "scores.svg").read_text()
    ranking = rank_examples(tmp_path / "run" / "ghost")
    for index, name in enumerate(ranking.ids):
        assert (f">{name}<" in drawn) == (index < 3)
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")


def test_tokens_are_shown_by_their_scores(tmp_path, capsys, monkeypatch):
    """The sums over steps; of a long text the part around the largest score."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("FORCE_COLOR", "1")
    log = ScoreLog(tmp_path)
    text = "x" * 400 + " good bad\x1b none"
    ends = np.array([400, 405, 410, 415])
    for step in (1, 2):
        scores = np.array([0.0, 1.5, -2.0, 0.1])
        tokens = [TokenScores(scores, ends), TokenScores(-scores, ends)]
        totals = {"model": np.array([-0.4, 0.4])}
        found = StepScores(
            step, ["a", "b"], np.zeros(2), totals, texts=[text] * 2, tokens=tokens
        )
        log.append(found)
    log.flush()
    ranking = rank_examples(tmp_path)
    (best,) = extreme_examples(tmp_path, ranking, 1, best=True)
    assert best.example == "b" and best.text == text
    np.testing.assert_allclose(best.tokens.scores, [0, -3, 4, -0.2], atol=1e-6)
    assert main(["bottom", str(tmp_path), "--count", "1"]) == 0
    shown = capsys.readouterr().out
    assert "green tokens lower it, red ones raise it" in " ".join(shown.split())
    cell = shown[shown.index("…x") :]
    red, green = "\x1b[31m", "\x1b[32m"
    marked = f"x«{green} good\x1b[0m{red} bad\N{REPLACEMENT CHARACTER}\x1b[0m» none"
    assert re.sub(r"\s+", " ", cell).startswith("…x") and marked in cell, repr(cell)
    for wrong in ([tokens[0]], [TokenScores(np.zeros(3), ends)] * 2):
        with pytest.raises(ValueError, match="tokens"):
            StepScores(3, ["a", "b"], np.zeros(2), totals, tokens=wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["top", "{}/run", "--plot", "a.pdf"], "--plot is written as .png or .svg"),
        (["top", "{}/run", "--plot", "no/a.svg"], "the folder 'no' does not exist"),
        (["top", "{}/run", "--csv", "no/a.csv"], "--csv: the folder 'no' does not exi"),
        (["top", "{}/nowhere"], "There is no folder .*nowhere"),
        (["top", "{}"], "has no scores of examples. Train with a `ghost` section"),
        (
            ["top", "{}/run", "--normalize", "norm"],
            "has rows without the norms of gradients",
        ),
        (
            ["by-layer", "{}/run", "--leaf", "*q_proj"],
            "matches none of the 2 leaves .*such as head.weight",
        ),
        (
            ["bottom", "{}/run", "--steps", "8:9"],
            "these steps, layer and leaves. It has scores of the steps ",
        ),
    ],
)
def test_the_command_refuses_with_one_message(tmp_path, capsys, arguments, message):
    written(tmp_path / "run" / "ghost", [1], norms=False)
    assert main([argument.format(tmp_path) for argument in arguments]) == 1
    shown = capsys.readouterr()
    assert (
        shown.out == ""
        and re.match(f"error: .*{message}", shown.err)
        and shown.err.count("\n") == 1
    )


@pytest.mark.parametrize("package", ["pyarrow", "rich"])
def test_a_missing_package_is_one_message_with_its_extra(
    tmp_path, capsys, monkeypatch, package
):
    written(tmp_path / "ghost", [1])
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    assert main(["top", str(tmp_path)]) == 1
    extra = {"pyarrow": "data", "rich": "train"}[package]
    assert f"{package}: pip install 'stacked_remat[{extra}]'" in capsys.readouterr().err
