"""Adapters on a small machine, with frozen weights in files: the memory of a process.

    export MALLOC_ARENA_MAX=1
    export XLA_FLAGS="--xla_cpu_use_fusion_emitters=false
                      --xla_cpu_parallel_codegen_split_count=1"
    python -OO -m benchmarks.small_machines --models qwen2_5_0_5b qwen3_4b --steps 1

Random weights of each model's true sizes are written as bfloat16 to safetensors files
in `--folder`, which are deleted at the end; 8 GB for `qwen3_4b`. Then a process of its
own opens them, compiles a step of SGD on adapters of attention, and runs it. Its
resident memory is what Linux says of the whole process, with Python, JAX and the
compiler: the peak until all is imported and a first program has run (`imported`), until
the step is compiled (`compiled`), and while it runs (`running`), each after freed
memory was given back. `anonymous` is the part of it that is no page of a file; the
others are code of libraries and pages of weights, which the system takes back where
memory is short. Beside it some models have a row with weights in memory.

Without the first flag XLA for CPUs takes three times the memory to compile; without
the second some MiB more, for a program that it divides among threads. `-OO` leaves out
docstrings.
"""

import ctypes
import dataclasses
import functools
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from models.hf_io.decoder_weights import read_decoder, tensor_maps
from models.hf_io.safetensors_folder import Pending, write_safetensors
from models.hf_io.stacked_weights import TensorMap
from models.lm import next_token_loss
from models.parts.config import DecoderConfig
from models.parts.decoder import Decoder
from models.parts.sections import AttentionConfig
from models.qwen2 import Qwen2Config
from models.qwen3 import Qwen3Config
from stacked_remat.lora import LoraConfig, apply_lora, lora_filter
from stacked_remat.training import (
    BATCH_AXIS,
    POSITION_AXIS,
    TokenBatch,
    cast_parameters,
)

