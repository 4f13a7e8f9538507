"""Lesson 15: an autoregressive language model, which writes one token after the other.

python scripts/lesson_15_autoregressive_lm.py
python scripts/lesson_15_autoregressive_lm.py --prompt "The dog" --steps 5 --plot attention.png
"""

import argparse
import collections
import itertools
import math

import numpy as np
from _page import point, print_columns, print_matrix, section
from _start import (
    check_count,
    check_file,
    check_picture,
    console,
    quiet_imports,
    ran_on,
    run,
    write_numbers,
    write_picture,
)

with quiet_imports():
    import keras
    import tensorflow as tf
    from _lesson_15_model import SENTENCES, VOCABULARY, reference_model, train, training_rows

    from keras_tinyattn import functional, next_token_loss, sample
    from keras_tinyattn.plotting import plot_attention

# Each of its words is to foretell the next.
LOSS_TEXT = "The cat sat on"
TEMPERATURES = (0.1, 0.5, 1.0, 2.0, 10.0)
DRAWS = 1000
# Logits nearer to each other than this are equal but for the rounding of float32.
TIE = 1e-5

# One graph for windows of every size; ids of unlike shape would otherwise make a graph each.
SIGNATURE = [tf.TensorSpec((None, None), tf.int32)]
MODES = {
    "xla": (
        "compiled with XLA (jit_compile=True)",
        lambda f: tf.function(f, input_signature=SIGNATURE, jit_compile=True),
    ),
    "graph": ("as a TensorFlow graph", lambda f: tf.function(f, input_signature=SIGNATURE)),
    "eager": ("one operation after the other (eager)", lambda f: f),
}


def main(argv=None):
    arguments = parse_arguments(argv)
    check_count("--steps", arguments.steps)
    check_picture("--plot", arguments.plot)
    check_file("--json", arguments.json)
    model, tokenizer = reference_model()
    words = len(tokenizer.encode(arguments.prompt))
    check_count("The number of words in --prompt", words, 1, model.sequence_length)
    keras.utils.set_random_seed(15)
    # On a GPU, float32 products may be rounded to 10 bits unless this is off.
    tf.config.experimental.enable_tensor_float_32_execution(False)

    numbers = compute(arguments.prompt, arguments.steps, arguments.mode)
    output = console()
    tell(numbers, output)
    write_picture(output, arguments.plot, lambda part: draw(numbers).savefig(part))
    write_numbers(output, arguments.json, as_json(numbers))


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        description="A language model on three words: from text to the next word, step by step, "
        "and what training changes."
    )
    parser.add_argument(
        "--prompt",
        default="The cat sat",
        metavar="TEXT",
        help='what to continue, 1 to 10 words of the vocabulary (default "The cat sat")',
    )
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="words to add at most (default 3)"
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="xla",
        help="how TensorFlow runs the model; the numbers are the same (default xla)",
    )
    parser.add_argument(
        "--plot", metavar="FILE.png", help="draw who looks at whom, before and after training"
    )
    parser.add_argument("--json", metavar="FILE", help="write every number of the lesson as JSON")
    return parser.parse_args(argv)


