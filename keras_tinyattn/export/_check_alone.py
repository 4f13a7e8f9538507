"""Check an export in a process of its own that knows TensorFlow alone; prints a JSON report.

python -I _check_alone.py VERSION_FOLDER xla|no-xla PATH...

PATH is where the caller finds its modules, TensorFlow among them.
"""

import sys

if __name__ == "__main__":
    sys.path[:] = sys.argv[3:]

import ctypes
import hashlib
import importlib.util
import json
import os
import pathlib

import numpy as np
import tensorflow as tf
from ml_dtypes import finfo
from tensorflow.python.framework import op_def_registry

# By its path, since the package itself is not to be imported here.
_spec = importlib.util.spec_from_file_location(
    "operations", pathlib.Path(__file__).with_name("operations.py")
)
operations = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(operations)


# Arrays with more entries, such as whole caches, would make the card larger than the model. Where an
# input is left out, it is what `prefill` answers.
LARGEST_ARRAY = 1000


def main(folder, mode, *_):
    """Run all checks of a mode; a list of rows (check, what was seen, whether it is right or None)."""
    folder = pathlib.Path(folder)
    card = json.loads((folder / "model_card.json").read_text(encoding="utf-8"))
    if mode == "no-xla" and not disable_xla():
        seen = "could not be checked: this TensorFlow has no switch for it"
        return [["XLA disabled", seen, None]]
    try:
        rows = [check_files(folder, card), *check_operations(folder)] if mode == "xla" else []
        # Held for life: the signatures alone would not keep the variables.
        loaded = tf.saved_model.load(str(folder))
        session = tf.compat.v1.Session(graph=tf.Graph())
        definitions = tf.compat.v1.saved_model.load(session, ["serve"], str(folder)).signature_def
    except Exception as error:  # Of any type, since any byte may be wrong.
        return [["load", _reason(error), False]]
    if mode == "xla":
        recorded = {answer["signature"] for answer in card["answers"]}
        missing = sorted(set(loaded.signatures) - recorded - {"generate_xla"})
        rows.append(["answers", f"none of {', '.join(missing)}" if missing else "of all", not missing])
    suffix = "" if mode == "xla" else ", XLA disabled"
    callers = {
        "": lambda name, inputs: loaded.signatures[name](**inputs),
        ", in a session": lambda name, inputs: run_in_session(session, definitions[name], inputs),
    }
    dtypes = card.get("precision", {}).get("compute_dtypes", [])
    half = {"bfloat16", "float16"} & set(dtypes)
    prompt = {}
    for answer in card["answers"]:
        names = [answer["signature"]]
        try:
            inputs = {key: from_json(part) for key, part in answer["inputs"].items()}
            expected_tokens = first_new_tokens(answer) if names == ["generate_ids"] else {}
        except Exception as error:
            rows.append([names[0] + suffix, f"an answer that cannot be read: {_reason(error)}", False])
            continue
        if mode == "xla" and names == ["generate"]:
            names.append("generate_xla")
        if names == ["prefill"]:
            prompt = inputs
        for where, call in callers.items():
            for name in names:
                label = name + where + suffix
                if name in ("sample", "step"):
                    row = check(
                        label, answer["outputs"], go_on, call, name, prompt, inputs, dtypes=dtypes
                    )
                else:
                    row = check(label, answer["outputs"], call, name, inputs, dtypes=dtypes)
                if name == "generate_xla" and half and not row[2]:
                    row = check_rounding(label, call, inputs, dtypes)
                rows.append(row)
            if names == ["generate_ids"]:
                label = f"prefill, step and sample{where}{suffix}"
                count = len(expected_tokens["token_id"]["value"])
                rows.append(check(label, expected_tokens, walk, call, inputs, count, dtypes=dtypes))
    return rows


def disable_xla():
    """Whether XLA is off now, as on a stock TensorFlow Serving; before any function is called.

    No Python name reaches the switch. It is tensorflow::DisableXlaCompilation() of whichever of
    TensorFlow's libraries holds it, under the name that the compiler of Linux and macOS gives it.
    """
    folder = pathlib.Path(tf.__file__).parent
    patterns = (
        "libtensorflow_cc.*",
        "libtensorflow_framework.*",
        "python/_pywrap_tensorflow_internal.*",
    )
    for library in (path for pattern in patterns for path in sorted(folder.glob(pattern))):
        try:
            switch = ctypes.CDLL(str(library))._ZN10tensorflow21DisableXlaCompilationEv
        except (OSError, AttributeError):
            continue
        switch()
        return True
    return False


def check_files(folder, card):
    """All files but the card itself, by their hashes; a name that leaves the folder is not followed."""
    recorded = card["sha256"]
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    present.discard("model_card.json")
    wrong = sorted(set(recorded) ^ present)
    wrong += [
        name
        for name in sorted(set(recorded) & present)
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != recorded[name]
    ]
    seen = f"{len(present - set(wrong))} of {len(present)} as recorded"
    return ["files", seen + (f"; not {', '.join(wrong)[:500]}" if wrong else ""), not wrong]


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


