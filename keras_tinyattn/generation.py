"""Prompt ids to a continuation, a step at a time, with a cache; with and without XLA.

    prefill  the prompt fills the cache, all positions at once
    step     the newest token meets the cache -> logits -> sampling -> the next token
    loop     steps until every row has stopped or has no room left; a compiled loop that has come to
             the end of its cache is followed by one with a longer cache

A row stands at its own position, so prompts of unequal length share a batch, padded on the right.
"""

import contextlib
import functools
import weakref
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_tinyattn import sampling
from keras_tinyattn._boundary import chosen, require, value_errors
from keras_tinyattn.layers import CausalSelfAttention, DecoderBlock
from keras_tinyattn.layers._step import given, make_step
from keras_tinyattn.model import block_caller

__all__ = ["Generation", "generate", "stream"]

MAX_STOP_TOKENS = 8
# Positions. For a cache that is shorter anyway, a loop more costs more to compile than it saves.
GROW_FROM = 256


class Generation(NamedTuple):
    """What `generate` returns; without the batch axis for a single prompt."""

    token_ids: Any  # (B, L) int32: prompt and continuation, then pad ids
    lengths: Any  # (B,) int32: how many of them count, a stop included
    new_logprobs: Any  # (B, N) float32: the model's own log-probability of each new token, then 0
    finish_reasons: Any  # (B,) strings: "stop" or "length"


class Settings(NamedTuple):
    """The settings of each row, `(B,)`; but `stop` is `(B, M)` ids, -1 in front of shorter ones."""

    max_new_tokens: Any
    temperature: Any
    top_k: Any
    top_p: Any
    seed: Any
    stop: Any


def generate(
    model,
    token_ids,
    max_new_tokens,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    seed=0,
    stop=None,
    pad_id=0,
    jit_compile=True,
):
    """Continue prompts, each setting one for all or one a prompt.

    Args:
        model: a `CausalLM`.
        token_ids: one prompt, a list of ids; or a list of prompts, which may differ in length.
        max_new_tokens: how many tokens to add at most; a prompt with less room before the last position
            gets what there is.
        temperature: 0 is greedy; finite and at least 0.
        top_k: draw among so many likeliest tokens; 0 for all.
        top_p: draw among the likeliest tokens that reach this share of the probability; in (0, 1].
        seed: any int32; the same seed draws the same tokens.
        stop: a token id, or a list of up to 8 ids that end a continuation together; a list of those
            (or None) for one a prompt. It counts among new tokens only.
        pad_id: the id that fills up a row behind its end.
        jit_compile: whether XLA compiles the loop: slower at the first call, faster after.

    Returns:
        A `Generation` of NumPy arrays; one row without the batch axis for one prompt.

    Raises:
        ValueError: if a prompt is empty or longer than `sequence_length`, an id is outside the
            vocabulary, or a setting is out of range.

    Example:

    >>> from keras_tinyattn import gpt
    >>> model = gpt(11, sequence_length=8, hidden_dim=4, num_heads=2, num_layers=1)
    >>> generate(model, [[1, 2, 3], [4]], max_new_tokens=2, jit_compile=False).lengths
    array([5, 3], dtype=int32)
    """
    _build(model)
    prompts, lengths, single = _pad_prompts(token_ids, pad_id)
    settings = _settings(
        len(lengths), max_new_tokens, temperature, top_k, top_p, seed, _stop_rows(stop, len(lengths))
    )
    with value_errors():
        result = request_graph(model, jit_compile)(prompts, lengths, settings, tf.constant(pad_id))
    result = [array.numpy() for array in result]
    result[3] = result[3].astype(str)
    return Generation(*(array[0] for array in result) if single else result)


