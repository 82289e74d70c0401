"""What a compilation found is read from a folder the next time, for the same program
and target only.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from stacked_remat.memory import TARGETS, report

VECTOR = jax.ShapeDtypeStruct((256,), jnp.float32)


def doubled(x):
    return 2 * x


@pytest.fixture
def compilations(monkeypatch):
    """The programs that were compiled."""
    programs, compile_ = [], jax.stages.Lowered.compile

    def counted(lowered, *args, **kwargs):
        programs.append(lowered.as_text())
        return compile_(lowered, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", counted)
    return programs


def test_the_same_program_is_compiled_once(compilations, tmp_path):
    folder = tmp_path / "new" / "folder"
    first = report(doubled, VECTOR, cache=folder)
    assert (
        report(doubled, VECTOR, cache=str(folder)) == first and len(compilations) == 1
    )
    assert (
        dataclasses.replace(
            report(doubled, VECTOR), compile_seconds=first.compile_seconds
        )
        == first
    )
    assert len(compilations) == 2


@pytest.mark.parametrize("other", ["program", "donation", "target", "flags"])
def test_anything_else_is_compiled_anew(other, compilations, tmp_path, monkeypatch):
    report(doubled, VECTOR, cache=tmp_path)
    if other == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_other=1")  # read by now
    report(
        (lambda x: 3 * x) if other == "program" else doubled,
        VECTOR,
        donate="all" if other == "donation" else (),
        target=dataclasses.replace(TARGETS["local"], memory=1)
        if other == "target"
        else "local",
        cache=tmp_path,
    )
    assert len(compilations) == 2


def test_a_damaged_file_is_written_again_and_a_folder_that_cannot_be_written_is_ignored(
    compilations, tmp_path
):
    first = report(doubled, VECTOR, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    for damaged in (
        path.read_text()[:-9],
        "{}",
        '{"device": {}, "host": {}, "seconds": 1}',
    ):
        path.write_text(damaged)
        found = report(doubled, VECTOR, cache=tmp_path)
        assert (found.arguments, found.total) == (first.arguments, first.total)
        assert report(doubled, VECTOR, cache=tmp_path) == found
    assert len(compilations) == 4
    assert report(doubled, VECTOR, cache=path / "below a file").total == first.total