def compute(prompt, steps, mode):
    """The lesson's numbers by name; nothing is printed."""
    model, tokenizer = reference_model()
    token_ids = tokenizer.encode(prompt)
    forward = make_forward(model, mode)
    first = look(forward, token_ids)
    (attention,) = model.blocks
    numbers = {
        "mode": mode,
        "device": first.pop("device"),
        "hidden_dim": model.embedding.hidden_dim,
        "sequence_length": model.sequence_length,
        "vocab": tokenizer.vocabulary,
        "end_id": tokenizer.end_id,
        "embedding_table": model.embedding.token_embeddings.numpy(),
        "position_embeddings": model.embedding.position_embeddings.numpy(),
        "w_q": attention.query_kernel.numpy(),
        "w_k": attention.key_kernel.numpy(),
        "w_v": attention.value_kernel.numpy(),
        "w_vocab": model.projection.kernel.numpy(),
        "prompt": prompt,
        "first_pass": first,
        "change_of_earlier_logits": change_of_earlier_logits(forward, token_ids, len(VOCABULARY)),
        "temperatures": [at_temperature(first["last_logits"], value) for value in TEMPERATURES],
        "steps": steps,
    }
    numbers |= write(forward, token_ids, steps, model.sequence_length, tokenizer)
    numbers["generated"] = token_ids
    if steps:
        # More than there are positions would be cut to the same.
        numbers["generated"] = model.generate(
            token_ids,
            min(steps, model.sequence_length),
            stop=tokenizer.end_id,
            jit_compile=mode == "xla",
        ).token_ids

    text_ids = tokenizer.encode(LOSS_TEXT)
    foretold = forward(tf.constant([text_ids[:-1]]))
    numbers["train"] = {
        "ids": text_ids[:-1],
        "targets": text_ids[1:],
        "x": foretold["x"][0].numpy(),
        "weights": foretold["weights"][0].numpy(),
        "logits": foretold["logits"][0].numpy(),
        "probs": functional.softmax(foretold["logits"])[0].numpy(),
        "loss": float(next_token_loss(foretold["logits"], [text_ids[1:]])),
    }
    numbers["guessing"] = math.log(len(VOCABULARY))
    numbers["pairs"] = compute_pairs(forward, numbers["w_vocab"])

    rows = training_rows(tokenizer)
    numbers["least_loss"] = least_loss(*(array.numpy() for array in rows))
    starts = {"training": model, "training_from_random": random_model()}
    numbers |= {name: learn(start, tokenizer, token_ids, rows) for name, start in starts.items()}
    # Both models look at what the trained one wrote, but for the end, after which nobody asks.
    written = numbers["training"]["ids"]
    if len(written) > 1 and written[-1] == tokenizer.end_id:
        written = written[:-1]
    sentence = tf.constant([written])
    numbers["picture"] = {
        "ids": written,
        "before": reference_model()[0](sentence, return_attention_scores=True)[1][0][0, 0].numpy(),
        "after": model(sentence, return_attention_scores=True)[1][0][0, 0].numpy(),
    }
    return numbers


def make_forward(model, mode):
    """A function from `(B, T)` ids to the stages of the model by name, run as the mode says."""

    def forward(token_ids):
        x = model.embedding(token_ids)
        logits, (weights,) = model(token_ids, return_attention_scores=True)
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

    return MODES[mode][1](forward)


def look(forward, token_ids):
    """The stages for one window of ids, without the batch axis, and the device that ran them."""
    stages = forward(tf.constant([token_ids]))
    found = {name: value.numpy()[0] for name, value in stages.items()}
    return {
        "ids": list(token_ids),
        **found,
        "next_id": int(found["next_id"]),
        "next_id_type": stages["next_id"].dtype.name,
        "device": ran_on(stages["logits"]),
    }


def write(forward, token_ids, steps, sequence_length, tokenizer):
    """The greedy loop, spelled out: each step looks at all so far and adds the likeliest word."""
    found, token_ids = {}, list(token_ids)
    ended = False
    while len(found) < steps and len(token_ids) < sequence_length and not ended:
        step = look(forward, token_ids)
        del step["device"]
        found[f"step_{len(found) + 1}"] = step
        token_ids.append(step["next_id"])
        ended = step["next_id"] == tokenizer.end_id
    full = len(token_ids) == sequence_length
    return {
        **found,
        "steps_taken": len(found),
        "end_of_writing": "end" if ended else "room" if full else "steps",
        "final_sequence": token_ids,
        "final_text": tokenizer.decode(token_ids),
    }


def change_of_earlier_logits(forward, token_ids, vocabulary_size):
    """The largest change of a logit before the last token when that is replaced by each other one."""
    if len(token_ids) == 1:
        return None
    windows = np.tile(np.array(token_ids, "int32"), (vocabulary_size, 1))
    before = forward(tf.constant(windows))["logits"]
    windows[:, -1] = np.arange(vocabulary_size)
    after = forward(tf.constant(windows))["logits"]
    return float(tf.reduce_max(tf.abs(after - before)[:, :-1]))


