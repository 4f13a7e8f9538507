"""Check an export in a process of its own that knows TensorFlow alone; prints a JSON report.

python _check_alone.py VERSION_FOLDER xla|no-xla
"""

import ctypes
import hashlib
import importlib.util
import json
import os
import pathlib
import sys

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

# By its path, since the package itself is not to be imported here.
_spec = importlib.util.spec_from_file_location(
    "operations", pathlib.Path(__file__).with_name("operations.py")
)
operations = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(operations)


def main(folder, mode):
    """Run all checks of a mode; a list of rows (check, what was seen, whether it is right)."""
    folder = pathlib.Path(folder)
    card = json.loads((folder / "model_card.json").read_text(encoding="utf-8"))
    if mode == "no-xla":
        disable_xla()
    rows = [check_files(folder, card), *check_operations(folder)] if mode == "xla" else []
    # Held for life: the signatures alone would not keep the variables.
    loaded = tf.saved_model.load(str(folder))
    session = tf.compat.v1.Session(graph=tf.Graph())
    definitions = tf.compat.v1.saved_model.load(session, ["serve"], str(folder)).signature_def
    suffix = "" if mode == "xla" else ", XLA disabled"
    callers = {
        "": lambda name, inputs: loaded.signatures[name](**inputs),
        ", in a session": lambda name, inputs: run_in_session(session, definitions[name], inputs),
    }
    for answer in card["answers"]:
        inputs = {key: from_json(part) for key, part in answer["inputs"].items()}
        names = [answer["signature"]]
        if mode == "xla" and names == ["generate"]:
            names.append("generate_xla")
        for where, call in callers.items():
            for name in names:
                rows.append(check(name + where + suffix, answer["outputs"], call, name, inputs))
            if names == ["generate_ids"]:
                label = f"prefill, step and sample{where}{suffix}"
                expected = first_new_tokens(answer)
                rows.append(
                    check(label, expected, walk, call, inputs, len(expected["token_id"]["value"]))
                )
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
    for name, (kinds, compiled) in operations.signature_operations(folder).items():
        if name == "generate_xla":
            continue
        foreign = sorted(
            kind for kind in kinds if kind.startswith("Xla") or op_def_registry.get(kind) is None
        )
        problems = foreign + [f"compiled function {function}" for function in compiled]
        seen = f"{len(kinds)} kinds" + (f"; not core: {', '.join(problems)}" if problems else "")
        yield [f"operations of {name}", seen, not problems]


def run_in_session(session, signature, inputs):
    """Run a signature as TensorFlow Serving does, where graphs are rewritten in other ways."""
    return session.run(
        {name: tensor.name for name, tensor in signature.outputs.items()},
        {signature.inputs[name].name: np.asarray(value) for name, value in inputs.items()},
    )


def walk(call, inputs, count):
    """The first new tokens of the first row, as a client gets them that calls each step itself."""
    row = {name: value[:1] for name, value in inputs.items()}
    prompt = {name: row.pop(name) for name in ("prompt_ids", "prompt_length")}
    settings = {name: value for name, value in row.items() if name not in ("max_new_tokens", "stop_id")}
    position, tokens, logprobs = int(prompt["prompt_length"][0]), [], []
    outputs = call("prefill", prompt)
    for index in range(count):
        place = {"position": tf.constant([position + index])}
        sampled = call("sample", {"logits": outputs["logits"], **place, **settings})
        tokens.append(sampled["token_id"][0])
        logprobs.append(sampled["logprob"][0])
        cache = {name[4:]: part for name, part in outputs.items() if name.startswith("new_")}
        outputs = call("step", {"token_id": sampled["token_id"], **place, **cache})
    return {"token_id": tokens, "logprob": logprobs}


def first_new_tokens(answer):
    """What `walk` gives, from a recorded answer of `generate_ids`."""
    [first, *_] = answer["inputs"]["prompt_length"]["value"]
    last, ids, logprobs = (
        answer["outputs"][name]["value"][0] for name in ("length", "token_ids", "new_logprobs")
    )
    return {
        "token_id": {"dtype": "int32", "value": ids[first:last]},
        "logprob": {"dtype": "float32", "value": logprobs[: last - first]},
    }


def check(label, expected, function, *inputs):
    """Compare what a function returns; an error is a failed row."""
    try:
        outputs = function(*inputs)
    except Exception as error:
        reason = str(error).removeprefix("Graph execution error:").strip().partition("\n")[0]
        return [label, f"{type(error).__name__}: {reason}", False]
    return compare(label, outputs, expected)


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
        seen, right = np.asarray(outputs[name]), from_json(expected[name]).numpy()
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