from .command import Rows, benchmark
from .record import in_a_process


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder and the rows of its embedding, which is its head too."""

    config: DecoderConfig
    vocab: int

    def shapes(self, remat: Any) -> Decoder:
        """Its shapes, in bfloat16."""

        def init() -> Decoder:
            Vocab = Axis("vocab", self.vocab)
            key = jax.random.key(0)
            made = Decoder.init(self.config, Vocab, remat=remat, key=key)
            return cast_parameters(made, "bfloat16")

        return eqx.filter_eval_shape(init)


_SHARED: dict[str, Any] = {"tie_word_embeddings": True, "compute_dtype": "bfloat16"}
MODELS = {
    "qwen2_5_0_5b": Model(
        Qwen2Config(
            hidden_dim=896,
            num_layers=24,
            num_heads=14,
            num_kv_heads=2,
            mlp_dim=4_864,
            # Its MLP is wide and its heads are few: tiles of positions save more than
            # the weights of attention take, which tiles of heads read as a whole.
            tiles=2,
            **_SHARED,
        ),
        151_936,
    ),
    "qwen3_4b": Model(
        Qwen3Config(
            hidden_dim=2_560,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            mlp_dim=9_728,
            attention=AttentionConfig(head_dim=128),
            **_SHARED,
        ),
        151_936,
    ),
    # For tests.
    "tiny": Model(Qwen2Config(hidden_dim=32, num_layers=2, **_SHARED), 100),
}


@benchmark("small_machines")
def main(
    models: tuple[str, ...] = ("qwen2_5_0_5b",),
    in_memory: tuple[str, ...] = ("qwen2_5_0_5b",),
    tokens: int = 256,
    rank: int = 8,
    remat: str = "nested",
    steps: int = 2,
    folder: str = ".",
) -> Rows:
    """The memory of a step on one sequence, with weights in files, and of
    some models in memory too.

    Raises:
        ArithmeticError: losses with weights in memory and in files differ.
    """
    for name in models:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            root = Path(place, name)
            in_a_process(write_random, name, root)
            places = ["files", "memory"] if name in in_memory else ["files"]
            losses = []
            for where in places:
                in_files = where == "files"
                found, phases = in_a_process(
                    measured, name, root, in_files, tokens, rank, remat, steps
                )
                losses.append(found)
                for row in phases:
                    yield {"model": name, "weights": where} | row
            if not np.allclose(losses[0], losses[-1], rtol=0.005):
                raise ArithmeticError(f"{name}: losses differ: {losses}")


def write_random(name: str, root: Path) -> None:
    """Write files with random weights of a model, a tensor at a time."""
    maps = tensor_maps(MODELS[name].shapes(True)).values()
    pending = {}
    for one in maps:
        for _, tensor, _ in one.numbered():
            make = functools.partial(_random_tensor, one, tensor)
            pending[tensor] = Pending(2 * math.prod(one.tensor_shape), make)
    write_safetensors(root, pending, documents={}, max_file_bytes=2**29)


def _random_tensor(one: TensorMap, name: str) -> np.ndarray:
    if "norm" in name:
        return np.ones(one.tensor_shape, jnp.bfloat16)
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    # Some numbers, over and over: billions would take minutes to draw.
    drawn = 0.02 * generator.standard_normal(1_000_003, np.float32)
    return np.resize(drawn.astype(jnp.bfloat16), one.tensor_shape)


def measured(
    name: str,
    root: Path,
    in_files: bool,
    tokens: int,
    rank: int,
    remat: str,
    steps: int,
) -> tuple[list[float], list[dict[str, Any]]]:
    """The losses of some steps of a model, and what this process takes for them."""
    phases = []
    with _measured(phases, "imported"):
        jax.block_until_ready(jax.jit(jnp.square)(jnp.ones(8)))
    with _measured(phases, "compiled"):
        like = MODELS[name].shapes(remat)
        decoder = read_decoder(root, like, in_files=in_files)
        config = LoraConfig(rank, targets=("*attention*",))
        model = apply_lora(decoder, config, key=jax.random.key(1))
        adapters, frozen = eqx.partition(model, lora_filter(model))
        batch = _batch(MODELS[name].vocab, tokens)
        step = jax.jit(_step, donate_argnums=0)
        compiled = step.lower(adapters, frozen, batch).compile()
        # What was traced is not needed to run it.
        jax.clear_caches()
        del decoder, model, step
    losses = []
    with _measured(phases, "running"):
        for _ in range(steps):
            adapters, loss = compiled(adapters, frozen, batch)
            losses.append(float(loss))
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise RuntimeError("XLA did not say what memory the step takes.")
    sizes = {
        "weights_bytes": 2 * sum(leaf.size for leaf in jax.tree.leaves(like)),
        "temporaries": analysis.temp_size_in_bytes,
    }
    return losses, [sizes | phase for phase in phases]


def _step(adapters: Any, frozen: Any, batch: TokenBatch) -> Any:
    """A step of SGD, and the loss before it."""

    def loss(adapters: Any) -> Any:
        return next_token_loss(eqx.combine(adapters, frozen), batch)[0]

    value, gradients = jax.value_and_grad(loss)(adapters)
    updated = jax.tree.map(lambda own, by: own - 1e-3 * by, adapters, gradients)
    return updated, value


def _batch(vocab: int, tokens: int) -> TokenBatch:
    axes = Axis(BATCH_AXIS, 1), Axis(POSITION_AXIS, tokens)
    drawn = np.random.default_rng(0).integers(vocab, size=(1, tokens + 1))
    drawn = drawn.astype(np.int32)
    # From NumPy, which has nothing to compile.
    tokens, targets, weights = jax.device_put(
        (drawn[:, :-1], drawn[:, 1:], np.ones((1, tokens), np.float32))
    )
    return TokenBatch(
        hax.named(tokens, axes), hax.named(targets, axes), hax.named(weights, axes)
    )


# Python without its packages, so that asking takes no memory that counts, nor waits for
# the process that is asked.
_ASK = """
import json, sys, threading, time
peaks = {}
ends = threading.Thread(target=sys.stdin.read, daemon=True)
ends.start()
is_last = False
while not is_last:
    is_last = not ends.is_alive()
    for line in open(f"/proc/{sys.argv[1]}/status"):
        field, _, value = line.partition(":")
        if field in ("VmHWM", "RssAnon"):
            peaks[field] = max(peaks.get(field, 0), int(value.split()[0]))
    time.sleep(0.002)
print(json.dumps(peaks))
"""


@contextmanager
def _measured(phases: list[dict[str, Any]], name: str) -> Iterator[None]:
    """Append the peaks of this process's resident memory in a `with`: by the system of
    all pages, and asked every 2 ms of those of no file.
    """
    gc.collect()
    # Memory that was freed, and that the C library has kept
    ctypes.CDLL(None).malloc_trim(0)
    if phases:
        Path("/proc/self/clear_refs").write_text("5")  # a new peak from here on
    ask = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _ASK, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield
    finally:
        found, _ = ask.communicate("")
        peaks = json.loads(found)
        phases.append(
            {
                "phase": name,
                "resident MiB": peaks["VmHWM"] >> 10,
                "anonymous MiB": peaks["RssAnon"] >> 10,
            }
        )


if __name__ == "__main__":
    main()
