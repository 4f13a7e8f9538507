"""One GPT-2, greedy, in each library that generates text: the same weights, the same ids."""

from typing import NamedTuple

import numpy as np
from _attention_peers import OURS
from _start import quiet_imports

UNEQUAL = f"{OURS}, XLA, unequal prompts"
BASELINES = ("KerasHub, XLA",)
NEEDS = {
    "KerasHub, graph": ("keras_hub", "keras-hub"),
    "KerasHub, XLA": ("keras_hub", "keras-hub"),
    "torch, key-value loop": ("torch", "torch"),
    "JAX, while_loop": ("jax", "jax"),
}


class Size(NamedTuple):
    """A model and a request to it."""

    name: str
    num_layers: int
    num_heads: int
    hidden_dim: int
    vocabulary_size: int
    sequence_length: int
    batch_size: int
    prompt_length: int
    new_tokens: int


def make_problem(size, columns):
    """Functions that generate ids `(B, new_tokens)`, one a column, and what each gave at its first run.

    Ours can be asked for fewer new tokens.
    """
    with quiet_imports():
        import keras

        import keras_tinyattn

    keras.utils.set_random_seed(size.num_layers)
    model = keras_tinyattn.gpt(
        size.vocabulary_size,
        size.sequence_length,
        size.hidden_dim,
        size.num_heads,
        size.num_layers,
    )
    model.build((None, size.sequence_length))
    for variable in model.weights:
        # Larger than at the start of training, so that rounding decides between no two candidates.
        if len(variable.shape) == 2:
            variable.assign(variable * 8)
    draw = np.random.default_rng(0)
    prompts = draw.integers(0, size.vocabulary_size, (size.batch_size, size.prompt_length))
    prompts = prompts.astype("int32")
    makers = {
        f"{OURS}, XLA": lambda: _ours(model, prompts, size, True),
        f"{OURS}, graph": lambda: _ours(model, prompts, size, False),
        UNEQUAL: lambda: _ours(model, prompts, size, True, unequal=True),
        "KerasHub, graph": lambda: _keras_hub(model, prompts, size, False),
        "KerasHub, XLA": lambda: _keras_hub(model, prompts, size, True),
        "torch, key-value loop": lambda: _torch(model, prompts, size),
        "JAX, while_loop": lambda: _jax(model, prompts, size),
    }
    functions = {column: makers[column]() for column in columns}
    return functions, {column: function() for column, function in functions.items()}


def columns_for(size):
    """All columns; prompts can be unequal where there are several."""
    names = [f"{OURS}, XLA", f"{OURS}, graph", *NEEDS]
    return names if size.batch_size == 1 else [UNEQUAL, *names]


