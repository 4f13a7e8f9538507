"""The signatures of an export: text in, text out, everything between in the graph.

Every input and output is batch-major, settings too, so that a server can put requests with different
settings into one batch. Every input is required. No output shares a name with an input.
"""

import functools
import types

import tensorflow as tf

from keras_tinyattn import sampling
from keras_tinyattn._boundary import chosen, require, require_inputs
from keras_tinyattn.export import stepwise
from keras_tinyattn.generation.graphs import read_parameters, window_graph
from keras_tinyattn.generation.loop import request_graph
from keras_tinyattn.generation.request import MAX_STOP_TOKENS, ROW_SETTINGS, Generation, Settings

MAX_ATTENTION_TOKENS = 256

_STRINGS = tf.TensorSpec((None,), tf.string)
_IDS = tf.TensorSpec((None, None), tf.int32)
_INTS = tf.TensorSpec((None,), tf.int32)
_FLOAT_ROWS = tf.TensorSpec((None, None), tf.float32)
_SETTINGS = {setting.name: tf.TensorSpec((None,), setting.dtype) for setting in ROW_SETTINGS}
_SAMPLING = {setting.name: _SETTINGS[setting.name] for setting in sampling.SETTINGS}


class Signatures(tf.Module):
    """The signatures of an export, and the variables and tables they need."""

    def __init__(self, model, tokenizer):
        super().__init__()
        self._model = lambda: model  # A function: the export tracks its variables alone.
        self.tokenizer = tokenizer
        self.variables_of_model = [variable.value for variable in model.variables]
        # What several signatures use is one function in the graph. Hidden from the tracker, which would
        # export each of them a second time.
        self._shared = types.SimpleNamespace(
            tokenize=_graph(tokenizer.tokenize, _STRINGS),
            detokenize=_graph(tokenizer.detokenize, _IDS, _INTS),
            prepare=_graph(self._prepare, _STRINGS, _STRINGS, *_SETTINGS.values()),
            present=_graph(
                self._present,
                Generation(_IDS, _INTS, _FLOAT_ROWS, _STRINGS),
                _INTS,
                _INTS,
            ),
        )

    def trace(self):
        """The signatures as concrete functions, by name."""
        strings, ids, ints = _STRINGS, _IDS, _INTS
        text_settings = {"prompt": strings, **_SETTINGS, "stop": strings}
        id_settings = {"prompt_ids": ids, "prompt_length": ints, **_SETTINGS, "stop_id": ints}
        model = self._model()
        specs = {
            "serving_default": (self.greedy, {"prompt": strings}),
            "generate": (self.generate, text_settings),
            "generate_xla": (self.generate_xla, text_settings),
            "generate_ids": (self.generate_ids, id_settings),
            "score": (self.score, {"text": strings}),
            "attention": (self.attention, {"text": strings}),
            "tokenize": (self.tokenize, {"text": strings}),
            "detokenize": (self.detokenize, {"token_ids": ids, "length": ints}),
            "prefill": (
                functools.partial(stepwise.prefill, model),
                {"prompt_ids": ids, "prompt_length": ints},
            ),
            "step": (
                functools.partial(stepwise.step, model),
                {"token_id": ints, "position": ints, **stepwise.cache_inputs(model)},
            ),
            "sample": (
                functools.partial(stepwise.sample, model),
                {"logits": _FLOAT_ROWS, "position": ints, **_SAMPLING},
            ),
        }
        return {
            name: tf.function(_checked(method), autograph=False).get_concrete_function(
                **{key: tf.TensorSpec(spec.shape, spec.dtype, name=key) for key, spec in inputs.items()}
            )
            for name, (method, inputs) in specs.items()
        }

    def greedy(self, prompt):
        """Prompt and greedy continuation, up to the stop or the last position."""
        rows = tf.shape(prompt)
        settings = {setting.name: tf.fill(rows, setting.default) for setting in sampling.SETTINGS}
        outputs = self.generate(
            prompt=prompt,
            max_new_tokens=tf.fill(rows, self._model().sequence_length),
            **settings,
            stop=tf.fill(rows, ""),
        )
        return {"text": outputs["text"]}

    def generate(self, prompt, stop, **settings):
        return self._generate(prompt, stop, settings, jit_compile=False)

    def generate_xla(self, prompt, stop, **settings):
        return self._generate(prompt, stop, settings, jit_compile=True)

    def _generate(self, prompt, stop, settings, jit_compile):
        prompt_ids, prompt_length, stop_ids, stop_length = self._shared.prepare(
            prompt, stop, *(settings[name] for name in _SETTINGS)
        )
        result = self._continue(prompt_ids, prompt_length, settings, stop_ids, jit_compile)
        return self._shared.present(result, prompt_length, stop_length)

    def _prepare(self, prompt, stop, *settings):
        """Prompts and stops as ids."""
        return (*self._shared.tokenize(prompt), *self._stop_ids(stop))

    def _present(self, result, prompt_length, stop_length):
        """What was generated as text, without the stop."""
        shown = result.lengths - tf.where(result.finish_reasons == "stop", stop_length, 0)
        # Row by row, the new tokens begin where the prompt ends.
        offset = prompt_length[:, None] + tf.range(tf.shape(result.new_logprobs)[1])[None, :]
        offset = tf.minimum(offset, tf.shape(result.token_ids)[1] - 1)
        new_ids = tf.gather(result.token_ids, offset, batch_dims=1)
        completion = self._shared.detokenize(new_ids, shown - prompt_length)
        return {
            "text": _valid_utf8(self._shared.detokenize(result.token_ids, shown)),
            "completion": _valid_utf8(completion),
            "completion_bytes": completion,
            "token_ids": result.token_ids,
            "length": result.lengths,
            "new_logprobs": result.new_logprobs,
            "finish_reason": result.finish_reasons,
        }

    def generate_ids(self, prompt_ids, prompt_length, stop_id, **settings):
        stop_ids = tf.pad(stop_id[:, None], ((0, 0), (MAX_STOP_TOKENS - 1, 0)), constant_values=-1)
        result = self._continue(prompt_ids, prompt_length, settings, stop_ids, jit_compile=False)
        return {
            "token_ids": result.token_ids,
            "length": result.lengths,
            "new_logprobs": result.new_logprobs,
            "finish_reason": result.finish_reasons,
        }

    def score(self, text):
        """The log-probability of each token of a text, given those before it."""
        token_ids, length = self._window(text, self._model().sequence_length)
        logits = tf.cast(self._read_window(token_ids)[0], tf.float32)
        # Behind the last token but one a row predicts nothing.
        behind = ~tf.sequence_mask(length - 1, tf.shape(token_ids)[1])
        with tf.control_dependencies(sampling.require_finite(sampling.is_finite(logits) | behind)):
            logits = tf.identity(logits)
        logprobs = tf.nn.log_softmax(logits)[:, :-1]
        logprobs = tf.gather(logprobs, token_ids[:, 1:], batch_dims=2)
        real = tf.sequence_mask(length - 1, tf.shape(logprobs)[1])
        logprobs = tf.where(real, logprobs, 0.0)
        targets = tf.cast(length - 1, tf.float32)
        return {
            "token_ids": token_ids,
            "length": length,
            # As wide as the ids, which of an empty batch have no columns.
            "logprobs": tf.pad(logprobs, ((0, 0), (1, 0)))[:, : tf.shape(token_ids)[1]],
            "loss": tf.math.divide_no_nan(-tf.reduce_sum(logprobs, axis=1), targets),
        }

    def attention(self, text):
        """The weights of every layer and head, and the logits of the next token."""
        longest = min(MAX_ATTENTION_TOKENS, self._model().sequence_length)
        token_ids, length = self._window(text, longest)
        logits, weights, _ = self._read_window(token_ids, attention_scores=True)
        real = tf.sequence_mask(length, tf.shape(token_ids)[1])
        next_logits = tf.cast(tf.gather(logits, length - 1, batch_dims=1), tf.float32)
        with tf.control_dependencies(sampling.require_finite(sampling.is_finite(next_logits))):
            next_logits = tf.identity(next_logits)
        weights = tf.stack([tf.cast(layer, tf.float32) for layer in weights], axis=1)
        pieces = self._shared.detokenize(
            tf.reshape(token_ids, (-1, 1)), tf.ones(tf.size(token_ids), tf.int32)
        )
        return {
            "tokens_bytes": tf.where(real, tf.reshape(pieces, tf.shape(token_ids)), ""),
            "length": length,
            "weights": tf.where(real[:, None, None, :, None], weights, 0.0),
            "next_logits": next_logits,
        }

    def tokenize(self, text):
        """Texts as ids, and the id that ends a text, -1 for none."""
        token_ids, length = self._shared.tokenize(text)
        end_id = -1 if self.tokenizer.end_id is None else self.tokenizer.end_id
        return {
            "token_ids": token_ids,
            "length": length,
            "end_id": tf.fill(tf.shape(length), end_id),
        }

    def detokenize(self, token_ids, length):
        """Ids as texts; the bytes need not be valid UTF-8."""
        texts = self._shared.detokenize(token_ids, length)
        return {"text": _valid_utf8(texts), "text_bytes": texts}

    def _read_window(self, token_ids, attention_scores=False):
        model = self._model()
        return window_graph(model, attention_scores)(read_parameters(model), token_ids)

    def _continue(self, prompt_ids, prompt_length, settings, stop_ids, jit_compile):
        settings = Settings(**settings, stop=stop_ids)
        run = request_graph(self._model(), jit_compile)
        return run(prompt_ids, prompt_length, settings, tf.constant(self.tokenizer.pad_id))

    def _stop_ids(self, stop):
        """Stop texts as (B, M) ids, -1 in front, and how many there are; "" is the tokenizer's own."""
        width = MAX_STOP_TOKENS
        ids, length = self._shared.tokenize(stop)
        end_id = self.tokenizer.end_id
        own = tf.reshape(tf.constant([-1 if end_id is None else end_id]), (1, 1))
        default = stop == ""
        nothing = ~default & (length == 0)
        checks = require(
            ~tf.reduce_any(nothing),
            "A stop holds no token. Expected a text with at least one, or an empty text for the "
            "tokenizer's own end. Received: '",
            chosen(stop, nothing),
            "'. White space separates words and is none.",
        )
        if self.tokenizer.unknown_id is not None:
            unknown = tf.reduce_any(ids == self.tokenizer.unknown_id, axis=1)
            checks += require(
                ~tf.reduce_any(unknown),
                "A stop holds a word outside the vocabulary. Expected words that the model can write. "
                "Received: ",
                chosen(stop, unknown),
                ". The text would end at any unknown word.",
            )
        length = tf.where(default, 0 if end_id is None else 1, length)
        checks += require(
            tf.reduce_all(length <= width),
            f"A stop is too long. Expected at most {width} tokens. Received: ",
            length,
            " tokens. Stop at a shorter text.",
        )
        with tf.control_dependencies(checks):
            ids = tf.pad(ids, ((0, 0), (0, width)))
        ids = tf.where(default[:, None], own, ids)
        place = tf.range(width)[None, :] - (width - length[:, None])
        shifted = tf.gather(ids, tf.maximum(place, 0), batch_dims=1)
        return tf.where(place >= 0, shifted, -1), length

    def _window(self, text, longest):
        """Texts as a window of 1 to `longest` tokens per row."""
        token_ids, length = self._shared.tokenize(text)
        checks = require(
            tf.reduce_all(length >= 1),
            "There is nothing to read. Expected at least one token in each text. "
            "Received: an empty text. Give at least one word or character.",
        ) + require(
            tf.reduce_all(length <= longest),
            f"The text is too long. Expected at most {longest} tokens. Received: ",
            length,
            " tokens. Shorten the text.",
        )
        with tf.control_dependencies(checks):
            return tf.identity(token_ids), tf.identity(length)


def _checked(method):
    """A signature that checks the shapes of its inputs first."""
    return lambda **inputs: method(**require_inputs(**inputs))


def _graph(function, *signature):
    return tf.function(function, input_signature=signature, autograph=False)


def _valid_utf8(texts):
    return tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8", errors="replace")