def stream(model, token_ids, max_new_tokens, **settings):
    """Continue one prompt and yield each new token id as soon as it is known.

    Args:
        model: a `CausalLM`.
        token_ids: one prompt, a list of ids.
        max_new_tokens: as in `generate`.
        **settings: temperature, top_k, top_p, seed and stop, as in `generate`.

    Yields:
        Integers: the ids that `generate` gives for the same arguments, a stop included.

    Raises:
        ValueError: as `generate`; at the call, before the first token is asked for.
    """
    _build(model)
    prompts, lengths, single = _pad_prompts(token_ids, 0)
    if not single:
        raise ValueError(
            "A stream follows one text. Expected one prompt, a list of ids. "
            f"Received: a batch of {len(lengths)}. Open one stream a prompt."
        )
    known = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "stop": None}
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise TypeError(f"stream() got an unexpected keyword argument {unknown[0]!r}")
    settings = {**known, **settings}
    settings["stop"] = _stop_rows(settings["stop"], 1)
    settings = _settings(1, max_new_tokens, **settings)
    start, step = _stepwise_graphs(model)
    with value_errors():
        state = start(prompts, lengths, settings)

    def tokens(state):
        for index in range(int(state.budget[0])):
            state = step(state, settings)
            yield int(state.new_ids[index, 0])
            if state.done[0]:
                return

    return tokens(state)


def check_request(model, prompt_ids, prompt_lengths, settings):
    """The assertions, in a graph, that refuse what cannot be continued."""
    real = tf.sequence_mask(prompt_lengths, tf.shape(prompt_ids)[1])
    outside = chosen(prompt_ids, real & ((prompt_ids < 0) | (prompt_ids >= model.vocabulary_size)))
    longest = _largest(prompt_lengths, 0)
    shortest = tf.minimum(tf.reduce_min(prompt_lengths), 1)
    settings_of = {
        "max_new_tokens": ("an integer of at least 0", settings.max_new_tokens >= 0),
        "temperature": (
            "a finite number of at least 0",
            (settings.temperature >= 0.0) & (settings.temperature < np.inf),
        ),
        "top_k": ("an integer of at least 0, where 0 means all", settings.top_k >= 0),
        "top_p": (
            "a number above 0 and up to 1, where 1 means all",
            (settings.top_p > 0.0) & (settings.top_p <= 1.0),
        ),
    }
    checks = require(
        tf.size(outside) == 0,
        f"A token id is outside the vocabulary. Expected ids from 0 to {model.vocabulary_size - 1}. "
        "Received: ",
        outside,
        ". Encode the text with the tokenizer of the model.",
    )
    checks += require(
        shortest >= 1,
        "There is nothing to continue. Expected at least one token in each prompt. "
        "Received: an empty prompt. Begin the text with at least one word or character.",
    )
    checks += require(
        longest <= tf.minimum(model.sequence_length, tf.shape(prompt_ids)[1]),
        "The prompt does not fit the positions of the model. Expected at most "
        f"sequence_length={model.sequence_length} tokens. Received: ",
        longest,
        " tokens. Shorten the prompt, or build a model with a larger sequence_length.",
    )
    for name, (expected, valid) in settings_of.items():
        checks += require(
            tf.reduce_all(valid),
            f"{name} is out of range. Expected {expected}. Received: ",
            chosen(getattr(settings, name), ~valid),
            ".",
        )
    return checks


def _continue(model, prompt_ids, prompt_lengths, settings, pad_id, jit_compile):
    """Prompts that were checked to a `Generation` of tensors."""
    budget = _budget(model, prompt_lengths, settings)
    if jit_compile:
        # A compiled function knows one shape: few widths and batch sizes mean few compilations.
        rows = tf.shape(prompt_ids)[0]
        width = _next_power_of_two(_largest(prompt_lengths, 1), 16)
        width = tf.minimum(width, model.sequence_length)
        # A row of zeros has no budget: it is done from the start.
        behind = tf.stack([0, _next_power_of_two(rows, 1) - rows])
        paddings = {1: behind[None], 2: tf.stack([behind, [0, 0]])}
        prompts, *arguments = tf.nest.map_structure(
            lambda x: tf.pad(x, paddings[x.shape.rank]),
            (_pad_width(prompt_ids, width), prompt_lengths, settings, budget),
        )
        run = _graph(
            model,
            "compiled",
            functools.partial(_run, jit_compile=True),
            (*_signature()[:3], _signature()[1]),
            jit_compile=True,
        )
        state = run(prompts, *arguments)
        state = [x[:rows] for x in state]
    else:
        width = _largest(prompt_lengths, 1)
        state = _run(model, prompt_ids[:, :width], prompt_lengths, settings, budget, jit_compile=False)
    return _assemble(prompt_ids, prompt_lengths, *state, pad_id)


