"""What importing the package brings in, and on which backends the layers run."""

import importlib
import importlib.util
import os
import subprocess
import sys

import pytest

import keras_tinyattn


def _python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def _run(program, *arguments, **environment):
    result = _python("-c", program, *arguments, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_name_is_there_and_listed():
    for name in keras_tinyattn.__all__:
        assert getattr(keras_tinyattn, name) is not None, name
    assert set(keras_tinyattn.__all__) <= set(dir(keras_tinyattn))
    assert len(keras_tinyattn.__all__) == len(set(keras_tinyattn.__all__))


def test_each_name_is_that_of_its_module():
    for module, names in keras_tinyattn._MODULES.items():
        found = importlib.import_module(f"keras_tinyattn.{module}")
        assert set(names) <= set(found.__all__), module
        assert getattr(keras_tinyattn, module) is found
        for name in names:
            assert getattr(keras_tinyattn, name) is getattr(found, name)


def test_an_unknown_name_is_an_attribute_error_and_an_import_error():
    with pytest.raises(AttributeError, match="has no attribute 'CasualLM'"):
        keras_tinyattn.CasualLM  # noqa: B018
    with pytest.raises(ImportError, match="CasualLM"):
        exec("from keras_tinyattn import CasualLM")


def test_the_package_alone_loads_a_model_from_a_file_and_brings_in_no_plotting_and_no_server(tmp_path):
    model = keras_tinyattn.gpt(11, sequence_length=5, hidden_dim=6, num_heads=3, num_layers=1)
    model.build((None, 5))
    model.save(tmp_path / "model.keras")
    # What Keras and TensorFlow bring in themselves is theirs.
    program = (
        "import sys, keras, tensorflow; before = set(sys.modules)\n"
        "import keras_tinyattn; loaded = set(sys.modules) - before\n"
        "sys.modules['matplotlib'] = None; import keras_tinyattn.plotting\n"
        "keras.saving.load_model(sys.argv[1]); print(*loaded)"
    )
    loaded = _run(program, tmp_path / "model.keras").split()
    assert "keras_tinyattn.layers" in loaded
    foreign = [name for name in loaded if name.split(".")[0] != "keras_tinyattn"]
    assert not [name for name in foreign if name.split(".")[0] in ("matplotlib", "ray", "http")]
    assert "keras_tinyattn.tokenizer" not in loaded


@pytest.mark.parametrize("command", [(), ("verify",)])
def test_help_is_silent_and_imports_neither_keras_nor_tensorflow(command):
    result = _python("-X", "importtime", "-m", "keras_tinyattn", *command, "--help")
    assert result.returncode == 0
    assert "verify" in result.stdout
    imported = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
    assert {"argparse", "keras_tinyattn"} <= imported
    assert not imported & {"keras", "numpy", "rich", "tensorflow"}


def test_a_command_writes_nothing_to_standard_error_but_its_own_sentence(tmp_path):
    result = _python("-m", "keras_tinyattn", "verify", tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("keras_tinyattn verify: error: There is no export to load.")
    assert result.stderr.count("\n") == 1


ON_JAX = """
import sys
import numpy as np
import keras_tinyattn.functional, keras_tinyattn.layers, keras_tinyattn
assert not [name for name in sys.modules if name.split(".")[0] == "tensorflow"]
import jax, keras
from keras_tinyattn import *

assert keras.backend.backend() == "jax"
random = np.random.default_rng(0)
x = random.normal(size=(2, 11, 6)).astype("float32")
mask = np.arange(11) < np.array([[7], [11]])

# Blockwise against dense: output, and gradients of weights and inputs, jitted.
def run(layer):
    layer.build(x.shape)
    for seed, variable in enumerate(layer.trainable_variables):
        variable.assign(np.random.default_rng(seed).normal(size=variable.shape))
    def loss(weights, x):
        output, _ = layer.stateless_call(weights, [], x, mask=mask)
        return (output**2).mean(), output
    weights = [variable.value for variable in layer.trainable_variables]
    (_, output), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(weights, x)
    return [output, *jax.tree_util.tree_leaves(gradients)]

blocks = functional.blockwise_attention
functional.blockwise_attention = lambda *args, **kwargs: blocks(*args, **kwargs, block_size=4)
for cls in (ScaledSelfAttention, CausalSelfAttention):
    arguments = {"head_dim": 4, "num_heads": 3, "output_dim": 6, "use_bias": True}
    blockwise, dense = (run(cls(**arguments, blockwise=choice)) for choice in (True, False))
    for ours, theirs in zip(blockwise, dense):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)

# The whole model: cached steps against the window, dropout, NaN for a bad id, fit.
model = gpt(13, sequence_length=11, hidden_dim=6, num_heads=3, num_layers=2, dropout=0.1)
ids = random.integers(0, 13, (2, 5))
window = model(ids)
cache = model.make_cache(2)
for t in range(5):
    logits, cache = model(ids[:, t : t + 1], cache=cache, positions=np.array([t]))
    np.testing.assert_allclose(logits[:, 0], window[:, t], rtol=1e-4, atol=1e-5)
assert np.all(np.isnan(model.embedding(np.array([[13, -1]]))))
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
losses = model.fit(ids, ids, epochs=5, verbose=0).history["loss"]
assert losses[-1] < losses[0]
print("ran on", keras.backend.backend())
"""


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
def test_functions_and_layers_run_on_jax_and_do_not_import_tensorflow():
    assert "ran on jax" in _run(ON_JAX, KERAS_BACKEND="jax")
