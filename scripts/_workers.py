"""The devices of a training run, on one machine or several: how they stop together, why they fail."""

import contextlib
import os
import re
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


def why_it_failed(error):
    """A sentence for the user about an error of TensorFlow, or a lack of memory."""
    message = str(error)
    if isinstance(error, MemoryError) or re.search("OOM|out of memory", message, re.IGNORECASE):
        wanted = re.search(r"shape\[[\d,]+\] and type \w+|allocate [\d.]+ ?\w+", message)
        wanted = f" ({wanted.group()})" if wanted else ""
        return f"Memory ran out{wanted}. A smaller batch, model or window needs less."
    if isinstance(error, tf.errors.UnavailableError) or "Collective ops is aborted" in message:
        worker = re.search(r"/job:worker/replica:\d+/task:(\d+) while calling", message)
        worker = f"Worker {worker.group(1)}" if worker else "Another worker"
        return f"{worker} does not answer: it was killed, or it failed and says why itself."
    # The operation, its place in the code and a traceback surround the reason.
    message = re.sub(r"\{\{.*?\}\}|\[Op:.*?\]", "", message)
    around = re.compile(r'\s*(Graph execution error|Detected at node|File "|$)')
    reasons = [line.strip() for line in message.splitlines() if not around.match(line)]
    return f"TensorFlow failed: {(reasons or [type(error).__name__])[0].rstrip('.:')}."
