"""Prompts to their continuations: what the graphs of a request compute.

prefill  the prompts are read as windows, which fill the cache
step     the newest token meets the cache -> logits -> sampling -> the next token
loop     steps until every row has stopped or has no room left; a compiled loop that has come to
         the end of its cache is followed by one with a longer cache
"""

import functools
from typing import Any, NamedTuple

import tensorflow as tf

from keras_tinyattn import sampling
from keras_tinyattn.generation.graphs import (
    cache_spec,
    graph,
    grow_cache,
    parameters_spec,
    read_parameters,
    step_graph,
    window_graph,
)
from keras_tinyattn.generation.request import (
    Generation,
    check_request,
    request_spec,
    sampling_settings,
)
from keras_tinyattn.layers.cache import as_in_place

# Positions from which the cache of a compiled loop grows, to three lengths one after the other: with
# fewer, a further loop takes longer to compile than it saves.
GROW_FROM = 256


def request_graph(model, jit_compile):
    """From a request, unchecked, to a `Generation` of tensors."""

    def run(model, prompt_ids, prompt_lengths, settings, pad_id):
        # Checked before the compiled part is entered, where an assertion would be dropped.
        prompt_ids = check_request(
            prompt_ids, prompt_lengths, settings, model.vocabulary_size, model.sequence_length
        )
        budget = _budget(model, prompt_lengths, settings)
        make_steps = _run_compiled if jit_compile else _run_plain
        new = make_steps(model, prompt_ids, prompt_lengths, settings, budget)
        return _assemble(prompt_ids, prompt_lengths, *new, pad_id)

    return graph(model, ("request", bool(jit_compile)), run, request_spec())


def _run_plain(model, prompt_ids, prompt_lengths, settings, budget):
    prompt_ids = prompt_ids[:, : _largest(prompt_lengths, 1)]
    cache_lengths = [_largest(prompt_lengths + budget, 0)]
    return _run(model, prompt_ids, prompt_lengths, settings, budget, cache_lengths, compiled=False)


