"""Low-rank adapters for the linears of any module, stacked or not, and reading and
writing PEFT's files.
"""

from ._adapter import (
    LoraConfig as LoraConfig,
    LoraLinear as LoraLinear,
    apply_lora as apply_lora,
    lora_filter as lora_filter,
    lora_linears as lora_linears,
    merge_lora as merge_lora,
)
from ._peft import (
    PeftNames as PeftNames,
    load_peft as load_peft,
    peft_tensor_names as peft_tensor_names,
    save_peft as save_peft,
)
from ._peft_layout import PeftParameter as PeftParameter
