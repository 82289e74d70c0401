"""Bytes as tokens: no vocabulary to learn, to download or to mismatch."""

from typing import ClassVar, final

import numpy as np
from jaxtyping import Integer


@final
class ByteTokenizer:
    """Tokens 0 to 255 are the bytes of UTF-8 text; 256 separates documents."""

    vocab_size: ClassVar[int] = 257
    separator: ClassVar[int] = 256

    def encode(self, text: str | bytes) -> Integer[np.ndarray, " tokens"]:
        """Maps text to one token a byte."""
        raw = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: Integer[np.ndarray, " tokens"]) -> str:
        """Maps tokens back to text, separators left out; bytes that are no UTF-8 become U+FFFD."""
        kept = np.asarray(tokens)[np.asarray(tokens) < 256]
        return kept.astype(np.uint8).tobytes().decode("utf-8", errors="replace")