class _State(NamedTuple):
    """Where the loop stands; every row has made the same number of steps."""

    index: Any  # scalar int32: steps made
    token: Any  # (B,) int32: the newest token of each row
    position: Any  # (B,) int32: where it stands
    budget: Any  # (B,) int32: how many new tokens the row may have
    count: Any  # (B,) int32: how many it has
    done: Any  # (B,) boolean
    stopped: Any  # (B,) boolean: done by its stop
    recent: Any  # (B, M) int32: the newest tokens, to compare with a stop of M tokens
    new_ids: Any  # (N, B) int32
    new_logprobs: Any  # (N, B) float32
    cache: Any


def _run(model, prompt_ids, prompt_lengths, settings, budget, jit_compile):
    """All the steps of a batch: new ids (B, N), their log-probabilities, counts, and who stopped."""
    weights = read_weights(model)
    state = _start(model, weights, prompt_ids, prompt_lengths, settings, budget)
    slots = model.sequence_length
    if not jit_compile:
        cache_lengths = [_largest(prompt_lengths + budget, 0)]
    else:
        # A step reads the whole cache, and the compiler must know its length: it grows in a few leaps.
        cache_lengths = [slots // 4, slots // 2, slots] if slots >= GROW_FROM else [slots]
    for cache_length in cache_lengths:
        cache_length = tf.maximum(cache_length, tf.shape(prompt_ids)[1])
        state = _loop_graph(model, in_place=not jit_compile)(weights, state, settings, cache_length)
        state = _State(*state)
    return (
        tf.transpose(state.new_ids),
        tf.transpose(state.new_logprobs),
        state.count,
        state.stopped,
    )


def _start(model, weights, prompt_ids, prompt_lengths, settings, budget):
    """Fill the cache with the prompts; the newest token of a row is the last of its prompt."""
    rows, slots = tf.shape(prompt_ids)[0], model.sequence_length
    # Nobody reads these logits, so the compiler drops their computation: the first step makes those of
    # the last prompt token again, by the same code as all others.
    _, _, cache = window_graph(model)(weights, prompt_ids)
    last = prompt_lengths - 1
    return _State(
        index=tf.constant(0),
        token=tf.gather(prompt_ids, tf.maximum(last, 0), batch_dims=1),
        position=last,
        budget=budget,
        count=tf.zeros_like(budget),
        done=budget == 0,
        stopped=tf.zeros_like(budget, tf.bool),
        recent=tf.fill(tf.shape(settings.stop), -2),
        new_ids=tf.zeros((slots, rows), tf.int32),
        new_logprobs=tf.zeros((slots, rows), tf.float32),
        cache=cache,
    )


def read_weights(model):
    """The values of the model's variables, and the joint projections of its attention layers."""
    return _weights_graph(model)()


def _weights_graph(model):
    def read(model):
        values = [tf.convert_to_tensor(variable.value) for variable in model.variables]
        with keras.StatelessScope(zip(model.variables, values, strict=True)):
            return values, [layer._joint_projection() for layer in _attention_layers(model)]

    return _graph(model, "weights", read, ())


def _weights_spec(model):
    weights = _weights_graph(model).structured_outputs
    return tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), weights)


def window_graph(model):
    """The forward pass of windows (B, T), padded on the right: one copy in a graph.

    It takes the values of the model's variables and ids, and gives logits, attention weights and a
    cache of T slots; what is not used costs nothing.
    """

    def read(model, weights, token_ids):
        rows, width = tf.unstack(tf.shape(token_ids))
        return _advance(
            model,
            weights,
            tf.clip_by_value(token_ids, 0, model.vocabulary_size - 1),
            tf.broadcast_to(tf.range(width), (rows, width)),
            model.make_cache(rows, width),
        )

    return _graph(model, "window", read, (_weights_spec(model), tf.TensorSpec((None, None), tf.int32)))


