"""Training: the loss by hand, batches from seed and step, the step, checkpoints, evaluation."""

import math
import subprocess
import sys

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
    training,
)

B, T, D, H, V = 2, 5, 6, 3, 11


def tiny_model(dropout=0.0, dtype=None, **kwargs):
    previous = keras.config.dtype_policy()
    if dtype:
        keras.config.set_dtype_policy(dtype)
    try:
        model = gpt(V, T, D, H, num_layers=1, dropout=dropout, **kwargs)
        model.build((None, T))
    finally:
        keras.config.set_dtype_policy(previous)
    return model


def a_batch(seed=0):
    ids = np.random.default_rng(seed).integers(0, V, (B, T + 1)).astype("int32")
    return ids[:, :-1], ids[:, 1:]


# The loss.


def test_the_loss_is_the_negative_log_of_the_share_that_the_target_gets():
    # Shares 1/4, 3/4 and 1/2: -(ln 1/4 + ln 3/4 + ln 1/2) / 3.
    logits = np.log([[1.0, 3.0], [1.0, 3.0], [1.0, 1.0]])
    expected = -(math.log(1 / 4) + math.log(3 / 4) + math.log(1 / 2)) / 3
    np.testing.assert_allclose(training.next_token_loss(logits, [0, 1, 1]), expected, rtol=1e-12)


def test_a_masked_target_does_not_count_even_where_its_loss_is_not_finite():
    logits = tf.Variable([[0.0, math.log(3.0)], [math.nan, 0.0]])
    with tf.GradientTape() as tape:
        # An id that pads a text need not be in the vocabulary.
        loss = training.next_token_loss(logits, [1, -1], mask=[True, False])
    np.testing.assert_allclose(loss, -math.log(3 / 4), rtol=1e-6)
    # softmax - one-hot, and nothing from the row that does not count.
    np.testing.assert_allclose(tape.gradient(loss, logits), [[0.25, -0.25], [0.0, 0.0]], atol=1e-6)


def test_no_real_target_gives_a_loss_and_a_gradient_of_zero():
    logits = tf.Variable([[1.0, 2.0, -3.0]])
    with tf.GradientTape() as tape:
        loss = training.next_token_loss(logits, [1], mask=[False])
    assert loss == 0.0
    np.testing.assert_array_equal(tape.gradient(loss, logits), np.zeros((1, 3)))


def test_the_loss_of_half_precision_logits_is_computed_in_float32():
    # -ln softmax = 60000 exactly; float16 holds it, float16 sums of two of them overflow.
    logits = tf.constant([[0.0, 60000.0], [0.0, 60000.0]], "float16")
    loss = training.next_token_loss(logits, [0, 0])
    assert loss.dtype == tf.float32
    assert loss == 60000.0


def test_the_worst_guess_still_has_a_gradient():
    logits = tf.Variable([[0.0, 1000.0]])
    with tf.GradientTape() as tape:
        loss = training.next_token_loss(logits, [0])
    assert loss == 1000.0
    np.testing.assert_array_equal(tape.gradient(loss, logits), [[-1.0, 1.0]])


# Text to batches.


def test_the_split_keeps_the_end_of_the_text_for_validation():
    first, last = training.split_token_ids(range(30), 0.1)
    assert first.tolist() == list(range(27))
    assert last.tolist() == [27, 28, 29]


@pytest.mark.parametrize("share", [-0.1, 1.0, math.nan])
def test_a_split_outside_the_text_is_refused(share):
    with pytest.raises(ValueError, match=r"Expected a number in \[0, 1\)"):
        training.split_token_ids(range(30), share)


def first_batches(count, **kwargs):
    dataset = training.training_batches(range(100, 140), T, B, **kwargs)
    return [(windows.numpy(), targets.numpy()) for windows, targets in dataset.take(count)]


def test_targets_are_the_windows_one_token_later():
    for windows, targets in first_batches(3):
        assert windows.shape == targets.shape == (B, T)
        np.testing.assert_array_equal(targets, windows + 1)


def test_windows_come_from_the_first_to_the_last_place_of_the_text_and_none_beyond():
    starts = np.concatenate([windows[:, 0] for windows, _ in first_batches(400)])
    # 40 tokens, a window of 5 and the token after it: places 0 to 34.
    assert set(starts) == set(range(100, 135))


