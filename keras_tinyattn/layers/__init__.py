"""Attention with weights, in the order in which a token meets the layers.

    token_ids (B, T)
      -> TokenAndPositionEmbedding  (B, T, D)
      -> CausalSelfAttention or DecoderBlock, any number of them  (B, T, D)
      -> VocabProjection  (B, T, V)

The letters are those of `functional`.
"""

from keras_tinyattn.layers.attention import AttentionTrace, ScaledSelfAttention
from keras_tinyattn.layers.causal_attention import CausalSelfAttention
from keras_tinyattn.layers.decoder import DecoderBlock
from keras_tinyattn.layers.embedding import TokenAndPositionEmbedding
from keras_tinyattn.layers.projection import VocabProjection

__all__ = [
    "AttentionTrace",
    "CausalSelfAttention",
    "DecoderBlock",
    "ScaledSelfAttention",
    "TokenAndPositionEmbedding",
    "VocabProjection",
]