def _ours(model, prompts, size, jit_compile, unequal=False):
    rows = list(prompts)
    if unequal:
        # Every second prompt is shorter; the others are still compared.
        rows = [row[: size.prompt_length // 2] if i % 2 else row for i, row in enumerate(rows)]

    def generate(new_tokens=size.new_tokens):
        result = model.generate(rows, new_tokens, jit_compile=jit_compile)
        return np.stack(
            [ids[len(row) : len(row) + new_tokens] for ids, row in zip(result[0], rows, strict=True)]
        )

    return generate


def _blocks(model):
    """Each block's arrays by their names in GPT-2."""
    for block in model.blocks:
        attention = block.attention
        yield {
            "ln_1": [block.attention_norm.gamma, block.attention_norm.beta],
            "q": [attention.query_kernel, attention.query_bias],
            "k": [attention.key_kernel, attention.key_bias],
            "v": [attention.value_kernel, attention.value_bias],
            "proj": [attention.output_kernel, attention.output_bias],
            "ln_2": [block.mlp_norm.gamma, block.mlp_norm.beta],
            "fc": [block.mlp_expand.kernel, block.mlp_expand.bias],
            "fc_proj": [block.mlp_contract.kernel, block.mlp_contract.bias],
        }


def _arrays(model):
    """All weights as NumPy arrays: tables, blocks with fused projections, final norm."""
    blocks = []
    for named in _blocks(model):
        block = {name: [np.array(part) for part in parts] for name, parts in named.items()}
        q, k, v = block.pop("q"), block.pop("k"), block.pop("v")
        block["qkv"] = [np.concatenate(parts, -1) for parts in zip(q, k, v, strict=True)]
        blocks.append(block)
    embedding, norm = model.embedding, model.final_norm
    return {
        "wte": np.array(embedding.token_embeddings),
        "wpe": np.array(embedding.position_embeddings),
        "ln_f": [np.array(norm.gamma), np.array(norm.beta)],
        "blocks": blocks,
    }


def _keras_hub(model, prompts, size, jit_compile):
    with quiet_imports():
        import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=size.vocabulary_size,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        hidden_dim=size.hidden_dim,
        intermediate_dim=4 * size.hidden_dim,
        dropout=0.0,
        max_sequence_length=size.sequence_length,
    )
    backbone.token_embedding.embeddings.assign(model.embedding.token_embeddings)
    backbone.position_embedding.position_embeddings.assign(model.embedding.position_embeddings)
    head = (size.num_heads, size.hidden_dim // size.num_heads)
    for layer, named in zip(backbone.transformer_layers, _blocks(model), strict=True):
        attention = layer._self_attention_layer
        for dense, name in (
            (attention._query_dense, "q"),
            (attention._key_dense, "k"),
            (attention._value_dense, "v"),
        ):
            dense.kernel.assign(np.reshape(named[name][0], (size.hidden_dim, *head)))
            dense.bias.assign(np.reshape(named[name][1], head))
        attention._output_dense.kernel.assign(np.reshape(named["proj"][0], (*head, size.hidden_dim)))
        attention._output_dense.bias.assign(named["proj"][1])
        for norm, name in (
            (layer._self_attention_layer_norm, "ln_1"),
            (layer._feedforward_layer_norm, "ln_2"),
        ):
            norm.gamma.assign(named[name][0])
            norm.beta.assign(named[name][1])
        for dense, name in (
            (layer._feedforward_intermediate_dense, "fc"),
            (layer._feedforward_output_dense, "fc_proj"),
        ):
            dense.kernel.assign(named[name][0])
            dense.bias.assign(named[name][1])
    backbone.layer_norm.gamma.assign(model.final_norm.gamma)
    backbone.layer_norm.beta.assign(model.final_norm.beta)
    peer = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    peer.compile(sampler="greedy", jit_compile=jit_compile)
    total = size.prompt_length + size.new_tokens
    padded = np.pad(prompts, ((0, 0), (0, total - size.prompt_length)))
    mask = np.arange(total)[None, :] < size.prompt_length
    request = {"token_ids": padded, "padding_mask": np.broadcast_to(mask, padded.shape).copy()}

    def generate():
        outputs = peer.generate(request, stop_token_ids=None)
        return np.asarray(outputs["token_ids"])[:, size.prompt_length :]

    return generate


def _torch(model, prompts, size):
    import torch
    from torch.nn import functional

    def tensors(part):
        if isinstance(part, dict):
            return {name: tensors(value) for name, value in part.items()}
        return [tensors(value) for value in part] if isinstance(part, list) else torch.from_numpy(part)

    weights = tensors(_arrays(model))
    # As torch.nn.Linear keeps them, (out, in).
    for block in weights["blocks"]:
        for name in ("qkv", "proj", "fc", "fc_proj"):
            block[name][0] = block[name][0].T.contiguous()
    heads, width = size.num_heads, size.hidden_dim
    shape = (size.batch_size, heads, size.prompt_length + size.new_tokens, width // heads)
    ids = torch.from_numpy(prompts).long()

    def forward(tokens, start, cache):
        length = tokens.shape[1]
        x = weights["wte"][tokens] + weights["wpe"][start : start + length]
        for block, (keys, values) in zip(weights["blocks"], cache, strict=True):
            normed = functional.layer_norm(x, (width,), *block["ln_1"])
            q, k, v = functional.linear(normed, *block["qkv"]).split(width, dim=-1)
            q, k, v = (part.view(*tokens.shape, heads, -1).transpose(1, 2) for part in (q, k, v))
            keys[:, :, start : start + length] = k
            values[:, :, start : start + length] = v
            attended = functional.scaled_dot_product_attention(
                q,
                keys[:, :, : start + length],
                values[:, :, : start + length],
                is_causal=length > 1,
            )
            attended = attended.transpose(1, 2).reshape(*tokens.shape, width)
            x = x + functional.linear(attended, *block["proj"])
            normed = functional.layer_norm(x, (width,), *block["ln_2"])
            expanded = functional.gelu(functional.linear(normed, *block["fc"]), approximate="tanh")
            x = x + functional.linear(expanded, *block["fc_proj"])
        x = functional.layer_norm(x[:, -1], (width,), *weights["ln_f"])
        return functional.linear(x, weights["wte"]).argmax(-1, keepdim=True)

    @torch.inference_mode()
    def generate():
        cache = [(torch.empty(shape), torch.empty(shape)) for _ in weights["blocks"]]
        token = forward(ids, 0, cache)
        new = [token]
        for step in range(size.new_tokens - 1):
            token = forward(token, size.prompt_length + step, cache)
            new.append(token)
        return torch.cat(new, dim=1).numpy()

    return generate


def _jax(model, prompts, size):
    import jax
    from jax import lax
    from jax import numpy as jnp

    weights = jax.tree.map(jnp.asarray, _arrays(model))
    heads, head_dim = size.num_heads, size.hidden_dim // size.num_heads
    total = size.prompt_length + size.new_tokens
    shape = (size.batch_size, heads, total, head_dim)

    def norm(x, gamma, beta):
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(variance + 1e-5) * gamma + beta

    def forward(weights, tokens, start, cache):
        length = tokens.shape[1]
        positions = start + jnp.arange(length)
        mask = positions[:, None] >= jnp.arange(total)[None, :]
        x, kept = weights["wte"][tokens] + weights["wpe"][positions], []
        for block, (keys, values) in zip(weights["blocks"], cache, strict=True):
            qkv = norm(x, *block["ln_1"]) @ block["qkv"][0] + block["qkv"][1]
            q, k, v = (
                part.reshape(size.batch_size, length, heads, head_dim).transpose(0, 2, 1, 3)
                for part in jnp.split(qkv, 3, axis=-1)
            )
            keys = lax.dynamic_update_slice(keys, k, (0, 0, start, 0))
            values = lax.dynamic_update_slice(values, v, (0, 0, start, 0))
            kept.append((keys, values))
            scores = q @ keys.swapaxes(-1, -2) * head_dim**-0.5
            attended = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)) @ values
            attended = attended.transpose(0, 2, 1, 3).reshape(x.shape)
            x = x + attended @ block["proj"][0] + block["proj"][1]
            expanded = norm(x, *block["ln_2"]) @ block["fc"][0] + block["fc"][1]
            expanded = jax.nn.gelu(expanded, approximate=True)
            x = x + expanded @ block["fc_proj"][0] + block["fc_proj"][1]
        logits = norm(x[:, -1], *weights["ln_f"]) @ weights["wte"].T
        return logits.argmax(-1).astype("int32")[:, None], kept

    @jax.jit
    def run(weights, prompts):
        cache = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in weights["blocks"]]
        token, cache = forward(weights, prompts, 0, cache)
        new = jnp.zeros((size.batch_size, size.new_tokens), "int32")

        def step(state):
            index, token, new, cache = state
            new = lax.dynamic_update_slice(new, token, (0, index))
            token, cache = forward(weights, token, size.prompt_length + index, cache)
            return index + 1, token, new, cache

        # The last token is written, not fed.
        index, token, new, _ = lax.while_loop(
            lambda state: state[0] < size.new_tokens - 1, step, (0, token, new, cache)
        )
        return lax.dynamic_update_slice(new, token, (0, index))

    ids = jnp.asarray(prompts)
    return lambda: np.asarray(run(weights, ids))
