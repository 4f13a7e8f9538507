"""A prompt is continued exactly: cached or not, alone or in a batch, plain or compiled."""

import gc
import warnings
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_tinyattn import (
    CausalLM,
    CausalSelfAttention,
    DecoderBlock,
    TokenAndPositionEmbedding,
    VocabProjection,
    generate,
    gpt,
    make_train_step,
    stream,
)
from keras_tinyattn.generation.graphs import step_graph
from keras_tinyattn.generation.loop import _next_power_of_two, request_graph

V, LENGTH = 11, 16
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5]]


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(1)
    model = gpt(V, sequence_length=LENGTH, hidden_dim=12, num_heads=3, num_layers=2)
    model(np.array([[1, 2]]))
    for variable in model.weights:
        variable.assign(variable * 20)  # Far from uniform, so that no two candidates are close.
    return model


def walk(model, prompt, steps):
    """The greedy continuation without a cache, and the log-probability of each new token."""
    ids, logprobs = list(prompt), []
    while steps and len(ids) < LENGTH:
        row = tf.nn.log_softmax(model(np.array([ids]))[0, -1]).numpy()
        ids.append(int(np.argmax(row)))
        logprobs.append(row[ids[-1]])
        steps -= 1
    return ids, logprobs


@pytest.mark.parametrize("jit_compile", [False, True])
def test_the_cached_loop_gives_what_whole_windows_give(model, jit_compile):
    steps = [5, 3, 6, 9]
    result = generate(model, PROMPTS, steps, jit_compile=jit_compile)
    for row, (prompt, count) in enumerate(zip(PROMPTS, steps, strict=True)):
        ids, logprobs = walk(model, prompt, count)
        assert result.token_ids[row, : result.lengths[row]].tolist() == ids
        assert not result.token_ids[row, result.lengths[row] :].any()
        # float32 over two layers of activations near 20.
        assert result.new_logprobs[row, : len(logprobs)] == pytest.approx(logprobs, abs=2e-4)
        assert not result.new_logprobs[row, len(logprobs) :].any()
    assert result.finish_reasons.tolist() == ["length"] * 4
    assert result.token_ids.shape[1] == max(result.lengths)
    assert result.new_logprobs.shape[1] == 6


@pytest.mark.parametrize("jit_compile", [False, True])
def test_texts_grow_through_all_the_lengths_of_the_cache(jit_compile):
    # Compiled, a short prompt alone goes on with a longer cache at 64 and at 128; all together at 128.
    keras.utils.set_random_seed(2)
    model = gpt(V, sequence_length=256, hidden_dim=12, num_heads=3, num_layers=1)
    model.build((None, 256))
    for variable in model.weights:
        variable.assign(variable * 20)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, V, size).tolist() for size in (3, 63, 64, 127)]
    settings = {"temperature": 1.0, "seed": 3, "jit_compile": jit_compile}
    together = generate(model, prompts, 150, **settings)
    assert together.lengths.tolist() == [153, 213, 214, 256]
    for row in (0, 3):
        prompt = prompts[row]
        alone = generate(model, prompt, 150, **settings).token_ids
        assert together.token_ids[row, : together.lengths[row]].tolist() == alone.tolist()
        # Each new token's log-probability as a window without a cache tells it.
        logprobs = tf.nn.log_softmax(model(alone[None])[0]).numpy()
        expected = logprobs[np.arange(len(prompt) - 1, len(alone) - 1), alone[len(prompt) :]]
        assert together.new_logprobs[row, : len(expected)] == pytest.approx(expected, abs=5e-3)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_alone_or_in_a_batch_of_any_order_a_prompt_gets_the_same_ids(model, jit_compile):
    settings = [
        {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 1},
        {"temperature": 0.9, "top_k": 4, "top_p": 1.0, "seed": 2},
        {"temperature": 2.0, "top_k": 0, "top_p": 0.8, "seed": 3},
    ]
    alone = [
        generate(model, prompt, 5, **setting, jit_compile=jit_compile).token_ids.tolist()
        for prompt, setting in zip(PROMPTS, settings, strict=False)
    ]
    for order in ([0, 1, 2], [2, 0, 1]):
        batch = {key: [settings[row][key] for row in order] for key in settings[0]}
        result = generate(model, [PROMPTS[row] for row in order], 5, **batch, jit_compile=jit_compile)
        for place, row in enumerate(order):
            assert result.token_ids[place, : result.lengths[place]].tolist() == alone[row]


