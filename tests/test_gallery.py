"""Examples run, print, and become pages; links of the documentation lead somewhere."""

import ast
import json
import re

import pytest

from scripts.gallery import (
    GALLERY,
    ROOT,
    Output,
    cells_of,
    examples,
    notebook,
    page,
    pictures,
    run,
    run_or_read,
    with_links_to_pages,
    with_thumbnails,
)
from stacked_remat import __version__

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *examples(),
]
LINK = re.compile(
    r"""(?:\]\(|(?:src|srcset|href)=")(?!https?:)([^)#"\s]+)(?:#[\w-]+)?[)"]"""
)


def test_an_example_that_fails_or_prints_once_ends_the_build(tmp_path):
    script = tmp_path / "example.py"
    first = "# %% [markdown]\n# # Title\n# %%\nprint(1)\n# %%\n"
    script.write_text(first + "print(2)\n")
    assert run(script) == [*map(Output, ("", "1\n", "2\n"))]
    script.write_text(first + "pass\n")
    with pytest.raises(ValueError, match="prints in at least two cells"):
        run(script)
    script.write_text(first + "raise OSError('a wrong example')\n")
    with pytest.raises(OSError, match="a wrong example"):
        run(script)


def test_an_example_is_run_again_once_it_has_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("KEPT_GALLERY", str(tmp_path / "kept"))
    script, ran = tmp_path / "example.py", tmp_path / "ran"
    writes = f"with open({str(ran)!r}, 'a') as file: file.write('x')\n"
    text = f"# %% [markdown]\n# # Title\n# %%\nprint(1)\n# %%\n{writes}"
    script.write_text(text + "print(2)\n")
    expected = [*map(Output, ("", "1\n", "2\n"))]
    assert run_or_read(script) == run_or_read(script) == expected
    assert ran.read_text() == "x"
    script.write_text(text + "print(3)\n")
    assert run_or_read(script)[-1].text == "3\n" and ran.read_text() == "xx"


def test_a_figure_is_a_picture_of_its_cell_alone(tmp_path):
    script = tmp_path / "drawn.py"
    script.write_text(
        "# %% [markdown]\n# # Title\n# %%\nprint(1)\n# %%\n"
        "from matplotlib.figure import Figure\n"
        "figure = Figure()\nfigure.subplots().plot([1, 2])\n# %%\nprint(2)\n"
    )
    outputs = run(script)
    assert [bool(output.picture) for output in outputs] == [False, False, True, False]
    assert outputs == run(script) and "</svg>" in outputs[2].picture
    assert pictures(script, outputs) == {"drawn-2.svg": outputs[2].picture}
    assert (
        "plot([1, 2])\n```\n\n![what the cell drew](drawn-2.svg)\n\n```python"
        in page(script, outputs)
    )
    rows = "| [Drawn](drawn.md) | it |\n| [Other](other.md) | it |\n"
    image = "![what the cell drew](drawn-2.svg){ width=240 loading=lazy }"
    assert with_thumbnails(rows, ["logo.svg", "drawn-2.svg"]) == rows.replace(
        "drawn.md)", f"drawn.md)<br>{image}"
    )
    cell = json.loads(notebook(script, outputs))["cells"][2]
    assert cell["outputs"][0]["data"] == {"image/svg+xml": outputs[2].picture}


def test_the_page_and_notebook_of_a_repository_on_github_lead_to_colab(tmp_path):
    script = tmp_path / "short.py"
    script.write_text("# %% [markdown]\n# # Title\n# %%\nprint(1)\n")
    outputs = [Output(""), Output("1\n")]
    on_github = "https://github.com/them/theirs"
    link = (
        "https://colab.research.google.com/github/them/theirs/blob/gh-pages/"
        f"{__version__}/gallery/short.ipynb"
    )
    assert f"({link})" in page(script, outputs, on_github)
    text, setup, code = json.loads(notebook(script, outputs, on_github))["cells"]
    assert f"--branch v{__version__} {on_github} stacked_remat\n" in setup["source"]
    assert (text["source"], code["source"]) == ("# Title", "print(1)")
    for elsewhere in (None, "https://example.com/them/theirs"):
        assert "colab" not in page(script, outputs, elsewhere)
    assert "colab" not in notebook(script, outputs)


def test_every_example_is_in_the_navigation_and_the_table():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"- (.*): gallery/(\w+)\.md", navigation)
    subjects = [script.stem for script in examples()]
    assert sorted(name for _, name in listed if name != "index") == subjects
    table = (GALLERY / "index.md").read_text(encoding="utf-8")
    assert (
        sorted(re.findall(r"^\| \[.*\]\((\w+)\.py\)", table, re.MULTILINE)) == subjects
    )


@pytest.mark.parametrize("script", examples(), ids=lambda script: script.stem)
def test_the_page_holds_all_cells(script):
    cells = cells_of(script)
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 125
    outputs = [
        Output(f"printed {number}\n" if cell.is_code else "")
        for number, cell in enumerate(cells)
    ]
    shown = page(script, outputs)
    assert (
        shown.startswith(cells[0].text.splitlines()[0] + "\n")
        and f"({script.name})" in shown
    )
    for cell, output in zip(cells, outputs, strict=True):
        if cell.is_code:
            printed = f"```text\n{output.text}```"
            assert f"```python\n{cell.text}\n```\n\n{printed}" in shown
    made = json.loads(notebook(script, outputs))
    assert [cell["source"] for cell in made["cells"]] == [cell.text for cell in cells]
    printed = [cell["outputs"] for cell in made["cells"] if "outputs" in cell]
    texts = [output.text for output in outputs if output.text]
    assert [output["text"] for (output,) in printed] == texts
    code = "\n".join(cell.text for cell in cells if cell.is_code)
    whole = script.read_text(encoding="utf-8")
    # No line is lost between cells
    assert ast.dump(ast.parse(code)) == ast.dump(ast.parse(whole))


def test_a_script_without_a_title_is_refused(tmp_path):
    script = tmp_path / "untitled.py"
    for text in (
        "print(1)\n",
        "# %%\nprint(1)\n",
        "import jax\n# %% [markdown]\n# # Title\n",
    ):
        script.write_text(text)
        with pytest.raises(ValueError, match="must begin with"):
            cells_of(script)


def test_every_relative_link_leads_to_a_file_of_the_repository():
    links = [(page, link) for page in PAGES for link in LINK.findall(text_of(page))]
    dead = [
        (page.name, link) for page, link in links if not (page.parent / link).exists()
    ]
    assert not dead and len(links) > 100


def text_of(page):
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(
        line for line in lines if page.suffix == ".md" or line.startswith("#")
    )


@pytest.mark.parametrize(
    ("link", "on_site"),
    [
        ("visitor.py", "visitor.md"),
        ("../gallery/llama_lora.py", "../gallery/llama_lora.md"),
        ("data.md#chats", "data.md#chats"),
        (
            "https://example.com/gallery/visitor.py",
            "https://example.com/gallery/visitor.py",
        ),
    ],
)
def test_links_to_examples_lead_to_their_pages(link, on_site):
    assert with_links_to_pages(f"see [it]({link}), (x)") == f"see [it]({on_site}), (x)"
