"""Lesson 15: an autoregressive language model, which writes one token after another.

Sections 1 to 7 are here; 8 to 10, about what its weights can do, are in `_lesson_15_training.py`.

python scripts/lesson_15_autoregressive_lm.py
python scripts/lesson_15_autoregressive_lm.py --prompt "The dog" --steps 5 --plot attention.png
"""

import numpy as np
from _page import point, print_columns, print_matrix, section
from _start import (
    check_count,
    console,
    lesson_parser,
    parse_lesson,
    quiet_imports,
    ran_on,
    run,
    write_numbers,
)

with quiet_imports():
    import keras
    import tensorflow as tf
    from _lesson_15_model import VOCABULARY, reference_model
    from _lesson_15_training import GUESSING, constant_start, limits, picture, training

    from keras_tinyattn import functional, next_token_loss, sample

MODES = {
    "xla": "compiled with XLA (jit_compile=True)",
    "graph": "as a TensorFlow graph",
    "eager": "one operation at a time (eager)",
}
TABLES = ("embedding_table", "position_embeddings", "w_q", "w_k", "w_v", "w_vocab")
TEMPERATURES = (0.1, 0.5, 1.0, 2.0, 10.0)
SAMPLES = 1000


def main(argv=None):
    parser = lesson_parser(
        "A language model on three words: from text to the next word, step by step, "
        "and what training changes.",
        plot="draw who looks at whom, before and after training",
    )
    add = parser.add_argument
    prompt = 'what to continue, 1 to 10 words of the vocabulary (default "The cat sat")'
    add("--prompt", default="The cat sat", metavar="TEXT", help=prompt)
    add("--steps", type=int, default=3, metavar="N", help="words to add at most (default 3)")
    mode = "how TensorFlow runs the model; the numbers are the same (default xla)"
    add("--mode", choices=MODES, default="xla", help=mode)
    options = parse_lesson(parser, argv)
    check_count("--steps", options.steps)
    model, tokenizer = reference_model()
    token_ids = tokenizer.encode(options.prompt)
    check_count("The number of words in --prompt", len(token_ids), 1, model.sequence_length)
    keras.utils.set_random_seed(15)
    # On a GPU, float32 products may be rounded to 10 bits unless this is off.
    tf.config.experimental.enable_tensor_float_32_execution(False)

    output = console()
    output.print("[bold cyan]Lesson 15: an autoregressive language model[/]")
    output.print("It reads a text and says how likely each word is to come next.")
    output.print("Append the likeliest word, ask again, and it writes.")
    output.print("\n    text -> ids -> vectors -> causal attention -> logits -> word\n", style="bold")
    forward = make_forward(model, options.mode)
    device = ran_on(forward(tf.constant([token_ids]))["logits"])
    output.print(f"Computed by CausalLM, {MODES[options.mode]}, on {device}.")

    tables = dict(zip(TABLES, model.get_weights(), strict=True))
    first = look(forward, token_ids)
    numbers = {"mode": options.mode, "device": device, **tables, "first_pass": first}
    numbers |= ids(options.prompt, tokenizer, output)
    numbers |= vectors(tables, first, output)
    numbers["change_of_earlier_logits"] = attention(forward, first, output)
    next_word(tables["w_vocab"], first, output)
    numbers["temperatures"] = temperature(first, output)
    numbers |= steps(model, tokenizer, forward, token_ids, options, output)
    numbers |= loss(forward, tokenizer, output)
    numbers["pairs"] = limits(forward, tables, output)
    numbers |= training(model, tokenizer, token_ids, output)
    trained = numbers["training"]
    numbers["training_from_random"] = constant_start(trained, tokenizer, token_ids, output)
    section(
        output,
        "The point",
        "Writing is a loop around one question: what comes next? The loop asked the given weights and "
        f"wrote '{numbers['final_text']}'. The same loop, after training from a loss of "
        f"{trained['losses'][0]:.2f} to {trained['losses'][-1]:.2f} (no model can go below "
        f"{numbers['least_loss']:.2f}), wrote '{trained['text']}'.",
    )
    numbers["picture"] = picture(model, tokenizer, trained["ids"], output, options.plot)
    write_numbers(output, options.json, numbers)


def make_forward(model, mode):
    """A function from token ids, `(B, T)`, to what the model makes of them, by name."""

    def forward(token_ids):
        x = model.embedding(token_ids)  # (B, T, D)
        logits, (weights,) = model(token_ids, return_attention_scores=True)  # (B, T, V), (B, H, T, T)
        return {
            "token_embeds": tf.gather(model.embedding.token_embeddings, token_ids),
            "x": x,
            "weights": weights[:, 0],
            "attended": model.blocks[0](x),
            "logits": logits,
            "last_logits": logits[:, -1],
            "probs": functional.softmax(logits[:, -1]),
            # At temperature 0, the default: the likeliest, of equal ones the lowest id.
            "next_id": sample(logits[:, -1]),
        }

    # One graph for texts of every length, where each would otherwise get its own.
    signature = [tf.TensorSpec((None, None), tf.int32)]
    graph = tf.function(forward, input_signature=signature, jit_compile=mode == "xla")
    return forward if mode == "eager" else graph