def test_compiled_and_plain_draw_the_same_tokens(model):
    settings = {"temperature": [0.5, 1.0, 2.0, 0.0], "top_p": 0.9, "seed": [1, 2, 3, 4]}
    plain = generate(model, PROMPTS, 8, **settings, jit_compile=False)
    compiled = generate(model, PROMPTS, 8, **settings, jit_compile=True)
    assert np.array_equal(plain.token_ids, compiled.token_ids)
    assert plain.new_logprobs == pytest.approx(compiled.new_logprobs, abs=2e-4)


def test_a_text_continued_later_draws_as_if_it_never_paused(model):
    settings = {"temperature": 100.0, "seed": 9, "jit_compile": False}
    whole = generate(model, [4, 5], 9, **settings).token_ids.tolist()
    half = generate(model, [4, 5], 4, **settings).token_ids.tolist()
    assert generate(model, half, 5, **settings).token_ids.tolist() == whole


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_stopped_row_is_padded_and_its_neighbour_goes_on(model, jit_compile):
    free = generate(model, PROMPTS[:2], 6, jit_compile=jit_compile)
    first_new = int(free.token_ids[0, 3])
    result = generate(model, PROMPTS[:2], 6, stop=[first_new, None], pad_id=9, jit_compile=jit_compile)
    assert result.token_ids[0].tolist() == [1, 2, 3, first_new, 9, 9, 9]
    assert result.token_ids[1].tolist() == free.token_ids[1, :7].tolist()
    assert result.lengths.tolist() == [4, 7]
    assert result.finish_reasons.tolist() == ["stop", "length"]
    assert result.new_logprobs[0, 1:].tolist() == [0.0] * 5


def test_a_stop_of_several_tokens_needs_all_of_them_in_order(model):
    ids = generate(model, [1, 2, 3], 6, jit_compile=False).token_ids.tolist()
    new = ids[3:]
    result = generate(model, [1, 2, 3], 6, stop=new[1:4], jit_compile=False)
    assert result.token_ids.tolist() == ids[:7]
    assert result.finish_reasons == "stop"
    assert new[1:3] != new[1:3][::-1]
    reverse = generate(model, [1, 2, 3], 6, stop=new[1:3][::-1] + [10], jit_compile=False)
    assert reverse.token_ids.tolist() == ids


def test_a_stop_in_the_prompt_does_not_stop(model):
    ids = generate(model, [1, 2, 3], 4, jit_compile=False).token_ids.tolist()
    assert generate(model, [1, 2, 3], 4, stop=3, jit_compile=False).token_ids.tolist() == ids
    # The last of the prompt and the first new one together are no stop either.
    stop = [3, ids[3]]
    assert generate(model, [1, 2, 3], 4, stop=stop, jit_compile=False).lengths > 4


@pytest.mark.parametrize("jit_compile", [False, True])
def test_generation_ends_at_the_last_position(model, jit_compile):
    full = list(range(11)) + [1, 2, 3, 4, 5]
    result = generate(model, [full, full[:-1]], 5, jit_compile=jit_compile)
    assert result.lengths.tolist() == [LENGTH, LENGTH]
    assert result.token_ids[0].tolist() == full
    assert result.new_logprobs.shape == (2, 1)
    assert result.finish_reasons.tolist() == ["length", "length"]


