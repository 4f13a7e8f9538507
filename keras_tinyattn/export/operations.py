"""Which operations each signature of a SavedModel runs, read from its graph.

TensorFlow is all that this file imports, since the check of an export loads it in a process that knows
nothing else.
"""

import collections
import pathlib

from google.protobuf.message import DecodeError
from tensorflow.core.protobuf import saved_model_pb2

__all__ = ["signature_operations"]


def signature_operations(path):
    """Count the operations that each signature of a SavedModel reaches through the functions it calls.

    A server needs a kernel for each kind of operation, and XLA for each compiled function.

    Args:
        path: the folder of a SavedModel, such as a version of an export.

    Returns:
        A dictionary `{signature: (kinds, compiled_functions)}`, sorted by signature: `kinds` is a
        `collections.Counter`, `{kind of operation: number of nodes}`, in which a function counts once
        however often it is called; `compiled_functions` is the sorted list of the names of the
        functions that must be compiled by XLA.

    Raises:
        ValueError: if the folder holds no SavedModel.

    Example:

    >>> import tempfile
    >>> import tensorflow as tf
    >>> module = tf.Module()
    >>> double = tf.function(lambda x: 2.0 * x, jit_compile=True)
    >>> module.double = tf.function(double, input_signature=[tf.TensorSpec([], name="x")])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tf.saved_model.save(module, folder, signatures={"double": module.double})
    ...     kinds, compiled_functions = signature_operations(folder)["double"]
    >>> kinds["Mul"], len(compiled_functions)
    (1, 1)
    """
    try:
        content = (pathlib.Path(path).expanduser() / "saved_model.pb").read_bytes()
        graph = saved_model_pb2.SavedModel.FromString(content).meta_graphs[0]
    except (OSError, DecodeError, IndexError) as error:
        raise ValueError(
            "There is no graph to read. Expected the folder of a SavedModel, holding saved_model.pb. "
            f"Received: {path}. Name a version of an export."
        ) from error
    functions = {function.signature.name: function for function in graph.graph_def.library.function}
    nodes = {node.name: node for node in graph.graph_def.node}
    found = {}
    for name, signature in sorted(graph.signature_def.items()):
        if not name.startswith("__"):
            # Each output is one of the results of a call in the main graph.
            calls = {tensor.name.split(":")[0] for tensor in signature.outputs.values()}
            found[name] = _reach([nodes[call] for call in calls], functions)
    return found


def _reach(waiting, functions):
    """The kinds of operations and the compiled functions that are reached from a list of nodes."""
    kinds, reached = collections.Counter(), set()
    while waiting:
        node = waiting.pop()
        kinds[node.op] += 1
        called = {node.op}
        for attribute in node.attr.values():
            called |= {attribute.func.name, *(function.name for function in attribute.list.func)}
        for name in (called & set(functions)) - reached:
            reached.add(name)
            waiting += functions[name].node_def
    # A node whose kind is the name of a function calls it, and is no operation of TensorFlow.
    for name in reached:
        kinds.pop(name, None)
    return kinds, sorted(name for name in reached if functions[name].attr["_XlaMustCompile"].b)
