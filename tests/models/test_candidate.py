"""Steps of small models of every kind: compiled for devices that are not attached, and
counted.

What they take is not compared: `tests/benchmarks` does that, with the compiler of the
recorded figures alone.
"""

import dataclasses
import importlib.util
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import equinox as eqx
import jax
import pytest

from models.candidate import Candidate
from models.gpt_oss import GptOssConfig
from models.lm import next_token_loss
from models.parts.sections import FULL, SLIDING, AttentionConfig, ExpertsConfig
from models.qwen3 import Qwen3Config
from models.qwen3_moe import Qwen3MoeConfig
from models.run_config import LmRunConfig
from models.run_state import batch_shapes, run_optimizer, state_shapes
from stacked_remat.lora import LoraConfig
from stacked_remat.memory import count_flops
from stacked_remat.ops import backends_taken
from stacked_remat.training import (
    DataConfig,
    MeshConfig,
    Partitioning,
    TrainerConfig,
    TrainStep,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")


ATTENTION = AttentionConfig(head_dim=128)  # which the kernels for TPUs take
SIZES = dict(
    hidden_dim=128, num_layers=2, num_heads=2, num_kv_heads=1, compute_dtype="bfloat16"
)
EXPERTS = ExpertsConfig(4, 2, 128)


WINDOWED = dataclasses.replace(
    ATTENTION, bias=True, window=64, layer_types=(SLIDING, FULL)
)
MODELS = {
    "qwen3": Qwen3Config(**SIZES, attention=ATTENTION),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, attention=ATTENTION, experts=EXPERTS),
    "gpt_oss": GptOssConfig(**SIZES, attention=WINDOWED, experts=EXPERTS),
}


ONE = MeshConfig({"data": 1})
CONTEXT = MeshConfig({"context": 2}, {"position": "context"}, {"embed": "context"})


def config_of(kind, mesh=ONE, seq_len=128):
    """Adapters of the decoder of two kinds of layers, and all weights of the others."""
    return LmRunConfig(
        model=MODELS[kind],
        vocab_size=257,
        lora=LoraConfig(rank=2) if kind == "gpt_oss" else None,
        data=DataConfig(seq_len=seq_len, batch_size=1),
        trainer=TrainerConfig(mesh=mesh),
    ).resolved()


def compiled(kind, target):
    """The report of a step with several documents, and the kernels that it takes."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        backends_taken() as taken,
    ):
        return Candidate(config_of(kind), target).report(), taken


PLUGINS = {"h200": "cuda", "b200": "cuda", "v5p": "tpu", "v6e": "tpu"}
# Every kind and every target; the other pairs are slow.
STEPS = [
    ("gpt_oss", "h200"),
    ("qwen3_moe", "b200"),
    ("gpt_oss", "v5p"),
    ("qwen3", "v5p"),
    ("qwen3_moe", "v6e"),
]
SLOW_STEPS = [("gpt_oss", "b200"), ("qwen3", "h200"), ("gpt_oss", "v6e")]


def step_of(kind, target, *marks):
    marks = [pytest.mark.target(PLUGINS[target]), *marks]
    return pytest.param(kind, target, marks=marks)


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        *(step_of(*step) for step in STEPS),
        *(step_of(*step, pytest.mark.slow) for step in SLOW_STEPS),
    ],
)
def test_a_step_compiles_for_a_device_that_is_not_attached(kind, target):
    if target == "b200":  # a process compiles Mosaic's kernels for one kind of GPU
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as another:
            found, taken = another.submit(compiled, kind, target).result()
    else:
        found, taken = compiled(kind, target)
    assert found.target == target and found.temporaries > 0 and found.flops.matmul > 0
    assert not [reason for reason in found.flops.too_low if "is not counted" in reason]
    on_gpu, has_tokamax = (
        target in ("h200", "b200"),
        importlib.util.find_spec("tokamax") is not None,
    )
    kernels = (
        "tokamax" if on_gpu and has_tokamax else "blockwise" if on_gpu else "splash"
    )
    assert taken and {
        name.split(" ")[0] for of, name in taken.items() if "attention" in of
    } == {kernels}


@pytest.mark.parametrize(
    ("target", "kernels"),
    [
        pytest.param("h200", "tokamax", marks=pytest.mark.target("cuda")),
        pytest.param("v5p", "splash", marks=pytest.mark.target("tpu")),
    ],
)
def test_a_step_of_divided_positions_takes_kernels(target, kernels):
    if kernels == "tokamax":
        pytest.importorskip("tokamax")
    config = config_of("gpt_oss", CONTEXT, seq_len=512)
    # Kernels of experts, which take half of the time, are those of the test above
    experts = dataclasses.replace(EXPERTS, backend="block")
    model = dataclasses.replace(config.model, experts=experts)
    config = dataclasses.replace(config, model=model)
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        backends_taken() as taken,
    ):
        found = Candidate(config, target, devices=2).report()
    assert {name.split(" ")[0] for of, name in taken.items() if "attention" in of} == {
        kernels
    }
    assert found.devices == 2 and found.sent > 0


FLOPS = {"qwen3": 662_831_104, "qwen3_moe": 606_208_048, "gpt_oss": 499_826_736}


@pytest.mark.parametrize("kind", MODELS)
def test_every_version_of_jax_counts_the_same_arithmetic(kind):
    """JAX 0.10.2 and 0.12 trace custom derivatives and checkpoints in other ways."""
    config = dataclasses.replace(config_of(kind), remat="nested")
    partitioning = Partitioning.of(config.trainer.mesh, jax.devices()[:1])
    step = TrainStep.of(
        config.trainer,
        loss_function=next_token_loss,
        optimizer=run_optimizer(config),
        partitioning=partitioning,
    )
    shapes = batch_shapes(config.data, partitioning), state_shapes(config, partitioning)
    found = count_flops(eqx.filter_make_jaxpr(step)(*shapes)[0])
    assert found.matmul == pytest.approx(FLOPS[kind], rel=0.01)
