"""The largest buffers of compiled programs."""

import inspect
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest

from stacked_remat import ScanCheckpointPolicy, Stacked, fold, memory
from stacked_remat.memory import DoesNotFit, _call
from stacked_remat.memory._compiled_text import largest_buffers

from ..blocks import Tanh

Layers = hax.Axis("layers", 12)
SIZE, ROWS, WIDE = 32, 256, 500


def gradient(remat: Any):
    run = fold(lambda x, w: x + jnp.tanh(jnp.sin(x @ w) @ w.T), Layers, remat=remat)

    def loss(weights, x):
        y = run(x, weights)
        return jnp.mean(jax.nn.logsumexp(y @ jnp.ones((SIZE, WIDE)), axis=-1))

    return jax.grad(loss)


ARGUMENTS = (
    jax.ShapeDtypeStruct((12, SIZE, SIZE), jnp.float32),
    jax.ShapeDtypeStruct((ROWS, SIZE), jnp.float32),
)


@pytest.mark.parametrize(
    "remat, carries",
    [(False, 12), (True, 12), ("nested", 5), (ScanCheckpointPolicy(max_carries=3), 3)],
)
def test_carries_and_what_is_largest_in_the_loss(remat: Any, carries: int):
    found = largest_buffers(
        jax.jit(gradient(remat)).lower(*ARGUMENTS).compile().as_text()
    )
    assert (found[0].size, found[0].shape) == (4 * ROWS * WIDE, f"f32[{ROWS},{WIDE}]")
    assert f"f32[{carries},{ROWS},{SIZE}]" in {buffer.shape for buffer in found}
    assert all(buffer.size <= found[0].size for buffer in found)


def test_a_report_names_them_with_their_lines():
    first = inspect.getsourcelines(gradient)[1]
    report = memory.report(gradient(True), *ARGUMENTS)
    of_logits = [each for each in report.largest if each.shape == f"f32[{ROWS},{WIDE}]"]
    assert of_logits
    for each in report.largest:
        assert each.size * 100 >= report.largest[0].size
        assert str(each) in " ".join(str(report).split())
    assert {each.source for each in of_logits} == {f"{__file__}:{first + 5}"}
    carries = next(
        each for each in report.largest if each.shape == f"f32[12,{ROWS},{SIZE}]"
    )
    # The caller's line, not the library's
    assert carries.source == f"{__file__}:{first + 4}"


def test_lines_of_a_module_are_not_those_of_the_libraries_that_call_it():
    def loss(blocks, x):
        return jnp.sum(blocks.fold(x) ** 2)

    blocks = eqx.filter_eval_shape(
        lambda weight: Stacked(Tanh(weight), Layers), ARGUMENTS[0]
    )
    report = memory.report(eqx.filter_grad(loss), blocks, ARGUMENTS[1])
    # XLA takes the line of one instruction of a fusion: of the block or of the fold.
    ours = {__file__, inspect.getsourcefile(Tanh), ""}
    assert (
        report.largest
        and {each.source.split(":")[0] for each in report.largest} <= ours
    )


def test_what_does_not_fit_names_them(monkeypatch: pytest.MonkeyPatch):
    text = jax.jit(gradient(True)).lower(*ARGUMENTS).compile().as_text()
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    monkeypatch.setattr(_call, "compiled_with_text", lambda *_: (error, text))
    with pytest.raises(
        DoesNotFit,
        match=rf"(?s)out of memory\nThe largest buffers.*f32\[{ROWS},{WIDE}\]",
    ):
        memory.report(gradient(True), *ARGUMENTS)
