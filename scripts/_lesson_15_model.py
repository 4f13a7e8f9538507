"""The language model of lesson 15: its weights, the model, and its training on a few sentences.

It imports TensorFlow, so scripts import it inside `quiet_imports`.
"""

import keras
import tensorflow as tf

from keras_tinyattn import (
    CausalLM,
    CausalSelfAttention,
    TokenAndPositionEmbedding,
    VocabProjection,
    WordTokenizer,
    make_train_step,
)

# A token's id is its position here.
VOCABULARY = (
    *("<pad>", "The", "cat", "sat", "on", "mat", "dog", "bites", "man", "a"),
    *("is", "happy", "furry", "friendly", "brown", "and", "the", "with", "sleeping", "<eos>"),
)
HIDDEN_DIM = 8

# (V, D): a row for each token.
TOKEN_EMBEDDINGS = (
    (0.1, 0.0, -0.1, 0.2, 0.3, 0.0, 0.1, -0.2),  # <pad>
    (0.9, 0.2, -0.4, 0.1, -0.1, 0.8, 0.3, 0.5),  # The
    (0.2, 0.8, 0.6, -0.2, 0.4, 0.1, 0.9, -0.1),  # cat
    (-0.1, 0.1, 0.9, 0.7, -0.3, 0.2, 0.1, 0.8),  # sat
    (0.0, 0.3, 0.1, -0.1, 0.8, 0.6, -0.2, 0.4),  # on
    (0.3, 0.4, -0.2, 0.9, 0.1, 0.3, 0.6, 0.0),  # mat
    (0.25, 0.75, 0.5, -0.3, 0.3, 0.15, 0.85, -0.15),  # dog
    (-0.15, 0.2, 0.85, 0.65, -0.25, 0.1, 0.05, 0.75),  # bites
    (0.8, -0.1, 0.3, 0.4, 0.5, -0.2, 0.1, 0.3),  # man
    (0.45, -0.35, 0.1, 0.2, -0.15, 0.4, -0.3, 0.2),  # a
    (-0.2, 0.5, 0.1, 0.3, 0.1, 0.6, -0.4, 0.1),  # is
    (0.7, 0.6, 0.8, -0.1, 0.2, 0.5, 0.3, -0.2),  # happy
    (0.15, 0.9, 0.4, -0.1, 0.5, 0.2, 0.7, -0.3),  # furry
    (0.65, 0.55, 0.45, -0.2, 0.1, 0.35, 0.25, -0.1),  # friendly
    (0.3, 0.3, -0.4, 0.8, 0.2, 0.1, 0.4, 0.0),  # brown
    (-0.3, -0.2, 0.1, 0.0, 0.5, 0.4, 0.6, 0.2),  # and
    (0.85, 0.15, -0.45, 0.05, -0.15, 0.75, 0.25, 0.45),  # the
    (0.1, 0.2, 0.3, 0.4, -0.4, -0.3, -0.2, -0.1),  # with
    (-0.1, -0.1, 0.5, 0.5, 0.2, 0.3, 0.1, 0.4),  # sleeping
    (-1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0),  # <eos>
)
# (10, D): a row for each position.
POSITION_EMBEDDINGS = (
    (0.0, 0.1, 0.2, 0.0, 0.1, 0.2, 0.0, 0.1),
    (0.1, 0.2, 0.0, 0.1, 0.2, 0.0, 0.1, 0.2),
    (0.2, 0.0, 0.1, 0.2, 0.0, 0.1, 0.2, 0.0),
    (0.05, 0.15, 0.25, 0.05, 0.15, 0.25, 0.05, 0.15),
    (0.15, 0.25, 0.05, 0.15, 0.25, 0.05, 0.15, 0.25),
    (0.25, 0.05, 0.15, 0.25, 0.05, 0.15, 0.25, 0.05),
    *[(0.0,) * HIDDEN_DIM] * 4,
)
# Each kernel of attention, (D, D), is filled with one number.
QUERY, KEY, VALUE = 0.5, 0.3, 0.8
# (V, D): a row for each token, which is its column of the vocabulary projection.
VOCAB_COLUMNS = (
    (0.1, 0.0, -0.2, 0.3, 0.1, 0.2, -0.1, 0.0),  # <pad>
    (0.8, 0.2, 0.1, -0.1, 0.4, 0.3, 0.9, 0.1),  # The
    (0.3, 0.9, 0.5, 0.2, -0.3, 0.1, 0.2, 0.4),  # cat
    (-0.1, 0.6, 0.8, 0.1, 0.5, -0.2, 0.4, 0.7),  # sat
    (0.4, -0.1, 0.9, 0.8, 0.2, 0.6, -0.3, 0.2),  # on
    (0.2, 0.4, -0.3, 0.7, 0.9, 0.5, 0.1, 0.3),  # mat
    (0.5, 0.7, 0.1, -0.2, 0.1, 0.8, 0.9, 0.1),  # dog
    (0.1, 0.2, 0.7, 0.4, 0.3, 0.9, 0.8, 0.5),  # bites
    (-0.2, 0.1, 0.4, 0.6, 0.2, -0.1, 0.5, 0.9),  # man
    (0.3, -0.2, 0.1, 0.2, 0.8, 0.3, 0.2, 0.6),  # a
    (0.1, 0.3, 0.2, 0.1, 0.4, 0.7, 0.1, -0.2),  # is
    (0.6, 0.1, 0.3, 0.5, 0.1, 0.2, 0.7, 0.3),  # happy
    (0.2, 0.8, 0.5, 0.3, 0.2, 0.1, 0.4, 0.6),  # furry
    (0.3, 0.5, 0.2, 0.1, 0.6, 0.4, 0.1, 0.8),  # friendly
    (0.4, 0.2, 0.1, 0.9, 0.1, 0.3, 0.2, 0.1),  # brown
    (-0.3, 0.1, -0.1, 0.2, 0.5, 0.1, 0.3, 0.4),  # and
    (0.8, 0.2, 0.1, -0.1, 0.4, 0.3, 0.9, 0.1),  # the
    (0.1, 0.3, 0.0, 0.4, -0.2, 0.2, 0.1, 0.2),  # with
    (-0.1, 0.4, 0.2, -0.3, 0.1, 0.6, -0.2, 0.5),  # sleeping
    (-0.9, -0.8, -0.7, -0.6, -0.5, -0.4, -0.3, -0.2),  # <eos>
)

