"""PyTorch, eager: `scaled_dot_product_attention`, a key-value loop, nanoGPT's training step."""

import numpy as np
import torch
from torch.nn import functional

from benchmarks.problems import CLIP_NORM, EPSILON, LEARNING_RATE, WEIGHT_DECAY, by_block


def layer(problem):
    """`scaled_dot_product_attention` behind one matrix for queries, keys and values."""
    B, T, D, H = problem.B, problem.T, problem.D, problem.H
    inputs, upstream = torch.from_numpy(problem.inputs), torch.from_numpy(problem.upstream)
    joined, output = (
        torch.from_numpy(np.ascontiguousarray(kernel.T)).requires_grad_()
        for kernel in (np.concatenate(problem.kernels[:3], axis=1), problem.kernels[3])
    )
    inputs.requires_grad_()

    def call():
        heads = functional.linear(inputs, joined).view(B, T, 3, H, D // H).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return functional.linear(attended.transpose(1, 2).reshape(B, T, D), output)

    def forward():
        with torch.inference_mode():
            return call().numpy()

    def backward():
        return torch.autograd.grad((call() * upstream).sum(), [inputs, joined, output])[0].numpy()

    return forward if problem.direction == "forward" else backward


def generate(problem):
    """A greedy loop with a key-value cache: ids `(B, new_tokens)`."""
    weights, blocks = tensors(problem.state_dict)
    total = problem.prompt_length + problem.new_tokens
    shape = (problem.B, problem.H, total, problem.D // problem.H)
    prompts = torch.from_numpy(problem.prompts).long()

    @torch.inference_mode()
    def compute():
        cache = [(torch.empty(shape), torch.empty(shape)) for _ in blocks]
        tokens, position, new = prompts, 0, []
        while len(new) < problem.new_tokens:
            x = hidden(weights, blocks, tokens, problem.H, position, cache)[:, -1]
            position += tokens.shape[1]
            tokens = functional.linear(x, weights["wte.weight"]).argmax(-1, keepdim=True)
            new.append(tokens)
        return torch.cat(new, dim=1).numpy()

    return compute


def train(problem):
    """nanoGPT's training step: the mean loss of the problem's steps."""
    weights, blocks = tensors(problem.state_dict)
    parameters = [
        *weights.values(),
        *(part for block in blocks for pair in block.values() for part in pair),
    ]
    for parameter in parameters:
        parameter.requires_grad_()
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, eps=EPSILON, weight_decay=WEIGHT_DECAY)
    inputs, targets = (torch.tensor(array).long() for array in (problem.inputs, problem.targets))

    def step(token_ids, expected):
        logits = functional.linear(hidden(weights, blocks, token_ids, problem.H), weights["wte.weight"])
        loss = functional.cross_entropy(logits.view(-1, problem.V), expected.reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        return loss.item()

    return lambda: np.mean([step(*batch) for batch in zip(inputs, targets, strict=True)])


def tensors(state_dict):
    """The tensors outside the blocks by name, and the blocks; kernels are `(out, in)`."""
    blocks = by_block(
        {
            name: torch.tensor(np.ascontiguousarray(array.T))
            for name, array in state_dict.items()
            if name.startswith("h.")
        }
    )
    others = {name: torch.tensor(array) for name, array in state_dict.items() if name[:2] != "h."}
    return others, blocks


def hidden(weights, blocks, token_ids, H, start=0, cache=None):
    """GPT-2 up to its final norm, `(B, T, D)`; a cache holds the keys and values before `start`."""
    T, D = token_ids.shape[1], weights["wte.weight"].shape[1]
    end = start + T
    x = functional.embedding(token_ids, weights["wte.weight"]) + weights["wpe.weight"][start:end]
    for index, block in enumerate(blocks):
        normed = functional.layer_norm(x, (D,), *block["ln_1"])
        q, k, v = (
            part.view(-1, T, H, D // H).transpose(1, 2)
            for part in functional.linear(normed, *block["attn.c_attn"]).split(D, dim=-1)
        )
        if cache is not None:
            for stored, part in zip(cache[index], (k, v), strict=True):
                stored[:, :, start:end] = part
            k, v = (stored[:, :, :end] for stored in cache[index])
        # With one query, all of the keys are past.
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        attended = attended.transpose(1, 2).reshape(-1, T, D)
        x = x + functional.linear(attended, *block["attn.c_proj"])
        normed = functional.layer_norm(x, (D,), *block["ln_2"])
        expanded = functional.gelu(functional.linear(normed, *block["mlp.c_fc"]), approximate="tanh")
        x = x + functional.linear(expanded, *block["mlp.c_proj"])
    return functional.layer_norm(x, (D,), weights["ln_f.weight"], weights["ln_f.bias"])
