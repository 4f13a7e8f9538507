"""Token ids to batches of windows and the tokens that come next."""

import numpy as np
import tensorflow as tf


def split_token_ids(token_ids, validation_share=0.1):
    """The first part of a text for training, and its end for validation.

    The text is cut once: random validation windows would overlap with training windows, and a model
    would be evaluated on what it has seen.

    Args:
        token_ids: `(N,)` integers.
        validation_share: share of the tokens, at the end, that is for validation, in [0, 1).

    Returns:
        Two `(n,)` int32 arrays.

    Raises:
        ValueError: if the share is out of range.

    Example:

    >>> split_token_ids(range(10), validation_share=0.2)
    (array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32), array([8, 9], dtype=int32))
    """
    if not 0 <= validation_share < 1:
        raise ValueError(
            "The validation share is a part of the text. Expected a number in [0, 1). "
            f"Received: validation_share={validation_share}. Use 0 for no validation."
        )
    token_ids = np.asarray(token_ids, "int32")
    cut = int(len(token_ids) * (1 - validation_share))
    return token_ids[:cut], token_ids[cut:]


def training_batches(token_ids, sequence_length, batch_size, seed=0, first_step=0, input_context=None):
    """Windows from random places of a text, endlessly; seed and step alone decide each batch.

    Windows are cut when they are needed, and a run that starts at `first_step` sees the batches that
    an uninterrupted run sees from that step.

    Args:
        token_ids: `(N,)` integers.
        sequence_length: T, the length of a window in tokens; at most N - 1.
        batch_size: B, the number of windows per step, on all devices together.
        seed: an int32.
        first_step: the step of the first batch.
        input_context: the `tf.distribute.InputContext` of one worker of several, which then gets the
            rows of its own devices, one batch per device.

    Returns:
        A `tf.data.Dataset` of pairs `(B, T)` int32: windows, and the same windows one token later.

    Raises:
        ValueError: if the text is shorter than a window and the token after it, or the devices do not
            divide the batch evenly.

    Example:

    >>> windows, targets = next(iter(training_batches(range(100), sequence_length=5, batch_size=2)))
    >>> bool(tf.reduce_all(targets == windows + 1))
    True
    """
    token_ids = tf.convert_to_tensor(np.asarray(token_ids, "int32"))
    places = len(token_ids) - sequence_length
    if places < 1:
        raise ValueError(
            "The text is shorter than one window and the token after it. "
            f"Expected at least {sequence_length + 1} tokens to train on. "
            f"Received: {len(token_ids)} tokens. Give a longer text, or use shorter windows."
        )
    devices, local_devices, first_device = 1, 1, 0
    if input_context is not None:
        devices = input_context.num_replicas_in_sync
        local_devices = devices // input_context.num_input_pipelines
        first_device = input_context.input_pipeline_id * local_devices
    if batch_size < 1 or batch_size % devices:
        raise ValueError(
            "Every device takes an equal part of the batch. "
            f"Expected batch_size to be a positive multiple of {devices}. "
            f"Received: batch_size={batch_size}. Change it, or the number of devices."
        )
    rows = batch_size // devices

    def batch(index):
        step, device = index // local_devices, first_device + index % local_devices
        starts = tf.random.stateless_uniform(
            [batch_size], tf.stack([tf.cast(seed, tf.int64), step]), 0, places, tf.int32
        )
        starts = starts[device * rows : (device + 1) * rows]
        windows = tf.gather(token_ids, starts[:, None] + tf.range(sequence_length + 1))
        windows = tf.ensure_shape(windows, (rows, sequence_length + 1))
        return windows[:, :-1], windows[:, 1:]

    indices = tf.data.Dataset.range(first_step * local_devices, np.iinfo("int64").max)
    return indices.map(batch, num_parallel_calls=1, deterministic=True).prefetch(2)