def look(forward, token_ids):
    """What the model makes of one text, without the batch axis."""
    found = {name: value[0].numpy() for name, value in forward(tf.constant([token_ids])).items()}
    next_id = found.pop("next_id")
    return {"ids": token_ids, **found, "next_id": int(next_id), "next_id_type": next_id.dtype.name}


def words_of(token_ids):
    return [VOCABULARY[index] for index in token_ids]


def ids(prompt, tokenizer, output):
    text = f"The model knows {len(VOCABULARY)} words; an id is a position in this list."
    section(output, "1. Words to ids", text)
    cells = np.array([(str(index), f"[bold cyan]{word}[/]") for index, word in enumerate(VOCABULARY)])
    rows = cells.reshape(4, -1, 2).transpose(1, 0, 2).reshape(-1, 8)
    print_columns(output, ("id", "word") * 4, rows, "rl" * 4)
    point(output, f"{prompt!r} is split at white space: its ids are {tokenizer.encode(prompt)}.")
    upper, lower = tokenizer.encode("The the")
    point(output, f"Capital letters count: 'The' ({upper}) and 'the' ({lower}) are two words.")
    return {"prompt": prompt, "vocab": tokenizer.vocabulary, "end_id": tokenizer.end_id}


def vectors(tables, first, output):
    tokens, positions = tables["embedding_table"], tables["position_embeddings"]
    words, width = words_of(first["ids"]), range(tokens.shape[1])
    section(output, "2. Ids to vectors", f"An id picks a row of the embedding table, {tokens.shape}.")
    print_matrix(output, first["token_embeds"], words, width, "{:.2f}", "token")
    output.print(
        "Attention by itself does not see the order of words, so a row for the position is added, from "
        f"the position table, {positions.shape}."
    )
    names = [f"position {index}" for index in range(len(words))]
    print_matrix(output, positions[: len(words)], names, width, "{:.2f}")
    output.print("The sum goes into attention:")
    print_matrix(output, first["x"], words, width, "{:.2f}", "token")
    total = f"{first['token_embeds'][0, 0]:.2f} + {positions[0, 0]:.2f} = {first['x'][0, 0]:.2f}"
    point(output, f"First number of '{words[0]}': {total}.")
    return {"hidden_dim": len(width), "sequence_length": len(positions)}


def attention(forward, first, output):
    words, weights = words_of(first["ids"]), first["weights"]
    section(
        output,
        "3. Causal attention",
        "As in lesson 06, but a word looks only at itself and at the words before it, never at later "
        "ones: those it has to predict.",
    )
    if len(words) <= 5:
        sums = ("row sum", [f"{total:.2%}" for total in weights.sum(axis=1)])
        print_matrix(output, weights, words, words, "{:.1%}", "query \\ key", sums)
    else:  # Too wide for a line of 80.
        names = [f"{index} {word}" for index, word in enumerate(words)]
        print_matrix(output, 100 * weights, names, range(len(words)), "{:.0f}", "query \\ key, in %")
    if len(words) == 1:
        return None
    above = weights[np.triu_indices(len(words), 1)].max()
    point(output, f"No word looks ahead: the largest weight above the diagonal is {above:g}, exactly.")
    # Each word of the vocabulary in place of the last: (V, T).
    texts = np.tile(np.array(first["ids"], "int32"), (len(VOCABULARY), 1))
    before = forward(tf.constant(texts))["logits"]
    texts[:, -1] = np.arange(len(VOCABULARY))
    after = forward(tf.constant(texts))["logits"]
    change = float(np.max(np.abs(after - before)[:, :-1]))
    point(
        output,
        f"Put each of the {len(VOCABULARY)} words in place of '{words[-1]}': the logits of the words "
        f"before it change by at most {change:g}. So a text that grows need not be read again.",
    )
    return change


def next_word(kernel, first, output):
    probs, logits, best = first["probs"], first["last_logits"], first["next_id"]
    section(
        output,
        "4. Logits, probabilities, the next word",
        f"The vocabulary projection, {kernel.shape}, gives each position a logit for each word: "
        f"{first['logits'].shape}. The row of the last word, '{words_of(first['ids'])[-1]}', is about "
        "what comes next; a softmax turns it into probabilities. The likeliest:",
    )
    # Rounded, so that equal logits are in the order of their ids on every processor.
    rows = [
        (f"[bold cyan]{VOCABULARY[i]}[/]", f"{i}", f"{logits[i]:.4f}", f"{probs[i]:.2%}")
        for i in np.argsort(-logits.round(4), kind="stable")[:7]
    ]
    print_columns(output, ("word", "id", "logit", "probability"), rows, "lrrr")
    point(output, f"All {len(probs)} probabilities add up to {probs.sum():.2%}.")
    chosen = f"'{VOCABULARY[best]}' (id {best}), with {probs[best]:.1%}"
    point(output, f"The next word is {chosen}; guessing would give {1 / len(probs):.1%}.")


