"""The same training step of the same language model as several libraries take it.

A peer is one function: it takes a `TrainingProblem` and returns a function of no arguments that takes
a step on each of the problem's batches and gives back the mean of their losses. All begin with the
same weights; GPT-2's arithmetic, AdamW with decay on all weights, the gradient clipped as a whole.
"""

from typing import Any, NamedTuple

import numpy as np
from _attention_peers import OURS

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0


class TrainingShape(NamedTuple):
    """The sizes of a model and of its batches."""

    B: int
    T: int
    D: int
    H: int
    layers: int
    V: int


class TrainingProblem(NamedTuple):
    """One model's first weights and its batches."""

    shape: TrainingShape
    weights: Any  # by their names in GPT-2; kernels are (in, out)
    token_ids: Any  # (steps, B, T + 1)


def make_training_problem(shape, steps, seed=0):
    """Weights as GPT-2 starts with them, and random tokens: what they say costs no time."""
    random = np.random.default_rng(seed)
    B, T, D, _, layers, V = shape

    def normal(*sizes):
        return (0.02 * random.standard_normal(sizes)).astype("float32")

    weights = {"wte": normal(V, D), "wpe": normal(T, D)}
    for index in range(layers):
        for name, sizes in (
            ("attn.query", (D, D)),
            ("attn.key", (D, D)),
            ("attn.value", (D, D)),
            ("attn.proj", (D, D)),
            ("mlp.fc", (D, 4 * D)),
            ("mlp.proj", (4 * D, D)),
        ):
            weights[f"{index}.{name}"] = normal(*sizes)
    return TrainingProblem(shape, weights, random.integers(0, V, (steps, B, T + 1)).astype("int32"))


def tinyattn_step(problem):
    """This package's model and its train step."""
    import keras
    import tensorflow as tf

    from keras_tinyattn import make_train_step

    model = _tinyattn_model(problem)
    optimizer = keras.optimizers.AdamW(LEARNING_RATE, weight_decay=WEIGHT_DECAY, epsilon=1e-8)
    step = make_train_step(model, optimizer, clip_norm=CLIP_NORM)
    batches = [(tf.constant(ids[:, :-1]), tf.constant(ids[:, 1:])) for ids in problem.token_ids]
    return lambda: np.mean([step(*batch).numpy() for batch in batches])


def tinyattn_fit(problem, jit_compile):
    """This package's model in Keras' own fit."""
    return _fit(problem, _tinyattn_model(problem), jit_compile)


