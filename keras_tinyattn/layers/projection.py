"""Hidden states to logits."""

import keras
from keras import constraints, initializers, ops, regularizers

from keras_tinyattn import functional
from keras_tinyattn.layers._arguments import check_size, own_draw, sizes

__all__ = ["VocabProjection"]


@keras.saving.register_keras_serializable(package="keras_tinyattn")
class VocabProjection(keras.layers.Layer):
    """Hidden states to one score per vocabulary entry: the logits of the next token.

    Args:
        vocabulary_size: V.
        use_bias: whether to add a bias.
        tied: whether the kernel is the transposed token table of an embedding, which `tie` names,
            instead of a variable of its own. `CausalLM` calls `tie` by itself.
        kernel_initializer: initializer of the kernel, if not tied.
        bias_initializer: initializer of the bias.
        kernel_regularizer: regularizer of the kernel, if not tied.
        bias_regularizer: regularizer of the bias.
        kernel_constraint: constraint of the kernel, if not tied.
        bias_constraint: constraint of the bias.

    Call arguments:
        inputs: `(..., D)`.

    Returns:
        `(..., V)` logits in float32, whatever the precision policy (float64 under float64).

    Raises:
        ValueError: if the vocabulary size is below 1, a tied projection was never tied, or the
            embedding's sizes do not fit.

    Example:

    >>> VocabProjection(vocabulary_size=20)(ops.ones((1, 3, 8))).shape
    TensorShape([1, 3, 20])

    Reference for tying: Press and Wolf, "Using the Output Embedding to Improve Language Models", 2017.
    """

    def __init__(
        self,
        vocabulary_size,
        use_bias=False,
        tied=False,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        kernel_regularizer=None,
        bias_regularizer=None,
        kernel_constraint=None,
        bias_constraint=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.vocabulary_size = check_size("vocabulary_size", vocabulary_size)
        self.use_bias = bool(use_bias)
        self.tied = bool(tied)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.kernel_regularizer = regularizers.get(kernel_regularizer)
        self.bias_regularizer = regularizers.get(bias_regularizer)
        self.kernel_constraint = constraints.get(kernel_constraint)
        self.bias_constraint = constraints.get(bias_constraint)
        self.supports_masking = True
        self._tied_embedding = None

    def tie(self, embedding):
        """Use the token table of a `TokenAndPositionEmbedding` as the kernel.

        Raises:
            ValueError: if the projection was not made with `tied=True`, or the sizes differ.
        """
        if not self.tied:
            raise ValueError(
                "The projection has a kernel of its own. Expected tied=True. Received: tied=False. "
                "Build it with VocabProjection(vocabulary_size, tied=True)."
            )
        if embedding.vocabulary_size != self.vocabulary_size:
            raise ValueError(
                "Tied layers share one table. Expected the embedding to have "
                f"vocabulary_size={self.vocabulary_size}. "
                f"Received: vocabulary_size={embedding.vocabulary_size}. Use one size for both."
            )
        # Held in a function, where Keras' tracker does not look: the table belongs to the embedding
        # alone, and is saved, counted and given an optimizer slot once.
        self._tied_embedding = lambda: embedding

    def build(self, input_shape):
        if not self.tied:
            self.kernel = self.add_weight(
                name="kernel",
                shape=(input_shape[-1], self.vocabulary_size),
                initializer=own_draw(self.kernel_initializer, 0),
                regularizer=self.kernel_regularizer,
                constraint=self.kernel_constraint,
            )
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(self.vocabulary_size,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
                # Added to logits in float32, so it is not rounded to half precision before.
                autocast=False,
            )

    def call(self, inputs):
        # As one matrix: fewer operations.
        *axes, width = sizes(inputs)
        tokens = ops.reshape(inputs, (-1, width))
        if not self.tied:
            logits = ops.matmul(tokens, ops.cast(self.kernel, self.compute_dtype))
        else:
            self._check_tie(inputs.shape[-1])
            table = ops.cast(self._tied_embedding().token_embeddings, self.compute_dtype)
            if len(inputs.shape) > 2 and inputs.shape[-2] == 1:
                # One token per row: the other way round no compiler copies the table, transposed.
                logits = ops.transpose(ops.matmul(table, ops.transpose(tokens)))
            else:
                logits = ops.matmul(tokens, ops.transpose(table))
        logits = functional.at_least_float32(logits)
        if self.bias is not None:
            logits = ops.add(logits, ops.cast(self.bias, logits.dtype))
        return ops.reshape(logits, (*axes, self.vocabulary_size))

    def _check_tie(self, hidden_dim):
        if self._tied_embedding is None:
            raise ValueError(
                "The projection is to share a table. Expected tie(embedding) before the first call. "
                "Received: no embedding. Call tie, or put both layers into a CausalLM."
            )
        embedding = self._tied_embedding()
        if embedding.hidden_dim != hidden_dim:
            raise ValueError(
                "Tied layers share one table. Expected inputs as wide as the embedding, "
                f"hidden_dim={embedding.hidden_dim}. Received: inputs of width {hidden_dim}."
                " Make the widths equal, or build the projection with tied=False."
            )

    def graph_key(self):
        """What a graph of the layer depends on, apart from its variables; hashable."""
        table = self._tied_embedding() if self._tied_embedding else None
        return (self.vocabulary_size, self.use_bias, self.tied, table)

    def get_config(self):
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "use_bias": self.use_bias,
            "tied": self.tied,
            "kernel_initializer": initializers.serialize(self.kernel_initializer),
            "bias_initializer": initializers.serialize(self.bias_initializer),
            "kernel_regularizer": regularizers.serialize(self.kernel_regularizer),
            "bias_regularizer": regularizers.serialize(self.bias_regularizer),
            "kernel_constraint": constraints.serialize(self.kernel_constraint),
            "bias_constraint": constraints.serialize(self.bias_constraint),
        }
