"""Training: the loss by hand, batches from seed and step, the step, checkpoints, evaluation."""

import math
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_tinyattn import gpt, training

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


def test_after_each_change_of_the_model_a_step_trains_as_one_made_after_the_change():
    model = tiny_model()
    windows, targets = a_batch()
    step = training.make_train_step(model, keras.optimizers.SGD(0.5))
    step(windows, targets)
    dense, weights = a_dense_layer(model), model.get_weights()

    def results(step):
        model.set_weights(weights)
        return [step(windows, targets).numpy(), *model.get_weights()]

    last = results(step)
    for owner, attribute, value in (
        (dense, "activation", keras.ops.sin),
        (dense, "dtype_policy", "mixed_bfloat16"),
        (model.embedding, "trainable", False),
    ):
        setattr(owner, attribute, value)
        after = results(step)
        for one, two in zip(
            after, results(training.make_train_step(model, keras.optimizers.SGD(0.5))), strict=True
        ):
            np.testing.assert_array_equal(one, two, err_msg=attribute)
        assert any(np.any(one != two) for one, two in zip(after, last, strict=True)), attribute
        last = after


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
    model.build((None, 5))
    model.set_weights([given[f"weight_{index}"] for index in range(len(model.weights))])
    step = make_train_step(model, keras.optimizers.SGD(0.5), clip_norm=0.2)
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
try:
    with strategy.scope():
        make_train_step(model, keras.optimizers.SGD(0.5, global_clipnorm=1.0))
except ValueError as error:
    print(error)
np.savez(sys.argv[2], loss=loss.numpy(), **after)
"""


def test_a_step_on_two_devices_is_the_step_on_one_also_where_their_real_targets_differ(tmp_path):
    # A plain gradient step: AdamW would hide a gradient that is twice as long.
    model = tiny_model()
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
    assert "Expected an optimizer that does not clip, on 2 devices" in ended.stdout
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
