"""Lesson 19: a model that any TensorFlow server runs.

python scripts/lesson_19_export.py
python scripts/lesson_19_export.py --temperature 0.8 --out exports
"""

import base64
import math
import tempfile
import textwrap

import numpy as np
from _page import point, print_columns, section
from _start import (
    check_count,
    console,
    lesson_parser,
    local_path,
    parse_lesson,
    quiet_imports,
    run,
    write_numbers,
)
from rich.markup import escape

with quiet_imports():
    import tensorflow as tf
    from _lesson_15_model import SENTENCES, STEPS, VOCABULARY, reference_model, train

    from keras_tinyattn import (
        SETTINGS,
        export_saved_model,
        load_saved_model,
        signature_operations,
        verify_saved_model,
    )

MODEL_NAME = "lesson_15"


def main(argv=None):
    options = read_options(argv)
    model, tokenizer = reference_model()
    prompt = tokenizer.encode(options.prompt)
    check_count("The number of words in --prompt", len(prompt), 1, model.sequence_length)
    # On a GPU, float32 products may be rounded to 10 bits unless this is off.
    tf.config.experimental.enable_tensor_float_32_execution(False)

    output = console()
    output.print("[bold cyan]Lesson 19: an export that any TensorFlow server runs[/]")
    output.print(
        f"The model of lesson 15, after {options.training_steps} training steps, becomes a folder that "
        "generates text where neither this package nor Python is known."
    )
    train(model, tokenizer, options.training_steps)
    with tempfile.TemporaryDirectory() as temporary:
        about = {"data": SENTENCES, "training_steps": options.training_steps}
        version = export_saved_model(model, tokenizer, options.out or temporary, about)
        loaded = load_saved_model(version)
        settings = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
        found = {"folder": str(version), **files(output, version, model)}
        found["signatures"] = signatures(output, loaded)
        found["operations"] = operations(output, version)
        found["checks"] = checks(output, version) if options.verify else []
        found["request"] = write_request(output, settings, options)
        found |= answer(output, loaded, found["request"])
    given = {**settings, "seed": options.seed, "stop": tokenizer.end_id, "jit_compile": False}
    ids = model.generate(prompt, options.steps, **given).token_ids.tolist()
    answered = found["answer"]["predictions"][0]["token_ids"]
    found["same_ids_as_in_python"] = answered[: len(ids)] == ids
    section(
        output,
        "The point",
        f"A prompt and {len(found['request']['instances'][0]) - 1} settings go in and text comes out: "
        "the tokenizer, the loop, the cache and the sampling are in the folder, "
        f"{sum(found['files'].values()) / 1024:.0f} KiB of it. Its token ids are those of "
        "model.generate in Python.",
    )
    if options.out is not None:
        output.print(f"Export: {version}", markup=False, soft_wrap=True)
    numbers = {
        **{name: getattr(options, name) for name in ("prompt", "steps", "seed", "training_steps")},
        "settings": settings,
        "export": found,
    }
    write_numbers(output, options.json, numbers)


