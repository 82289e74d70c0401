"""A finished run that tests of training, export and generation share; each worker
trains it once.
"""

import pytest

from .tiny_run import make_workplace, train


@pytest.fixture
def workplace(tmp_path):
    """A folder with a config file and a text."""
    return make_workplace(tmp_path)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a run of the plain config, which has learnt its text; not to be
    changed.
    """
    folder = make_workplace(tmp_path_factory.mktemp("finished"))
    assert train(folder) == 0
    return folder / "run"
