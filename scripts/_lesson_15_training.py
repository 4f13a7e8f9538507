"""Sections 8 to 10 of lesson 15: what its given weights cannot do, and what training makes of them.

It imports TensorFlow, so scripts import it inside `quiet_imports`.
"""

import collections
import itertools
import math

import keras
import numpy as np
import tensorflow as tf
from _lesson_15_model import SENTENCES, STEPS, VOCABULARY, reference_model, train, training_rows
from _page import point, print_columns, print_losses, section
from _start import write_picture

from keras_tinyattn import next_token_loss, plot_attention

# The loss of guessing, where all words are equally likely.
GUESSING = math.log(len(VOCABULARY))


def limits(forward, tables, output):
    ids = range(len(VOCABULARY))
    pairs = np.array(list(itertools.product(ids, ids)), "int32")
    stages = forward(tf.constant(pairs))
    logits, attended, next_ids = (stages[name].numpy() for name in ("logits", "attended", "next_id"))
    # An attended vector holds one number throughout: (V * V, 2).
    columns, numbers = tables["w_vocab"].T, attended.mean(axis=-1)
    sums, spread = columns.sum(axis=1), np.max(np.ptp(attended, axis=-1))
    residual = np.max(np.abs(logits - numbers[..., None] * sums))
    q, k, v = (tables[name][0, 0] for name in ("w_q", "w_k", "w_v"))
    section(
        output,
        "8. What these weights cannot do",
        f"W_Q, W_K and W_V hold one number each ({q:g}, {k:g}, {v:g}), so all {len(columns[0])} "
        "entries of an attended vector are equal. A row of logits is then that one number times the "
        "column sums of the vocabulary projection.",
    )
    point(
        output,
        f"Over all {len(pairs)} prompts of two words, an attended vector's entries differ by at most "
        f"{spread:.1g}, and the logits from number times column sum by at most {residual:.1g}.",
    )

    best, worst, negative = np.argmax(sums), np.argmin(sums), numbers[:, -1] < 0
    high, low = f"'{VOCABULARY[best]}'", f"'{VOCABULARY[worst]}'"
    point(
        output,
        f"The largest column sum is that of {high} ({sums[best]:.1f}), the smallest that of {low} "
        f"({sums[worst]:.1f}): where the number is positive the answer is {high}, where it is negative "
        f"{low}, and no other word can come.",
    )
    answers = collections.Counter(VOCABULARY[index] for index in next_ids).most_common()
    counts = " and ".join(f"'{word}' {count} times" for word, count in answers)
    last_ids = sorted(set(pairs[negative, -1].tolist()))
    last = " or ".join(f"'{VOCABULARY[index]}'" for index in last_ids)
    point(output, f"The answer is {counts}; the number is negative only if the last word is {last}.")

    repeated = collections.Counter(sums.round(4).tolist()).values()
    shared = sum(count for count in repeated if count > 1)
    equal = [two for two in itertools.combinations(ids, 2) if np.array_equal(*columns[list(two)])]
    ((left, right),) = equal
    difference = np.max(np.abs(logits[..., left] - logits[..., right]))
    point(
        output,
        f"{shared} of the {len(sums)} words share their column sum with another word, and so, but for "
        f"rounding, their logit. '{VOCABULARY[left]}' and '{VOCABULARY[right]}' have equal columns "
        f"outright: their logits differ by at most {difference:.1g}.",
    )
    return {
        "count": len(pairs),
        "column_sums": sums,
        "factors": numbers,
        "spread_of_attended": spread,
        "residual": residual,
        "next_ids": next_ids,
        "answers": dict(answers),
        "last_ids_if_negative": last_ids,
        "sign_decides": np.all(next_ids == np.where(negative, worst, best)),
        "equal_columns": equal,
        "difference_of_equal_logits": difference,
    }


def training(model, tokenizer, token_ids, output):
    section(
        output,
        "9. Training: the same model learns",
        f"{len(SENTENCES)} sentences, in which each word predicts the next; padding after the shorter "
        f"ones does not count. {STEPS} steps of Adam, each on all of them, compiled:",
    )
    for sentence in SENTENCES:
        output.print(f"    {sentence}")
    trained, least = fit(model, tokenizer, token_ids), least_loss(SENTENCES)
    losses, below = trained["losses"], steps_to_beat_guessing(trained["losses"])
    print_losses(output, losses, early=True)
    point(
        output,
        f"The loss went from {losses[0]:.3f} to {losses[-1]:.3f}; after {below} steps it was below "
        f"guessing ({GUESSING:.3f}).",
    )
    point(output, f"No model can go below {least:.3f}: some beginnings continue in more than one way.")
    prompt = tokenizer.decode(token_ids)
    point(output, f"With the likeliest word each time, '{prompt}' becomes '{trained['text']}'.")
    whole = f"{completed(trained)} of the {len(SENTENCES)} sentences"
    point(output, f"Given the first two words, it completes {whole}.")
    for beginning, text in zip(trained["beginnings"], trained["texts"], strict=True):
        if text not in SENTENCES:
            point(output, f"After '{beginning}' it writes '{text}'.")
    return {"least_loss": least, "training": trained}