def keras_fit(problem, jit_compile):
    """A model of Keras' own layers, `MultiHeadAttention` among them, in Keras' own fit."""
    import keras
    from keras import layers, ops

    _, T, D, H, num_layers, V = problem.shape
    weights = problem.weights
    token_ids = keras.Input((T,), dtype="int32")
    tokens = layers.Embedding(V, D)
    add_positions, table_of = _keras_layers(T, D)
    x = add_positions(tokens(token_ids))
    tokens.set_weights([weights["wte"]])
    add_positions.set_weights([weights["wpe"]])
    for index in range(num_layers):
        attention = layers.MultiHeadAttention(H, D // H)
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        x = x + attention(y, y, use_causal_mask=True)
        zeros = np.zeros((H, D // H), "float32")
        parts = []
        for name in ("query", "key", "value"):
            parts += [weights[f"{index}.attn.{name}"].reshape(D, H, D // H), zeros]
        attention.set_weights(
            [*parts, weights[f"{index}.attn.proj"].reshape(H, D // H, D), np.zeros(D, "float32")]
        )
        expand = layers.Dense(4 * D, activation=_tanh_gelu)
        contract = layers.Dense(D)
        x = x + contract(expand(layers.LayerNormalization(epsilon=1e-5)(x)))
        expand.set_weights([weights[f"{index}.mlp.fc"], np.zeros(4 * D, "float32")])
        contract.set_weights([weights[f"{index}.mlp.proj"], np.zeros(D, "float32")])
    x = layers.LayerNormalization(epsilon=1e-5)(x)
    logits = ops.matmul(x, ops.transpose(table_of(tokens)(x)))
    return _fit(problem, keras.Model(token_ids, logits), jit_compile)


def torch_step(problem):
    """nanoGPT's model and step in eager torch."""
    import torch
    from torch import nn
    from torch.nn import functional

    B, T, D, H, num_layers, V = problem.shape
    weights = {name: torch.tensor(array) for name, array in problem.weights.items()}

    def linear(array):
        layer = nn.Linear(*array.shape)
        with torch.no_grad():
            layer.weight.copy_(array.T)
            layer.bias.zero_()
        return layer

    class Block(nn.Module):
        def __init__(self, index):
            super().__init__()
            names = (f"{index}.attn.{name}" for name in ("query", "key", "value"))
            self.qkv = linear(torch.cat([weights[name] for name in names], 1))
            self.proj = linear(weights[f"{index}.attn.proj"])
            self.fc = linear(weights[f"{index}.mlp.fc"])
            self.contract = linear(weights[f"{index}.mlp.proj"])
            self.norms = nn.ModuleList([nn.LayerNorm(D, eps=1e-5) for _ in range(2)])

        def forward(self, x):
            q, k, v = (
                part.view(B, T, H, D // H).transpose(1, 2)
                for part in self.qkv(self.norms[0](x)).split(D, dim=2)
            )
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(B, T, D))
            return x + self.contract(functional.gelu(self.fc(self.norms[1](x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding.from_pretrained(weights["wte"], freeze=False)
            self.wpe = nn.Embedding.from_pretrained(weights["wpe"], freeze=False)
            self.blocks = nn.ModuleList([Block(index) for index in range(num_layers)])
            self.norm = nn.LayerNorm(D, eps=1e-5)

        def forward(self, token_ids):
            x = self.wte(token_ids) + self.wpe(torch.arange(T))
            for block in self.blocks:
                x = block(x)
            return self.norm(x) @ self.wte.weight.T

    model = Model()
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, (0.9, 0.999), eps=1e-8, weight_decay=WEIGHT_DECAY
    )
    batches = [
        (torch.tensor(ids[:, :-1]).long(), torch.tensor(ids[:, 1:]).long()) for ids in problem.token_ids
    ]

    def step(token_ids, targets):
        loss = functional.cross_entropy(model(token_ids).view(-1, V), targets.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        return loss.item()

    return lambda: np.mean([step(*batch) for batch in batches])


def _tinyattn_model(problem):
    from keras_tinyattn import gpt

    _, T, D, H, num_layers, V = problem.shape
    model = gpt(V, T, D, H, num_layers)
    model.build((None, T))
    weights = problem.weights
    model.embedding.token_embeddings.assign(weights["wte"])
    model.embedding.position_embeddings.assign(weights["wpe"])
    for index, block in enumerate(model.blocks):
        for name in ("query", "key", "value"):
            getattr(block.attention, f"{name}_kernel").assign(weights[f"{index}.attn.{name}"])
        block.attention.output_kernel.assign(weights[f"{index}.attn.proj"])
        block.mlp_expand.kernel.assign(weights[f"{index}.mlp.fc"])
        block.mlp_contract.kernel.assign(weights[f"{index}.mlp.proj"])
    return model


def _fit(problem, model, jit_compile):
    import keras

    model.compile(
        keras.optimizers.AdamW(
            LEARNING_RATE, weight_decay=WEIGHT_DECAY, epsilon=1e-8, global_clipnorm=CLIP_NORM
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    ids = problem.token_ids.reshape(-1, problem.shape.T + 1)
    settings = {"batch_size": problem.shape.B, "shuffle": False, "verbose": 0}
    return lambda: model.fit(ids[:, :-1], ids[:, 1:], **settings).history["loss"][0]


def _tanh_gelu(x):
    import keras

    return keras.activations.gelu(x, approximate=True)


def _keras_layers(T, D):
    """The two layers that Keras lacks: one that adds positions, a class of those that give a table."""
    import keras

    class AddPositions(keras.layers.Layer):
        def build(self, input_shape):
            self.table = self.add_weight(shape=(T, D))

        def call(self, inputs):
            return inputs + self.table

    class TableOf(keras.layers.Layer):
        """The logits are tied to the table of an embedding."""

        def __init__(self, embedding):
            super().__init__()
            self.embedding = embedding

        def call(self, inputs):
            return self.embedding.embeddings

        def compute_output_spec(self, inputs):
            return keras.KerasTensor(self.embedding.embeddings.shape)

    return AddPositions(), TableOf


TORCH = "torch, nanoGPT's step"
TRAINING_BASELINES = ["Keras layers in fit, graph", "Keras layers in fit, XLA"]
TRAINING_COLUMNS = {
    f"{OURS} train step": tinyattn_step,
    f"{OURS} in fit, XLA": lambda problem: tinyattn_fit(problem, True),
    TRAINING_BASELINES[0]: lambda problem: keras_fit(problem, False),
    TRAINING_BASELINES[1]: lambda problem: keras_fit(problem, True),
    TORCH: torch_step,
}
TRAINING_NEEDS = {TORCH: ("torch", "torch")}
