"""A causal language model: token ids in, the logits of each next token out."""

import keras

from keras_tinyattn.layers import DecoderBlock, TokenAndPositionEmbedding, VocabProjection
from keras_tinyattn.layers._graph_key import graph_key
from keras_tinyattn.layers.cache import make_steps

__all__ = ["CausalLM", "gpt"]


@keras.saving.register_keras_serializable(package="keras_tinyattn")
class CausalLM(keras.Model):
    """Embedding, causal blocks and vocabulary projection, one after the other.

    Args:
        embedding: a `TokenAndPositionEmbedding`, or a layer that is called as it is and has the same
            sizes (and, for a tied projection, `token_embeddings`).
        blocks: list of causal layers that follow one protocol: `block(x)` for a window, `block(x,
            cache=entry)` for a window that is kept, `block(x, cache=entry, positions=step)` for a step,
            where `entry` is what `block.make_cache(batch_size, length)` made and `step.positions` the
            absolute positions; `CausalSelfAttention` and `DecoderBlock` do. Blocks whose class defines
            `graph_key` and `precompute`, as those do, share a graph where their keys are equal.
        projection: a `VocabProjection`; one with `tied=True` is tied to the embedding here, and again
            when the model is cloned or loaded.
        final_norm: a layer applied after the last block; none unless given.

    Call arguments:
        token_ids: `(B, T)` integers, T at most `sequence_length`.
        cache: what `make_cache` makes, one entry per block. Without positions a window is read into it.
        positions: `(T,)` or `(B, T)` integers, where the tokens of a cached step stand.
        return_attention_scores: whether to return the weights as well.
        training: whether dropout is on.
        blocks: what to call in place of each block, by the same protocol: generation passes functions
            that share one graph.

    Returns:
        `logits`, `(B, T, V)` float32: row t scores the token at t + 1; then, if
        `return_attention_scores`, the weights, a tuple of `(B, H, T, S)`, one per block; then the new
        cache if one was given.

    Raises:
        ValueError: if there is no block, the vocabulary sizes differ, or the window is too long.

    Example:

    >>> model = CausalLM(
    ...     TokenAndPositionEmbedding(vocabulary_size=20, sequence_length=10, hidden_dim=8),
    ...     [DecoderBlock(hidden_dim=8, num_heads=2)],
    ...     VocabProjection(vocabulary_size=20),
    ... )
    >>> model(keras.ops.array([[1, 2, 3]])).shape
    TensorShape([1, 3, 20])
    """

    def __init__(self, embedding, blocks, projection, final_norm=None, **kwargs):
        super().__init__(**kwargs)
        if not blocks:
            raise ValueError(
                "A language model needs at least one block to look at the past. "
                "Expected a list of causal layers. Received: an empty list. "
                "Give [CausalSelfAttention(head_dim)] or a list of DecoderBlock."
            )
        if projection.vocabulary_size != embedding.vocabulary_size:
            raise ValueError(
                "The model reads and writes one vocabulary. Expected a projection with "
                f"vocabulary_size={embedding.vocabulary_size}, as the embedding has. "
                f"Received: vocabulary_size={projection.vocabulary_size}. Use one size for both."
            )
        self.embedding = embedding
        self.blocks = list(blocks)
        self._made_with = frozenset(map(id, blocks))
        self.final_norm = final_norm
        self.projection = projection
        if projection.tied:
            projection.tie(embedding)

    @property
    def vocabulary_size(self):
        return self.embedding.vocabulary_size

    @property
    def sequence_length(self):
        return self.embedding.sequence_length

    def build(self, input_shape):
        # A layer that was deserialized is built already.
        if not self.embedding.built:
            self.embedding.build(input_shape)
        shape = (*input_shape, self.embedding.hidden_dim)
        for layer in (*self.blocks, self.final_norm, self.projection):
            if layer is None:
                continue
            if not layer.built:
                layer.build(shape)
            shape = (*shape[:-1], _width_after(layer, shape))

    def call(
        self,
        token_ids,
        cache=None,
        positions=None,
        return_attention_scores=False,
        training=None,
        blocks=None,
    ):
        if cache is None and positions is not None:
            raise ValueError(
                "Positions say where tokens go in a cache; a window without one begins at 0. "
                "Expected a cache with positions. Received: positions without a cache. "
                "Give both, or leave positions out."
            )
        x = self.embedding(token_ids, positions=positions)
        # What follows from the positions is the same for all blocks.
        steps = None if positions is None else list(make_steps(positions, cache))
        weights, new_cache = [], []
        for index, block in enumerate(blocks or self.blocks):
            options = {"training": training}
            if cache is not None:
                options["cache"] = cache[index]
            if steps is not None:
                options["positions"] = steps[index]
            if return_attention_scores:
                options["return_attention_scores"] = True
            outputs = block(x, **options)
            x, *extras = outputs if isinstance(outputs, tuple) else (outputs,)
            if return_attention_scores:
                weights.append(extras.pop(0))
            if cache is not None:
                new_cache.append(extras.pop())
        if self.final_norm is not None:
            x = self.final_norm(x)
        outputs = (self.projection(x),)
        if return_attention_scores:
            outputs += (tuple(weights),)
        if cache is not None:
            outputs += (tuple(new_cache),)
        return outputs if len(outputs) > 1 else outputs[0]

    def generate(self, token_ids, max_new_tokens, **settings):
        """Continue prompts: `generation.generate` of this model."""
        from keras_tinyattn.generation import generate

        return generate(self, token_ids, max_new_tokens, **settings)

    def make_cache(self, batch_size, length=None):
        """An empty cache, one entry per block.

        Args:
            batch_size: B.
            length: how many positions it holds; `sequence_length` unless given.
        """
        length = self.sequence_length if length is None else length
        return tuple(block.make_cache(batch_size, length) for block in self.blocks)

    def graph_key(self):
        """What the graphs of the built model depend on, hashable: with another key a graph is stale.

        The key holds what matters in a call of each layer, and which variables they are. A graph keeps
        its variables alive, so no other variable gets the `id` of one while the graph exists.

        Raises:
            ValueError: if a block was put into the list after the model was made.
        """
        blocks = tuple(map(id, self.blocks))
        if not set(blocks) <= self._made_with:
            raise ValueError(
                "Keras does not see a block that is put into the list of a model. Expected blocks that "
                f"the model was made with. Received: another one among {len(blocks)}. "
                "Make a CausalLM of the layers that it should have."
            )
        layers = (self.embedding, *self.blocks, self.final_norm, self.projection)
        return (
            blocks,
            *(None if layer is None else graph_key(layer) for layer in layers),
            *((id(variable), variable.trainable) for variable in self.variables),
        )

    def get_config(self):
        serialize = keras.saving.serialize_keras_object
        return {
            **super().get_config(),
            "embedding": serialize(self.embedding),
            "blocks": [serialize(block) for block in self.blocks],
            "projection": serialize(self.projection),
            "final_norm": None if self.final_norm is None else serialize(self.final_norm),
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        parts = ("embedding", "blocks", "projection", "final_norm")
        config = {
            key: keras.saving.deserialize_keras_object(value, custom_objects) if key in parts else value
            for key, value in config.items()
        }
        return cls(**config)


def gpt(
    vocabulary_size,
    sequence_length,
    hidden_dim,
    num_heads,
    num_layers,
    intermediate_dim=None,
    dropout=0.0,
    tie_embeddings=True,
    activation=None,
    dtype=None,
    **kwargs,
):
    """A `CausalLM` of GPT-2's shape: pre-norm blocks, a final norm, learned positions.

    Args:
        vocabulary_size: V.
        sequence_length: the longest window, in tokens.
        hidden_dim: D.
        num_heads: H; must divide D.
        num_layers: the number of `DecoderBlock`s.
        intermediate_dim: width of the inner layer of each MLP; 4 D unless given.
        dropout: share dropped in training, in [0, 1).
        tie_embeddings: whether the projection uses the token table.
        activation: activation of each MLP, as in `DecoderBlock`; tanh GELU unless given.
        dtype: dtype or policy of every layer, such as "mixed_bfloat16"; Keras' global one unless given.
        **kwargs: passed on to `CausalLM`, such as `name`.

    Returns:
        A `CausalLM`, not yet built. Kernels and tables start normal with standard deviation 0.02;
        `keras.utils.set_random_seed` makes them, and the dropout, repeat.

    Raises:
        ValueError: if a size is below 1, the heads do not divide the width, or dropout is out of
            range.

    Example:

    >>> model = gpt(65, sequence_length=16, hidden_dim=8, num_heads=2, num_layers=2)
    >>> model(keras.ops.array([[1, 2]])).shape
    TensorShape([1, 2, 65])

    Reference: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019.
    """

    def initializer():
        return keras.initializers.RandomNormal(stddev=0.02)

    return CausalLM(
        TokenAndPositionEmbedding(
            vocabulary_size,
            sequence_length,
            hidden_dim,
            embeddings_initializer=initializer(),
            dtype=dtype,
            name="embedding",
        ),
        [
            DecoderBlock(
                hidden_dim,
                num_heads,
                intermediate_dim,
                dropout=dropout,
                kernel_initializer=initializer(),
                activation=activation,
                dtype=dtype,
                name=f"block_{index}",
            )
            for index in range(num_layers)
        ],
        VocabProjection(
            vocabulary_size,
            tied=tie_embeddings,
            kernel_initializer=initializer(),
            dtype=dtype,
            name="projection",
        ),
        final_norm=keras.layers.LayerNormalization(epsilon=1e-5, dtype=dtype, name="final_norm"),
        dtype=dtype,
        **kwargs,
    )


def _width_after(layer, shape):
    """The width of what a layer gives for inputs of this shape."""
    return layer.compute_output_spec(keras.KerasTensor(shape, layer.compute_dtype)).shape[-1]
