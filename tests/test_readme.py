"""The Python and the commands on the documentation's pages run, and their tables and
charts are true.
"""

import importlib.util
import inspect
import io
import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import jax
import pytest

from scripts.charts import charts, write
from stacked_remat import ScanCheckpointPolicy, ScanCheckpointSpec

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

SLOW_PAGES = (
    "porting",
    "port-a-loop",
    "nnx",
    "extending",
    "fused-updates",
    "ops",
    "ghost",
    "long-loops",
    "with-equinox",
    "training-loop",
)

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(BLOCK.pattern.replace("python", "bash"), BLOCK.flags)
POLICY_TABLE = re.compile(
    r"^\| `remat=` \| kept for the backward pass \| FLOPs \|\n((?:\|.*\|\n)+)",
    re.MULTILINE,
)


def _program(page: Path) -> str:
    """The Python blocks of a page as one program whose line numbers are those of the
    page.
    """
    text = page.read_text(encoding="utf-8")
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        first = text[: block.start(1)].count("\n")
        for offset, line in enumerate(block.group(1).splitlines()):
            lines[first + offset] = line
    return "\n".join(lines)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=_name(page),
            marks=pytest.mark.deep if page.stem in SLOW_PAGES else (),
        )
        for page in PAGES[1:]  # the next test runs the README's
        if _program(page).strip()
    ],
)
def test_the_python_on_the_page_runs(page):
    exec(compile(_program(page), page, "exec"), {"__name__": page.stem})


def test_the_first_table_is_what_the_first_program_prints(capsys):
    page = ROOT / "README.md"
    (table,) = re.findall(r"^```text\n(.*?)^```$", page.read_text(), BLOCK.flags)
    exec(compile(_program(page), page, "exec"), {"__name__": page.stem})
    printed = capsys.readouterr().out
    # The last column has seconds; sizes are those of one version of XLA.
    row = re.compile(
        r"^(\S+) +MiB +([\d.]+) +([\d.]+) +([\d.]+) +[\d.]+$", re.MULTILINE
    )
    rows, found = row.findall(table), row.findall(printed)
    assert [name for name, *_ in rows] == ["False", "True", "'nested'"]
    assert re.sub(row, "", table) == re.sub(row, "", printed)
    for (name, *figures), (printed_name, *printed_figures) in zip(
        rows, found, strict=True
    ):
        assert name == printed_name
        *sizes, flops = map(float, figures)
        *printed_sizes, printed_flops = map(float, printed_figures)
        assert printed_flops == flops
        if f"JAX {jax.__version__})" in page.read_text():
            assert printed_sizes == pytest.approx(sizes, rel=0.02)


