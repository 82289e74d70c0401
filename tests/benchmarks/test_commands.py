"""Benchmarks run at toy size on the CPU and write their rows, with the options that
they declare.
"""

import importlib
import importlib.util
import json

import haliax as hax
import numpy as np
import pytest

from benchmarks.command import benchmark, one_of
from benchmarks.long_loops import VARIANTS
from benchmarks.planted_examples import auc
from benchmarks.qwen3_context import CONFIG
from benchmarks.residual_mlp import Sizes

MLP = "--layers 4 --tokens 32 --width 16 --inner 24"
SMALL = "--model.num_layers 2 --model.hidden_dim 32"
CONTEXT = (
    f"--config {CONFIG.with_name('qwen3_moe_65k_cpu.yaml')} --target local {SMALL}"
)
TINY = CONFIG.with_name("qwen3_moe_tiny.yaml")
STAGES = f"--config {TINY} --target local --devices 4 --layers 2 --stages 1 2"
STEP = f"--configs {CONFIG.with_name('qwen3_moe_tiny.yaml')} --target local --devices 8"
# The command, the file that it writes, how many rows, but for those of kernels that are
# refused, and what is above zero in all rows that have it, of which there is one at
# least.
COMMANDS = [
    (
        f"step_memory {STEP} --layers 1 --policies True",
        "qwen3_moe_tiny_local_8",
        1,
        ("total", "sent"),
    ),
    (
        f"stack_memory {MLP} --only ^lax[^,]*$",
        "stack_memory_local",
        2,
        ("total", "matmul_flops"),
    ),
    (
        f"checkpoint_chain {MLP} --only ^nothing|^BlockSeq,.nested$",
        "checkpoint_chain_local",
        2,
        ("temporaries", "products"),
    ),
    (
        f"pattern {MLP} --dtype float32 --only remainder",
        "pattern_memory_local",
        3,
        ("total", "matmul_flops"),
    ),
    (
        f"pipeline {STAGES} --sequences 8 --data.seq_len 64",
        "pipeline_qwen3_moe_tiny_local_4",
        2,
        ("total", "sent"),
    ),
    (
        f"gathered_ahead {MLP} --target local --policies nested",
        "gathered_ahead_local_8",
        2,
        ("temporaries", "collectives in loops"),
    ),
    (
        "long_loops --steps 30 --size 3 --leaves 4 --rounds 1 --only prime",
        "long_loops_cpu",
        len(VARIANTS),
        ("ratio",),
    ),
    (
        "training_loop --sizes short --steps 3 --rounds 1",
        "training_loop",
        1,
        ("step_milliseconds", "run_milliseconds"),
    ),
    (
        "tokenizing --mebibytes 1 --rounds 1",
        "tokenizing",
        2,
        ("rate", "ratio"),
    ),
    (
        "disk_carries --steps 12 --width 8 --checked_steps 6",
        "disk_carries_cpu",
        2,
        ("written", "read", "seconds", "resident", "temporaries"),
    ),
    (
        "small_machines --models tiny --in_memory tiny --tokens 16 --steps 1",
        "small_machines",
        6,
        ("resident MiB", "anonymous MiB"),
    ),
    (
        f"layer_flops --configs {CONFIG.with_name('qwen3_moe_tiny.yaml')} --tokens 64",
        "layer_flops",
        1,
        ("matmul_flops",),
    ),
    (
        f"qwen3_context {CONTEXT} --tokens 64 --policies nested --tiles 2",
        "qwen3_moe_65k_cpu_tiles_local",
        1,
        ("total", "matmul_flops"),
    ),
    (
        f"qwen3_context longest {CONTEXT} --step 64 --limit 64",
        "qwen3_moe_65k_cpu_longest_local",
        2,
        ("total", "tokens"),
    ),
    (
        f"qwen3_context gathers --config {TINY} --target local --devices 4"
        " --layers 3 --tokens 64 --policies True",
        "qwen3_moe_tiny_gathers_local_4",
        1,
        ("temporaries", "collectives in loops"),
    ),
    (
        f"qwen3_context planned {CONTEXT} --tokens 64 --policies nested",
        "qwen3_moe_65k_cpu_planned_local",
        1,
        ("total", "planned_total", "ratio"),
    ),
    (
        "streaming --target local --depths 2 --tokens 32 --width 16 --inner 24",
        "streaming_local",
        4,
        ("total",),
    ),
    (
        "planted_examples --examples 200 --steps 56 --every 4",
        "planted_examples",
        12,
        ("auc_of_scores", "auc_of_loss", "held_out_loss", "held_out_loss_without"),
    ),
    (
        "ghost --target local --tokens 64 --examples 1",
        "ghost_memory_local",
        2,
        ("temporaries_ratio", "flops_ratio"),
    ),
    (
        (
            "expert_layer --rounds 2 --tokens 64 --embed 16 --inner 8 --experts 4"
            " --chosen 2"
        ),
        "expert_layer_cpu",
        4,
        ("median_seconds", "to_dense"),
    ),
    (
        (
            "attention_layer --kv_heads 1 --group 2 --head_dim 8 --tokens 64 --check 64"
            " --rounds 1"
        ),
        "attention_layer_cpu",
        10,
        ("milliseconds", "utilisation_of_matmul_peak", "agrees"),
    ),
    (
        (
            "linear_attention --key_heads 1 --key_dim 8 --value_dim 8 --tokens 96"
            " --check 96 --rounds 1"
        ),
        "linear_attention_cpu",
        8,
        ("forward_milliseconds", "with_gradient_milliseconds", "flops", "agrees"),
    ),
    pytest.param(
        "metasmoothness --examples 32 --epochs 1 --runs 3 --targets 2 --only sgd",
        "metasmoothness",
        5,
        (),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        (
            "digits --examples 160 --epochs 1 --runs 3 --queries 2 --ensemble 2"
            " --only adam"
        ),
        "digits",
        11,
        (),
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(
                importlib.util.find_spec("sklearn") is None,
                reason="needs scikit-learn",
            ),
        ],
    ),
    pytest.param(
        "influence --examples 32 --epochs 1 --runs 3 --targets 2",
        "influence",
        12,
        (),
        marks=pytest.mark.slow,
    ),
]
SIZES = Sizes()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("command", "name", "rows", "positive"),
    COMMANDS,
    ids=lambda value: str(value).split(" --")[0],
)
def test_a_benchmark_writes_its_rows(
    command, name, rows, positive, tmp_path, monkeypatch, standard_promotion
):
    monkeypatch.setattr("benchmarks.streaming.EXPERTS", (2, 4, 16, 8))
    monkeypatch.setattr("benchmarks.qwen3_context.LEANEST", ("nested",))
    adapted = tmp_path / "adapted.yaml"
    adapted.write_text(
        CONFIG.with_name("qwen3_moe_65k_cpu.yaml").read_text() + "lora: {rank: 2}\n"
    )
    monkeypatch.setattr("benchmarks.ghost.CONFIG", adapted)
    monkeypatch.setattr("benchmarks.ghost.SMALL", [("experts", "adapters", 8, 1024)])
    monkeypatch.setattr("benchmarks.attention_layer.matmul_peak", lambda: 1.0)
    monkeypatch.setattr("benchmarks.planted_examples.BATCH", 32)
    monkeypatch.setattr(
        "benchmarks.planted_examples.Position", hax.Axis("position", 40)
    )
    monkeypatch.chdir(tmp_path)
    module, *arguments = command.split(" ")
    path = importlib.import_module(f"benchmarks.{module}").main(
        [*arguments, "--out", str(tmp_path)]
    )
    found = json.loads(path.read_text())
    measured = [row for row in found["rows"] if "refused" not in row]
    assert path == tmp_path / f"{name}.json" and len(measured) == rows
    assert found["target"] == "local" if "target" in found else found["device"] == "cpu"
    for key in positive:
        values = [row[key] for row in measured if key in row]
        assert values and min(values) > 0, key