def grow_cache(model, cache, length):
    """The same cache with empty slots behind, `length` in all."""

    def grow(x, spec):
        grows = [int(axis > 0 and size is None) for axis, size in enumerate(spec.shape)]
        behind = (length - tf.shape(x)) * grows
        return tf.pad(x, tf.stack([tf.zeros_like(behind), behind], axis=1))

    # When all of it is there nobody reads the old one any more, and the new one may be its memory.
    with tf.control_dependencies(tf.nest.flatten(cache)):
        return tf.nest.map_structure(grow, cache, _cache_spec(model))


def _step(model, weights, state, settings, in_place):
    """One more token for each row that is not done."""
    logits, _, cache = step_graph(model, in_place)(
        weights, tf.expand_dims(state.token, 1), tf.expand_dims(state.position, 1), state.cache
    )
    logits = tf.cast(tf.squeeze(logits, 1), tf.float32)
    token = sampling.sample(
        logits,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.seed,
        position=state.position + 1,
    )
    logprobs = -tf.nn.sparse_softmax_cross_entropy_with_logits(labels=token, logits=logits)
    active = ~state.done
    count = state.count + tf.cast(active, tf.int32)
    recent = tf.concat([state.recent[:, 1:], tf.expand_dims(token, 1)], axis=1)
    # -1 stands in front of a shorter stop and matches anything; a row of -1 is no stop.
    match = tf.reduce_all((recent == settings.stop) | (settings.stop < 0), axis=1)
    stopped = state.stopped | (active & match & (settings.stop[:, -1] >= 0))
    place = tf.reshape(state.index, (1, 1))
    return _State(
        index=state.index + 1,
        token=token,
        # A row that is done stays where it is, inside the cache.
        position=state.position + tf.cast(active & (count < state.budget), tf.int32),
        budget=state.budget,
        count=count,
        done=stopped | (count >= state.budget),
        stopped=stopped,
        recent=recent,
        new_ids=tf.tensor_scatter_nd_update(state.new_ids, place, tf.expand_dims(token, 0)),
        new_logprobs=tf.tensor_scatter_nd_update(
            state.new_logprobs, place, tf.expand_dims(logprobs, 0)
        ),
        cache=cache,
    )


@functools.partial(
    tf.function,
    input_signature=[
        tf.TensorSpec((None, None), tf.int32),
        tf.TensorSpec((None,), tf.int32),
        tf.TensorSpec((None, None), tf.int32),
        tf.TensorSpec((None, None), tf.float32),
        tf.TensorSpec((None,), tf.int32),
        tf.TensorSpec((None,), tf.bool),
        tf.TensorSpec((), tf.int32),
    ],
    autograph=False,
)
def _assemble(prompt_ids, prompt_lengths, new_ids, new_logprobs, count, stopped, pad_id):
    """Put each row's new tokens right behind its prompt, and pad ids behind them."""
    lengths = prompt_lengths + count
    total, added = _largest(lengths, 0), _largest(count, 0)
    place = tf.range(total)[None, :]
    from_prompt = tf.gather(
        prompt_ids,
        tf.minimum(tf.tile(place, (tf.shape(prompt_ids)[0], 1)), tf.shape(prompt_ids)[1] - 1),
        batch_dims=1,
    )
    offset = tf.clip_by_value(place - prompt_lengths[:, None], 0, tf.shape(new_ids)[1] - 1)
    token_ids = tf.where(
        place < prompt_lengths[:, None], from_prompt, tf.gather(new_ids, offset, batch_dims=1)
    )
    counted = tf.range(added)[None, :] < count[:, None]
    return Generation(
        tf.where(place < lengths[:, None], token_ids, pad_id),
        lengths,
        tf.where(counted, new_logprobs[:, :added], 0.0),
        tf.where(stopped, "stop", "length"),
    )


def _budget(model, prompt_lengths, settings):
    """How many tokens each row may add: what it asked for, or the room before the last position."""
    return tf.minimum(settings.max_new_tokens, model.sequence_length - prompt_lengths)