@pytest.mark.deep
def test_type_checkers_know_the_values_on_first_pages(tmp_path):
    """Pyright knows the types of variables, parameters and lambdas, but for what
    Equinox leaves open.
    """
    pytest.importorskip("pyright")
    rules = (
        "reportUnknownVariableType",
        "reportUnknownParameterType",
        "reportUnknownLambdaType",
    )
    config = {
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "basic",
        **dict.fromkeys(rules, "error"),
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    programs = {
        page: _program(ROOT / page) for page in ("README.md", "docs/getting-started.md")
    }
    for page, program in programs.items():
        (tmp_path / page.replace("/", "_")).with_suffix(".py").write_text(program)
    check = [
        sys.executable,
        "-m",
        "pyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
        "-p",
        tmp_path,
    ]
    result = json.loads(subprocess.run(check, stdout=subprocess.PIPE, text=True).stdout)
    assert result["summary"]["filesAnalyzed"] == len(programs)
    found = [
        (
            entry["message"],
            Path(entry["file"])
            .read_text()
            .splitlines()[entry["range"]["start"]["line"]],
        )
        for entry in result["generalDiagnostics"]
    ]
    assert not [
        entry
        for entry in found
        if not re.search(r"eqx\.(filter_grad|tree_at)", entry[1])
    ]


def test_pages_and_configs_install_from_the_checkout():
    # A message may name `stacked_remat[data]`: pip then adds the extra to the library
    # that is installed.
    files = [
        *PAGES,
        *(ROOT / "docs" / "gallery").glob("*.py"),
        *(ROOT / "models").rglob("*.yaml"),
    ]
    text = {_name(file): file.read_text(encoding="utf-8") for file in files}
    commands = re.compile(r"pip install \S*stacked_remat\S*")
    found = {
        name: sorted(set(commands.findall(own)))
        for name, own in text.items()
        if commands.search(own)
    }
    assert found == {"README.md": ["pip install 'stacked_remat[data]'`,"]}


def _policy_table(text: str) -> list[list[str]]:
    (table,) = POLICY_TABLE.findall(text)
    return [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in table.splitlines()[1:]
    ]


def test_the_tables_of_policies_agree_and_name_every_alias():
    table = _policy_table(inspect.getdoc(ScanCheckpointPolicy) or "")
    assert (
        _policy_table((ROOT / "docs" / "policies.md").read_text(encoding="utf-8"))
        == table
    )
    named = {code for row in table for code in re.findall(r"`([^`]+)`", row[0])}
    aliases = {
        repr(alias).replace("'", '"')
        for kind in typing.get_args(ScanCheckpointSpec)
        for alias in typing.get_args(kind)
        if isinstance(alias, str)
    }
    assert aliases | {"True", "False"} == {code for code in named if "=" not in code}


def _words(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def _drawn(figure: Any) -> list[str]:
    file = io.StringIO()
    write(figure, file)
    return _words(file.getvalue())


def test_charts_are_drawn_from_the_results():
    for path, figure in charts():
        assert _words(path.read_text(encoding="utf-8")) == _drawn(figure), (
            "make figures draws it again"
        )


def _printed(block, folder):
    """What a block of commands prints; every command has to succeed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # Users have one device
    flags = os.environ["XLA_FLAGS"].replace(
        "--xla_force_host_platform_device_count=8", ""
    )
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder,
        env={
            **os.environ,
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": flags,
            "COLUMNS": "120",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{block}\nsays:\n{done.stdout}"
    return done.stdout


def _shown(page, folder):
    """What each block of commands of a page prints, run one after the other."""
    shown = {}
    for block in COMMANDS.findall((ROOT / "docs" / page).read_text(encoding="utf-8")):
        if not block.startswith("pip install"):
            shown[block] = _printed(block, folder)
    return shown


def _needs(*packages):
    return pytest.mark.skipif(
        not all(importlib.util.find_spec(package) for package in packages),
        reason=f"the page takes {', '.join(packages)}",
    )


@pytest.mark.torch
@_needs("torch", "transformers", "peft", "lm_eval")
def test_the_commands_of_lora_on_your_chats_run_one_after_the_other(tmp_path):
    shown = _shown("lora-on-your-chats.md", tmp_path)

    def of(words):
        return next(text for block, text in shown.items() if words in block)

    assert "«Paris" in of("--show_example")
    result = json.loads((tmp_path / "runs" / "chats" / "result.json").read_text())
    after, before = result["held_out_after"], result["held_out_before"]
    assert after["held_out"] < before["held_out"] - 2
    assert re.search(r"held_out_loss .*steps 0 to", of("models.plot"))
    answers = of("models.generate")
    assert "Paris" in answers
    assert of("models.eval_lm").count("exact_match") >= 2
    # PEFT's model writes what this library does.
    last = of("PeftModel").strip().splitlines()[-1]
    assert last.removesuffix("<|im_end|>") in answers


@pytest.mark.torch
@_needs("torch", "transformers")
def test_the_commands_of_train_your_model_run_one_after_the_other(tmp_path):
    shown = _shown("train-your-model.md", tmp_path)

    def of(words):
        (found,) = [text for block, text in shown.items() if words in block]
        return found

    assert "fits 1.00 GiB" in of("models.plan_lm")
    assert "stopped by SIGTERM" in of(
        "kill -TERM"
    ) and "stopped with exit status 75" in of("kill -TERM")
    assert (
        "resuming after step"
        in shown["python -m models.train_lm --config_path my-model.yaml\n"]
    )
    result = json.loads((tmp_path / "runs" / "mine" / "result.json").read_text())
    assert (
        result["held_out_after"]["held_out"] < result["held_out_before"]["held_out"] - 1
    )
    assert len(of("models.generate")) > len("The statement")
    exported = {path.name for path in (tmp_path / "exported").iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= exported