def rows_of(
    sizes: Sizes = SIZES, only: tuple[int, ...] = (), fast: bool = False, overrides=()
):
    yield {
        "name": f"{sizes.layers} {sizes.inner} {only} {fast} {overrides}",
        "temporaries": 2**30,
    }


def test_options_are_those_of_the_function(tmp_path, capsys):
    run = one_of(
        first=benchmark("rows_{layers}_{platform}")(rows_of),
        second=benchmark("second")(rows_of),
    )
    path = run(
        [
            "--layers",
            "5",
            "--only",
            "1",
            "2",
            "--fast",
            "--a.key",
            "x",
            "--out",
            str(tmp_path / "new"),
        ]
    )
    found = json.loads(path.read_text())
    assert path == tmp_path / "new/rows_5_cpu.json" and (
        found["sizes"]["layers"],
        found["only"],
    ) == (
        5,
        [1, 2],
    )
    assert found["rows"][0]["name"] == "5 2048 (1, 2) True ('--a.key', 'x')"
    assert "temporaries 1.00 GiB" in capsys.readouterr().out
    assert (
        run(["second", "--name", "other", "--out", str(tmp_path)]).name == "other.json"
    )


def test_wrong_options_and_nothing_to_measure_are_errors(tmp_path, capsys):
    def none(only: str = ""):
        yield from ()

    with pytest.raises(SystemExit):
        benchmark("none")(none)(["--unknown", "1"])
    assert "unrecognized arguments: --unknown 1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="nothing is left to measure of .*no such"):
        benchmark("none")(none)(["--only", "no such", "--out", str(tmp_path)])


def test_an_area_under_a_curve_counts_pairs_and_half_of_equal_ones():
    harm = np.array([3.0, 1.0, 1.0, 2.0, 0.0])
    wrong = np.array([True, True, False, False, False])
    # Of six pairs 3 is above three; 1 above one, and equal to one.
    assert auc(harm, wrong) == round(4.5 / 6, 4)