# The graphs of a model, made once and forgotten with it; they hold it weakly themselves.
_graphs = weakref.WeakKeyDictionary()


def _graph(model, name, function, signature, **options):
    """The graph of `function(model, ...)`, a concrete function: one a model and name."""
    graphs = _graphs.setdefault(model, {})
    if name not in graphs:
        reference = weakref.ref(model)
        graphs[name] = tf.function(
            lambda *inputs: function(reference(), *inputs), autograph=False, **options
        ).get_concrete_function(*signature)
    return graphs[name]


def _loop_graph(model, in_place):
    """Steps until every row is done or one has come to the end of the cache, which grows first."""

    def loop(model, weights, state, settings, cache_length):
        state = _State(*state)
        return tf.while_loop(
            lambda *state: _goes_on(_State(*state), cache_length),
            lambda *state: _step(model, weights, _State(*state), settings, in_place),
            state._replace(cache=grow_cache(model, state.cache, cache_length)),
            parallel_iterations=1,
        )

    signature = (_weights_spec(model), _state_spec(model), _signature()[2], tf.TensorSpec((), tf.int32))
    return _graph(model, ("loop", in_place), loop, signature)


def _goes_on(state, cache_length):
    return ~tf.reduce_all(state.done) & tf.reduce_all(state.position < cache_length)


def step_graph(model, in_place=False):
    """The cached forward pass of a token a row: one copy in a graph, however often it is called.

    It takes the values of the model's variables, which a loop then reads once and not at every step,
    ids (B, 1), positions (B, 1) and a cache, and gives logits, attention weights and cache; what is not
    used costs nothing.

    Args:
        model: the model.
        in_place: whether it may write into the cache it is given, to which nobody else may hold a
            reference then. A compiler finds that out by itself.
    """

    def step(model, *inputs):
        return _advance(model, *inputs, in_place=in_place)

    ids = tf.TensorSpec((None, 1), tf.int32)
    signature = (_weights_spec(model), ids, ids, _cache_spec(model))
    return _graph(model, ("step", in_place), step, signature)


def _advance(model, weights, token_ids, positions, cache, in_place=False):
    """The model with a cache, its variables replaced by these values."""
    variables, _ = weights
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras.StatelessScope(zip(model.variables, variables, strict=True)))
        stack.callback(
            block_caller.reset, block_caller.set(_caller_of_blocks(model, weights, in_place))
        )
        return model(
            token_ids,
            cache=cache,
            positions=positions,
            return_attention_scores=True,
            training=False,
        )


def _caller_of_blocks(model, weights, in_place):
    """Calls blocks so that those which differ in their weights alone are one function in the graph."""
    variables, joint_projections = weights
    value_of = {id(own): value for own, value in zip(model.variables, variables, strict=True)}
    joint_of = dict(zip(map(id, _attention_layers(model)), joint_projections, strict=True))
    functions, steps = {}, {}

    def call(block, x, cache, positions, **options):
        layer = _attention_layer(block)
        if layer is None:
            return block(x, cache=cache, positions=positions, **options)
        sizes = (layer.num_heads, layer.head_dim)
        if sizes not in steps:
            steps[sizes] = make_step(positions, x, cache[0])
        arguments = (
            [value_of[id(variable)] for variable in block.variables],
            joint_of[id(layer)],
            x,
            cache,
            steps[sizes],
        )

        def run(variables, joint_projection, x, cache, step):
            scope = keras.StatelessScope(zip(block.variables, variables, strict=True))
            with scope, given(step, joint_projection if in_place else None):
                return block(x, cache=cache, positions=step.positions, **options)

        kind = _kind(block)
        if kind not in functions:
            spec = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), arguments)
            functions[kind] = tf.function(
                run,
                autograph=False,
                # A window is read once a request, where a call costs nothing; with fewer copies of the
                # block the first answer comes sooner.
                experimental_attributes={} if x.shape[1] == 1 else {"_noinline": True},
            ).get_concrete_function(*spec)
        return functions[kind](*arguments)

    return call


