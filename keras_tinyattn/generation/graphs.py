"""What is made once for a model: the graphs of its forward pass, whose blocks share theirs.

A graph is kept with the model under `graph_key`, which says what graphs depend on: a change to the
model changes the key, and the graphs are made anew.
"""

import weakref
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_tinyattn.layers import CausalSelfAttention, DecoderBlock
from keras_tinyattn.layers._graph_key import declares_graph_key, graph_key
from keras_tinyattn.layers._window import BLOCKWISE_FROM
from keras_tinyattn.layers.cache import as_in_place

_graphs = weakref.WeakKeyDictionary()


def graph(model, name, function, signature, **options):
    """The graph of `function(model, ...)`, a concrete function, made once for a model and name.

    Graphs hold their model weakly, and are forgotten with it.

    Args:
        model: a built `CausalLM`.
        name: hashable; with the model it says what the graph computes.
        function: what to trace.
        signature: the tensor specs of its arguments behind the model.
        **options: of `tf.function`.
    """
    key = model.graph_key()
    kept_under, graphs = _graphs.get(model, (None, {}))
    if kept_under != key:
        graphs = {}
        _graphs[model] = (key, graphs)
    if name not in graphs:
        reference = weakref.ref(model)
        graphs[name] = tf.function(
            lambda *inputs: function(reference(), *inputs), autograph=False, **options
        ).get_concrete_function(*signature)
    return graphs[name]


class Parameters(NamedTuple):
    """What a model computes with, read once for a whole loop."""

    variables: Any  # the value of each of `model.variables`
    precomputed: Any  # one entry per block: what its `precompute` made, or ()


def read_parameters(model):
    """The `Parameters` of a model, read when the graph runs."""
    return _parameters_graph(model)()


def _parameters_graph(model):
    def read(model):
        return Parameters(
            [tf.convert_to_tensor(variable.value) for variable in model.variables],
            [block.precompute() if declares_graph_key(block) else () for block in model.blocks],
        )

    return graph(model, "parameters", read, ())


def parameters_spec(model):
    """The specs of what `read_parameters` returns."""
    return _specs(_parameters_graph(model).structured_outputs)


def window_graph(model, attention_scores=False, compiled=False):
    """The forward pass of windows: one copy in a graph.

    It takes `Parameters` and ids (B, T), padded on the right, and returns logits (B, T, V), the weights
    of each block (or (), where they were not asked for), and a cache of T slots. What is not used costs
    nothing.

    Args:
        model: the model.
        attention_scores: whether the weights are wanted.
        compiled: whether the caller is compiled by XLA. It then gets a graph of its own: a session
            would turn a condition that was traced elsewhere into operations unknown to XLA.
    """
    # Windows too short to go by blocks make their weights anyway: one graph is enough, and it needs no
    # condition on the length.
    makes_weights = model.sequence_length < BLOCKWISE_FROM and all(map(_makes_weights, model.blocks))
    attention_scores = attention_scores or makes_weights

    def run_window(model, parameters, token_ids):
        rows, width = tf.unstack(tf.shape(token_ids))
        token_ids = tf.clip_by_value(token_ids, 0, model.vocabulary_size - 1)
        cache = model.make_cache(rows, width)
        # In a cached step even a layer with `blockwise=True` makes its weights.
        positions = tf.range(width) if attention_scores and not makes_weights else None
        logits, *weights, cache = _forward(
            model, parameters, token_ids, positions, cache, attention_scores
        )
        return logits, weights[0] if weights else (), cache

    ids = tf.TensorSpec((None, None), tf.int32)
    # Without a condition in it, one graph serves compiled functions too.
    name = ("window", attention_scores, compiled and not makes_weights)
    return graph(model, name, run_window, (parameters_spec(model), ids))


def _makes_weights(block):
    """Whether a block of ours makes its weights in a short window: unless it insists on blocks."""
    attention = getattr(block, "attention", block)
    ours = type(block) in (DecoderBlock, CausalSelfAttention)
    return ours and type(attention) is CausalSelfAttention and not attention.blockwise


def step_graph(model, in_place=False):
    """The cached forward pass of one token per row: one copy in a graph, however often it is called.

    It takes `Parameters`, ids (B, 1), positions (B, 1) and a cache, and returns logits (B, 1, V) and
    the new cache.

    Args:
        model: the model.
        in_place: whether the cache is one of `as_in_place`.
    """

    ids = tf.TensorSpec((None, 1), tf.int32)
    cache = as_in_place(cache_spec(model)) if in_place else cache_spec(model)
    return graph(model, ("step", in_place), _forward, (parameters_spec(model), ids, ids, cache))


def _forward(model, parameters, token_ids, positions, cache, return_attention_scores=False):
    with keras.StatelessScope(zip(model.variables, parameters.variables, strict=True)):
        return model(
            token_ids,
            cache=cache,
            positions=positions,
            return_attention_scores=return_attention_scores,
            training=False,
            blocks=_sharing_blocks(model, parameters),
        )


def _sharing_blocks(model, parameters):
    """One function per block, to call in its place; blocks with one key are one function in the graph.

    A block whose class has no `graph_key` of its own is called as it is: nothing is known of it.
    """
    value_of = {
        id(own): value for own, value in zip(model.variables, parameters.variables, strict=True)
    }
    functions = {}

    def sharing(block, precomputed):
        values = [value_of[id(variable)] for variable in block.variables]

        def call(x, cache, positions=None, **options):
            arguments = (values, precomputed, x, cache, () if positions is None else positions)

            def run(values, precomputed, x, cache, step):
                with keras.StatelessScope(zip(block.variables, values, strict=True)):
                    return block(
                        x,
                        cache=cache,
                        positions=step or None,
                        precomputed=precomputed,
                        **options,
                    )

            specs = _specs(arguments)
            key = (graph_key(block), *tf.nest.flatten(specs))
            if key not in functions:
                functions[key] = tf.function(
                    run,
                    autograph=False,
                    # A window is read once a request, where a call costs nothing; with fewer copies of
                    # the block the first answer comes sooner.
                    experimental_attributes={} if x.shape[1] == 1 else {"_noinline": True},
                ).get_concrete_function(*specs)
            return functions[key](*arguments)

        return call

    return [
        sharing(block, precomputed) if declares_graph_key(block) else block
        for block, precomputed in zip(model.blocks, parameters.precomputed, strict=True)
    ]


def cache_spec(model):
    """The specs of what `make_cache` makes, of any batch size and length."""
    with tf.init_scope():
        shorter, longer = model.make_cache(1, 1), model.make_cache(1, 2)

    def spec(x, y):
        sizes = [m if m == n else None for m, n in zip(x.shape[1:], y.shape[1:], strict=True)]
        return tf.TensorSpec((None, *sizes), x.dtype)

    return tf.nest.map_structure(spec, shorter, longer)


def grow_cache(model, cache, length):
    """The same cache with empty slots behind, `length` in all."""

    def grow(x, spec):
        grows = [int(axis > 0 and size is None) for axis, size in enumerate(spec.shape)]
        behind = (length - tf.shape(x)) * grows
        return tf.pad(x, tf.stack([tf.zeros_like(behind), behind], axis=1))

    # Once all of the old cache is computed it is not read again, and the new one may reuse its memory.
    with tf.control_dependencies(tf.nest.flatten(cache)):
        return tf.nest.map_structure(grow, cache, cache_spec(model))


def _specs(tensors):
    return tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), tensors)
