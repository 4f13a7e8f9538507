"""Check an export in a process of its own that knows TensorFlow alone; prints a JSON report.

python _check_alone.py VERSION_FOLDER xla|no-xla
"""

import ctypes
import hashlib
import json
import os
import pathlib
import sys

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.framework import op_def_registry


def main(folder, mode):
    """Run all checks of a mode; a list of rows (check, what was seen, whether it is right)."""
    folder = pathlib.Path(folder)
    card = json.loads((folder / "model_card.json").read_text(encoding="utf-8"))
    if mode == "no-xla":
        disable_xla()
    rows = [check_files(folder, card), *check_operations(folder)] if mode == "xla" else []
    # Held for life: the signatures alone would not keep the variables.
    loaded = tf.saved_model.load(str(folder))
    for answer in card["answers"]:
        name = answer["signature"]
        inputs = {key: from_json(part) for key, part in answer["inputs"].items()}
        label = name if mode == "xla" else f"{name}, XLA disabled"
        outputs = loaded.signatures[name](**inputs)
        rows.append(compare(label, outputs, answer["outputs"]))
        if mode == "xla" and name == "generate":
            compiled = loaded.signatures["generate_xla"](**inputs)
            rows.append(compare("generate_xla", compiled, answer["outputs"]))
    return rows


def disable_xla():
    """As on a stock TensorFlow Serving, which is built without XLA; before any function is called."""
    library = pathlib.Path(tf.__file__).parent / "libtensorflow_cc.so.2"
    ctypes.CDLL(str(library))._ZN10tensorflow21DisableXlaCompilationEv()


def check_files(folder, card):
    wrong = [
        name
        for name, expected in card["sha256"].items()
        if not (folder / name).is_file()
        or hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected
    ]
    seen = f"{len(card['sha256']) - len(wrong)} of {len(card['sha256'])} as recorded"
    return ["files", seen + (f"; not {', '.join(wrong)}" if wrong else ""), not wrong]


def check_operations(folder):
    """What a server must know to run the plain signatures."""
    saved = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())
    graph = saved.meta_graphs[0]
    functions = {function.signature.name: function for function in graph.graph_def.library.function}
    nodes = {node.name: node for node in graph.graph_def.node}
    for name, signature in sorted(graph.signature_def.items()):
        if name.startswith("__") or name == "generate_xla":
            continue
        # Each output is one of the results of a call in the main graph.
        outputs = {tensor.name.split(":")[0] for tensor in signature.outputs.values()}
        operations, compiled = reachable([nodes[output] for output in outputs], functions)
        foreign = sorted(
            op for op in operations if op.startswith("Xla") or op_def_registry.get(op) is None
        )
        problems = foreign + [f"compiled function {name}" for name in compiled]
        seen = f"{len(operations)} kinds" + (f"; not core: {', '.join(problems)}" if problems else "")
        yield [f"operations of {name}", seen, not problems]


def reachable(start, functions):
    operations, compiled, seen, waiting = set(), [], set(), list(start)
    while waiting:
        node = waiting.pop()
        if node.op not in functions:
            operations.add(node.op)
        names = [node.op]
        for attribute in node.attr.values():
            names += [attribute.func.name] + [function.name for function in attribute.list.func]
        for name in names:
            if name in functions and name not in seen:
                seen.add(name)
                function = functions[name]
                if function.attr["_XlaMustCompile"].b:
                    compiled.append(name)
                waiting += function.node_def
    return operations, compiled


def from_json(part):
    value = part["value"]
    if part["dtype"] == "string":
        encode = np.vectorize(lambda text: text.encode("latin-1"), otypes=[object])
        return tf.constant(encode(np.array(value, object)) if np.size(value) else value, tf.string)
    return tf.constant(value, part["dtype"])


def compare(label, outputs, expected):
    """Equal strings and integers, and floats as close as another order of summing leaves them."""
    # The card leaves out answers of many entries.
    worst, wrong = 0.0, sorted(set(expected) - set(outputs))
    for name in set(outputs) & set(expected):
        seen, right = outputs[name].numpy(), from_json(expected[name]).numpy()
        if seen.shape != right.shape:
            wrong.append(name)
        elif right.dtype.kind == "f":
            worst = max(worst, float(np.max(np.abs(seen - right), initial=0.0)))
            if not np.allclose(seen, right, rtol=1e-3, atol=1e-4):
                wrong.append(name)
        elif not np.array_equal(seen, right):
            wrong.append(name)
    seen = f"largest difference {worst:.1e}" + (f"; other {', '.join(wrong)}" if wrong else "")
    return [label, seen, not wrong]


if __name__ == "__main__":
    report = main(*sys.argv[1:])
    # Past whatever a library may have printed.
    with os.fdopen(os.dup(1), "w") as output:
        output.write("\n" + json.dumps(report) + "\n")
