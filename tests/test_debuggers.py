"""What is right runs under TensorFlow's debuggers, which stop at every NaN and infinity."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_tinyattn import (
    ByteTokenizer,
    CausalSelfAttention,
    ScaledSelfAttention,
    export_saved_model,
    gpt,
    load_saved_model,
    sample,
    stream,
)


@contextlib.contextmanager
def check_numerics():
    tf.debugging.enable_check_numerics()
    try:
        yield
    finally:
        tf.debugging.disable_check_numerics()


@contextlib.contextmanager
def functions_run_eagerly():
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("make", [ScaledSelfAttention, CausalSelfAttention])
@pytest.mark.parametrize("blockwise", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_masked_rows_and_padding_make_no_nan_on_the_way(make, blockwise, in_graph):
    x = tf.random.stateless_normal((2, 5, 8), (1, 2))
    masks = [{}, {"mask": tf.constant([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])}]
    if not blockwise:
        masks.append({"attention_mask": tf.zeros((5, 5), tf.bool)})
    layer = make(head_dim=4, num_heads=2, blockwise=blockwise)
    layer.build(x.shape)

    def output_and_gradients(x, masks):
        with tf.GradientTape() as tape:
            tape.watch(x)
            output = layer(x, **masks)
        return output, tape.gradient(output, [x, *(v.value for v in layer.trainable_variables)])

    def run(masks):
        function = tf.function(output_and_gradients) if in_graph else output_and_gradients
        return tf.nest.flatten(function(x, masks))

    with check_numerics():
        checked = [run(mask) for mask in masks]
    for one, mask in zip(checked, masks, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, run(mask), strict=True))


# TensorFlow says that the data sets of `fit` stay graphs.
@pytest.mark.filterwarnings("ignore:Even though the `tf.config.experimental_run_functions_eagerly`")
@pytest.mark.parametrize(
    ("debugger", "whole"),
    [
        (check_numerics, False),
        pytest.param(check_numerics, True, marks=pytest.mark.slow),
        pytest.param(functions_run_eagerly, True, marks=pytest.mark.slow),
    ],
)
def test_generation_export_and_training_run_under_a_debugger(debugger, whole, tmp_path):
    def run(folder):
        keras.utils.set_random_seed(1)
        model = gpt(256, sequence_length=8, hidden_dim=4, num_heads=1, num_layers=1)
        model.build((None, 8))
        ids = []
        for settings in (
            {},
            {"temperature": 1.0, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
            {"temperature": [1e-30, 3e38], "top_k": [2, 0]},
        ):
            result = model.generate([[1, 2, 3], [4]], 3, jit_compile=False, **settings)
            ids += result.token_ids.tolist()
            ids += sample(tf.random.stateless_normal((2, 9), (1, 2)), **settings).numpy().tolist()
        if not whole:
            return ids, []
        ids += list(stream(model, [1, 2], 2, temperature=1.0))
        loaded = load_saved_model(export_saved_model(model, ByteTokenizer(), folder))
        ids += loaded.generate(["ab", "c"], 3, temperature=1.0, top_k=4)["token_ids"].tolist()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=False)
        x = np.arange(16).reshape(2, 8)
        return ids, model.fit(x, x, verbose=0).history["loss"]

    with debugger():
        checked = run(tmp_path / "checked")
    ids, losses = run(tmp_path / "plain")
    assert checked[0] == ids
    assert checked[1] == pytest.approx(losses)
