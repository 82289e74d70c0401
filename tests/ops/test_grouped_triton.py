"""Where the kernels of Triton can be compiled; `test_grouped_products.py` tests what they compute."""

import jax
import pytest

from stacked_remat.ops._grouped_triton import against_pallas_triton


@pytest.mark.parametrize(
    ("version", "is_attached", "message"),
    [((0, 10, 2), False, None), ((0, 12, 0), True, None), ((0, 12, 0), False, "for an attached GPU alone")],
)
def test_later_versions_of_jax_compile_triton_for_attached_gpus_alone(
    version, is_attached, message, monkeypatch
):
    monkeypatch.setattr(jax, "__version_info__", version)
    reason = against_pallas_triton(is_attached)
    assert reason is None if message is None else message in reason
