"""What only a GPU can show: that everything computes there what it computes on the CPU.

python scripts/check_gpu.py
"""

import argparse
import tempfile
import time

import numpy as np
from _page import print_columns, section
from _start import console, quiet_imports, run

with quiet_imports():
    import keras
    import tensorflow as tf

    import keras_tinyattn

# Float32 sums of thousands of terms, each device in its own order.
LARGEST_DIFFERENCE = 1e-3
V, T = 50, 256


def main(argv=None):
    parser = argparse.ArgumentParser(
        description="Compare this machine's GPU with its CPU: attention on every path and its "
        "gradients, generation, training, an export. Ends with 0 if all agree, with 1 if not."
    )
    parser.add_argument(
        "--device", default="GPU:0", help="the device to compare with the CPU (default: GPU:0)"
    )
    device = parser.parse_args(argv).device
    known = [each.name.removeprefix("/device:") for each in tf.config.list_logical_devices()]
    if device not in known:
        raise ValueError(
            f"TensorFlow does not see {device} on this machine, but {', '.join(known)}. For NVIDIA's "
            'GPUs, install their driver and keras-tinyattn with the extra "and-cuda".'
        )
    # With it, products of float32 matrices keep ten bits of the fraction.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    # Each length and form is a new function, which TensorFlow reports as retracing.
    tf.get_logger().setLevel("ERROR")
    output = console()
    failed = 0
    # TensorFlow reports no peak memory of a CPU.
    checks = [attention, generation, training, export]
    for check in [*checks, memory] if device.startswith("GPU") else checks:
        section(output, check.__doc__.rstrip("."))
        rows = list(check(device))
        failed += sum(not passed for _, _, passed in rows)
        print_columns(
            output,
            ["", "", "seen"],
            [
                ["[green]passed[/]" if passed else "[red]FAILED[/]", name, seen]
                for name, seen, passed in rows
            ],
            "lll",
        )
    output.print(f"\n{device} and CPU agree." if not failed else f"\n{failed} checks failed.")
    if failed:
        raise SystemExit(1)


def attention(device):
    """Attention, forward and gradients."""
    for length, way in ((100, "dense"), (300, "by strips"), (1500, "by blocks")):
        layer = keras_tinyattn.CausalSelfAttention(16, num_heads=4, output_dim=64, use_bias=True)
        x = tf.constant(np.random.default_rng(0).normal(size=(2, length, 64)), tf.float32)
        layer.build(x.shape)

        def compute(x, layer=layer):
            with tf.GradientTape() as tape:
                tape.watch(x)
                output = layer(x)
                loss = tf.reduce_sum(output**2)
            return [output, *tape.gradient(loss, [x, *layer.trainable_variables])]

        with tf.device("CPU:0"):
            expected = [array.numpy() for array in compute(x)]
        for jit_compile in (False, True):
            with tf.device(device):
                function = tf.function(compute, jit_compile=jit_compile)
                results, seconds = timed(function, x)
            difference = max(
                np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1)
                for ours, theirs in zip(results, expected, strict=True)
            )
            yield (
                f"{length} tokens, {way}, {'XLA' if jit_compile else 'graph'}",
                f"largest difference {difference:.0e}, {1e3 * seconds:.2f} ms",
                difference < LARGEST_DIFFERENCE,
            )


def memory(device):
    """Memory of blockwise attention, forward and gradients."""
    layer = keras_tinyattn.CausalSelfAttention(64, num_heads=4)
    layer.build((1, None, 256))

    @tf.function(jit_compile=True)
    def differentiate(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x) ** 2)
        return tape.gradient(loss, layer.trainable_variables)

    peaks = []
    for length in (8192, 16384):
        with tf.device(device):
            x = tf.ones((1, length, 256))
            differentiate(x)
            tf.config.experimental.reset_memory_stats(device)
            before = tf.config.experimental.get_memory_info(device)["current"]
            differentiate(x)
        peaks.append(tf.config.experimental.get_memory_info(device)["peak"] - before)
    yield (
        "8,192 and 16,384 tokens",
        f"{peaks[0] / 1e6:.0f} and {peaks[1] / 1e6:.0f} MB",
        peaks[1] < 3 * peaks[0],
    )


def generation(device):
    """Generation of 100 tokens, three prompts of different lengths."""
    model = small_model()
    prompts = [[1, 2, 3], list(range(40)), [7]]
    for settings in ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "seed": 3}):
        with tf.device("CPU:0"):
            expected = model.generate(prompts, 100, **settings, jit_compile=False).token_ids
        for jit_compile in (False, True):
            with tf.device(device):
                result, seconds = timed(
                    lambda settings=settings, jit_compile=jit_compile: (
                        model.generate(prompts, 100, **settings, jit_compile=jit_compile).token_ids
                    )
                )
            same = float(np.mean(result == expected))
            yield (
                f"temperature {settings['temperature']:.0f}, {'XLA' if jit_compile else 'graph'}",
                f"{same:.1%} as on the CPU, {300 / seconds:,.0f} tokens/s",
                same == 1.0,
            )


def training(device):
    """Training on one batch, 40 steps."""
    ids = np.random.default_rng(1).integers(0, V, (8, T + 1)).astype("int32")
    for policy in ("float32", "mixed_float16"):
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            with tf.device(device):
                model = small_model(dropout=0.1)
                optimizer = keras.optimizers.AdamW(3e-3)
                if policy == "mixed_float16":
                    optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
                model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
                history = model.fit(ids[:, :-1], ids[:, 1:], batch_size=8, epochs=40, verbose=0)
        finally:
            keras.config.set_dtype_policy(before)
        first, *_, last = history.history["loss"]
        yield f"fit, {policy}", f"loss from {first:.3f} to {last:.3f}", last < 0.9 * first
    with tf.device(device):
        model = small_model()
        step = keras_tinyattn.make_train_step(model, keras.optimizers.AdamW(3e-3), clip_norm=1.0)
        losses = [float(step(ids[:, :-1], ids[:, 1:])) for _ in range(40)]
    yield "GradientTape, XLA", f"loss from {losses[0]:.3f} to {losses[-1]:.3f}", losses[-1] < losses[0]


def export(device):
    """An export, checked in fresh processes."""
    with tempfile.TemporaryDirectory() as folder, tf.device(device):
        tokenizer = keras_tinyattn.CharTokenizer("".join(map(chr, range(60, 60 + V))))
        version = keras_tinyattn.export_saved_model(small_model(), tokenizer, folder)
        for check in keras_tinyattn.verify_saved_model(version):
            yield check.name, check.seen, check.passed


def small_model(dropout=0.0):
    keras.utils.set_random_seed(0)
    model = keras_tinyattn.gpt(V, T, hidden_dim=32, num_heads=4, num_layers=2, dropout=dropout)
    model.build((None, T))
    if not dropout:
        for variable in model.trainable_variables:
            # Far from uniform, so that no rounding decides between two candidates.
            variable.assign(variable * 10)
    return model


def timed(function, *arguments):
    """The result of the second call, and its seconds; the first one compiles."""
    function(*arguments)
    start = time.perf_counter()
    results = function(*arguments)
    results = [np.asarray(array) for array in results]
    return results, time.perf_counter() - start


if __name__ == "__main__":
    run(main)
