"""How well a model predicts a text that it was not trained on."""

import math
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_tinyattn.training.step import never_stale, sum_of_losses


class Evaluation(NamedTuple):
    """The loss over a whole text."""

    loss: float  # nats per token
    num_tokens: int  # how many tokens were predicted

    @property
    def perplexity(self):
        """The model is as uncertain as a uniform choice among this many tokens."""
        return math.exp(min(self.loss, 700.0))

    def bits(self, count):
        """Bits per character or byte, where the predicted tokens are `count` of them."""
        return self.loss * self.num_tokens / count / math.log(2)


def make_evaluation(model, token_ids, sequence_length=None, batch_size=16):
    """A function that measures the loss over a whole text, in windows that do not overlap.

    Every token but the first is predicted once, from the tokens before it in its window.

    Args:
        model: a built `CausalLM`.
        token_ids: `(N,)` integers, at least two.
        sequence_length: T, the length of a window; the model's longest unless given.
        batch_size: how many windows are evaluated at once.

    Returns:
        `evaluate()`, which returns an `Evaluation` of the model as it is then.

    Raises:
        ValueError: if there are fewer than two tokens.
    """
    token_ids = np.asarray(token_ids, "int32")
    if len(token_ids) < 2:
        raise ValueError(
            "A token is predicted from the one before it. Expected at least 2 tokens to evaluate on. "
            f"Received: {len(token_ids)}. Give a longer text, or a larger validation share."
        )
    T = model.sequence_length if sequence_length is None else sequence_length
    num_tokens = len(token_ids) - 1
    batch_size = min(batch_size, -(-num_tokens // T))
    num_batches = -(-num_tokens // (batch_size * T))

    def batches(flat):
        padded = np.zeros(num_batches * batch_size * T, flat.dtype)
        padded[: len(flat)] = flat
        return padded.reshape(num_batches, batch_size, T)

    inputs, targets = batches(token_ids[:-1]), batches(token_ids[1:])
    mask = batches(np.ones(num_tokens, "bool"))

    def make_batch_loss():
        @tf.function(jit_compile=True)
        def batch_loss(token_ids, targets, mask):
            return sum_of_losses(model(token_ids, training=False), targets, mask)[0]

        return batch_loss

    batch_loss = never_stale(model, make_batch_loss)

    def evaluate():
        total = sum(float(batch_loss(*batch)) for batch in zip(inputs, targets, mask, strict=True))
        return Evaluation(total / num_tokens, num_tokens)

    return evaluate
