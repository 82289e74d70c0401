"""Mixers: the parts through which tokens of a sequence read each other."""

import abc

import equinox as eqx
from haliax import Axis, NamedArray
from jaxtyping import DTypeLike

from models.parts.cache import Kept, LayerCache
from models.parts.rotary import RotaryEmbedding
from models.parts.tokens import Tokens


class Mixer(eqx.Module):
    """The part of a layer through which a token reads others, and says what it keeps of
    them.

    Attributes:
        rotary: the rotary embedding that it uses; None for none.
    """

    rotary: eqx.AbstractVar[RotaryEmbedding | None]

    @abc.abstractmethod
    def __call__(
        self, x: NamedArray, tokens: Tokens, cache: LayerCache | None = None
    ) -> tuple[NamedArray, LayerCache | None]:
        """Maps `[..., Embed]` to itself; a token reads its document up to itself.

        With a cache, writes there what it keeps of the tokens. Sequences must be whole,
        from their first token on, and what is after `tokens.lengths` is padding, which
        a state must not absorb; a single token of each reads those in the cache.
        """

    @abc.abstractmethod
    def empty_cache(self, Batch: Axis, slots: int, dtype: DTypeLike) -> Kept:
        """What a layer keeps of sequences of so many tokens, before it has read some.

        `dtype` is that of activations; a state may have another.
        """
