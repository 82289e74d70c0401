"""Values of the `data` section, and the errors for bad ones."""

import pytest

from stacked_remat.training import DataConfig, SourceConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chat_date": "30.6.2025"}, r"data.chat_date must be a date such as 2025-06-30, got '30.6.2025'"),
        ({"held_out_fraction": 1.0}, r"data.held_out_fraction must lie between 0 and 1, got 1.0"),
        ({"cache_dir": "s3://u:SECRET@h/x"}, r"^data.cache_dir = 's3://\*\*\*@h/x' is a URL; it must be"),
    ],
)
def test_values_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paths": ("",)}, r"A data source needs paths: .* got \[''\]"),
        ({"paths": ("x",), "weight": float("nan")}, r"positive and finite, got nan. To leave"),
    ],
)
def test_bad_sources_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SourceConfig(**changes)