def at_temperature(logits, temperature):
    probs = functional.softmax(tf.constant(logits / temperature)).numpy()
    drawn = sample(tf.tile([logits], (DRAWS, 1)), temperature, seed=tf.range(DRAWS)).numpy()
    best = int(np.argmax(logits))
    return {
        "temperature": temperature,
        "next_id": int(np.argmax(probs)),
        "prob": float(probs[best]),
        "drawn_share": float(np.mean(drawn == best)),
    }


def compute_pairs(forward, kernel):
    """What the model answers to every prompt of two words."""
    pairs = np.array(list(itertools.product(range(len(VOCABULARY)), repeat=2)), "int32")
    stages = forward(tf.constant(pairs))
    logits, attended = stages["logits"].numpy(), stages["attended"].numpy()
    sums = kernel.sum(axis=0)
    # All entries of an attended vector are one number; (400, 2).
    factors = attended.mean(axis=-1)
    next_ids = stages["next_id"].numpy()
    equal = [
        (left, right)
        for left, right in itertools.combinations(range(kernel.shape[1]), 2)
        if np.array_equal(kernel[:, left], kernel[:, right])
    ]
    return {
        "count": len(pairs),
        "column_sums": sums,
        "factors": factors,
        "spread_of_attended": float(np.max(np.ptp(attended, axis=-1))),
        "residual": float(np.max(np.abs(logits - factors[..., None] * sums))),
        "next_ids": next_ids,
        "answers": {VOCABULARY[i]: int(np.sum(next_ids == i)) for i in np.unique(next_ids)},
        "last_ids_if_negative": sorted({int(last) for last in pairs[factors[:, -1] < 0, -1]}),
        "sign_decides": bool(
            np.all(next_ids == np.where(factors[:, -1] > 0, np.argmax(sums), np.argmin(sums)))
        ),
        "equal_columns": equal,
        "difference_of_equal_logits": max(
            (float(np.max(np.abs(logits[..., i] - logits[..., j]))) for i, j in equal), default=0.0
        ),
    }


def least_loss(inputs, targets, mask):
    """The loss of one who knows, for each beginning, how often the sentences go on with each word."""
    counts = collections.Counter()
    for row, following, real in zip(inputs, targets, mask, strict=True):
        for place in range(int(np.sum(real))):
            counts[tuple(row[: place + 1]), following[place]] += 1
    beginnings = collections.Counter()
    for (beginning, _), count in counts.items():
        beginnings[beginning] += count
    logs = [count * math.log(count / beginnings[start]) for (start, _), count in counts.items()]
    return -sum(logs) / counts.total()


def random_model():
    """The same model, but for attention that starts with numbers that differ."""
    model, _ = reference_model()
    (attention,) = model.blocks
    for seed, kernel in enumerate(
        (attention.query_kernel, attention.key_kernel, attention.value_kernel)
    ):
        kernel.assign(keras.initializers.GlorotUniform(seed=seed)(kernel.shape))
    return model


def learn(model, tokenizer, token_ids, rows):
    """Train the model, and what it has become."""
    inputs, targets, mask = rows
    losses = train(model, tokenizer)
    losses.append(float(next_token_loss(model(inputs), targets, mask)))
    beginnings = [" ".join(sentence.split()[:2]) for sentence in SENTENCES]
    prompts = [token_ids, *map(tokenizer.encode, beginnings)]
    written = model.generate(prompts, model.sequence_length, stop=tokenizer.end_id, jit_compile=False)
    own, *texts = [
        row[:length].tolist() for row, length in zip(written.token_ids, written.lengths, strict=True)
    ]
    (attention,) = model.blocks
    kernels = {"q": attention.query_kernel, "k": attention.key_kernel, "v": attention.value_kernel}
    kernels = {letter: kernel.numpy() for letter, kernel in kernels.items()}
    return {
        "losses": losses,
        "ids": own,
        "text": tokenizer.decode(own),
        "finish_reason": str(written.finish_reasons[0]),
        "beginnings": beginnings,
        "texts": [tokenizer.decode(text) for text in texts],
        # The largest difference between two entries of one row: how far apart the columns are.
        "column_differences": {
            letter: float(np.max(np.ptp(kernel, axis=1))) for letter, kernel in kernels.items()
        },
        # A score is x (W_Q W_K^T) y: so many independent ways of matching two tokens.
        "rank_of_scores": int(np.linalg.matrix_rank(kernels["q"] @ kernels["k"].T)),
    }


