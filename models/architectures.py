"""Importing this module registers every config and format."""

from models.cohere2 import Cohere2Config as Cohere2Config
from models.deepseek_v3 import DeepseekV3Config as DeepseekV3Config
from models.gemma2 import Gemma2Config as Gemma2Config
from models.gemma3 import Gemma3Config as Gemma3Config
from models.glm4_moe import Glm4MoeConfig as Glm4MoeConfig
from models.gpt_oss import GptOssConfig as GptOssConfig
from models.granite import GraniteConfig as GraniteConfig
from models.granitemoehybrid import (
    GraniteMoeHybridConfig as GraniteMoeHybridConfig,
)
from models.kimi_linear import KimiLinearConfig as KimiLinearConfig
from models.lfm2 import Lfm2Config as Lfm2Config
from models.lfm2_moe import Lfm2MoeConfig as Lfm2MoeConfig
from models.llama import LlamaConfig as LlamaConfig
from models.llama4 import Llama4Config as Llama4Config
from models.minimax_m2 import MiniMaxM2Config as MiniMaxM2Config
from models.mistral import MistralConfig as MistralConfig
from models.mixtral import MixtralConfig as MixtralConfig
from models.olmo3 import Olmo3Config as Olmo3Config
from models.olmo_hybrid import OlmoHybridConfig as OlmoHybridConfig
from models.phi3 import Phi3Config as Phi3Config
from models.qwen2 import Qwen2Config as Qwen2Config
from models.qwen3 import Qwen3Config as Qwen3Config
from models.qwen3_5 import (
    Qwen3_5Config as Qwen3_5Config,
    Qwen3_5MoeConfig as Qwen3_5MoeConfig,
)
from models.qwen3_moe import Qwen3MoeConfig as Qwen3MoeConfig
from models.qwen3_next import Qwen3NextConfig as Qwen3NextConfig
from models.smollm3 import SmolLM3Config as SmolLM3Config
