"""Token ids to vectors that say which token it is and at which position."""

import keras
from keras import backend, constraints, initializers, ops, regularizers

from keras_tinyattn.layers._arguments import check_positions, check_size, own_draw
from keras_tinyattn.layers._masks import nan_unless

__all__ = ["TokenAndPositionEmbedding"]


@keras.saving.register_keras_serializable(package="keras_tinyattn")
class TokenAndPositionEmbedding(keras.layers.Layer):
    """A learned vector for each token plus a learned vector for each position.

    Attention alone does not see the order of its inputs; the position vector tells it.

    Args:
        vocabulary_size: V, the number of token ids; ids run from 0 to V - 1.
        sequence_length: the number of positions; the longest window the layer accepts.
        hidden_dim: D, the width of a vector.
        embeddings_initializer: initializer of both tables.
        embeddings_regularizer: regularizer of both tables.
        embeddings_constraint: constraint of both tables.

    Call arguments:
        token_ids: `(B, T)` integers.
        positions: `(T,)` or `(B, T)` integers, the absolute position of each token; 0 to T - 1
            unless given.

    Returns:
        `(B, T, D)`. A token whose id or position is out of range becomes a vector of NaN, on every
        path alike: nothing is clamped or wrapped, and a compiled function cannot raise.

    Raises:
        ValueError: if a size is below 1, the ids are not of rank 2, the positions are of another
            shape, or T exceeds `sequence_length`.

    Example:

    >>> embedding = TokenAndPositionEmbedding(vocabulary_size=20, sequence_length=10, hidden_dim=8)
    >>> embedding(ops.array([[1, 2, 3]])).shape
    TensorShape([1, 3, 8])

    Reference: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019.
    """

    def __init__(
        self,
        vocabulary_size,
        sequence_length,
        hidden_dim,
        embeddings_initializer="uniform",
        embeddings_regularizer=None,
        embeddings_constraint=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        # Ids that come as floats must not be rounded to half precision.
        self.autocast = False
        self.vocabulary_size = check_size("vocabulary_size", vocabulary_size)
        self.sequence_length = check_size("sequence_length", sequence_length)
        self.hidden_dim = check_size("hidden_dim", hidden_dim)
        self.embeddings_initializer = initializers.get(embeddings_initializer)
        self.embeddings_regularizer = regularizers.get(embeddings_regularizer)
        self.embeddings_constraint = constraints.get(embeddings_constraint)

    def build(self, input_shape):
        def table(name, rows, index):
            return self.add_weight(
                name=name,
                shape=(rows, self.hidden_dim),
                initializer=own_draw(self.embeddings_initializer, index),
                regularizer=self.embeddings_regularizer,
                constraint=self.embeddings_constraint,
                autocast=False,
            )

        self.token_embeddings = table("token_embeddings", self.vocabulary_size, 0)
        self.position_embeddings = table("position_embeddings", self.sequence_length, 1)

    def call(self, token_ids, positions=None):
        token_ids = ops.convert_to_tensor(token_ids)
        if len(token_ids.shape) != 2:
            raise ValueError(
                "Token ids must be a batch of windows. "
                f"Expected shape (B, T). Received: shape {tuple(token_ids.shape)}. "
                "Put a batch axis of size 1 before a single window."
            )
        batch_size, length = token_ids.shape
        if positions is not None:
            positions = ops.convert_to_tensor(positions)
            check_positions(positions.shape, batch_size, length)
        else:
            if length is not None and length > self.sequence_length:
                raise ValueError(
                    "The window does not fit the position table. "
                    f"Expected at most sequence_length={self.sequence_length} tokens. "
                    f"Received: {length} tokens. "
                    "Shorten the window, or build the layer with a larger sequence_length."
                )
            positions = ops.arange(ops.shape(token_ids)[1])
        tokens, are_tokens = self._look_up(self.token_embeddings, token_ids)
        places, are_places = self._look_up(self.position_embeddings, positions)
        known = ops.expand_dims(are_tokens & are_places, -1)
        return ops.where(known, tokens + places, nan_unless(known, self.compute_dtype))

    def _look_up(self, table, indices):
        """Rows of the table in the compute dtype, and whether there are such rows."""
        indices = ops.convert_to_tensor(indices)
        whole = indices
        if backend.standardize_dtype(indices.dtype) not in ("int32", "int64"):
            whole = ops.cast(indices, "int32")
        inside = ops.clip(whole, 0, table.shape[0] - 1)
        rows = ops.cast(ops.take(table, inside, axis=0), self.compute_dtype)
        # Compared in the type that came in: a fraction, or what the cast wrapped, is no id either.
        return rows, ops.cast(inside, indices.dtype) == indices

    def graph_key(self):
        """What a graph of the layer depends on, apart from its variables; hashable."""
        return (self.vocabulary_size, self.sequence_length, self.hidden_dim)

    def get_config(self):
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "sequence_length": self.sequence_length,
            "hidden_dim": self.hidden_dim,
            "embeddings_initializer": initializers.serialize(self.embeddings_initializer),
            "embeddings_regularizer": regularizers.serialize(self.embeddings_regularizer),
            "embeddings_constraint": constraints.serialize(self.embeddings_constraint),
        }
