"""Low-rank adapters for the linears of any module, stacked ones among them, and PEFT's files of them."""

from ._adapter import (
    LoraLinear as LoraLinear,
    apply_lora as apply_lora,
    lora_filter as lora_filter,
    merge_lora as merge_lora,
)
from ._config import LoraConfig as LoraConfig
