"""What every peer computes with: a function of the sizes alone, so each process makes its own."""

from types import SimpleNamespace

import numpy as np

# The layers of a block, in GPT-2's order: a weight and a bias each.
BLOCK = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")

# AdamW with decay on all weights, behind a gradient that is clipped as a whole.
LEARNING_RATE, WEIGHT_DECAY, EPSILON, CLIP_NORM = 1e-3, 0.1, 1e-8, 1.0


def layer(size):
    """A causal self-attention layer with an output projection and no bias, float32.

    `inputs` and `upstream` (the gradient of the loss with respect to the output) are `(B, T, D)`, the
    four `kernels` (query, key, value, output) `(D, D)`.
    """
    random = np.random.default_rng(0)
    B, T, D = size["B"], size["T"], size["D"]
    # Weights of attention that are neither even nor one-hot.
    return SimpleNamespace(
        **size,
        inputs=_normal(random, 1, B, T, D),
        upstream=_normal(random, 1, B, T, D),
        kernels=[_normal(random, D**-0.5, D, D) for _ in range(4)],
    )


def generate(size):
    """A GPT-2 and `prompts`, `(B, prompt_length)`."""
    random = np.random.default_rng(0)
    # Weights much larger than at the start of training, so that no rounding decides between candidates.
    state_dict = gpt2_state_dict(random, size, spread=0.16)
    prompts = random.integers(0, size["V"], (size["B"], size["prompt_length"])).astype("int32")
    return SimpleNamespace(**size, state_dict=state_dict, prompts=prompts)


def train(size):
    """A GPT-2 and `steps` batches of random tokens: `inputs` and `targets`, `(steps, B, T)`."""
    random = np.random.default_rng(0)
    state_dict = gpt2_state_dict(random, size, spread=0.02)
    token_ids = random.integers(0, size["V"], (size["steps"], size["B"], size["T"] + 1)).astype("int32")
    return SimpleNamespace(
        **size, state_dict=state_dict, inputs=token_ids[..., :-1], targets=token_ids[..., 1:]
    )


def gpt2_state_dict(random, size, spread):
    """A GPT-2's tensors by their names in it; kernels are `(in, out)`, as its own code keeps them."""
    D = size["D"]
    shapes = {"wte.weight": (size["V"], D), "wpe.weight": (size["T"], D)}
    for index in range(size["num_layers"]):
        for name, shape in zip(
            BLOCK, ((D,), (D, 3 * D), (D, D), (D,), (D, 4 * D), (4 * D, D)), strict=True
        ):
            shapes[f"h.{index}.{name}.weight"] = shape
            shapes[f"h.{index}.{name}.bias"] = shape[-1:]
    shapes |= {"ln_f.weight": (D,), "ln_f.bias": (D,)}
    tensors = {name: _normal(random, spread, *shape) for name, shape in shapes.items()}
    for name in tensors:
        if "ln_" in name and name.endswith("weight"):
            tensors[name] += 1
    return tensors


def by_block(state_dict):
    """The weight and the bias of each layer of each block: a list of dicts with the names of BLOCK."""
    num_layers = sum(name.endswith("ln_1.weight") for name in state_dict)
    return [
        {
            name: [state_dict[f"h.{index}.{name}.{part}"] for part in ("weight", "bias")]
            for name in BLOCK
        }
        for index in range(num_layers)
    ]


def _normal(random, spread, *shape):
    return random.standard_normal(shape, dtype=np.float32) * np.float32(spread)
