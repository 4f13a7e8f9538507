"""Prompt ids to a continuation, with a cache; with and without XLA.

request  Python values to checked tensors
graphs   what is made once for a model: its forward pass for windows and for steps
loop     prefill and steps, until every row has stopped or has no room left
public   `generate` and `stream`

Each row has its own position, so prompts of unequal length share a batch, padded on the right.
"""

from keras_tinyattn.generation.public import generate, stream
from keras_tinyattn.generation.request import Generation

__all__ = ["Generation", "generate", "stream"]