def _kind(block):
    """What two blocks have in common that differ in their weights alone."""
    layers = [
        # Two functions of one name look alike in a configuration.
        (type(layer), {**layer.get_config(), "name": None}, id(getattr(layer, "activation", None)))
        for layer in _layers(block)
    ]
    return repr((layers, [(variable.shape, variable.dtype) for variable in block.variables]))


def _attention_layer(block):
    """The attention layer of a block of this package; None for any other, which may do anything."""
    if type(block) is CausalSelfAttention:
        return block
    of_keras = (keras.layers.LayerNormalization, keras.layers.Dense, keras.layers.Dropout)
    usual = {DecoderBlock, CausalSelfAttention, *of_keras}
    return block.attention if {type(layer) for layer in _layers(block)} == usual else None


def _attention_layers(model):
    layers = map(_attention_layer, model.blocks)
    return [layer for layer in layers if layer is not None]


def _layers(block):
    """The block and the layers in it: Keras has no public way to list them."""
    return list(block._flatten_layers())


def check_graph(model):
    """Gives the prompt ids back if `check_request` has nothing against them."""

    def check(model, prompt_ids, prompt_lengths, settings):
        checks = check_request(model, prompt_ids, prompt_lengths, settings)
        with tf.control_dependencies(checks):
            return tf.identity(prompt_ids)

    return _graph(model, "check", check, _signature()[:3])


def request_graph(model, jit_compile):
    """From a request, unchecked, to a `Generation` of tensors."""

    def run(model, prompt_ids, prompt_lengths, settings, pad_id):
        # Checked before the compiled part is entered, where an assertion would be dropped.
        prompt_ids = check_graph(model)(prompt_ids, prompt_lengths, settings)
        return _continue(model, prompt_ids, prompt_lengths, settings, pad_id, jit_compile)

    return _graph(model, ("request", bool(jit_compile)), run, _signature())


def _stepwise_graphs(model):
    """The beginning and a step of the loop, for a caller who walks it himself."""

    def start(model, prompt_ids, prompt_lengths, settings):
        prompt_ids = check_graph(model)(prompt_ids, prompt_lengths, settings)
        budget = _budget(model, prompt_lengths, settings)
        weights = read_weights(model)
        state = _start(model, weights, prompt_ids, prompt_lengths, settings, budget)
        return state._replace(cache=grow_cache(model, state.cache, model.sequence_length))

    def step(model, state, settings):
        return _step(model, read_weights(model), _State(*state), settings, in_place=False)

    settings = _signature()[2]
    return (
        _graph(model, "start", start, _signature()[:3]),
        _graph(model, "go on", step, (_state_spec(model), settings)),
    )


def _state_spec(model):
    row, scalar = tf.TensorSpec((None,), tf.int32), tf.TensorSpec((), tf.int32)
    flags, slots = tf.TensorSpec((None,), tf.bool), model.sequence_length
    return _State(
        index=scalar,
        token=row,
        position=row,
        budget=row,
        count=row,
        done=flags,
        stopped=flags,
        recent=_signature()[2].stop,
        new_ids=tf.TensorSpec((slots, None), tf.int32),
        new_logprobs=tf.TensorSpec((slots, None), tf.float32),
        cache=_cache_spec(model),
    )


def _cache_spec(model):
    """What `make_cache` makes, of any batch size and length: arrays (B, ...), (B, H, S, K) of ours."""
    with tf.init_scope():
        shorter, longer = model.make_cache(1, 1), model.make_cache(1, 2)

    def spec(x, y):
        sizes = [m if m == n else None for m, n in zip(x.shape[1:], y.shape[1:], strict=True)]
        return tf.TensorSpec((None, *sizes), x.dtype)

    return tf.nest.map_structure(spec, shorter, longer)


def _signature():
    def row(dtype):
        return tf.TensorSpec((None,), dtype)

    settings = Settings(
        max_new_tokens=row(tf.int32),
        temperature=row(tf.float32),
        top_k=row(tf.int32),
        top_p=row(tf.float32),
        seed=row(tf.int32),
        stop=tf.TensorSpec((None, MAX_STOP_TOKENS), tf.int32),
    )
    return (tf.TensorSpec((None, None), tf.int32), row(tf.int32), settings, tf.TensorSpec((), tf.int32))