def fit(model, tokenizer, token_ids):
    """Train a model, then let it continue the prompt and the first two words of each sentence."""
    inputs, targets, mask = training_rows(tokenizer)
    losses = train(model, tokenizer)
    losses.append(float(next_token_loss(model(inputs), targets, mask)))
    beginnings = [" ".join(sentence.split()[:2]) for sentence in SENTENCES]
    prompts = [token_ids, *map(tokenizer.encode, beginnings)]
    written = model.generate(prompts, model.sequence_length, stop=tokenizer.end_id, jit_compile=False)
    rows = zip(written.token_ids, written.lengths, strict=True)
    text_ids, *others = [row[:length].tolist() for row, length in rows]
    (layer,) = model.blocks
    q, k, v = (kernel.numpy() for kernel in (layer.query_kernel, layer.key_kernel, layer.value_kernel))
    return {
        "losses": losses,
        "ids": text_ids,
        "text": tokenizer.decode(text_ids),
        "finish_reason": str(written.finish_reasons[0]),
        "beginnings": beginnings,
        "texts": [tokenizer.decode(other) for other in others],
        # The largest difference between two entries of a row: how far apart the columns are.
        "column_differences": {
            letter: float(np.max(np.ptp(kernel, axis=1)))
            for letter, kernel in (("q", q), ("k", k), ("v", v))
        },
        # A score is x (W_Q W_K^T) y: the rank counts its independent ways of comparing two tokens.
        "rank_of_scores": int(np.linalg.matrix_rank(q @ k.T)),
    }


def least_loss(sentences):
    """The loss of a model that knows how often each beginning continues with each word."""
    rows = [sentence.split() for sentence in sentences]
    seen = collections.Counter(tuple(row[:end]) for row in rows for end in range(1, len(row) + 1))
    continued = {text: count for text, count in seen.items() if len(text) > 1}
    nats = sum(count * math.log(seen[text[:-1]] / count) for text, count in continued.items())
    return nats / sum(continued.values())


def steps_to_beat_guessing(losses):
    return next(step for step, loss in enumerate(losses) if loss < GUESSING)


def completed(trained):
    return sum(text in SENTENCES for text in trained["texts"])


def constant_start(trained, tokenizer, token_ids, output):
    other = fit(random_model(), tokenizer, token_ids)
    section(
        output,
        "10. What a constant start costs",
        "Columns of a matrix that start equal and get equal gradients stay equal. Side by side, the "
        "same training from projections of random numbers (Glorot):",
    )
    early = STEPS // 4
    names = [f"columns of W_{letter} differ by at most" for letter in "QKV"]
    names += ["rank of W_Q W_K^T", "steps to fall below guessing"]
    names += [f"loss after {early} steps", f"loss after {STEPS} steps", "sentences completed"]
    columns = []
    for start in (trained, other):
        losses = start["losses"]
        column = [f"{difference:.3g}" for difference in start["column_differences"].values()]
        column += [f"{start['rank_of_scores']}", f"{steps_to_beat_guessing(losses)}"]
        columns.append([*column, f"{losses[early]:.3f}", f"{losses[-1]:.3f}", f"{completed(start)}"])
    rows = list(zip(names, *columns, strict=True))
    print_columns(output, ("after training", "from constants", "from random"), rows, "lrr")
    point(
        output,
        f"The columns of W_Q differ by at most {rows[0][1]}, those of W_K by at most {rows[1][1]}: "
        "queries and keys meet only each other, so equal columns get equal gradients, but for "
        "rounding, which training may magnify. Those of W_V came apart, since the rows of the "
        "vocabulary projection differ.",
    )
    rank, full = trained["rank_of_scores"], other["rank_of_scores"]
    heads = f"a head of {full} that works like a head of {rank}"
    point(output, f"So W_Q W_K^T, which scores pairs of words, has rank {rank}, not {full}: {heads}.")
    ratio = trained["losses"][early] / other["losses"][early]
    point(
        output,
        f"After {early} steps the loss is {ratio:.1f} times that of the random start; after {STEPS}, "
        f"{trained['losses'][-1]:.3f} against {other['losses'][-1]:.3f}.",
    )
    return other


def random_model():
    """The same model, but with random numbers in the kernels of attention."""
    model, _ = reference_model()
    (layer,) = model.blocks
    for seed, kernel in enumerate((layer.query_kernel, layer.key_kernel, layer.value_kernel)):
        kernel.assign(keras.initializers.GlorotUniform(seed=seed)(kernel.shape))
    return model


def picture(model, tokenizer, token_ids, output, path):
    """Draw the attention weights in what the trained model wrote, before and after training."""
    # Without the end of the text, after which no word is predicted.
    if len(token_ids) > 1 and token_ids[-1] == tokenizer.end_id:
        token_ids = token_ids[:-1]
    before, after = (
        either(tf.constant([token_ids]), return_attention_scores=True)[1][0][0, 0].numpy()
        for either in (reference_model()[0], model)
    )

    def save(part):
        words = tokenizer.decode(token_ids).split()
        titles = ["given weights", f"after {STEPS} steps of training"]
        title = "Attention weights: no word looks at a later one"
        plot_attention(np.stack([before, after]), words, title=title, head_titles=titles).savefig(part)

    write_picture(output, path, save)
    return {"ids": token_ids, "before": before, "after": after}