def draw(numbers):
    steps = len(numbers["training"]["losses"]) - 1
    return plot_attention(
        np.stack([numbers["picture"]["before"], numbers["picture"]["after"]]),
        words_of(numbers, numbers["picture"]["ids"]),
        title="Who looks at whom: never at what comes later",
        head_titles=["given weights", f"after {steps} steps of training"],
    )


def tell(numbers, output):
    """Print the lesson; each sentence about a number is made from that number."""
    output.print("[bold cyan]Lesson 15: an autoregressive language model[/]")
    output.print(
        "It reads a text and says how likely each word is to come next. Put the word behind the text, "
        "ask again, and it writes."
    )
    output.print(
        "\n    text -> ids -> vectors -> causal attention -> logits -> next word\n",
        style="bold",
    )
    output.print(f"Computed by CausalLM, {MODES[numbers['mode']][0]}, on {numbers['device']}.")
    tell_ids(numbers, output)
    tell_vectors(numbers, output)
    tell_attention(numbers, output)
    tell_next_word(numbers, output)
    tell_temperature(numbers, output)
    tell_steps(numbers, output)
    tell_loss(numbers, output)
    tell_limits(numbers, output)
    tell_training(numbers, output)
    tell_constant_start(numbers, output)

    before, after = numbers["final_text"], numbers["training"]["text"]
    loss, least = numbers["training"]["losses"][-1], numbers["least_loss"]
    section(
        output,
        "The point",
        "Writing is a loop around one question, what comes next? The loop asked the given weights and "
        f"wrote '{before}'. The same loop, after training from a loss of "
        f"{numbers['training']['losses'][0]:.2f} to {loss:.2f} (no model can go below {least:.2f}), "
        + (f"wrote '{after}'." if after != before else "wrote that again."),
    )


def tell_ids(numbers, output):
    vocabulary, token_ids = numbers["vocab"], numbers["first_pass"]["ids"]
    section(
        output,
        "1. Words to ids",
        f"The model knows {len(vocabulary)} words; an id is a place in this list.",
    )
    rows = math.ceil(len(vocabulary) / 4)
    cells = [(str(index), f"[bold cyan]{word}[/]") for index, word in enumerate(vocabulary)]
    cells += [("", "")] * (4 * rows - len(cells))
    table = [sum((cells[row + rows * column] for column in range(4)), ()) for row in range(rows)]
    print_columns(output, ("id", "word") * 4, table, "rl" * 4)
    point(
        output,
        f"{numbers['prompt']!r} is split at white space: {len(token_ids)} "
        f"word{'s' * (len(token_ids) > 1)}, ids {token_ids}.",
    )
    by_letters = collections.defaultdict(list)
    for word in vocabulary:
        by_letters[word.lower()].append(word)
    for spellings in by_letters.values():
        if len(spellings) > 1:
            named = " and ".join(f"'{word}' ({vocabulary.index(word)})" for word in spellings)
            point(output, f"Capital letters count: {named} are {len(spellings)} words.")


def tell_vectors(numbers, output):
    first = numbers["first_pass"]
    words, width = words_of(numbers, first["ids"]), range(numbers["hidden_dim"])
    section(
        output,
        "2. Ids to vectors",
        f"An id picks a row of the embedding table, {numbers['embedding_table'].shape}.",
    )
    print_matrix(output, first["token_embeds"], words, width, "{:.2f}", "token")
    output.print(
        "Attention by itself does not see the order of words, so a row for the place is added, from "
        f"the position table, {numbers['position_embeddings'].shape}."
    )
    places = numbers["position_embeddings"][: len(words)]
    print_matrix(output, places, [f"place {place}" for place in range(len(words))], width, "{:.2f}")
    output.print("The sum goes into attention:")
    print_matrix(output, first["x"], words, width, "{:.2f}", "token")
    point(
        output,
        f"First number of '{words[0]}': {first['token_embeds'][0, 0]:.2f} + {places[0, 0]:.2f} = "
        f"{first['x'][0, 0]:.2f}.",
    )