def test_no_new_tokens_and_one_are_what_was_asked_for(model):
    result = generate(model, PROMPTS[:2], [0, 1], jit_compile=False)
    assert result.lengths.tolist() == [3, 2]
    assert generate(model, [1, 2], 0, jit_compile=False).token_ids.tolist() == [1, 2]


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    ("token_ids", "settings", "message"),
    [
        ([], {}, "nothing to continue"),
        ([[]], {}, "nothing to continue"),
        ([[1], []], {}, "nothing to continue"),
        (np.zeros((0,), int), {}, "nothing to continue"),
        (np.zeros((2, 0), int), {}, "nothing to continue"),
        ([1] * 17, {}, "at most sequence_length=16 tokens. Received: 17 tokens"),
        ([V], {}, r"ids from 0 to 10. Received: 11\."),
        ([[1], [-1]], {}, r"Received: -1\."),
        ([10**6], {}, r"Received: 1000000\."),
        ([10**12], {}, r"Received: 1000000000000\."),
        ([1], {"max_new_tokens": -1}, "max_new_tokens is out of range"),
        ([1], {"temperature": -1.0}, r"temperature is out of range.*Received: -1\."),
        ([1], {"temperature": float("nan")}, "temperature is out of range.*Received: nan"),
        ([1], {"temperature": float("inf")}, "temperature is out of range.*Received: inf"),
        ([1], {"top_k": -1}, "top_k is out of range"),
        ([1], {"top_p": 0.0}, "top_p is out of range"),
        ([1], {"top_p": 1.5}, r"top_p is out of range.*Received: 1\.5"),
        (
            [1],
            {"min_p": -0.1},
            r"min_p is out of range. Expected a number from 0 to 1.*Received: -0\.1",
        ),
        ([1], {"min_p": 1.5}, r"min_p is out of range.*Received: 1\.5"),
        ([1], {"min_p": float("nan")}, "min_p is out of range.*Received: nan"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(model, token_ids, settings, message, jit_compile):
    with pytest.raises(ValueError, match=message):
        generate(model, token_ids, **{"max_new_tokens": 1, **settings}, jit_compile=jit_compile)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 2**31}, "seed does not fit 32 bits"),
        ({"seed": [1, 2]}, "seed is one for all rows or one per row"),
        ({"top_k": 1.5}, "top_k is one for all"),
        ({"stop": list(range(9))}, "up to 8"),
        ({"stop": -3}, "up to 8"),
        ({"stop": [[1], [2]]}, "Expected 1 of them"),
    ],
)
def test_a_setting_of_a_wrong_kind_is_refused(model, settings, message):
    with pytest.raises(ValueError, match=message):
        generate(model, [1], 1, **settings)


def test_ids_that_are_no_integers_are_refused(model):
    with pytest.raises(ValueError, match="Expected integers"):
        generate(model, [1.5], 1)


def test_a_stream_yields_what_generate_returns(model):
    settings = {"temperature": 1.0, "top_k": 5, "seed": 4, "stop": 3}
    whole = generate(model, [4], 8, **settings, jit_compile=False)
    assert list(stream(model, [4], 8, **settings)) == whole.token_ids[1 : whole.lengths].tolist()
    assert list(stream(model, [4], 0)) == []
    with pytest.raises(ValueError, match="one prompt"):
        stream(model, [[1], [2]], 3)
    with pytest.raises(ValueError, match="top_p is out of range"):
        stream(model, [1], 3, top_p=2.0)
    with pytest.raises(TypeError, match="heat"):
        stream(model, [1], 3, heat=2.0)


def test_prompts_of_every_length_and_setting_share_one_graph(model, monkeypatch):
    graph = request_graph(model, jit_compile=False)
    with monkeypatch.context() as patch:
        patch.setattr(tf, "function", None)  # Nothing is traced any more.
        for length in range(1, LENGTH + 1):
            generate(
                model,
                [[token % V for token in range(length)]] * (1 + length % 3),
                length,
                temperature=length / 3,
                top_k=length,
                seed=length,
                stop=length % V,
                jit_compile=False,
            )
    assert request_graph(model, jit_compile=False) is graph


def test_a_model_is_forgotten_together_with_its_functions():
    model = gpt(V, sequence_length=4, hidden_dim=4, num_heads=2, num_layers=1)
    generate(model, [1], 1, jit_compile=False)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_model_of_one_attention_layer_generates_by_the_same_loop():
    model = CausalLM(
        TokenAndPositionEmbedding(V, LENGTH, 6), [CausalSelfAttention(6)], VocabProjection(V)
    )
    model(np.array([[1, 2]]))
    for variable in model.weights:
        variable.assign(variable * 20)
    assert model.generate([3, 1], 5, jit_compile=False).token_ids.tolist() == walk(model, [3, 1], 5)[0]