def go_on(call, name, prompt, inputs):
    """One call of `sample` or `step` after a `prefill`, whose large outputs no card holds."""
    state = {key.removeprefix("new_"): value for key, value in call("prefill", prompt).items()}
    if name == "step":
        del state["logits"]
    else:
        state = {"logits": state["logits"]}
    return call(name, state | inputs)


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


def check_rounding(label, call, inputs, dtypes):
    """Check a compiled answer in half precision, which may take another token at a near-tie.

    The plain steps read the tokens as they came. Each must be the one that `sample` takes once its
    logit is raised by the rounding, and that of the plain choice lowered, with the log-probability that
    the plain logits give it.
    """
    try:
        outputs = call("generate_xla", inputs)
        prompt = call("tokenize", {"text": inputs["prompt"]})
        seen, expected = follow(call, inputs, prompt, outputs, tolerance(dtypes)[0])
    except Exception as error:
        return [label, _reason(error), False]
    label, difference, passed = compare(label, seen, expected, dtypes)
    return [label, f"{difference}, where it goes another way at a near-tie", passed]


def follow(call, request, prompt, outputs, rounding):
    """The new tokens and their log-probabilities, as they came and as the plain steps take them."""
    others = ("prompt", "max_new_tokens", "stop")
    settings = {name: value for name, value in request.items() if name not in others}
    ids, first, last = map(np.asarray, (outputs["token_ids"], prompt["length"], outputs["length"]))
    rows, seen, expected = np.arange(len(ids)), [], []
    state = call("prefill", {"prompt_ids": prompt["token_ids"], "prompt_length": first})
    for index in range(max(last - first)):
        # A row that has come to its end reads its last token again.
        position = np.minimum(first + index, last - 1).astype("int32")
        token, logits = ids[rows, position], np.array(state["logits"])
        logprobs = tf.nn.log_softmax(logits).numpy()[rows, token]
        place = {"position": tf.constant(position)}
        shift = rounding * (1 + np.max(np.abs(logits), axis=1))
        for _ in range(2):
            inputs = {"logits": tf.constant(logits), **place, **settings}
            sampled = np.asarray(call("sample", inputs)["token_id"])
            logits[rows, sampled] -= shift
            logits[rows, token] += shift
        counted = first + index < last
        new_logprobs = np.asarray(outputs["new_logprobs"])[:, index]
        seen += zip(token[counted], new_logprobs[counted], strict=True)
        expected += zip(sampled[counted], logprobs[counted], strict=True)
        cache = {name[4:]: part for name, part in state.items() if name.startswith("new_")}
        state = call("step", {"token_id": tf.constant(token), **place, **cache})
    (ids, logprobs), (right_ids, right_logprobs) = (zip(*x, strict=True) for x in (seen, expected))
    return {"token_id": ids, "logprob": logprobs}, {
        "token_id": {"dtype": "int32", "value": right_ids},
        "logprob": {"dtype": "float32", "value": right_logprobs},
    }


def check(label, expected, function, *inputs, dtypes=()):
    """Compare what a function returns; an error is a failed row."""
    try:
        return compare(label, function(*inputs), expected, dtypes)
    except Exception as error:
        return [label, _reason(error), False]


def _reason(error):
    """An error on one line."""
    reason = str(error).removeprefix("Graph execution error:").strip().partition("\n")[0]
    return f"{type(error).__name__}: {reason}"[:500]


def from_json(part):
    value = part["value"]
    if part["dtype"] == "string":
        encode = np.vectorize(lambda text: text.encode("latin-1"), otypes=[object])
        return tf.constant(encode(np.array(value, object)) if np.size(value) else value, tf.string)
    return tf.constant(value, part["dtype"])


def tolerance(dtypes):
    """The relative and the absolute error that rounding leaves, by the coarsest type computed in."""
    rounding = [16 * float(finfo(tf.as_dtype(name).as_numpy_dtype).eps) for name in dtypes]
    return max([1e-3, *rounding]), max([1e-4, *rounding])


def compare(label, outputs, expected, dtypes=()):
    """Equal strings and integers, and floats as close as rounding in the model's types leaves them."""
    rtol, atol = tolerance(dtypes)
    # The card leaves out answers of many entries, and no others.
    due = {name for name, value in outputs.items() if np.size(value) <= LARGEST_ARRAY}
    worst, wrong = 0.0, sorted((set(expected) - set(outputs)) | (due - set(expected)))
    for name in set(outputs) & set(expected):
        seen, right = np.asarray(outputs[name]), from_json(expected[name]).numpy()
        if seen.shape != right.shape:
            wrong.append(name)
        elif right.dtype.kind == "f":
            worst = max(worst, float(np.max(np.abs(seen - right), initial=0.0)))
            if not np.allclose(seen, right, rtol=rtol, atol=atol):
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