# What the model is trained on.
SENTENCES = (
    "The cat sat on the mat <eos>",
    "The dog bites the man <eos>",
    "The man is happy <eos>",
    "a friendly dog sat with a furry cat <eos>",
    "the brown dog is sleeping <eos>",
    "the cat and the dog sat on a mat <eos>",
)
STEPS = 400


def reference_model():
    """The model with the weights above, built, and its tokenizer."""
    vocabulary_size, sequence_length = len(VOCABULARY), len(POSITION_EMBEDDINGS)
    model = CausalLM(
        TokenAndPositionEmbedding(vocabulary_size, sequence_length, HIDDEN_DIM, name="embedding"),
        [CausalSelfAttention(head_dim=HIDDEN_DIM, name="attention")],
        VocabProjection(vocabulary_size, name="projection"),
        name="lesson_15",
    )
    model.build((None, None))
    model.embedding.token_embeddings.assign(TOKEN_EMBEDDINGS)
    model.embedding.position_embeddings.assign(POSITION_EMBEDDINGS)
    (attention,) = model.blocks
    attention.query_kernel.assign(tf.fill((HIDDEN_DIM, HIDDEN_DIM), QUERY))
    attention.key_kernel.assign(tf.fill((HIDDEN_DIM, HIDDEN_DIM), KEY))
    attention.value_kernel.assign(tf.fill((HIDDEN_DIM, HIDDEN_DIM), VALUE))
    model.projection.kernel.assign(tf.transpose(VOCAB_COLUMNS))
    return model, WordTokenizer(VOCABULARY)


def training_rows(tokenizer):
    """Inputs, the tokens that follow them, and a mask that is False at padding: `(B, T)` each."""
    token_ids, lengths = tokenizer.tokenize(tf.constant(SENTENCES))
    mask = tf.sequence_mask(lengths - 1, tf.shape(token_ids)[1] - 1)
    return token_ids[:, :-1], token_ids[:, 1:], mask


def train(model, tokenizer, steps=STEPS):
    """Train the model, each step on all sentences, so that nothing is random.

    Args:
        model: a built `CausalLM`; its weights are changed.
        tokenizer: its tokenizer.
        steps: how many steps to take, each down the gradient of the next-token loss.

    Returns:
        A list of `steps` losses, in nats a token, each before its step.
    """
    step = make_train_step(model, keras.optimizers.Adam(0.01))
    rows = training_rows(tokenizer)
    return [float(step(*rows)) for _ in range(steps)]