def tell_attention(numbers, output):
    weights = numbers["first_pass"]["weights"]
    words = words_of(numbers, numbers["first_pass"]["ids"])
    section(
        output,
        "3. Causal attention",
        "As in lesson 06, but a word looks at itself and at what stands before it, never at what comes "
        "later: that is what it has to foretell.",
    )
    if sum(max(len(word), len("100.0%")) + 3 for word in words) <= 54:
        row_sums = ("row sum", [f"{total:.2%}" for total in weights.sum(axis=1)])
        print_matrix(output, weights, words, words, "{:.1%}", "query \\ key", row_sums)
    else:  # Too wide for a line of 80.
        names = [f"{place} {word}" for place, word in enumerate(words)]
        places = range(len(words))
        print_matrix(output, 100 * weights, names, places, "{:.0f}", "query \\ key, in %")
    above = weights[np.triu_indices(len(words), 1)]
    if len(above) == 0:
        point(output, f"'{words[0]}' has nobody to look at but itself: {weights[0, 0]:.0%}.")
        return
    largest = float(np.max(above))
    point(
        output,
        f"Above the diagonal stand{'s' * (len(above) == 1)} {len(above)} "
        f"weight{'s' * (len(above) > 1)}; the largest is {largest:g}"
        + (", exactly." if largest == 0 else ": the future leaks in."),
    )
    change = numbers["change_of_earlier_logits"]
    point(
        output,
        f"Put each of the {len(numbers['vocab'])} words in place of '{words[-1]}': the logits of the "
        f"words before it change by at most {change:g}. "
        + (
            "So a text that grows need not be read again."
            if change == 0
            else "So the model sees what it has to foretell."
        ),
    )


def tell_next_word(numbers, output):
    first, vocabulary = numbers["first_pass"], numbers["vocab"]
    words = words_of(numbers, first["ids"])
    section(
        output,
        "4. Logits, probabilities, the next word",
        f"The vocabulary projection, {numbers['w_vocab'].shape}, gives each place a score for each "
        f"word: {first['logits'].shape} logits. The row of the last word, '{words[-1]}', is about what "
        "comes next; a softmax makes it probabilities. The likeliest:",
    )
    logits, probs = first["last_logits"], first["probs"]
    groups = ranking(logits)
    rows, rank = [], 1
    for group in groups:
        if rank > 5:
            break
        for token in group:
            name = f"{rank}=" if len(group) > 1 else f"{rank} "
            rows.append(
                (name, f"[bold cyan]{vocabulary[token]}[/]", str(token))
                + (f"{logits[token]:.4f}", f"{probs[token]:.2%}")
            )
        rank += len(group)
    print_columns(output, ("rank", "word", "id", "logit", "probability"), rows, "rlrrr")
    best = first["next_id"]
    point(output, f"All {len(probs)} probabilities add up to {probs.sum():.2%}.")
    point(
        output,
        f"The next word is '{vocabulary[best]}' (id {best}), with {probs[best]:.1%}; to guess would "
        f"give {1 / len(probs):.1%}.",
    )
    tied = sum(len(group) for group in groups if len(group) > 1)
    if tied:
        point(
            output,
            f"A rank with = is shared: {tied} of the {len(logits)} words have a logit equal to "
            "another's but for rounding. Of equal ones the lowest id would be taken.",
        )


def tell_temperature(numbers, output):
    found = numbers["temperatures"]
    word = numbers["vocab"][numbers["first_pass"]["next_id"]]
    section(
        output,
        "5. A temperature cannot change the likeliest word",
        "Logits are divided by it before the softmax. That moves them nearer or farther apart, and "
        "never past each other. It matters to whoever draws the word by lot:",
    )
    print_columns(
        output,
        ("temperature", "likeliest", f"probability of '{word}'", f"share of {DRAWS} draws"),
        [
            (
                f"{entry['temperature']:g}",
                f"[bold cyan]{numbers['vocab'][entry['next_id']]}[/]",
                f"{entry['prob']:.1%}",
                f"{entry['drawn_share']:.1%}",
            )
            for entry in found
        ],
        "rlrr",
    )
    likeliest = {entry["next_id"] for entry in found}
    coldest, hottest = found[0], found[-1]
    point(
        output,
        (
            f"The likeliest is '{word}' at all {len(found)} temperatures"
            if likeliest == {numbers["first_pass"]["next_id"]}
            else f"The likeliest changes: {len(likeliest)} words"
        )
        + f", and its probability goes from {coldest['prob']:.1%} at {coldest['temperature']:g} to "
        f"{hottest['prob']:.1%} at {hottest['temperature']:g}.",
    )


