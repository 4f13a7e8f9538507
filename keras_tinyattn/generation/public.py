"""The two public functions of generation."""

from keras_tinyattn import sampling
from keras_tinyattn._boundary import value_errors
from keras_tinyattn.generation.loop import request_graph, stepwise_graphs
from keras_tinyattn.generation.request import (
    Generation,
    make_pad_id,
    make_prompts,
    make_settings,
)


def generate(model, token_ids, max_new_tokens, *, stop=None, pad_id=0, jit_compile=True, **settings):
    """Continue prompts, with each setting for all of them or one per prompt.

    Args:
        model: a `CausalLM`.
        token_ids: one prompt, a list of ids; or a list of prompts, which may differ in length.
        max_new_tokens: how many tokens to add at most; a prompt with less room before the last position
            gets what there is.
        stop: a token id, or a list of up to 8 ids that end a continuation together; or a list with one
            of these, or None, per prompt. Only new tokens are searched for it.
        pad_id: the id that fills each row after its end.
        jit_compile: whether XLA compiles the loop: slower at the first call, faster after. The ids are
            the same in float32 and float64; in bfloat16 and float16 XLA rounds at different places, and
            where two tokens are about equally likely it may take the other.
        **settings: how tokens are sampled, by the names of `sampling.SETTINGS`: `temperature` (0, the
            default, is greedy), `top_k`, `top_p`, `min_p`, `seed`.

    Returns:
        A `Generation` of NumPy arrays; one row without the batch axis for one prompt.

    Raises:
        ValueError: if a prompt is empty or longer than `sequence_length`, an id is outside the
            vocabulary, a setting is out of range, or the logits of a new token are not finite.

    Example:

    >>> from keras_tinyattn import gpt
    >>> model = gpt(11, sequence_length=8, hidden_dim=4, num_heads=2, num_layers=1)
    >>> generate(model, [[1, 2, 3], [4]], max_new_tokens=2, jit_compile=False).lengths
    array([5, 3], dtype=int32)
    """
    _build(model)
    size = model.vocabulary_size
    prompts, lengths, single = make_prompts(token_ids, size)
    settings = make_settings(len(lengths), size, max_new_tokens, stop, settings)
    pad_id = make_pad_id(pad_id)
    with value_errors():
        result = request_graph(model, jit_compile)(prompts, lengths, settings, pad_id)
    result = Generation(*(array.numpy() for array in result))
    result = result._replace(finish_reasons=result.finish_reasons.astype(str))
    return Generation(*(array[0] for array in result)) if single else result


def stream(model, token_ids, max_new_tokens, *, stop=None, **settings):
    """Continue one prompt and yield each new token id as soon as it is known.

    Args:
        model: a `CausalLM`.
        token_ids: one prompt, a list of ids.
        max_new_tokens: as in `generate`.
        stop: as in `generate`.
        **settings: as in `generate`.

    Yields:
        Integers: the ids that `generate` gives for the same arguments, a stop included.

    Raises:
        ValueError: as `generate`; at the call, before the first token is asked for, but where the
            logits of a token are not finite.
    """
    _build(model)
    size = model.vocabulary_size
    prompts, lengths, single = make_prompts(token_ids, size)
    if not single:
        raise ValueError(
            "A stream follows one text. Expected one prompt, a list of ids. "
            f"Received: a batch of {len(lengths)}. Open one stream for each prompt."
        )
    settings = make_settings(1, size, max_new_tokens, stop, settings)
    start, step = stepwise_graphs(model)
    with value_errors():
        state = start(prompts, lengths, settings)

    def tokens(state):
        for index in range(int(state.budget[0])):
            state = step(state, settings)
            sampling.require_finite(state.token >= 0)
            yield int(state.new_ids[index, 0])
            if not state.active[0]:
                return

    return tokens(state)


def _build(model):
    """Make the variables now: a graph cannot."""
    if not model.built:
        model.build((None, model.sequence_length))
