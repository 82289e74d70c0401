"""`import stacked_remat`: its names, its packages, and the extra that training needs."""

import pkgutil
import re
from pathlib import Path

import pytest

import stacked_remat
from stacked_remat.training.extra import PACKAGES, check_installed

ROOT = Path(__file__).resolve().parents[1]


def test_every_public_name_is_there():
    assert all(hasattr(stacked_remat, name) for name in stacked_remat.__all__)
    assert {"memory", "ops", "lora", "training", "Stacked", "__version__"} <= set(dir(stacked_remat))
    assert re.fullmatch(r"\d+\.\d+\.\d+", stacked_remat.__version__)
    assert callable(stacked_remat.memory.report) and callable(stacked_remat.ops.causal_attention)
    assert callable(stacked_remat.lora.apply_lora) and callable(stacked_remat.training.train)
    assert callable(stacked_remat.nnx.remat_scan)
    with pytest.raises(AttributeError, match="module 'stacked_remat' has no attribute 'stack'"):
        stacked_remat.stack  # noqa: B018


def test_names_are_documented():
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    packages = {"ghost", "lora", "memory", "ops", "__version__"}
    missing = [
        name for name in set(stacked_remat.__all__) - packages if f"::: stacked_remat.{name}\n" not in pages
    ]
    assert not missing, f"docs/api lacks {missing}"
    for name in re.findall(r"^::: (\S+)$", pages, re.MULTILINE):
        pkgutil.resolve_name(name)


def test_training_says_which_extra_it_takes():
    check_installed()
    with pytest.raises(ModuleNotFoundError, match=r"needs no_such_package.*'stacked_remat\[train\]'"):
        check_installed((*PACKAGES, "no_such_package"))
