"""`import stacked_remat`: its names, its packages, and the extra that training
needs.
"""

import importlib
import pkgutil
import re
import tomllib
import types
import typing
from pathlib import Path

import pytest
import yaml

import stacked_remat
from stacked_remat.training.extra import PACKAGES, check_installed

ROOT = Path(__file__).resolve().parents[1]
API_PAGES = "".join(
    page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")
)


def test_every_public_name_is_there():
    assert all(hasattr(stacked_remat, name) for name in dir(stacked_remat))
    assert {"memory", "ops", "lora", "training", "Stacked", "__version__"} <= set(
        dir(stacked_remat)
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+", stacked_remat.__version__)
    with pytest.raises(
        AttributeError, match="module 'stacked_remat' has no attribute 'stack'"
    ):
        stacked_remat.stack  # noqa: B018


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    assert citation["version"] == stacked_remat.__version__
    assert [{"name": author["name"]} for author in citation["authors"]] == project[
        "authors"
    ]
    assert {name: citation[name] for name in ("license", "keywords")} == {
        name: project[name] for name in ("license", "keywords")
    }


def test_the_conda_recipe_is_of_this_version_and_its_requirements():
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert recipe["context"]["version"] == stacked_remat.__version__
    about = recipe["about"]
    assert (about["license"], about["summary"]) == (
        project["license"],
        project["description"],
    )
    needs = [f"python{project['requires-python']}", *project["dependencies"]]
    written = [need.replace(" ", "") for need in recipe["requirements"]["run"]]
    assert sorted(written) == sorted(needs)


def test_the_address_of_the_repository_is_that_of_the_project():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls")
    address = (urls or {}).get("Repository", "https://ADDRESS")
    assert f"git clone {address} stacked_remat" in (ROOT / "README.md").read_text()
    assert f"[stacked_remat]({address})" in (ROOT / "CONTRIBUTING.md").read_text()


def test_training_says_which_extra_it_takes():
    check_installed()
    with pytest.raises(
        ModuleNotFoundError, match=r"needs no_such_package.*'stacked_remat\[train\]'"
    ):
        check_installed((*PACKAGES, "no_such_package"))


def _public_names(package):
    """What `__all__` or the imports of a package make public, and what a single file
    defines.
    """
    names = getattr(package, "__all__", None) or [
        name for name in vars(package) if not name.startswith("_")
    ]
    for name in names:
        value = getattr(package, name)
        local = (
            hasattr(package, "__path__")
            or getattr(value, "__module__", None) == package.__name__
        )
        if local and not isinstance(value, types.ModuleType | str | typing.TypeVar):
            yield f"{package.__name__}.{name}"


@pytest.mark.parametrize(
    "package",
    [
        "",
        ".ghost",
        ".diffrax",
        ".levanter",
        ".lora",
        ".memory",
        ".nnx",
        ".ops",
        ".streaming",
        ".training",
    ],
)
def test_every_public_name_is_on_an_api_page(package):
    names = list(_public_names(importlib.import_module(f"stacked_remat{package}")))
    missing = [name for name in names if f"::: {name}\n" not in API_PAGES]
    assert names and not missing, f"docs/api lacks {missing}"


def test_the_api_pages_name_what_there_is():
    for name in re.findall(r"^::: (\S+)$", API_PAGES, re.MULTILINE):
        pkgutil.resolve_name(name)