def tell_steps(numbers, output):
    taken, vocabulary = numbers["steps_taken"], numbers["vocab"]
    section(
        output,
        f"6. Writing, {taken} step{'s' * (taken != 1)}",
        "Each step asks for the next word and puts it behind the others."
        + (" What flows, without the batch axis:" if taken else ""),
    )
    rows = []
    for index in range(1, taken + 1):
        step = numbers[f"step_{index}"]
        shapes = [np.shape(step[name]) for name in ("ids", "token_embeds", "x", "weights", "logits")]
        shapes.append(np.shape(step["last_logits"]))
        rows.append(
            (str(index), *map(str, shapes), f"{vocabulary[step['next_id']]} ({step['next_id']})")
        )
    names = ("step", "ids", "vectors", "+ places", "weights", "logits", "last row", "next word")
    if rows:
        print_columns(output, names, rows, "rrrrrrrl")
    for index in range(1, taken + 1):
        step = numbers[f"step_{index}"]
        point(
            output,
            f"{' '.join(words_of(numbers, step['ids']))} -> [bold]{vocabulary[step['next_id']]}[/] "
            f"({step['probs'][step['next_id']]:.1%})",
        )
    positions = numbers["sequence_length"]
    missing = numbers["steps"] - taken
    ends = {
        "steps": "" if taken else "No step was asked for (--steps 0).",
        "end": f"'{vocabulary[numbers['end_id']]}' ends a text, so writing stops here"
        + (f", {missing} step{'s' * (missing > 1)} early." if missing else "."),
        "room": f"The text fills all {positions} positions of the model, so writing stops here: "
        f"{taken} of {numbers['steps']} steps were taken.",
    }
    if ends[numbers["end_of_writing"]]:
        point(output, ends[numbers["end_of_writing"]])
    output.print(f"\n    {numbers['final_text']}\n", style="bold")
    if taken:
        same = list(numbers["generated"]) == numbers["final_sequence"]
        point(
            output,
            "model.generate, the same loop in one graph, which keeps keys and values of what it read, "
            f"gives {'the same' if same else 'other'} ids.",
        )


def tell_loss(numbers, output):
    training, vocabulary = numbers["train"], numbers["vocab"]
    text = " ".join(words_of(numbers, [*training["ids"], training["targets"][-1]]))
    section(
        output,
        "7. How wrong is it? The next-token loss",
        f"In '{text}' each word foretells the next. The loss is the mean of -ln(probability), for the "
        "words that came.",
    )
    rows = []
    for place, (given, target) in enumerate(zip(training["ids"], training["targets"], strict=True)):
        prob = training["probs"][place, target]
        rows.append(
            (f"[bold cyan]{vocabulary[given]}[/]", vocabulary[target])
            + (f"{prob:.2%}", f"{-math.log(prob):.4f}")
        )
    print_columns(output, ("after", "came", "probability", "-ln"), rows, "llrr")
    loss, guessing = training["loss"], numbers["guessing"]
    compared = "worse" if loss > guessing else "no worse"
    point(
        output,
        f"Loss {loss:.4f}. Guessing, all {len(vocabulary)} words alike, has ln {len(vocabulary)} = "
        f"{guessing:.4f}: the model is {compared} than guessing.",
    )


