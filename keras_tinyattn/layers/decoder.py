"""Attention and an MLP on one residual stream."""

import keras
from keras import activations, initializers, ops

from keras_tinyattn.layers._arguments import check_rate, check_size, own_draw, sizes
from keras_tinyattn.layers._graph_key import graph_key
from keras_tinyattn.layers._masks import hide_masked, implicit_mask
from keras_tinyattn.layers.causal_attention import CausalSelfAttention

__all__ = ["DecoderBlock"]


@keras.saving.register_keras_serializable(package="keras_tinyattn")
def _tanh_gelu(x):
    return keras.activations.gelu(x, approximate=True)


@keras.saving.register_keras_serializable(package="keras_tinyattn")
class DecoderBlock(keras.layers.Layer):
    """GPT-2's block: attention, then an MLP of two layers, each on a normalised residual stream.

        x = x + attention(norm(x))
        x = x + mlp(norm(x)),    mlp(x) = gelu(x W + b) W' + b'

    The normalisation is LayerNorm with epsilon 1e-5, the GELU its tanh approximation unless another
    activation is given.

    Args:
        hidden_dim: D, the width of the residual stream.
        num_heads: H; must divide D.
        intermediate_dim: width of the MLP's inner layer; 4 D unless given.
        dropout: share dropped in training from the weights and from what each half adds, in [0, 1).
        kernel_initializer: initializer of every kernel; each kernel is sampled anew.
        activation: activation of the MLP's inner layer, as Keras names it: `"gelu"` is the exact GELU.
            Its tanh approximation unless given.
        blockwise: as in `ScaledSelfAttention`.
        seed: seed of the dropout.

    Call arguments:
        inputs: `(B, T, D)`.
        mask, attention_mask, cache, positions, precomputed: as in `CausalSelfAttention`.
        return_attention_scores: whether to return the weights as well.
        training: whether dropout is on.

    Returns:
        `output`, `(B, T, D)`, then the weights `(B, H, T, S)` if `return_attention_scores`, then the
        new cache if one was given.

    Raises:
        ValueError: if a size is below 1, the heads do not divide the width, or dropout is out of
            range.

    Example:

    >>> DecoderBlock(hidden_dim=8, num_heads=2)(keras.ops.ones((1, 3, 8))).shape
    TensorShape([1, 3, 8])

    Reference: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019.
    """

    def __init__(
        self,
        hidden_dim,
        num_heads,
        intermediate_dim=None,
        dropout=0.0,
        kernel_initializer="glorot_uniform",
        blockwise=None,
        seed=None,
        activation=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.hidden_dim = check_size("hidden_dim", hidden_dim)
        self.num_heads = check_size("num_heads", num_heads)
        if hidden_dim % num_heads:
            raise ValueError(
                "The heads share the width evenly. Expected num_heads to divide hidden_dim. "
                f"Received: hidden_dim={hidden_dim}, num_heads={num_heads}. "
                f"Choose a hidden_dim that is a multiple of {num_heads}."
            )
        self.intermediate_dim = check_size(
            "intermediate_dim", 4 * hidden_dim if intermediate_dim is None else intermediate_dim
        )
        self.dropout = check_rate(dropout)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.activation = None if activation is None else activations.get(activation)
        self.blockwise = blockwise
        self.seed = seed
        self.supports_masking = True
        self.attention_norm = keras.layers.LayerNormalization(
            epsilon=1e-5, dtype=self.dtype_policy, name="attention_norm"
        )
        self.attention = CausalSelfAttention(
            head_dim=hidden_dim // num_heads,
            num_heads=num_heads,
            output_dim=hidden_dim,
            use_bias=True,
            dropout=dropout,
            kernel_initializer=self.kernel_initializer,
            blockwise=blockwise,
            seed=seed,
            dtype=self.dtype_policy,
            name="attention",
        )
        self.mlp_norm = keras.layers.LayerNormalization(
            epsilon=1e-5, dtype=self.dtype_policy, name="mlp_norm"
        )
        self.mlp_expand = keras.layers.Dense(
            self.intermediate_dim,
            activation=self.activation or _tanh_gelu,
            kernel_initializer=own_draw(self.kernel_initializer, 4),
            dtype=self.dtype_policy,
            name="mlp_expand",
        )
        self.mlp_contract = keras.layers.Dense(
            hidden_dim,
            kernel_initializer=own_draw(self.kernel_initializer, 5),
            dtype=self.dtype_policy,
            name="mlp_contract",
        )
        self.residual_dropout = keras.layers.Dropout(
            self.dropout,
            # Another stream of random numbers than that of the weights' dropout.
            seed=None if seed is None else seed + 1,
            dtype=self.dtype_policy,
            name="residual_dropout",
        )

    def build(self, input_shape):
        if input_shape[-1] != self.hidden_dim:
            raise ValueError(
                "The block adds to a residual stream of its own width. "
                f"Expected inputs of shape (B, T, {self.hidden_dim}). "
                f"Received: shape {tuple(input_shape)}. "
                "Project the inputs to that width, or build the block with another hidden_dim."
            )
        self.attention_norm.build(input_shape)
        self.attention.build(input_shape)
        self.mlp_norm.build((None, self.hidden_dim))
        self.mlp_expand.build((None, self.hidden_dim))
        self.mlp_contract.build((None, self.intermediate_dim))

    def call(
        self,
        inputs,
        mask=None,
        attention_mask=None,
        cache=None,
        positions=None,
        precomputed=None,
        return_attention_scores=False,
        training=None,
    ):
        mask = implicit_mask(inputs) if mask is None else mask
        if cache is None and (mask is not None or attention_mask is not None):
            # What attention hides must not reach the gradients of the MLP either.
            inputs, *_ = hide_masked(inputs, mask, attention_mask, self.num_heads, causal=True)
        attended = self.attention(
            self.attention_norm(inputs),
            mask=mask,
            attention_mask=attention_mask,
            cache=cache,
            positions=positions,
            precomputed=precomputed,
            return_attention_scores=return_attention_scores,
            training=training,
        )
        extras = ()
        if cache is not None or return_attention_scores:
            attended, *extras = attended
        x = inputs + self.residual_dropout(attended, training=training)
        # The MLP knows no positions: all tokens as one matrix.
        expanded = self.mlp_expand(self.mlp_norm(ops.reshape(x, (-1, self.hidden_dim))))
        added = ops.reshape(self.mlp_contract(expanded), sizes(x))
        x = x + self.residual_dropout(added, training=training)
        return (x, *extras) if extras else x

    def make_cache(self, batch_size, length):
        """An empty cache for the block's attention, as `CausalSelfAttention.make_cache` makes it."""
        return self.attention.make_cache(batch_size, length)

    def precompute(self):
        """As `CausalSelfAttention.precompute`, of the block's attention."""
        return self.attention.precompute()

    def graph_key(self):
        """What a graph of the block depends on, apart from its variables; hashable."""
        layers = (
            *(self.attention_norm, self.attention, self.residual_dropout),
            *(self.mlp_norm, self.mlp_expand, self.mlp_contract),
        )
        return (self.hidden_dim, self.num_heads, *map(graph_key, layers))

    def get_config(self):
        return {
            **super().get_config(),
            "hidden_dim": self.hidden_dim,
            "num_heads": self.num_heads,
            "intermediate_dim": self.intermediate_dim,
            "dropout": self.dropout,
            "kernel_initializer": initializers.serialize(self.kernel_initializer),
            "activation": None if self.activation is None else activations.serialize(self.activation),
            "blockwise": self.blockwise,
            "seed": self.seed,
        }