class Doubled(DecoderBlock):
    """A block of somebody's own, which a graph must not take for the usual one."""

    def call(self, inputs, cache=None, positions=None, return_attention_scores=False, training=None):
        options = {"return_attention_scores": return_attention_scores, "training": training}
        return super().call(2 * inputs, cache=cache, positions=positions, **options)


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_blocks_that_are_not_alike_are_not_taken_for_each_other(jit_compile):
    keras.utils.set_random_seed(4)
    blocks = [
        DecoderBlock(12, 3),
        DecoderBlock(12, 3),
        DecoderBlock(12, 2),
        DecoderBlock(12, 3),
        DecoderBlock(12, 3, intermediate_dim=7),
        CausalSelfAttention(4, num_heads=3, output_dim=12),
        CausalSelfAttention(4, num_heads=3, output_dim=12, use_bias=True),
        Doubled(12, 3),
    ]
    blocks[3].mlp_norm.epsilon = 1000.0
    model = CausalLM(TokenAndPositionEmbedding(V, LENGTH, 12), blocks, VocabProjection(V, tied=True))
    model.build((None, LENGTH))
    draw = np.random.default_rng(5)
    for variable in model.weights:
        variable.assign(variable + 0.1 * draw.normal(size=variable.shape))
    result = model.generate([[1, 2, 3], [4]], 8, jit_compile=jit_compile)
    assert result.new_logprobs.max() < -0.1  # Where all were certain, nothing would differ.
    for row, prompt in enumerate([[1, 2, 3], [4]]):
        ids = result.token_ids[row, : result.lengths[row]]
        logprobs = tf.nn.log_softmax(model(ids[None])[0]).numpy()
        expected = logprobs[np.arange(len(prompt) - 1, len(ids) - 1), ids[len(prompt) :]]
        assert result.new_logprobs[row] == pytest.approx(expected, abs=1e-4)
        assert logprobs.argmax(-1)[len(prompt) - 1 : -1].tolist() == ids[len(prompt) :].tolist()


class Least(keras.layers.Layer):
    """A block that knows no more than the protocol of `CausalLM`."""

    def __init__(self, width):
        super().__init__()
        self.attention = CausalSelfAttention(width)

    def build(self, input_shape):
        self.attention.build(input_shape)

    def call(self, x, cache=None, positions=None, training=None):
        if cache is None:
            return self.attention(x)
        return self.attention(x, cache=cache, positions=positions)

    def make_cache(self, batch_size, length):
        return self.attention.make_cache(batch_size, length)


def check_against_windows(model, result, prompt_length):
    """Each new token is the likeliest, with the log-probability that a window without a cache tells."""
    ids = result.token_ids
    logprobs = tf.nn.log_softmax(model(ids[None])[0, prompt_length - 1 : -1]).numpy()
    new = ids[prompt_length:]
    assert logprobs.argmax(-1).tolist() == new.tolist()
    expected = logprobs[np.arange(len(new)), new]
    assert result.new_logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "make", [lambda: Least(12), lambda: DecoderBlock(12, 3, blockwise=True)], ids=["least", "blockwise"]
)
def test_a_block_need_not_return_weights_to_generate(make):
    model = CausalLM(TokenAndPositionEmbedding(V, LENGTH, 12), [make(), make()], VocabProjection(V))
    model.build((None, LENGTH))
    check_against_windows(model, model.generate([1, 2, 3], 6, jit_compile=False), 3)
    assert len(list(stream(model, [1, 2, 3], 6))) == 6


class Stretched(keras.layers.Layer):
    """A layer of somebody's own, with a state that no configuration tells."""

    def __init__(self, stretch):
        super().__init__()
        self.stretch = stretch

    def call(self, x):
        return self.stretch(x)


def _leaky(slope):
    def leaky(x):
        return keras.activations.relu(x, negative_slope=slope)

    return leaky


def _change_activation(block, slope):
    block.mlp_expand.activation = _leaky(slope)


def _change_norm(block, slope):
    block.mlp_norm = Stretched(lambda x: x * (1 + 5 * slope))


@pytest.mark.parametrize("change", [_change_activation, _change_norm])
def test_blocks_that_were_changed_unlike_are_not_taken_for_each_other(change):
    blocks = [DecoderBlock(12, 3), DecoderBlock(12, 3)]
    for block, slope in zip(blocks, (0.0, 0.9), strict=True):
        change(block, slope)
    model = CausalLM(TokenAndPositionEmbedding(V, LENGTH, 12), blocks, VocabProjection(V, tied=True))
    model.build((None, LENGTH))
    result = model.generate([1, 2, 3], 8, jit_compile=False)
    logprobs = tf.nn.log_softmax(model(result.token_ids[None])[0]).numpy()
    expected = logprobs[np.arange(2, 10), result.token_ids[3:]]
    assert result.new_logprobs == pytest.approx(expected, abs=1e-5)