def read_options(argv):
    parser = lesson_parser("What an exported model consists of, and how a server calls it.")

    def option(name, default, metavar, text):
        text = f"{text} (default {default})"
        parser.add_argument(name, type=type(default), default=default, metavar=metavar, help=text)

    option("--prompt", "The cat", "TEXT", "what to continue, 1 to 10 words of the vocabulary")
    option("--steps", 6, "N", "words to add at most")
    option("--temperature", 1.0, "X", "temperature of the request; 0 takes the most likely word")
    option("--top-k", 0, "K", "sample from so many most likely words; 0 is all")
    option("--top-p", 0.9, "P", "sample from the most likely words of this share; 1 is all")
    option("--seed", 18, "N", "seed of the request")
    option("--training-steps", STEPS // 4, "N", "training of lesson 15's model")
    parser.add_argument(
        "--out", metavar="DIR", help="keep the export in this folder, as its next version"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="also check the export in processes of its own, with and without XLA (takes longer)",
    )
    options = parse_lesson(parser, argv)
    check_count("--steps", options.steps)
    check_count("--training-steps", options.training_steps)
    check_count("--seed", options.seed, at_most=2**31 - 1)
    check_count("--top-k", options.top_k, at_most=2**31 - 1)
    if not (math.isfinite(options.temperature) and options.temperature >= 0):
        raise ValueError(
            f"--temperature must be finite and 0 or more, but {options.temperature} was received."
        )
    if not 0 < options.top_p <= 1:
        raise ValueError(f"--top-p must be above 0 and up to 1, but {options.top_p} was received.")
    if options.out and local_path(options.out).is_file():
        raise ValueError(f"--out needs a folder, but {options.out!r} is a file.")
    return options


def files(output, version, model):
    section(
        output,
        "1. What is in the export",
        "export_saved_model writes a folder named by a number, the version:",
    )
    paths = sorted(path for path in version.rglob("*") if path.is_file())
    sizes = {path.relative_to(version).as_posix(): path.stat().st_size for path in paths}
    rows = [(name, f"{size:,}") for name, size in (*sizes.items(), ("all", sum(sizes.values())))]
    print_columns(output, ("file", "bytes"), rows, "lr")
    weights = sum(weight.numpy().nbytes for weight in model.weights)
    point(
        output,
        f"The weights take {weights:,} bytes of it; most of the rest is the graph of the signatures, "
        "the functions that a server can call.",
    )
    return {"files": sizes, "bytes_of_weights": weights}


def signatures(output, loaded):
    section(output, "2. What a server can call: the signatures")
    found = {}
    for name, signature in sorted(loaded.signatures.items()):
        inputs, outputs = signature.structured_input_signature[1], signature.structured_outputs
        found[name] = {
            side: {key: [spec.dtype.name, axes(spec.shape)] for key, spec in sorted(specs.items())}
            for side, specs in (("inputs", inputs), ("outputs", outputs))
        }
    rows = [
        (f"[bold cyan]{name}[/]", *(textwrap.fill(", ".join(names), 28) for names in sides.values()))
        for name, sides in found.items()
    ]
    print_columns(output, ("signature", "inputs", "outputs"), rows, "lll")
    output.print("Each has a type and a shape, the batch B first. Those of generate:")
    rows = [
        (side.removesuffix("s"), f"[bold cyan]{name}[/]", kind, f"({', '.join(shape)})")
        for side, tensors in found["generate"].items()
        for name, (kind, shape) in tensors.items()
    ]
    print_columns(output, ("", "name", "type", "shape"), rows, "llll")
    return found


def axes(shape):
    """A shape with the batch as B, and sizes that only a call decides as a question mark."""
    return ["B", *("?" if size is None else str(size) for size in shape[1:])]


def operations(output, version):
    section(
        output,
        "3. What a server needs to run it",
        "Operations that each signature reaches in saved_model.pb, functions that it calls included:",
    )
    found, rows = {}, []
    for name, (kinds, compiled) in signature_operations(version).items():
        xla = sorted(kind for kind in kinds if kind.startswith("Xla"))
        found[name] = {
            "nodes": kinds.total(),
            "kinds": len(kinds),
            "xla_kinds": xla,
            "compiled_functions": len(compiled),
        }
        cells = (kinds.total(), len(kinds), ", ".join(xla) or "none", len(compiled))
        rows.append((f"[bold cyan]{name}[/]", *map(str, cells)))
    names = ("signature", "operations", "kinds", "XLA operations", "functions for XLA")
    print_columns(output, names, rows, "lrrrr")
    point(
        output,
        f"Only generate_xla has a part that XLA compiles. The other {len(found) - 1} reach neither an "
        "XLA operation nor a function to be compiled: a server built without XLA can run them.",
    )
    return found


def checks(output, version):
    found = verify_saved_model(version)
    rows = [
        (check.name, escape(textwrap.fill(check.seen, 26)), "passed" if check.passed else "FAILED")
        for check in found
    ]
    print_columns(output, ("checked in a process of its own", "seen", ""), rows, "lll")
    passed = sum(check.passed for check in found)
    point(output, f"verify_saved_model: {passed} of {len(found)} checks passed.")
    return found


def write_request(output, settings, options):
    section(
        output,
        "4. How a server is called",
        "TensorFlow Serving answers POST requests to this address. The body is JSON with an entry for "
        "each text, and each has its own settings:",
    )
    address = f"http://localhost:8501/v1/models/{MODEL_NAME}:predict"
    output.print(f"\nPOST {address}\n", markup=False, soft_wrap=True)
    defaults = {setting.name: setting.default for setting in SETTINGS}
    common = {"max_new_tokens": options.steps, **defaults, "seed": options.seed, "stop": ""}
    instances = [
        {"prompt": options.prompt, **common, **settings},
        {"prompt": VOCABULARY[1], **common},
    ]
    request = {"signature_name": "generate", "instances": instances}
    output.print_json(data=request)
    return request


def answer(output, loaded, request):
    output.print(
        "\nNo server runs here. The same entries as tensors, given to the loaded signature, are "
        "answered (rounded to 4 digits):\n"
    )
    answered = answer_like_a_server(loaded.signatures, request)
    rows = answered["predictions"]
    rounded = [np.round(row["new_logprobs"], 4).tolist() for row in rows]
    shown = [{**row, "new_logprobs": part} for row, part in zip(rows, rounded, strict=True)]
    output.print_json(data={"predictions": shown})
    output.print()
    point(output, f"{len(rows)} texts with different settings make one batch.")
    decoded = [base64.b64decode(row["completion_bytes"]["b64"]).decode() for row in rows]
    point(
        output,
        "Outputs whose names end in _bytes travel as base64, since they need not be UTF-8. Decoded, "
        f"they are the completions: {' | '.join(decoded)}",
    )
    refusal = None
    try:
        loaded.generate(request["instances"][0]["prompt"], 1, temperature=-1.0)
    except ValueError as error:
        refusal = str(error)
    point(output, f"A temperature of -1 is refused: {refusal}")
    output.print(
        "\nTo serve it, keep it with --out DIR, then\n\n"
        f"    docker run -p 8501:8501 -v $PWD/DIR:/models/{MODEL_NAME} \\\n"
        f"      -e MODEL_NAME={MODEL_NAME} tensorflow/serving",
        markup=False,
    )
    same = decoded == [row["completion"] for row in rows]
    return {"answer": answered, "refusal": refusal, "same_completion_in_bytes": same}


def answer_like_a_server(signatures, request):
    """What TensorFlow Serving does with the JSON of a predict request in row format.

    Args:
        signatures: the signatures of a loaded SavedModel.
        request: `signature_name`, and `instances`: for each row its inputs by name.

    Returns:
        A dictionary for JSON: `predictions`, for each row its outputs by name.
    """
    signature, rows = signatures[request["signature_name"]], request["instances"]
    inputs = {
        name: tf.constant([row[name] for row in rows], spec.dtype)
        for name, spec in signature.structured_input_signature[1].items()
    }
    outputs = {name: value.numpy().tolist() for name, value in sorted(signature(**inputs).items())}
    for name, values in outputs.items():
        if isinstance(values[0], bytes):
            # A server knows by this ending that bytes need not be text.
            is_text = not name.endswith("_bytes")
            outputs[name] = [
                value.decode() if is_text else {"b64": base64.b64encode(value).decode()}
                for value in values
            ]
    return {
        "predictions": [
            {name: values[row] for name, values in outputs.items()} for row in range(len(rows))
        ]
    }


if __name__ == "__main__":
    run(main)
