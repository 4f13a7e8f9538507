"""Models that others trained, in ours.

files.py   tensors by name, out of a mapping or a file
gpt2.py    those of a GPT-2 in a `CausalLM`
"""

from keras_tinyattn.pretrained.gpt2 import causal_lm_from_gpt2

__all__ = ["causal_lm_from_gpt2"]