def _run_compiled(model, prompt_ids, prompt_lengths, settings, budget):
    # A compiled function knows one shape: few widths and batch sizes mean few compilations.
    rows = tf.shape(prompt_ids)[0]
    width = _next_power_of_two(_largest(prompt_lengths, 1), 16)
    width = tf.minimum(width, model.sequence_length)
    # A row of zeros has no budget: it is done from the start.
    behind = tf.stack([0, _next_power_of_two(rows, 1) - rows])
    paddings = {1: behind[None], 2: tf.stack([behind, [0, 0]])}
    arguments = tf.nest.map_structure(
        lambda x: tf.pad(x, paddings[x.shape.rank]),
        (_pad_width(prompt_ids, width), prompt_lengths, settings, budget),
    )
    # A step reads the whole cache, and the compiler must know its length: it grows in a few leaps.
    slots = model.sequence_length
    cache_lengths = [slots // 4, slots // 2, slots] if slots >= GROW_FROM else [slots]

    def run(model, *arguments):
        return _run(model, *arguments, cache_lengths, compiled=True)

    ids, row, settings_spec, _ = request_spec()
    signature = (ids, row, settings_spec, row)
    new = graph(model, "compiled", run, signature, jit_compile=True)(*arguments)
    return [x[:rows] for x in new]


def _run(model, prompt_ids, prompt_lengths, settings, budget, cache_lengths, compiled):
    """All the steps of a batch: new ids (B, N), their log-probabilities, counts, and who stopped."""
    parameters = read_parameters(model)
    state = _prefill(model, parameters, prompt_ids, prompt_lengths, settings, budget, compiled)
    for cache_length in cache_lengths:
        cache_length = tf.maximum(cache_length, tf.shape(prompt_ids)[1])
        state = _loop_graph(model, compiled)(parameters, state, settings, cache_length)
    return (
        tf.transpose(state.new_ids),
        tf.transpose(state.new_logprobs),
        state.count,
        state.stopped,
    )


class State(NamedTuple):
    """Where the loop stands; every row has made the same number of steps."""

    index: Any  # scalar int32: steps made
    token: Any  # (B,) int32: the newest token of each row
    position: Any  # (B,) int32: where it stands
    budget: Any  # (B,) int32: how many new tokens the row may have
    count: Any  # (B,) int32: how many it has
    active: Any  # (B,) boolean: neither stopped nor at the end of its budget
    stopped: Any  # (B,) boolean: ended by its stop
    recent: Any  # (B, M) int32: the newest tokens, to compare with a stop of M tokens
    new_ids: Any  # (N, B) int32
    new_logprobs: Any  # (N, B) float32
    cache: Any


def _state_spec(model):
    row, scalar = tf.TensorSpec((None,), tf.int32), tf.TensorSpec((), tf.int32)
    flags, slots = tf.TensorSpec((None,), tf.bool), model.sequence_length
    return State(
        index=scalar,
        token=row,
        position=row,
        budget=row,
        count=row,
        active=flags,
        stopped=flags,
        recent=request_spec()[2].stop,
        new_ids=tf.TensorSpec((slots, None), tf.int32),
        new_logprobs=tf.TensorSpec((slots, None), tf.float32),
        cache=cache_spec(model),
    )


def _loop_graph(model, compiled):
    """Steps until every row is done or one has come to the end of the cache, which grows first."""

    def loop(model, parameters, state, settings, cache_length):
        cache = grow_cache(model, state.cache, cache_length)
        state = tf.while_loop(
            lambda *state: _goes_on(State(*state), cache_length),
            lambda *state: _step(model, parameters, State(*state), settings, in_place=not compiled),
            state._replace(cache=cache if compiled else as_in_place(cache)),
            parallel_iterations=1,
        )
        return State(*state)

    signature = (
        parameters_spec(model),
        _state_spec(model),
        request_spec()[2],
        tf.TensorSpec((), tf.int32),
    )
    return graph(model, ("loop", compiled), loop, signature)


def _goes_on(state, cache_length):
    return tf.reduce_any(state.active) & tf.reduce_all(state.position < cache_length)


def _prefill(model, parameters, prompt_ids, prompt_lengths, settings, budget, compiled=False):
    """Fill the cache with the prompts; the newest token of a row is the last of its prompt."""
    rows, slots = tf.shape(prompt_ids)[0], model.sequence_length
    # The logits are not used, and not computed: the first step computes those of the last
    # prompt token again, by the same code as all other steps.
    _, _, cache = window_graph(model, compiled=compiled)(parameters, prompt_ids)
    last = prompt_lengths - 1
    return State(
        index=tf.constant(0),
        token=tf.gather(prompt_ids, tf.maximum(last, 0), batch_dims=1),
        position=last,
        budget=budget,
        count=tf.zeros_like(budget),
        active=budget > 0,
        stopped=tf.zeros_like(budget, tf.bool),
        recent=tf.fill(tf.shape(settings.stop), -2),  # which no stop matches
        new_ids=tf.zeros((slots, rows), tf.int32),
        new_logprobs=tf.zeros((slots, rows), tf.float32),
        cache=cache,
    )


def _step(model, parameters, state, settings, in_place):
    """One more token for each row that is not done."""
    logits, cache = step_graph(model, in_place)(
        parameters, tf.expand_dims(state.token, 1), tf.expand_dims(state.position, 1), state.cache
    )
    logits = tf.cast(tf.squeeze(logits, 1), tf.float32)
    token = sampling.sample_unchecked(
        logits, position=state.position + 1, **sampling_settings(settings)
    )
    # A token of -1, where the logits are not finite, is refused when the loop is over.
    logprobs = -tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=tf.maximum(token, 0), logits=logits
    )
    count = state.count + tf.cast(state.active, tf.int32)
    recent = tf.concat([state.recent[:, 1:], tf.expand_dims(token, 1)], axis=1)
    # -1 stands in front of a shorter stop and matches anything; a row of -1 is no stop.
    match = tf.reduce_all((recent == settings.stop) | (settings.stop < 0), axis=1)
    stopped = state.stopped | (state.active & match & (settings.stop[:, -1] >= 0))
    active = ~stopped & (count < state.budget)
    place = tf.reshape(state.index, (1, 1))
    return State(
        index=state.index + 1,
        token=token,
        # A row that is done stays where it is, inside the cache.
        position=state.position + tf.cast(active, tf.int32),
        budget=state.budget,
        count=count,
        active=active,
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
    with tf.control_dependencies(sampling.require_finite((new_ids[:, :added] >= 0) | ~counted)):
        lengths = tf.identity(lengths)
    return Generation(
        tf.where(place < lengths[:, None], token_ids, pad_id),
        lengths,
        tf.where(counted, new_logprobs[:, :added], 0.0),
        tf.where(stopped, "stop", "length"),
    )


def _budget(model, prompt_lengths, settings):
    """How many tokens each row may add: what it asked for, or the room before the last position."""
    return tf.minimum(settings.max_new_tokens, model.sequence_length - prompt_lengths)


def stepwise_graphs(model):
    """The beginning and a step of the loop, for a caller that makes the steps one by one."""

    def start(model, prompt_ids, prompt_lengths, settings):
        prompt_ids = check_request(
            prompt_ids, prompt_lengths, settings, model.vocabulary_size, model.sequence_length
        )
        budget = _budget(model, prompt_lengths, settings)
        parameters = read_parameters(model)
        state = _prefill(model, parameters, prompt_ids, prompt_lengths, settings, budget)
        return state._replace(cache=grow_cache(model, state.cache, model.sequence_length))

    def step(model, state, settings):
        return _step(model, read_parameters(model), state, settings, in_place=False)

    signature = request_spec()
    return (
        graph(model, "start", start, signature[:3]),
        graph(model, "next", step, (_state_spec(model), signature[2])),
    )


def _largest(numbers, least):
    """The largest of them, or `least` if that is larger or there are none."""
    return tf.maximum(tf.reduce_max(numbers), least)


def _next_power_of_two(number, least):
    """The smallest power of two that is at least `number` and at least `least`, itself one."""
    powers = tf.constant([2**exponent for exponent in range(31) if 2**exponent >= least])
    return tf.reduce_min(tf.where(powers >= number, powers, powers.dtype.max))


def _pad_width(x, width):
    x = x[:, :width]
    return tf.pad(x, [[0, 0], [0, width - tf.shape(x)[1]]])
