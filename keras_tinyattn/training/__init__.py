"""A text to a trained model, in the order in which a run needs them.

windows.py      token ids, split into training and validation -> batches of windows and next tokens
optimizer.py    AdamW with a schedule
step.py         windows -> next-token loss -> gradients -> an update; the loop
evaluation.py   the loss over a whole text
checkpoints.py  what a run that was stopped needs to continue
"""

from keras_tinyattn.training.checkpoints import Checkpoints
from keras_tinyattn.training.evaluation import Evaluation, make_evaluation
from keras_tinyattn.training.optimizer import make_optimizer
from keras_tinyattn.training.step import make_train_step, next_token_loss, train
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
