"""The devices of a training run, on one machine or several, and how they stop together."""

import contextlib
import os
import signal

import tensorflow as tf


def make_strategy(name, devices):
    """The `tf.distribute` strategy, or None for one device."""
    if name == "none":
        return None
    if name == "multiworker":
        if "TF_CONFIG" not in os.environ:
            raise ValueError(
                "--strategy multiworker finds the other machines in the environment variable "
                "TF_CONFIG, which is not set; the README shows one."
            )
        return tf.distribute.MultiWorkerMirroredStrategy()
    gpus = tf.config.list_physical_devices("GPU")
    devices = devices or len(gpus) or os.cpu_count()
    if not gpus:
        cpu = tf.config.list_physical_devices("CPU")[0]
        parts = [tf.config.LogicalDeviceConfiguration()] * devices
        tf.config.set_logical_device_configuration(cpu, parts)
    elif devices > len(gpus):
        raise ValueError(f"--devices {devices} was asked for, but TensorFlow sees {len(gpus)} GPUs.")
    kind = "GPU" if gpus else "CPU"
    return tf.distribute.MirroredStrategy([f"{kind}:{index}" for index in range(devices)])


@contextlib.contextmanager
def watched_signals():
    """A list to which the first Ctrl-C or TERM adds its number; a second one ends the process."""
    received = []

    def remember(number, frame):
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_largest(strategy):
    """A function that returns the largest of one number per worker, to each of them."""
    if strategy is None or strategy.cluster_resolver is None:
        return lambda number: number

    @tf.function
    def largest(number):
        def on_device(number):
            every = tf.distribute.get_replica_context().all_gather(number[None], axis=0)
            return tf.reduce_max(every)

        return strategy.experimental_local_results(strategy.run(on_device, (number,)))[0]

    return lambda number: int(largest(tf.constant(number)))
