"""CausalLM and gpt: arithmetic, causality, the cache, saving, Keras' own training."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_tinyattn import (
    CausalLM,
    CausalSelfAttention,
    TokenAndPositionEmbedding,
    VocabProjection,
    gpt,
)
from keras_tinyattn.export import card
from keras_tinyattn.layers import _window

B, T, D, H, V = 2, 5, 6, 3, 11
LAYERS = 2


def built(**kwargs):
    model = gpt(V, T, D, H, LAYERS, **kwargs)
    model.build((None, T))
    # Norms start as ones and biases as zeros, under which a lost one would not be seen.
    for index, variable in enumerate(model.trainable_variables):
        noise = np.random.default_rng(index).normal(0, 0.3, variable.shape)
        variable.assign_add(noise.astype("float32"))
    return model


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(1)
    return built()


@pytest.fixture(scope="module")
def token_ids():
    return np.random.default_rng(0).integers(0, V, (B, T)).astype("int32")


def gpt2(model, token_ids):
    """GPT-2's forward pass in NumPy, float64, one window after the other, by the model's weights."""
    weights = {
        "/".join(variable.path.split("/")[1:]): variable.numpy().astype("float64")
        for variable in model.weights
    }

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        x = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return x * weights[f"{name}/gamma"] + weights[f"{name}/beta"]

    def linear(x, name, join="_"):
        return x @ weights[f"{name}{join}kernel"] + weights[f"{name}{join}bias"]

    windows = []
    for ids in token_ids:
        x = weights["embedding/token_embeddings"][ids]
        x = x + weights["embedding/position_embeddings"][: len(ids)]
        for block in (f"block_{index}" for index in range(LAYERS)):
            y = norm(x, f"{block}/attention_norm")
            heads = []
            for head in range(H):
                part = slice(head * D // H, (head + 1) * D // H)
                q, k, v = (
                    linear(y, f"{block}/attention/{name}")[:, part]
                    for name in ("query", "key", "value")
                )
                scores = np.exp(q @ k.T / np.sqrt(D // H)) * np.tri(len(ids))
                heads.append(scores / scores.sum(-1, keepdims=True) @ v)
            x = x + linear(np.concatenate(heads, -1), f"{block}/attention/output")
            y = linear(norm(x, f"{block}/mlp_norm"), f"{block}/mlp_expand", "/")
            y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
            x = x + linear(y, f"{block}/mlp_contract", "/")
        x = norm(x, "final_norm")
        windows.append(x @ weights.get("projection/kernel", weights["embedding/token_embeddings"].T))
    return np.stack(windows)


@pytest.mark.parametrize("tied", [True, False])
def test_gpt_computes_what_gpt2_computes(tied, model, token_ids):
    model = model if tied else built(tie_embeddings=False)
    # float32 against float64 through two blocks, logits of the order of 1.
    np.testing.assert_allclose(model(token_ids), gpt2(model, token_ids), atol=2e-5)


def test_gpt_has_gpt2s_number_of_parameters():
    # Tables V D + T D; a block 12 D^2 + 13 D; the last norm 2 D; a kernel of its own D V.
    tied = V * D + T * D + LAYERS * (12 * D**2 + 13 * D) + 2 * D
    assert built().count_params() == tied
    assert built(tie_embeddings=False).count_params() == tied + D * V


def test_gpt_starts_near_a_uniform_guess_with_kernels_of_their_own():
    model = gpt(V, T, D, H, LAYERS)
    logits = model(np.zeros((1, T), "int32")).numpy()
    # Tables of deviation 0.02 against a normalised vector of length sqrt(D).
    assert np.abs(logits).max() < 0.3
    kernels = [variable.numpy() for variable in model.trainable_variables if len(variable.shape) == 2]
    assert len({kernel.tobytes() for kernel in kernels}) == len(kernels)
    assert all(kernel.std() < 0.04 for kernel in kernels)


def test_the_future_does_not_change_the_past(model, token_ids):
    other = token_ids.copy()
    other[:, 3:] = (other[:, 3:] + 1) % V
    one, two = model(token_ids).numpy(), model(other).numpy()
    np.testing.assert_array_equal(one[:, :3], two[:, :3])
    assert np.all(np.any(one[:, 3:] != two[:, 3:], axis=-1))


def test_cached_steps_give_the_logits_of_the_window(model, token_ids):
    cache = model.make_cache(B)
    window = model(token_ids).numpy()
    for first, last in ((0, 2), (2, 3), (3, T)):
        positions = np.arange(first, last, dtype="int32")
        logits, cache = model(token_ids[:, first:last], cache=cache, positions=positions)
        np.testing.assert_allclose(logits, window[:, first:last], atol=1e-5)


@pytest.mark.parametrize(
    ("policy", "tolerance", "length"),
    [
        ("float32", 1e-5, T),
        ("mixed_float16", 2e-2, 4),
        pytest.param("mixed_bfloat16", 2e-1, 1, marks=pytest.mark.slow),
    ],
)
def test_a_window_kept_in_a_cache_and_steps_from_it_give_the_logits_of_the_window(
    policy, tolerance, length, token_ids, on_every_path
):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = built()
    finally:
        keras.config.set_dtype_policy(before)
    window = model(token_ids).numpy()

    def keep_and_step(ids):
        logits, cache = model(ids[:, :length], cache=model.make_cache(B))
        parts = [logits]
        for position in range(length, T):
            at = tf.constant([position])
            logits, cache = model(ids[:, position : position + 1], cache=cache, positions=at)
            parts.append(logits)
        return tf.concat(parts, axis=1)

    for path, logits in on_every_path(keep_and_step, tf.constant(token_ids)):
        # Some units in the last place of logits near 3, of 10 bits or of 7.
        np.testing.assert_allclose(logits, window, atol=tolerance, err_msg=path)


def test_a_window_of_unknown_length_goes_densely_or_by_blocks_and_trains_alike(monkeypatch):
    monkeypatch.setattr(_window, "BLOCKWISE_FROM", 4)
    lengths = []
    blocks = _window.blockwise_attention
    monkeypatch.setattr(
        _window,
        "blockwise_attention",
        lambda queries, *args, **kwargs: (
            lengths.append(queries.shape[2]) or blocks(queries, *args, **kwargs)
        ),
    )
    model = built()

    def loss_and_gradients(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(ids) ** 2)
        return loss, [
            tf.convert_to_tensor(gradient)
            for gradient in tape.gradient(loss, model.trainable_variables)
        ]

    lengths.clear()  # Of what `build` asked.
    spec = [tf.TensorSpec((None, None), tf.int32)]
    unknown = tf.function(loss_and_gradients, input_signature=spec)
    for length in (3, T):
        ids = np.random.default_rng(length).integers(0, V, (B, length)).astype("int32")
        monkeypatch.setattr(_window, "BLOCKWISE_FROM", 1024)
        loss, gradients = loss_and_gradients(ids)
        monkeypatch.setattr(_window, "BLOCKWISE_FROM", 4)
        ours, our_gradients = unknown(ids)
        np.testing.assert_allclose(ours, loss, rtol=1e-5)
        largest = max(np.abs(gradient).max() for gradient in gradients)
        for one, two in zip(our_gradients, gradients, strict=True):
            np.testing.assert_allclose(one, two, atol=1e-5 * largest)
    assert lengths == [None] * LAYERS


def test_batch_and_length_are_free_up_to_the_longest_window(model, token_ids):
    run = tf.function(model, input_signature=[tf.TensorSpec([None, None], tf.int32)])
    window = model(token_ids).numpy()
    np.testing.assert_allclose(run(token_ids[:1, :2]), window[:1, :2], atol=1e-5)
    assert run(np.zeros((0, T), "int32")).shape == (0, T, V)
    with pytest.raises(ValueError, match=r"at most sequence_length=5 tokens\. Received: 6 tokens"):
        model(np.zeros((1, T + 1), "int32"))


def test_a_saved_model_comes_back_tied_with_the_same_logits(model, token_ids, tmp_path):
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(token_ids), model(token_ids))
    assert [variable.shape for variable in loaded.weights] == [v.shape for v in model.weights]
    loaded.embedding.token_embeddings.assign(0 * loaded.embedding.token_embeddings)
    np.testing.assert_array_equal(loaded(token_ids), np.zeros((B, T, V)))


def test_the_configuration_holds_every_argument():
    model = gpt(V, T, D, H, LAYERS, dropout=0.25, tie_embeddings=False, name="named")
    again = CausalLM.from_config(model.get_config())
    assert again.get_config() == model.get_config()
    assert again.name == "named"
    assert [block.dropout for block in again.blocks] == [0.25] * LAYERS
    assert not again.projection.tied
    assert (again.vocabulary_size, again.sequence_length) == (V, T)


def test_the_summary_names_the_parts_and_the_parameters(model):
    lines = []
    model.summary(print_fn=lines.append)
    text = "\n".join(lines)
    for name in ("embedding", "block_0", "block_1", "final_norm", "projection"):
        assert name in text
    assert f"{model.count_params():,}" in text


def test_keras_own_export_gives_the_logits_elsewhere(model, token_ids, tmp_path):
    signature = [keras.InputSpec(shape=(None, None), dtype="int32")]
    model.export(tmp_path / "export", input_signature=signature, verbose=False)
    (tmp_path / "export").rename(tmp_path / "moved")
    loaded = tf.saved_model.load(str(tmp_path / "moved"))
    np.testing.assert_allclose(loaded.serve(token_ids[:, :3]), model(token_ids[:, :3]), atol=1e-5)


def text_to_fit():
    """Windows in which the next token is the one after it in the alphabet."""
    starts = np.arange(24)[:, None] % V
    windows = ((starts + np.arange(T + 1)) % V).astype("int32")
    return windows[:, :-1], windows[:, 1:]


def compiled_for_fit(jit_compile=True):
    keras.utils.set_random_seed(1)
    model = gpt(V, T, D, H, num_layers=1, dropout=0.1)
    model.build((None, T))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.02), loss, jit_compile=jit_compile)
    return model


def test_keras_fit_trains_with_keras_callbacks(tmp_path):
    inputs, targets = text_to_fit()
    model = compiled_for_fit()
    callbacks = [
        keras.callbacks.ModelCheckpoint(
            tmp_path / "best.keras", monitor="val_loss", save_best_only=True
        ),
        keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, min_delta=10.0),
        keras.callbacks.TerminateOnNaN(),
    ]
    data = {"batch_size": 8, "validation_data": (inputs[:8], targets[:8]), "verbose": 0}
    fitted = model.fit(inputs, targets, epochs=9, callbacks=callbacks, **data)
    losses = fitted.history["val_loss"]
    # No epoch is better by 10 nats: the first, and two of patience.
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    best = keras.saving.load_model(tmp_path / "best.keras")
    best.compile(loss=model.loss)
    assert best.evaluate(*data["validation_data"], verbose=0) == pytest.approx(min(losses), rel=1e-5)
    # BackupAndRestore goes on from the backup: of four epochs one is left.
    restored = compiled_for_fit(jit_compile=False)
    fitted = restored.fit(inputs, targets, epochs=4, callbacks=callbacks[1:2], **data)
    assert fitted.epoch == [3]


@pytest.mark.slow
def test_terminate_on_nan_ends_a_run_that_has_lost_its_way():
    inputs, targets = text_to_fit()
    model = compiled_for_fit(jit_compile=False)
    model.final_norm.gamma.assign(np.full(D, np.nan))
    callbacks = [keras.callbacks.TerminateOnNaN()]
    fitted = model.fit(inputs, targets, batch_size=8, epochs=3, callbacks=callbacks, verbose=0)
    assert len(fitted.epoch) <= 1


def test_keras_tensorboard_callback_writes_its_log(tmp_path):
    pytest.importorskip("tensorboard", reason="install tensorboard for Keras' callback of that name")
    inputs, targets = text_to_fit()
    callbacks = [keras.callbacks.TensorBoard(tmp_path)]
    compiled_for_fit(jit_compile=False).fit(
        inputs, targets, batch_size=8, callbacks=callbacks, verbose=0
    )
    assert list(tmp_path.rglob("events*"))


def parts(vocabulary_size=V):
    return (
        TokenAndPositionEmbedding(vocabulary_size, T, D),
        [CausalSelfAttention(D)],
        VocabProjection(V),
    )


def test_what_is_no_language_model_is_refused(model, token_ids):
    embedding, _, projection = parts()
    with pytest.raises(ValueError, match=r"Expected a list of causal layers\. Received: an empty list"):
        CausalLM(embedding, [], projection)
    with pytest.raises(ValueError, match=r"Received: an empty list"):
        gpt(V, T, D, H, num_layers=0)
    with pytest.raises(ValueError, match=r"vocabulary_size=12, as the embedding has\. Received: .*=11"):
        CausalLM(*parts(12))
    with pytest.raises(
        ValueError, match=r"Expected a cache with positions\. Received: positions without"
    ):
        model(token_ids, positions=np.arange(T))


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "float16", "float64"])
def test_the_dtype_of_gpt_reaches_every_layer_and_survives_its_config(dtype):
    model = gpt(V, T, D, num_heads=2, num_layers=2, dropout=0.1, dtype=dtype)
    policy = keras.DTypePolicy(dtype)
    for one in (model, CausalLM.from_config(model.get_config())):
        one.build((None, T))
        layers = one._flatten_layers()
        assert {layer.dtype_policy.name for layer in layers} == {dtype}
        floats = {variable.dtype for variable in one.trainable_variables}
        assert floats == {policy.variable_dtype}
        assert one(np.array([[1, 2]])).dtype == ("float64" if dtype == "float64" else "float32")
    assert card._precision(model)["compute_dtypes"] == [policy.compute_dtype]


def test_quantize_names_the_layers_that_stay_as_they_are():
    model = gpt(V, T, D, num_heads=2, num_layers=1)
    model.build((None, T))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.quantize("int8")
    said = " ".join(str(warning.message) for warning in caught)
    for layer in (model.embedding, model.blocks[0].attention, model.projection):
        assert f"{type(layer).__name__} does not have a `quantize`" in said
    assert model.blocks[0].mlp_expand.quantization_mode == "int8"
