"""Low-rank adapters for the linears of any module, on weights of 16, 8 or 4 bits, and
PEFT's files.
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
from ._quantized import (
    QuantizedForm as QuantizedForm,
    QuantizedWeight as QuantizedWeight,
    dequantize_linears as dequantize_linears,
    has_quantized as has_quantized,
    quantize_linears as quantize_linears,
)