def test_what_follows_from_the_positions_is_computed_once_for_all_blocks():
    model = gpt(V, sequence_length=LENGTH, hidden_dim=12, num_heads=3, num_layers=3)
    model.build((None, LENGTH))
    for in_place in (False, True):
        graph = step_graph(model, in_place).graph.as_graph_def()
        (block,) = graph.library.function
        # The masks of a step compare, and nothing else in a block does.
        assert not {"GreaterEqual", "Range"} & {node.op for node in block.node_def}
        assert sum(node.op == "GreaterEqual" for node in graph.node) == 1


@pytest.mark.parametrize(
    ("number", "least", "expected"),
    [(0, 1, 1), (1, 1, 1), (3, 1, 4), (4, 1, 4), (5, 16, 16), (16, 16, 16), (17, 16, 32)],
)
def test_compiled_shapes_are_rounded_up_to_powers_of_two_and_no_further(number, least, expected):
    assert int(_next_power_of_two(tf.constant(number), least)) == expected


def test_a_refusal_names_twenty_of_what_is_wrong(model):
    with pytest.raises(ValueError, match="Received: ") as refused:
        generate(model, [[V + 5] * (LENGTH - 1)] * 4, 1, jit_compile=False)
    assert str(refused.value).count(str(V + 5)) == 20


def test_what_runs_once_or_seldom_is_a_call_and_not_a_copy_in_each_graph():
    model = gpt(V, sequence_length=LENGTH, hidden_dim=12, num_heads=3, num_layers=3)
    model.build((None, LENGTH))
    graph = request_graph(model, jit_compile=False).graph.as_graph_def()
    with_operation = {
        operation: [
            function.attr["_noinline"].b
            for function in graph.library.function
            if any(node.op == operation for node in function.node_def)
        ]
        for operation in (
            "BitwiseXor",
            "BatchMatMulV2",
            "TensorScatterUpdate",
            "InplaceUpdate",
            "While",
            "StatelessWhile",
        )
    }
    # Sampling's random numbers; a block of the prompt and one of a step; new tokens; their cache.
    assert with_operation["BitwiseXor"] == [True]
    assert sorted(with_operation["BatchMatMulV2"]) == [False, True]
    assert with_operation["TensorScatterUpdate"] == [False]
    assert with_operation["InplaceUpdate"] == [False]
    assert len(with_operation["While"] + with_operation["StatelessWhile"]) == 1


def test_blocks_that_differ_in_their_weights_alone_are_one_function():
    def functions(num_layers):
        model = gpt(V, sequence_length=LENGTH, hidden_dim=12, num_heads=3, num_layers=num_layers)
        model.build((None, LENGTH))
        return len(request_graph(model, False).graph.as_graph_def().library.function)

    assert functions(1) == functions(5)