def temperature(first, output):
    logits, best, found, rows = first["last_logits"], first["next_id"], [], []
    for value in TEMPERATURES:
        probs = functional.softmax(tf.constant(logits / value)).numpy()
        sampled = sample(
            tf.tile([logits], (SAMPLES, 1)), temperature=value, seed=tf.range(SAMPLES)
        ).numpy()
        likeliest, prob, share = int(np.argmax(probs)), float(probs[best]), np.mean(sampled == best)
        found.append({"temperature": value, "next_id": likeliest, "prob": prob, "drawn_share": share})
        rows.append((f"{value:g}", VOCABULARY[likeliest], f"{prob:.1%}", f"{share:.1%}"))
    section(
        output,
        "5. Temperature does not change the likeliest word",
        "Logits are divided by it before the softmax. That moves them closer together or further "
        "apart, but never past each other. It matters when the next word is sampled:",
    )
    word, share = VOCABULARY[best], f"share of {SAMPLES} samples"
    print_columns(output, ("temperature", "likeliest", f"probability of '{word}'", share), rows, "rlrr")
    point(
        output,
        f"The likeliest is '{word}' at all {len(rows)} temperatures, and its probability goes from "
        f"{rows[0][2]} at {rows[0][0]} to {rows[-1][2]} at {rows[-1][0]}.",
    )
    return found


def steps(model, tokenizer, forward, prompt_ids, options, output):
    section(output, "6. The loop that writes", "Each step predicts the next word and appends it:")
    token_ids, found, shapes = prompt_ids, {}, []
    names = ("ids", "token_embeds", "x", "weights", "logits", "last_logits")
    while len(found) < options.steps and len(token_ids) < model.sequence_length:
        step = look(forward, token_ids)
        found[f"step_{len(found) + 1}"] = step
        word, prob = VOCABULARY[step["next_id"]], step["probs"][step["next_id"]]
        point(output, f"{tokenizer.decode(token_ids)} -> [bold]{word}[/] ({prob:.1%})")
        shapes.append([f"{len(found)}", *(f"{np.shape(step[name])}" for name in names), word])
        token_ids = [*token_ids, step["next_id"]]
        if step["next_id"] == tokenizer.end_id:
            break
    taken, text = len(shapes), tokenizer.decode(token_ids)
    output.print(f"\n    {text}\n", style="bold")
    output.print("What went through the model, without the batch axis:")
    headings = ("step", "ids", "vectors", "sum", "weights", "logits", "last row", "next word")
    print_columns(output, headings, shapes, "rrrrrrrl")
    point(
        output,
        f"Steps taken: {taken} of {options.steps}. The loop ends early when it has written "
        f"'{VOCABULARY[tokenizer.end_id]}' or filled the model's {model.sequence_length} positions.",
    )
    limit, xla = min(options.steps, model.sequence_length), options.mode == "xla"
    generated = model.generate(prompt_ids, limit, stop=tokenizer.end_id, jit_compile=xla).token_ids
    point(
        output,
        f"The ids are {token_ids}. model.generate, the same loop in one graph, which keeps the keys "
        f"and values of what it has read, gives {generated.tolist()}.",
    )
    full = len(token_ids) == model.sequence_length
    end = "end" if taken and token_ids[-1] == tokenizer.end_id else "room" if full else "steps"
    found |= {"steps": options.steps, "steps_taken": taken, "end_of_writing": end}
    return {**found, "final_sequence": token_ids, "final_text": text, "generated": generated}


def loss(forward, tokenizer, output):
    text = "The cat sat on"
    token_ids = tokenizer.encode(text)
    inputs, targets = token_ids[:-1], token_ids[1:]
    found = look(forward, inputs)
    probs = functional.softmax(tf.constant(found["logits"])).numpy()
    mean = float(next_token_loss(found["logits"][None], [targets]))
    section(
        output,
        "7. How wrong is it? The next-token loss",
        f"In '{text}' each word predicts the next. The loss is the mean of -ln(probability) of the "
        "words that came.",
    )
    rows = [
        (f"[bold cyan]{VOCABULARY[i]}[/]", VOCABULARY[j], f"{row[j]:.2%}", f"{-np.log(row[j]):.4f}")
        for i, j, row in zip(inputs, targets, probs, strict=True)
    ]
    print_columns(output, ("after", "came", "probability", "-ln"), rows, "llrr")
    guessing = f"with all words equally likely it is ln {len(VOCABULARY)} = {GUESSING:.4f}"
    point(output, f"Loss {mean:.4f}. That is worse than guessing: {guessing}.")
    found = {name: found[name] for name in ("ids", "x", "weights", "logits")}
    return {"train": {**found, "targets": targets, "probs": probs, "loss": mean}, "guessing": GUESSING}


if __name__ == "__main__":
    run(main)