def test_a_batch_follows_from_seed_and_step_alone():
    whole = first_batches(5, seed=7)
    for rest, batch in zip(first_batches(2, seed=7, first_step=3), whole[3:], strict=True):
        np.testing.assert_array_equal(rest, batch)
    assert not np.array_equal(whole[0], whole[1])
    assert not np.array_equal(whole, first_batches(5, seed=8))


def test_the_devices_together_see_the_batch_of_one_device():
    def of_worker(worker):
        context = tf.distribute.InputContext(
            num_input_pipelines=2, input_pipeline_id=worker, num_replicas_in_sync=4
        )
        dataset = training.training_batches(
            range(100), T, 8, seed=3, first_step=2, input_context=context
        )
        return [windows.numpy() for windows, _ in dataset.take(4)]

    whole = [w.numpy() for w, _ in training.training_batches(range(100), T, 8, 3, first_step=2).take(2)]
    # Two devices a worker: its first two batches belong to the first step.
    first, second = of_worker(0), of_worker(1)
    for step in (0, 1):
        parts = [*first[2 * step : 2 * step + 2], *second[2 * step : 2 * step + 2]]
        np.testing.assert_array_equal(np.concatenate(parts), whole[step])


def test_a_text_of_one_window_has_one_place_and_a_shorter_one_is_refused():
    dataset = training.training_batches(range(T + 1), T, B)
    np.testing.assert_array_equal(next(iter(dataset))[0], [list(range(T))] * B)
    with pytest.raises(
        ValueError, match=r"Expected at least 6 tokens to train on\. Received: 5 tokens"
    ):
        training.training_batches(range(T), T, B)


def test_a_batch_that_the_devices_cannot_share_is_refused():
    context = tf.distribute.InputContext(1, 0, num_replicas_in_sync=2)
    with pytest.raises(ValueError, match=r"positive multiple of 2\. Received: batch_size=3"):
        training.training_batches(range(30), T, 3, input_context=context)


# The step.


def test_the_gradient_of_every_kind_of_variable_is_what_finite_differences_say():
    model = tiny_model(dtype="float64", tie_embeddings=False)
    for variable in model.trainable_variables:  # Away from zeros and ones, where signs could hide.
        noise = np.random.default_rng(len(variable.path)).normal(0, 0.3, variable.shape)
        variable.assign_add(noise)
    windows, targets = a_batch()

    @tf.function
    def loss():
        return training.next_token_loss(model(windows), targets)

    with tf.GradientTape() as tape:
        value = loss()
    gradients = tape.gradient(value, model.trainable_variables)
    step = 1e-5
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        gradient = tf.convert_to_tensor(gradient).numpy()
        index = np.unravel_index(np.argmax(np.abs(gradient)), gradient.shape)
        base = variable.numpy()
        sides = []
        for sign in (1, -1):
            moved = base.copy()
            moved[index] += sign * step
            variable.assign(moved)
            sides.append(float(loss()))
        variable.assign(base)
        # Central differences in float64: an error of order step**2, and rounding of order 1e-16 / step.
        np.testing.assert_allclose(
            (sides[0] - sides[1]) / (2 * step),
            gradient[index],
            rtol=1e-5,
            atol=1e-9,
            err_msg=variable.path,
        )


@pytest.fixture(scope="module")
def sgd_step():
    """A model with a plain gradient step of rate 0.5, shared by tests that only look at one step."""
    keras.utils.set_random_seed(1)
    model = tiny_model()
    optimizer = keras.optimizers.SGD(0.5)
    return model, training.make_train_step(model, optimizer)