def tell_limits(numbers, output):
    pairs, vocabulary = numbers["pairs"], numbers["vocab"]
    sums = pairs["column_sums"]
    best, worst = vocabulary[int(np.argmax(sums))], vocabulary[int(np.argmin(sums))]
    constants = [numbers[f"w_{letter}"] for letter in "qkv"]
    section(
        output,
        "8. What these weights cannot do",
        "W_Q, W_K and W_V hold one number each ("
        + ", ".join(f"{kernel[0, 0]:g}" for kernel in constants)
        + f"), so all {numbers['hidden_dim']} entries of an attended vector are equal. A row of logits "
        "is then that one number times the column sums of the vocabulary projection.",
    )
    point(
        output,
        f"Over all {pairs['count']} prompts of two words, an attended vector's entries differ by at "
        f"most {pairs['spread_of_attended']:.1g}, and the logits from number times column sum by at "
        f"most {pairs['residual']:.1g}.",
    )
    point(
        output,
        f"The largest column sum is that of '{best}' ({sums.max():.1f}), the smallest that of "
        f"'{worst}' ({sums.min():.1f}): "
        + (
            f"where the number is positive the answer is '{best}', where it is negative '{worst}', and "
            "no other word can ever come."
            if pairs["sign_decides"]
            else "but the sign of the number does not decide the answer."
        ),
    )
    answers = ", ".join(f"{count} times '{word}'" for word, count in pairs["answers"].items())
    point(output, f"The {pairs['count']} prompts of two words are answered {answers}.")
    last = pairs["last_ids_if_negative"]
    if last:
        named = " or ".join(f"'{vocabulary[index]}'" for index in last)
        point(output, f"The number is negative only where the last word is {named}.")
    for left, right in pairs["equal_columns"]:
        point(
            output,
            f"Columns {left} ('{vocabulary[left]}') and {right} ('{vocabulary[right]}') of the "
            "projection are equal, so these words are always equally likely: their logits differ by at "
            f"most {pairs['difference_of_equal_logits']:g}.",
        )


def tell_training(numbers, output):
    trained, guessing = numbers["training"], numbers["guessing"]
    losses, steps = trained["losses"], len(trained["losses"]) - 1
    section(
        output,
        "9. Training: the same model learns",
        f"{len(SENTENCES)} sentences, each word foretelling the next; padding behind the shorter ones "
        f"does not count. {steps} steps down the gradient that a GradientTape finds, compiled:",
    )
    for sentence in SENTENCES:
        output.print(f"    {sentence}", markup=False)
    # At most nine rows, nearer together where the loss falls fast; the first and the last are there.
    shown = sorted({round(steps * (index / 8) ** 2) for index in range(9)})
    block = "\u2588" if output.encoding.lower().startswith("utf") else "#"
    print_columns(
        output,
        ("steps", "loss", ""),
        [
            (
                str(step),
                f"{losses[step]:.4f}",
                block * min(40, math.ceil(30 * losses[step] / losses[0])),
            )
            for step in shown
        ],
        "rrl",
    )
    below = steps_below(losses, guessing)
    point(
        output,
        f"The loss went from {losses[0]:.3f} to {losses[-1]:.3f}; "
        + (
            f"after {below} steps it was below guessing ({guessing:.3f})."
            if below is not None and losses[-1] < guessing
            else f"guessing has {guessing:.3f}, so it is still no better than that."
        ),
    )
    point(
        output,
        f"No model can go below {numbers['least_loss']:.3f} here: some beginnings go on in more than "
        "one way.",
    )
    output.print(f"\n    {trained['text']}\n", style="bold", markup=False)
    prompt = " ".join(words_of(numbers, numbers["first_pass"]["ids"]))
    end = numbers["vocab"][numbers["end_id"]]
    added = len(trained["ids"]) - len(numbers["first_pass"]["ids"])
    ends = f"and ends with '{end}'" if trained["finish_reason"] == "stop" else f"without an '{end}'"
    point(
        output,
        f"So it goes on after '{prompt}' with the likeliest word each time, {ends}."
        if added
        else f"Behind '{prompt}' there is no position left to go on.",
    )
    missed = [
        f" After '{beginning}' it writes '{text}'."
        for beginning, text in zip(trained["beginnings"], trained["texts"], strict=True)
        if text not in SENTENCES
    ]
    point(
        output,
        f"Given two words, it completes {completed(trained)} of the {len(SENTENCES)} sentences."
        + "".join(missed),
    )


