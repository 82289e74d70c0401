"""Importing this module registers every config and format."""

from models.deepseek_v3 import DeepseekV3Config as DeepseekV3Config
from models.gemma3 import Gemma3Config as Gemma3Config
from models.gpt_oss import GptOssConfig as GptOssConfig
from models.llama import LlamaConfig as LlamaConfig
from models.mistral import MistralConfig as MistralConfig
from models.mixtral import MixtralConfig as MixtralConfig
from models.olmo3 import Olmo3Config as Olmo3Config
from models.phi3 import Phi3Config as Phi3Config
from models.qwen2 import Qwen2Config as Qwen2Config
from models.qwen3 import Qwen3Config as Qwen3Config, Qwen3MoeConfig as Qwen3MoeConfig