@pytest.mark.parametrize(
    "policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)]
)
def test_half_precision_generates_the_same_plain_and_compiled(policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = gpt(V, sequence_length=8, hidden_dim=8, num_heads=2, num_layers=1)
        model(np.array([[1, 2]]))
    finally:
        keras.config.set_dtype_policy(before)
    for variable in model.weights:
        variable.assign(variable * 30)
    plain = generate(model, [[1, 2], [5]], 5, jit_compile=False)
    compiled = generate(model, [[1, 2], [5]], 5, jit_compile=True)
    assert np.array_equal(plain.token_ids, compiled.token_ids)
    assert plain.new_logprobs.dtype == np.float32


class Late(DecoderBlock):
    """A block of somebody's own, which stands at positions of its own."""

    def call(self, inputs, cache=None, positions=None, return_attention_scores=False, training=None):
        if positions is not None:
            positions = positions.positions + 1
        options = {"return_attention_scores": return_attention_scores, "training": training}
        return super().call(inputs, cache=cache, positions=positions, **options)


def test_a_block_at_positions_of_its_own_gets_its_own_step():
    blocks = [DecoderBlock(12, 3), Late(12, 3)]
    model = CausalLM(TokenAndPositionEmbedding(V, LENGTH, 12), blocks, VocabProjection(V))
    model.build((None, LENGTH))
    cache = model.make_cache(1)
    _, cache = model(np.array([[4]]), cache=cache, positions=np.array([[2]]))
    keys = [np.abs(part[0]).sum(axis=(0, 1, 3)) for part in cache]
    assert [np.flatnonzero(row).tolist() for row in keys] == [[2], [3]]


@pytest.mark.parametrize(
    "blocks",
    [[{"head_dim": 4}, {"head_dim": 5}], [{"head_dim": 4, "output_dim": None}, {"head_dim": 4}]],
)
@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_of_unlike_widths_share_a_model(blocks, jit_compile):
    blocks = [CausalSelfAttention(**{"num_heads": 3, "output_dim": 12, **block}) for block in blocks]
    width = 12 if blocks[0].output_dim else 6
    model = CausalLM(TokenAndPositionEmbedding(V, LENGTH, width), blocks, VocabProjection(V))
    model.build((None, LENGTH))
    for variable in model.weights:
        variable.assign(variable * 3)
    result = model.generate([1, 2, 3], 5, jit_compile=jit_compile)
    logprobs = tf.nn.log_softmax(model(result.token_ids[None])[0]).numpy()
    assert result.new_logprobs == pytest.approx(
        logprobs[[2, 3, 4, 5, 6], result.token_ids[3:]], abs=1e-4
    )


def _low_rank(model):
    dense = model.blocks[1].mlp_expand
    dense.enable_lora(2)
    dense.lora_kernel_b.assign(np.ones(dense.lora_kernel_b.shape))


def _activation(model):
    model.blocks[1].mlp_expand.activation = _leaky(0.5)


def _epsilon(model):
    model.blocks[0].attention_norm.epsilon = 3.0


def _epsilon_of_the_last_norm(model):
    model.final_norm.epsilon = 3.0


def _no_last_norm(model):
    model.final_norm = None


def _policy_of_attention(model):
    model.blocks[0].attention.dtype_policy = keras.DTypePolicy("mixed_bfloat16")


def _policy_of_the_embedding(model):
    model.embedding.dtype_policy = keras.DTypePolicy("mixed_bfloat16")


def _heads(model):
    model.blocks[0].attention.num_heads, model.blocks[0].attention.head_dim = 2, 6


def _fewer_blocks(model):
    del model.blocks[1]


def _another_table(model):
    embedding = TokenAndPositionEmbedding(V, LENGTH, 12)
    embedding.build((None, LENGTH))
    model.projection.tie(embedding)


def _quantized(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras names each layer that it cannot quantize.
        model.quantize("int8")


CHANGES = [_low_rank, _epsilon]
MORE_CHANGES = [
    _fewer_blocks,
    _activation,
    _policy_of_attention,
    _another_table,
    _epsilon_of_the_last_norm,
    _no_last_norm,
    _policy_of_the_embedding,
    _heads,
    _quantized,
]


@pytest.mark.parametrize(
    "change", [*CHANGES, *(pytest.param(change, marks=pytest.mark.slow) for change in MORE_CHANGES)]
)
def test_after_a_change_to_the_model_generation_answers_as_the_changed_model_does(change):
    keras.utils.set_random_seed(6)
    model = gpt(V, sequence_length=LENGTH, hidden_dim=12, num_heads=3, num_layers=2)
    model.build((None, LENGTH))
    draw = np.random.default_rng(7)
    for variable in model.weights:
        variable.assign(variable + 0.3 * draw.normal(size=variable.shape))
    before = model.generate([1, 2, 3], 6, jit_compile=False)
    change(model)
    after = model.generate([1, 2, 3], 6, jit_compile=False)
    # bfloat16 keeps two to three digits.
    tolerance = 5e-2 if "policy" in change.__name__ else 1e-4
    logprobs = tf.nn.log_softmax(model(after.token_ids[None])[0].numpy().astype("float32")).numpy()
    expected = logprobs[np.arange(2, 8), after.token_ids[3:]]
    assert after.new_logprobs == pytest.approx(expected, abs=tolerance)
    assert np.abs(after.new_logprobs - before.new_logprobs).max() > 1e-3


@pytest.mark.slow
def test_a_stream_and_a_compiled_loop_follow_a_change_too():
    model = gpt(V, sequence_length=LENGTH, hidden_dim=12, num_heads=3, num_layers=2)
    model.build((None, LENGTH))
    for variable in model.weights:
        variable.assign(variable * 20)

    def answers():
        compiled = model.generate([1, 2, 3], 6).token_ids[3:].tolist()
        return [list(stream(model, [1, 2, 3], 6)), compiled]

    assert answers() == [walk(model, [1, 2, 3], 6)[0][3:]] * 2
    before = walk(model, [1, 2, 3], 6)[0]
    _epsilon_of_the_last_norm(model)
    _low_rank(model)
    assert answers() == [walk(model, [1, 2, 3], 6)[0][3:]] * 2
    assert walk(model, [1, 2, 3], 6)[0] != before


def test_a_block_that_keras_does_not_see_is_refused():
    model = gpt(V, sequence_length=LENGTH, hidden_dim=12, num_heads=3, num_layers=2)
    model.build((None, LENGTH))
    step = make_train_step(model, keras.optimizers.SGD())
    model.blocks[1] = DecoderBlock(12, 3)
    model.blocks[1].build((None, LENGTH, 12))
    for use in (
        lambda: model.generate([1], 2, jit_compile=False),
        lambda: stream(model, [1], 2),
        lambda: step(np.array([[1, 2]]), np.array([[2, 3]])),
    ):
        with pytest.raises(ValueError, match=r"Received: another one among 2\. Make a CausalLM"):
            use()
    again = CausalLM(model.embedding, model.blocks, model.projection, model.final_norm)
    assert again.generate([1], 2, jit_compile=False).lengths == 3


def test_a_block_that_is_used_twice_keeps_a_cache_for_each_use():
    block = DecoderBlock(12, 3)
    model = CausalLM(TokenAndPositionEmbedding(V, LENGTH, 12), [block, block], VocabProjection(V))
    model.build((None, LENGTH))
    check_against_windows(model, model.generate([1, 2, 3], 6, jit_compile=False), 3)


@pytest.mark.parametrize(
    "bad", [-np.inf, *(pytest.param(x, marks=pytest.mark.slow) for x in (np.nan, np.inf))]
)
def test_logits_that_are_not_finite_are_an_error_on_every_path(bad):
    keras.utils.set_random_seed(1)
    model = CausalLM(
        TokenAndPositionEmbedding(V, LENGTH, 4),
        [DecoderBlock(4, 1)],
        VocabProjection(V, use_bias=True),
    )
    model.build((None, LENGTH))
    right = generate(model, [1, 2], 3, jit_compile=False).token_ids.tolist()
    assert list(stream(model, [1, 2], 3)) == right[2:]
    bias = np.zeros(V)
    bias[7] = bad  # Of one token, which with -inf no argmax would take.
    model.projection.bias.assign(bias)
    for jit_compile in (False, True):
        for settings in ({}, {"temperature": 1.0, "top_k": 3}):
            with pytest.raises(ValueError, match="The logits are not finite"):
                generate(model, [1, 2], 3, jit_compile=jit_compile, **settings)
    with pytest.raises(ValueError, match="The logits are not finite"):
        list(stream(model, [1, 2], 3))


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_row_whose_logits_do_not_count_fails_no_other(model, jit_compile):
    broken = keras.models.clone_model(model)
    broken.build((None, LENGTH))
    broken.set_weights(model.get_weights())
    positions = broken.embedding.position_embeddings
    table = positions.numpy()
    table[-1] = np.nan
    positions.assign(table)
    whole = [1] * LENGTH  # No room: its logits are not asked for.
    right = generate(model, [[1, 2]], 3, jit_compile=False).token_ids[0].tolist()
    if not jit_compile:  # Compiled, every window is as wide as the model.
        result = generate(broken, [[1, 2]], 3, jit_compile=False)
        assert result.token_ids[0].tolist() == right
    embedding = broken.embedding.token_embeddings
    positions.assign(model.embedding.position_embeddings)
    untied = CausalLM(broken.embedding, broken.blocks, VocabProjection(V), final_norm=broken.final_norm)
    untied.build((None, LENGTH))
    right = generate(untied, [1, 2], 1, jit_compile=jit_compile)
    table = embedding.numpy()
    table[9] = np.nan
    embedding.assign(table)
    with pytest.raises(ValueError, match="The logits are not finite"):
        generate(untied, [[1, 2], [9]], 1, jit_compile=jit_compile)
    result = generate(untied, [[1, 2], [9], [9, *whole[1:]]], [1, 0, 5], jit_compile=jit_compile)
    assert result.token_ids[0, :3].tolist() == right.token_ids.tolist()
    assert np.isfinite(result.new_logprobs).all()