def tell_constant_start(numbers, output):
    trained, other = numbers["training"], numbers["training_from_random"]
    differences = trained["column_differences"]
    ranks = trained["rank_of_scores"], other["rank_of_scores"]
    section(
        output,
        "10. What a constant start costs",
        "Where columns of a matrix start equal and get equal gradients, they move as one. "
        "Side by side, the same training from projections of random numbers (Glorot):",
    )
    guessing, steps = numbers["guessing"], len(trained["losses"]) - 1
    early = steps // 4
    rows = [
        (
            f"columns of W_{letter.upper()} differ by at most",
            *(f"{start['column_differences'][letter]:.3g}" for start in (trained, other)),
        )
        for letter in "qkv"
    ]
    rows += [
        ("rank of W_Q W_K^T", *map(str, ranks)),
        (
            "steps to fall below guessing",
            *(
                "never" if below is None else str(below)
                for below in (steps_below(start["losses"], guessing) for start in (trained, other))
            ),
        ),
        (
            f"loss after {early} steps",
            *(f"{start['losses'][early]:.3f}" for start in (trained, other)),
        ),
        (f"loss after {steps} steps", *(f"{start['losses'][-1]:.3f}" for start in (trained, other))),
        ("sentences completed", *(str(completed(start)) for start in (trained, other))),
    ]
    print_columns(output, ("after training", "from constants", "from random"), rows, "lrr")
    stuck = [f"W_{letter.upper()}" for letter in "qkv" if differences[letter] == 0]
    # Equal gradients are equal but for rounding, by which a processor may tell the columns apart.
    drifted = [
        letter for letter in "qk" if 0 < differences[letter] < other["column_differences"][letter] / 10
    ]
    moved = [
        f"W_{letter.upper()}" for letter in "qkv" if differences[letter] > 0 and letter not in drifted
    ]
    if stuck:
        point(
            output,
            f"The columns of {' and '.join(stuck)} are still equal after {steps} steps, and always "
            "will be: queries and keys meet only each other, so that equal columns get equal gradients."
            + (
                f" Those of {' and '.join(moved)} came apart, since the rows of the vocabulary "
                "projection differ."
                if moved
                else ""
            ),
        )
    for letter in drifted:
        share = other["column_differences"][letter] / differences[letter]
        point(
            output,
            f"The columns of W_{letter.upper()} got equal gradients too, but for rounding, and "
            f"training enlarged what rounding began: after {steps} steps they differ by "
            f"{differences[letter]:.3g}, 1/{share:.0f} of what they do from random numbers.",
        )
    if ranks[0] < ranks[1]:
        point(
            output,
            f"So a score has {ranks[0]} way{'s' * (ranks[0] > 1)} to match two words, and not "
            f"{ranks[1]}: a head of {numbers['hidden_dim']} that works as a head of {ranks[0]}.",
        )
    slower, losses = trained["losses"][early], (trained["losses"][-1], other["losses"][-1])
    gap = losses[0] - losses[1]
    point(
        output,
        f"After {early} steps the loss is {slower / other['losses'][early]:.1f} times that of the "
        f"random start; after {steps} steps it is {abs(gap):.3f} {'above' if gap > 0 else 'below'} it.",
    )


def words_of(numbers, token_ids):
    return [numbers["vocab"][index] for index in token_ids]


def ranking(logits):
    """Ids from the largest logit down, in groups that rounding cannot tell apart, ids ascending."""
    groups = []
    for index in np.argsort(-logits, kind="stable").tolist():
        if groups and logits[groups[-1][-1]] - logits[index] <= TIE:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [sorted(group) for group in groups]


def steps_below(losses, level):
    """After how many steps the loss was first below a level; None if never."""
    return next((step for step, loss in enumerate(losses) if loss < level), None)


def completed(trained):
    return sum(text in SENTENCES for text in trained["texts"])


def as_json(numbers):
    """Arrays as lists, at any depth."""
    if isinstance(numbers, dict):
        return {name: as_json(value) for name, value in numbers.items()}
    if isinstance(numbers, list | tuple):
        return [as_json(value) for value in numbers]
    return numbers.tolist() if isinstance(numbers, np.ndarray | np.generic) else numbers


if __name__ == "__main__":
    run(main)
