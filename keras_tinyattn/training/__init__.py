"""Text to a fitted model, in the order in which a run goes through it.

text -> token ids, split into a part to learn from and a part to judge by
  -> batches of windows and their next tokens, each a pure function of seed and step
  -> next-token loss -> gradients -> optimizer step
  -> whole-split evaluation, checkpoints
"""

from keras_tinyattn.training.checkpoints import Checkpoints
from keras_tinyattn.training.evaluation import Evaluation, make_evaluation
from keras_tinyattn.training.loop import train
from keras_tinyattn.training.loss import next_token_loss
from keras_tinyattn.training.optimizer import make_optimizer
from keras_tinyattn.training.step import make_train_step
from keras_tinyattn.training.windows import split_token_ids, training_batches

__all__ = [
    "Checkpoints",
    "Evaluation",
    "make_evaluation",
    "make_optimizer",
    "make_train_step",
    "next_token_loss",
    "split_token_ids",
    "train",
    "training_batches",
]