def test_a_step_moves_every_variable_against_its_gradient_and_returns_the_loss_before(sgd_step):
    model, step = sgd_step
    windows, targets = a_batch()
    before = [variable.numpy() for variable in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = training.next_token_loss(model(windows), targets)
    gradients = tape.gradient(loss, model.trainable_variables)
    # XLA orders sums differently from eager operations.
    np.testing.assert_allclose(step(windows, targets), loss, rtol=1e-5)
    for variable, start, gradient in zip(model.trainable_variables, before, gradients, strict=True):
        gradient = tf.convert_to_tensor(gradient)
        assert np.any(gradient), variable.path
        np.testing.assert_allclose(variable, start - 0.5 * gradient, atol=1e-6, err_msg=variable.path)


def test_a_step_leaves_masked_targets_out(sgd_step):
    model, step = sgd_step
    windows, targets = a_batch(1)
    mask = np.ones((B, T), "bool")
    mask[0, 3:] = False
    other = np.where(mask, targets, (targets + 1) % V).astype("int32")
    weights = model.get_weights()
    loss = step(windows, targets, mask)
    after = model.get_weights()
    model.set_weights(weights)
    assert step(windows, other, mask) == loss
    for one, two in zip(after, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_clipping_scales_the_whole_gradient_to_the_longest_allowed():
    model = tiny_model()
    step = training.make_train_step(model, keras.optimizers.SGD(1.0), clip_norm=0.01)
    before = model.get_weights()
    step(*a_batch())
    moved = [after - start for after, start in zip(model.get_weights(), before, strict=True)]
    length = math.sqrt(sum(float(np.sum(np.square(part, dtype="float64"))) for part in moved))
    # The moves are differences of float32 weights near 1, rounded to 1e-7 each.
    assert length == pytest.approx(0.01, rel=1e-3)


def test_fifty_steps_memorize_one_batch():
    model = tiny_model()
    step = training.make_train_step(model, keras.optimizers.Adam(0.05))
    # Each token has one successor, so the loss can come near zero.
    windows = np.array([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], "int32")
    losses = [float(step(windows, windows + 1)) for _ in range(50)]
    assert losses[0] == pytest.approx(math.log(V), abs=0.1)
    assert losses[-1] < 0.05


def a_dense_layer(model):
    return next(x for x in model.blocks[0]._flatten_layers() if isinstance(x, keras.layers.Dense))


@pytest.mark.parametrize(
    ("find", "attribute", "value"),
    [
        (a_dense_layer, "activation", keras.ops.sin),
        pytest.param(a_dense_layer, "dtype_policy", "mixed_bfloat16", marks=pytest.mark.slow),
        pytest.param(lambda model: model.embedding, "trainable", False, marks=pytest.mark.slow),
    ],
    ids=["activation", "policy", "trainable"],
)
def test_after_a_change_of_the_model_a_step_trains_as_one_made_after_it(find, attribute, value):
    model = tiny_model()
    windows, targets = a_batch()
    step = training.make_train_step(model, keras.optimizers.SGD(0.5))
    step(windows, targets)
    weights = model.get_weights()

    def results(step):
        model.set_weights(weights)
        return [step(windows, targets).numpy(), *model.get_weights()]

    before = results(step)
    setattr(find(model), attribute, value)
    after = results(step)
    for one, two in zip(
        after, results(training.make_train_step(model, keras.optimizers.SGD(0.5))), strict=True
    ):
        np.testing.assert_array_equal(one, two)
    assert any(np.any(one != two) for one, two in zip(after, before, strict=True))


def test_an_optimizer_for_other_variables_than_the_model_trains_is_refused():
    model = tiny_model()
    optimizer = keras.optimizers.SGD(0.5)
    step = training.make_train_step(model, optimizer)
    step(*a_batch())
    a_dense_layer(model).enable_lora(2)
    message = r"The optimizer was built for other variables\. .* was not built for \S*lora"
    with pytest.raises(ValueError, match=message):
        step(*a_batch())
    with pytest.raises(ValueError, match=message):
        training.make_train_step(model, optimizer)
    step = training.make_train_step(model, keras.optimizers.SGD(0.5))
    frozen, trained = a_dense_layer(model).kernel.numpy(), a_dense_layer(model).lora_kernel_b
    for _ in range(2):
        step(*a_batch())
    assert np.any(trained)
    assert np.any(frozen != a_dense_layer(model).kernel)


# The step and Keras' contract: what `fit` does, a step does.


class AddsLoss(CausalSelfAttention):
    def call(self, inputs, **kwargs):
        outputs = super().call(inputs, **kwargs)
        self.add_loss(0.3 * keras.ops.mean(keras.ops.square(outputs)))
        return outputs


class HasAState(CausalSelfAttention):
    """Batch normalization after attention: variables that change and are not trained."""

    def build(self, input_shape):
        super().build(input_shape)
        self.norm = keras.layers.BatchNormalization()
        self.norm.build(input_shape)

    def call(self, inputs, training=None, **kwargs):
        return self.norm(super().call(inputs, training=training, **kwargs), training=training)


class HasAnIdleVariable(CausalSelfAttention):
    def build(self, input_shape):
        super().build(input_shape)
        self.idle = self.add_weight(name="idle", shape=(3,), initializer="ones")


def small_model(block=CausalSelfAttention, regularizer=None, **kwargs):
    """One attention layer; the same variables each time."""
    keras.utils.set_random_seed(3)
    model = CausalLM(
        TokenAndPositionEmbedding(V, T, D, embeddings_regularizer=regularizer),
        [block(2, H, kernel_regularizer=regularizer, **kwargs)],
        VocabProjection(V, kernel_regularizer=regularizer, bias_regularizer=regularizer),
        name="model",
    )
    model.build((None, T))
    return model


def sgd(**kwargs):
    return keras.optimizers.SGD(0.5, momentum=0.5, **kwargs)


def fit(model, optimizer, windows, targets):
    """One step of `fit`, and its loss."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, run_eagerly=True)
    return model.fit(windows, targets, batch_size=len(windows), verbose=0).history["loss"][0]


def assert_same_state(one, two):
    assert len(one) == len(two)
    for first, second in zip(one, two, strict=True):
        # Compiled and not, in float32 or with products in half precision.
        np.testing.assert_allclose(first.numpy(), second.numpy(), atol=2e-5, err_msg=first.path)


def scaled(optimizer):
    return keras.optimizers.LossScaleOptimizer(optimizer)


@pytest.mark.parametrize(
    ("of_model", "make_optimizer"),
    [
        ({"dtype": "mixed_float16"}, lambda: scaled(sgd(global_clipnorm=0.1))),
        ({"block": AddsLoss, "regularizer": "l2", "activity_regularizer": "l1"}, sgd),
        ({}, lambda: sgd(gradient_accumulation_steps=2)),
        pytest.param({}, lambda: scaled(sgd()), marks=pytest.mark.slow),
        pytest.param({"regularizer": "l1l2"}, lambda: scaled(sgd()), marks=pytest.mark.slow),
        pytest.param({"activity_regularizer": "l2"}, sgd, marks=pytest.mark.slow),
        pytest.param({"block": HasAState}, sgd, marks=pytest.mark.slow),
        pytest.param(
            {},
            lambda: sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
            marks=pytest.mark.slow,
        ),
        pytest.param({}, lambda: sgd(clipnorm=0.01), marks=pytest.mark.slow),
        pytest.param({}, lambda: sgd(clipvalue=0.001), marks=pytest.mark.slow),
        pytest.param({}, lambda: sgd(weight_decay=0.1), marks=pytest.mark.slow),
        pytest.param({}, lambda: keras.optimizers.AdamW(0.1, epsilon=1e-2), marks=pytest.mark.slow),
        pytest.param({}, lambda: keras.optimizers.Adafactor(0.01), marks=pytest.mark.slow),
    ],
)
def test_a_step_is_the_step_of_fit(of_model, make_optimizer):
    # Each token once: Keras clips and squares the rows of a sparse gradient, one for each occurrence.
    batch = np.array([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], "int32"), a_batch()[1]
    one, two = small_model(**of_model), small_model(**of_model)
    first, second = make_optimizer(), make_optimizer()
    step = training.make_train_step(two, second)
    for _ in range(2):
        assert float(step(*batch)) == pytest.approx(fit(one, first, *batch), rel=1e-5)
        # `fit` puts the averages into the model at its end; a step is in the middle.
        second.finalize_variable_values(two.trainable_variables)
        assert_same_state(one.variables, two.variables)
        assert_same_state(first.variables, second.variables)


def test_a_fixed_factor_of_the_loss_is_divided_out_again_before_the_gradient_is_clipped():
    one, two = small_model(), small_model()
    plain, factor = sgd(), sgd(loss_scale_factor=64.0)  # A power of two: exact.
    for model, optimizer in ((one, plain), (two, factor)):
        training.make_train_step(model, optimizer, clip_norm=0.01)(*a_batch())
    for first, second in zip(one.get_weights(), two.get_weights(), strict=True):
        np.testing.assert_allclose(first, second, atol=1e-7)
    assert np.any(one.get_weights()[0] != small_model().get_weights()[0])


def test_a_model_that_is_not_built_is_built_for_its_first_step():
    model = gpt(V, T, D, H, num_layers=1)
    step = training.make_train_step(model, keras.optimizers.SGD(0.5))
    before = model.get_weights()
    step(*a_batch())
    assert len(before) > 0
    assert all(np.any(one != two) for one, two in zip(before, model.get_weights(), strict=True))


def test_a_gradient_that_is_not_finite_is_skipped_and_halves_the_scale():
    model, optimizer = small_model(dtype="mixed_float16"), scaled(sgd())
    step = training.make_train_step(model, optimizer)
    before = [variable.numpy() for variable in model.variables]
    optimizer.dynamic_scale.assign(2.0**40)  # The gradient of the scaled loss overflows in float16.
    step(*a_batch())
    for start, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(start, variable)
    assert optimizer.dynamic_scale.numpy() == 2.0**39
    # A second step with the optimizer goes on with its scale.
    training.make_train_step(model, optimizer)
    assert optimizer.dynamic_scale.numpy() == 2.0**39


# TensorFlow's AutoGraph on Python 3.13; `pytest.warns` passes on every warning but the one it expects.
@pytest.mark.filterwarnings(
    "ignore:.*got an unexpected keyword argument '___pyct_anno':DeprecationWarning"
)
def test_a_variable_without_a_gradient_is_named_in_a_warning_and_left_as_it_is():
    model = small_model(HasAnIdleVariable)
    step = training.make_train_step(model, sgd(), clip_norm=1.0)
    before = model.embedding.token_embeddings.numpy()
    with pytest.warns(UserWarning, match=r"Gradients do not exist for variables \[.*idle'\]"):
        step(*a_batch())
    np.testing.assert_array_equal(model.blocks[0].idle, [1.0, 1.0, 1.0])
    assert np.any(before != model.embedding.token_embeddings)


def test_layers_frozen_after_the_step_was_made_are_frozen_as_in_a_fit_after_compile():
    one, two = small_model(), small_model()
    first, second = sgd(), sgd()
    step = training.make_train_step(two, second)
    for frozen in (None, "embedding", "projection"):
        for model in (one, two):
            model.embedding.trainable = frozen != "embedding"
            model.projection.trainable = frozen != "projection"
        fit(one, first, *a_batch())
        step(*a_batch())
        assert_same_state(one.variables, two.variables)
    two.trainable = False
    with pytest.raises(ValueError, match=r"Expected at least one\. .* all frozen\. Set `trainable"):
        step(*a_batch())


def test_one_optimizer_for_two_models_is_refused():
    optimizer = sgd()
    training.make_train_step(small_model(), optimizer)
    with pytest.raises(ValueError, match=r"The optimizer was built for other variables\."):
        training.make_train_step(small_model(), optimizer)


@pytest.mark.parametrize("optimizer", ["adam", None, keras.optimizers.SGD])
def test_what_is_no_optimizer_is_refused(optimizer):
    with pytest.raises(TypeError, match=r"Expected a keras\.optimizers\.Optimizer\. Received: "):
        training.make_train_step(small_model(), optimizer)


ON_TWO_DEVICES = """
import sys
import keras, numpy as np, tensorflow as tf
from keras_tinyattn import gpt, make_train_step

given = np.load(sys.argv[1])
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    model = gpt(11, 5, 6, 3, num_layers=1)
    model.embedding.embeddings_regularizer = keras.regularizers.L2(0.5)
    model.build((None, 5))
    model.set_weights([given[f"weight_{index}"] for index in range(len(model.weights))])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    step = make_train_step(model, optimizer, clip_norm=0.2)
    batch = [
        strategy.experimental_distribute_values_from_function(
            lambda context, name=name: tf.constant(
                given[name][context.replica_id_in_sync_group : context.replica_id_in_sync_group + 1]
            )
        )
        for name in ("windows", "targets", "mask")
    ]
    loss = step(*batch)
    after = {f"weight_{i}": keras.ops.convert_to_numpy(v) for i, v in enumerate(model.weights)}
for option in ("global_clipnorm", "gradient_accumulation_steps"):
    try:
        with strategy.scope():
            make_train_step(model, keras.optimizers.SGD(0.5, **{option: 2}))
    except ValueError as error:
        print(error)
np.savez(sys.argv[2], loss=loss.numpy(), **after)
"""


@pytest.mark.slow
def test_a_step_on_two_devices_is_the_step_on_one_also_where_their_real_targets_differ(tmp_path):
    # A plain gradient step: AdamW would hide a gradient that is twice as long.
    model = gpt(V, T, D, H, num_layers=1)
    model.embedding.embeddings_regularizer = keras.regularizers.L2(0.5)
    model.build((None, T))
    step = training.make_train_step(model, keras.optimizers.SGD(0.5), clip_norm=0.2)
    windows, targets = a_batch()
    mask = np.ones((B, T), "bool")
    mask[0, 1:] = False
    weights = {f"weight_{index}": weight for index, weight in enumerate(model.get_weights())}
    np.savez(tmp_path / "given.npz", windows=windows, targets=targets, mask=mask, **weights)
    loss = step(windows, targets, mask)
    command = [sys.executable, "-c", ON_TWO_DEVICES, tmp_path / "given.npz", tmp_path / "got.npz"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    for option in ("global_clipnorm", "gradient_accumulation_steps"):
        assert f"does none of these, on 2 devices. Received: {option}=2." in ended.stdout
    got = np.load(tmp_path / "got.npz")
    # Float32 sums in another order.
    np.testing.assert_allclose(got["loss"], loss, rtol=1e-5)
    assert np.any(got["weight_0"] != weights["weight_0"])
    for index, weight in enumerate(model.get_weights()):
        np.testing.assert_allclose(got[f"weight_{index}"], weight, atol=1e-6)


def test_vectors_do_not_decay_and_matrices_do():
    model = tiny_model()
    optimizer = training.make_optimizer(model, 0.1, steps=4, weight_decay=0.5, final_share=1.0)
    optimizer.build(model.trainable_variables)
    before = [variable.numpy() for variable in model.trainable_variables]
    optimizer.apply([tf.zeros(variable.shape) for variable in model.trainable_variables])
    for variable, start in zip(model.trainable_variables, before, strict=True):
        kept = 1.0 - 0.1 * 0.5 if start.ndim > 1 else 1.0
        np.testing.assert_allclose(variable, kept * start, rtol=1e-6, err_msg=variable.path)
    assert any(np.any(start) and start.ndim == 1 for start in before)


def test_the_learning_rate_rises_then_follows_a_cosine_down_and_stays():
    optimizer = training.make_optimizer(
        tiny_model(), 0.4, steps=12, warmup_steps=4, final_share=0.1, weight_decay=0.0
    )
    rates = []
    for step in (0, 1, 2, 4, 8, 12, 20):
        optimizer.iterations.assign(step)
        rates.append(float(optimizer.learning_rate))
    # Half way down, the cosine is at the mean of peak and end: (0.4 + 0.04) / 2.
    np.testing.assert_allclose(rates, [0.0, 0.1, 0.2, 0.4, 0.22, 0.04, 0.04], rtol=1e-5)


def test_an_optimizer_needs_a_built_model_and_a_step_after_the_warm_up():
    with pytest.raises(ValueError, match=r"Expected a built model"):
        training.make_optimizer(gpt(V, T, D, H, 1), 0.1, steps=4)
    with pytest.raises(
        ValueError, match=r"Expected warmup_steps from 0 to 3\. Received: warmup_steps=4"
    ):
        training.make_optimizer(tiny_model(), 0.1, steps=4, warmup_steps=4)


# The loop and its checkpoints.

TEXT = np.random.default_rng(3).integers(0, V, 60)


def run(model, optimizer, steps, **kwargs):
    loop = training.train(model, optimizer, TEXT, steps, B, seed=5, clip_norm=1.0, **kwargs)
    return [(taken, float(loss)) for taken, loss in loop]


def fresh(dropout=0.25):
    keras.utils.set_random_seed(2)
    model = tiny_model(dropout)
    optimizer = training.make_optimizer(model, 0.01, steps=6, warmup_steps=2)
    optimizer.build(model.trainable_variables)
    return model, optimizer


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Six steps with dropout, a checkpoint after the third."""
    directory = tmp_path_factory.mktemp("unbroken")
    model, optimizer = fresh()
    checkpoints = training.Checkpoints(directory, model, optimizer)
    measured = []
    for taken, loss in training.train(model, optimizer, TEXT, 6, B, seed=5, clip_norm=1.0):
        measured.append((taken, float(loss)))
        if taken == 3:
            checkpoints.save()
    return directory, measured, model.get_weights()


def test_a_run_counts_its_steps(unbroken):
    _, measured, _ = unbroken
    assert [taken for taken, _ in measured] == [1, 2, 3, 4, 5, 6]


def test_a_resumed_run_repeats_the_unbroken_one_bit_for_bit_dropout_included(unbroken):
    directory, measured, weights = unbroken
    model, optimizer = fresh()
    # Other random states than those that the checkpoint holds.
    for variable in model.variables:
        if "seed_generator_state" in variable.path:
            variable.assign(variable.numpy() + 12345)
    assert training.Checkpoints(directory, model, optimizer).restore() == 3
    assert run(model, optimizer, 6) == measured[3:]
    for one, two in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_finished_run_takes_no_more_steps(unbroken):
    directory, _, _ = unbroken
    model, optimizer = fresh()
    training.Checkpoints(directory, model, optimizer).restore()
    assert run(model, optimizer, 3) == []


def test_an_empty_directory_restores_nothing_and_a_model_of_another_shape_is_refused(
    unbroken, tmp_path
):
    model, optimizer = fresh()
    before = model.get_weights()
    assert training.Checkpoints(tmp_path, model, optimizer).restore() == 0
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    other = gpt(V, T, 2 * D, H, num_layers=1)
    other.build((None, T))
    optimizer = training.make_optimizer(other, 0.01, steps=6)
    optimizer.build(other.trainable_variables)
    with pytest.raises(ValueError, match=r"belongs to a model or optimizer of other sizes"):
        training.Checkpoints(unbroken[0], other, optimizer).restore()


@pytest.mark.slow
def test_a_broken_newest_checkpoint_falls_back_to_the_one_before(tmp_path):
    model, optimizer = fresh(dropout=0.0)
    checkpoints = training.Checkpoints(tmp_path, model, optimizer)
    for taken, _ in training.train(model, optimizer, TEXT, 2, B):
        checkpoints.save()
        if taken == 1:
            weights = model.get_weights()
    (data,) = tmp_path.glob("ckpt-2.data*")
    data.write_bytes(data.read_bytes()[:100])
    model, optimizer = fresh(dropout=0.0)
    assert training.Checkpoints(tmp_path, model, optimizer).restore() == 1
    for one, two in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(one, two)


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    model, optimizer = fresh(dropout=0.0)
    checkpoints = training.Checkpoints(tmp_path, model, optimizer, keep=2)
    for step in (3, 5, 9):
        optimizer.iterations.assign(step)
        checkpoints.save()
    assert sorted(path.name for path in tmp_path.glob("*.index")) == ["ckpt-5.index", "ckpt-9.index"]


def test_what_a_killed_save_left_over_is_removed_by_the_next_and_nothing_else(tmp_path):
    model, optimizer = fresh(dropout=0.0)
    training.Checkpoints(tmp_path, model, optimizer).save()
    for name in ("ckpt-7.index", "ckpt-7.data-00000-of-00001"):  # Complete, but not in the list.
        (tmp_path / name).write_bytes((tmp_path / name.replace("-7", "-0")).read_bytes())
    (tmp_path / "ckpt-8.data-00000-of-00001").touch()
    (tmp_path / "ckpt-8_temp").mkdir()
    (tmp_path / "checkpoint.tmp123").touch()
    others = ["ckpt-best.index", "ckpt-1.index.txt", "notes"]
    for name in others:
        (tmp_path / name).touch()
    checkpoints = training.Checkpoints(tmp_path, model, optimizer)
    checkpoints.restore()
    optimizer.iterations.assign(9)
    checkpoints.save()
    parts = [f"ckpt-{step}.{part}" for step in (0, 9) for part in ("data-00000-of-00001", "index")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["checkpoint", *parts, *others])


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    model, optimizer = fresh(dropout=0.0)
    checkpoints = training.Checkpoints(tmp_path, model, optimizer)
    model.embedding.token_embeddings.assign(np.full((V, D), math.inf))
    with pytest.raises(ValueError, match=r"diverged by step 0\. .* NaN or infinity in \S*token_emb"):
        checkpoints.save()
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_of_what_is_not_built_are_refused(tmp_path):
    model = tiny_model()
    with pytest.raises(ValueError, match=r"Received: an optimizer without variables\."):
        training.Checkpoints(tmp_path, model, keras.optimizers.SGD())
    with pytest.raises(ValueError, match=r"Received: a model without variables\."):
        training.Checkpoints(tmp_path, gpt(V, T, D, H, 1), keras.optimizers.SGD())


def test_a_damaged_list_of_checkpoints_is_named(tmp_path):
    (tmp_path / "checkpoint").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"checkpoint is damaged\. Expected TensorFlow's list"):
        training.Checkpoints(tmp_path, *fresh())


def test_a_batch_is_a_step_where_two_make_an_update_and_the_averages_come_at_the_end(tmp_path):
    def start():
        model = small_model()
        optimizer = sgd(gradient_accumulation_steps=2, use_ema=True)
        optimizer.build(model.trainable_variables)
        return model, optimizer, training.Checkpoints(tmp_path, model, optimizer)

    model, optimizer, checkpoints = start()
    measured = []
    for taken, loss in training.train(model, optimizer, TEXT, 5, B):
        measured.append((taken, float(loss)))
        if taken == 3:
            checkpoints.save()
    assert [taken for taken, _ in measured] == [1, 2, 3, 4, 5]
    for variable, average in zip(
        model.trainable_variables, optimizer._model_variables_moving_average, strict=True
    ):
        np.testing.assert_array_equal(variable, average)
    model, optimizer, checkpoints = start()
    assert checkpoints.restore() == 3
    assert [(t, float(x)) for t, x in training.train(model, optimizer, TEXT, 5, B)] == measured[3:]


# Evaluation.


def test_evaluation_predicts_every_token_but_the_first_once():
    model = tiny_model()
    # 23 tokens: four windows of five targets and one of two, measured three windows at a time.
    text = np.random.default_rng(4).integers(0, V, 23).astype("int32")
    total = 0.0
    for start in range(0, 22, T):
        window, targets = text[start : min(start + T, 22)], text[start + 1 : start + T + 1]
        logits = model(window[None]).numpy()[0].astype("float64")
        shares = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
        total -= shares[np.arange(len(targets)), targets].sum()
    judged = training.make_evaluation(model, text, batch_size=3)()
    assert judged.num_tokens == 22
    # Logits in float32, compiled and not.
    assert judged.loss == pytest.approx(total / 22, rel=1e-5)


def test_evaluation_measures_the_model_as_it_is_then_and_without_dropout():
    model = tiny_model(dropout=0.5)
    evaluate = training.make_evaluation(model, TEXT)
    first = evaluate()
    assert evaluate() == first
    model.embedding.token_embeddings.assign_add(np.eye(V, D))
    second = evaluate()
    assert second.loss != first.loss
    a_dense_layer(model).activation = keras.ops.sin
    assert evaluate().loss != second.loss


def test_perplexity_and_bits_of_a_loss():
    # Two nats per token over three tokens: six nats, over five characters.
    judged = training.Evaluation(loss=2.0, num_tokens=3)
    assert judged.perplexity == pytest.approx(math.e**2)
    assert judged.bits(5) == pytest.approx(6 / 5 / math.log(2))


def test_one_token_is_not_enough_to_evaluate_on():
    with pytest.raises(ValueError, match=r"Expected at least 2 tokens to evaluate on\. Received: 1"):
        training.make_evaluation(tiny_model(), [3])
