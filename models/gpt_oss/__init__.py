"""gpt-oss: its config, and its names in Hugging Face's files."""

from models.gpt_oss.config import GptOssConfig as GptOssConfig
from models.gpt_oss.hf import TENSOR_NAMES as TENSOR_NAMES  # registers it