def _build(model):
    """Make the variables now: a graph cannot."""
    if not model.built:
        model.build((None, model.sequence_length))


def _pad_prompts(token_ids, pad_id):
    """Prompts as (B, T) ids and (B,) lengths, and whether there was a single one."""
    if hasattr(token_ids, "numpy"):
        token_ids = token_ids.numpy()
    rows = list(token_ids)
    single = not rows or np.ndim(rows[0]) == 0
    rows = [np.asarray(row) for row in ([rows] if single else rows)]
    for row in rows:
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise ValueError(
                "A prompt is a list of token ids. Expected integers, one list or a list of lists. "
                f"Received: {row.dtype} of shape {row.shape}. Encode the text with a tokenizer."
            )
    lengths = np.array([row.size for row in rows], np.int32)
    prompts = np.full((len(rows), max(lengths, default=0)), pad_id, np.int64)
    for place, row in zip(prompts, rows, strict=True):
        place[: row.size] = row
    # An id beyond int32 stays outside the vocabulary.
    prompts = np.clip(prompts, np.iinfo(np.int32).min, np.iinfo(np.int32).max).astype(np.int32)
    return tf.constant(prompts), tf.constant(lengths), single


def _settings(rows, max_new_tokens, temperature, top_k, top_p, seed, stop):
    def row(name, value, dtype):
        value = np.asarray(value)
        if value.shape not in ((), (rows,)) or (
            dtype == np.int32 and not np.issubdtype(value.dtype, np.integer)
        ):
            kind = "integer" if dtype == np.int32 else "number"
            raise ValueError(
                f"{name} is one for all prompts or one a prompt. Expected an {kind} or {rows} of them. "
                f"Received: {value.tolist()}."
            )
        if dtype == np.int32 and not np.all((value >= -(2**31)) & (value < 2**31)):
            raise ValueError(
                f"{name} does not fit 32 bits. Expected integers from {-(2**31)} to {2**31 - 1}. "
                f"Received: {value.tolist()}."
            )
        return tf.constant(np.broadcast_to(value, (rows,)).astype(dtype))

    return Settings(
        row("max_new_tokens", max_new_tokens, np.int32),
        row("temperature", temperature, np.float32),
        row("top_k", top_k, np.int32),
        row("top_p", top_p, np.float32),
        row("seed", seed, np.int32),
        stop,
    )


def _stop_rows(stop, rows):
    """Stops as (B, 8) ids, -1 in front."""
    one_each = isinstance(stop, (list, tuple)) and any(
        part is None or np.ndim(part) > 0 for part in stop
    )
    stops = list(stop) if one_each else [stop] * rows
    if len(stops) != rows:
        raise ValueError(
            f"stop is one for all prompts or one a prompt. Expected {rows} of them. "
            f"Received: {len(stops)}."
        )
    table = np.full((rows, MAX_STOP_TOKENS), -1, np.int32)
    for place, part in zip(table, stops, strict=True):
        ids = [] if part is None else np.atleast_1d(np.asarray(part)).tolist()
        if len(ids) > MAX_STOP_TOKENS or not all(isinstance(i, int) and i >= 0 for i in ids):
            raise ValueError(
                f"A stop is what ends a text. Expected one token id, or up to {MAX_STOP_TOKENS}. "
                f"Received: {part!r}."
            )
        if ids:
            place[-len(ids) :] = ids
    return tf.constant(table)


def _largest(numbers, least):
    """The largest of them, and at least so many, even of none."""
    return tf.maximum(tf.reduce_max(numbers), least)


def _next_power_of_two(number, least):
    """The smallest power of two that is at least `number` and at least `least`, itself one."""
    powers = tf.constant([2**exponent for exponent in range(31) if 2**exponent >= least])
    return tf.reduce_min(tf.where(powers >= number, powers, powers.dtype.max))


def _pad_width(x, width):
    x = x[:, :width]
    return tf.pad(x, [[0, 0], [0, width - tf.shape(x)[1]]])
