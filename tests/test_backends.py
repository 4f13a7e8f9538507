"""The layers and a model compute the same numbers on JAX as on TensorFlow, without TensorFlow.

The second process runs this file itself, under another `KERAS_BACKEND`: `python test_backends.py FILE`.
"""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
from keras import ops

from keras_tinyattn import (
    CausalSelfAttention,
    ScaledSelfAttention,
    TokenAndPositionEmbedding,
    gpt,
)

B, T, D, H, K, V = 2, 7, 6, 3, 4, 11
MASK = np.arange(T) < np.array([[5], [7]])


def _draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def _built(layer, shape=(B, T, D)):
    """With weights that do not depend on the backend's random numbers."""
    layer.build(shape)
    for seed, variable in enumerate(layer.trainable_variables):
        variable.assign(0.5 * _draw(*variable.shape, seed=seed))
    return layer


def _whole(function, *inputs):
    """What a function of tensors returns; compiled whole by JAX, which compiles each operation else."""
    if keras.backend.backend() == "tensorflow":
        return function(*inputs)
    import jax

    return jax.jit(function)(*inputs)


def _gradients(layer, loss):
    """Of `loss()`, with respect to the weights of the layer."""
    variables = layer.trainable_variables
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = tf.function(loss, autograph=False, jit_compile=True)()
        return tape.gradient(value, [variable.value for variable in variables])
    import jax

    def of_weights(weights):
        with keras.StatelessScope(state_mapping=list(zip(variables, weights, strict=True))):
            return loss()

    return jax.jit(jax.grad(of_weights))([variable.value for variable in variables])


def _steps(model, token_ids, kept):
    """A window of `kept` tokens that goes into the cache, then a step for each token after it."""
    outputs, cache = model(token_ids[:, :kept], cache=model.make_cache(B, T + 1))
    outputs = [outputs]
    for t in range(kept, T):
        output, cache = model(token_ids[:, t : t + 1], cache=cache, positions=ops.array([t]))
        outputs.append(output)
    return ops.concatenate(outputs, axis=1)


def numbers():
    """What each path of the layers and of a model computes, by name."""
    x, found = ops.convert_to_tensor(_draw(B, T, D)), {}
    attention = {"head_dim": K, "num_heads": H, "output_dim": D, "use_bias": True}
    for cls in (ScaledSelfAttention, CausalSelfAttention):
        layer, blocks = _built(cls(**attention)), _built(cls(**attention, blockwise=True))
        name = cls.__name__
        found[name], found[f"{name}, weights"] = _whole(
            lambda x, layer=layer: layer(x, mask=MASK, return_attention_scores=True), x
        )
        found[f"{name}, blockwise"] = _whole(lambda x, blocks=blocks: blocks(x, mask=MASK), x)
    gradients = _gradients(blocks, lambda: ops.sum(ops.square(blocks(x, mask=MASK))))
    for variable, gradient in zip(blocks.trainable_variables, gradients, strict=True):
        found[f"gradient of {variable.name}"] = gradient
    found["by strips"] = _whole(layer, ops.convert_to_tensor(_draw(1, 130, D)))
    embedding = _built(TokenAndPositionEmbedding(V, T, D), (B, T))
    found["embedding of ids out of range"] = _whole(embedding, np.array([[V, 3, -1]]))
    model = _built(gpt(V, T, D, H, num_layers=1), (B, T))
    ids = ops.convert_to_tensor(np.random.default_rng(0).integers(0, V, (B, T)), "int32")
    found["window"] = _whole(model, ids)
    found["window in a cache, and steps"] = _whole(lambda ids: _steps(model, ids, kept=T - 2), ids)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    found["losses of fit"] = model.fit(ids, ids, epochs=3, verbose=0).history["loss"]
    return {name: ops.convert_to_numpy(value) for name, value in found.items()}


def test_jax_computes_what_tensorflow_computes(tmp_path):
    command = [sys.executable, __file__, tmp_path / "numbers.npz"]
    environment = {"KERAS_BACKEND": "jax", "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    ended = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "jax\n"
    ours = numbers()
    with np.load(tmp_path / "numbers.npz") as theirs:
        assert set(theirs) == set(ours)
        for name, expected in ours.items():
            # Float32 sums in another order; NaN in the same places.
            np.testing.assert_allclose(theirs[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)
    for name in ("ScaledSelfAttention", "CausalSelfAttention"):
        np.testing.assert_allclose(ours[f"{name}, blockwise"], ours[name], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        ours["window in a cache, and steps"], ours["window"], rtol=1e-4, atol=1e-5
    )
    assert np.any(ours["gradient of query_kernel"])
    assert np.isnan(ours["embedding of ids out of range"]).all(-1).tolist() == [[True, False, True]]
    assert ours["losses of fit"][-1] < ours["losses of fit"][0]


if __name__ == "__main__":
    np.savez(sys.argv[1], **numbers())
    assert not [name for name in sys.modules if name.split(".")[0] == "tensorflow"]
    print(keras.backend.backend())
