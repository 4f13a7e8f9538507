"""The weights of a GPT-2, as others name and lay them out, in a `CausalLM`."""

import re

import keras
import numpy as np

from keras_tinyattn.model import gpt
from keras_tinyattn.pretrained.files import listed, opened

__all__ = ["causal_lm_from_gpt2"]

# What wrappers put in front of a name: torch.compile, DataParallel, a task's model, Hugging Face.
_WRAPPERS = {"_orig_mod", "module", "model", "transformer"}
# The causal mask, which PyTorch models keep among their tensors; ours makes it from positions.
_MASK_NAME = re.compile(r"h\.[0-9]+\.attn\.(bias|masked_bias)")
_BLOCK_NAME = re.compile(r"h\.[0-9]+\.")
# Integers of a quantized model mean nothing without their scales.
_DTYPES = ("float16", "bfloat16", "float32", "float64")


def causal_lm_from_gpt2(state_dict, num_heads, dropout=0.0, activation=None, **kwargs):
    """A `CausalLM` with the weights of a GPT-2, as Hugging Face, minGPT and nanoGPT name them.

    Sizes follow from the shapes. Kernels may be stored `(in, out)`, as GPT-2's own `Conv1D` does, or
    `(out, in)`, as PyTorch's `Linear` does: the shape of `attn.c_attn.weight`, `(D, 3 D)` or
    `(3 D, D)`, says which, and holds for the square kernels too, whose shape says nothing.

    No tensor says which activation the MLPs have: GPT-2, minGPT and Hugging Face (`gelu_new`) use the
    tanh approximation of GELU, but nanoGPT the exact one, which is `activation="gelu"`. The wrong one
    changes each logit a little and raises no error.

    A file is read a tensor at a time: while it is read, memory holds the model and a few copies of the
    largest tensor. A `.safetensors` file needs the `safetensors` library: `keras-tinyattn[pretrained]`.

    Args:
        state_dict: mapping of names such as `transformer.h.0.attn.c_attn.weight` to float arrays or
            tensors; or the path of a `.npz` or `.safetensors` file of them. `transformer`, `model`,
            `module` and `_orig_mod` may stand anywhere in a name, or not. Without any bias, as nanoGPT
            trains with `bias=False`, the biases are zeros. Without a `lm_head.weight`, or with one
            equal to `wte.weight`, the projection is tied to the token table.
        num_heads: H, which no shape tells: 12 for the smallest GPT-2.
        dropout: share dropped in further training, in [0, 1).
        activation: activation of the MLPs, as in `DecoderBlock`; tanh GELU unless given.
        **kwargs: passed on to `CausalLM`, such as `name`.

    Returns:
        A `CausalLM`, built.

    Raises:
        ValueError: if a name is missing, unexpected or there twice, a shape does not fit, a tensor is
            not of finite floats, or the heads do not divide the width; or if the file is of another
            kind, damaged, or beyond a limit: a `.npz` file may unpack to 100 MB and 20 times its own
            size, the header of a `.safetensors` file has at most 100 MB.
        TypeError: if `state_dict` is neither a mapping nor a path, or a name is no string.
        ImportError: if the file needs `safetensors`, which is not installed.

    Example:

    >>> D, zeros = 6, np.zeros
    >>> block = {
    ...     "ln_1.weight": zeros(D), "ln_1.bias": zeros(D),
    ...     "ln_2.weight": zeros(D), "ln_2.bias": zeros(D),
    ...     "attn.c_attn.weight": zeros((D, 3 * D)), "attn.c_attn.bias": zeros(3 * D),
    ...     "attn.c_proj.weight": zeros((D, D)), "attn.c_proj.bias": zeros(D),
    ...     "mlp.c_fc.weight": zeros((D, 4 * D)), "mlp.c_fc.bias": zeros(4 * D),
    ...     "mlp.c_proj.weight": zeros((4 * D, D)), "mlp.c_proj.bias": zeros(D),
    ... }
    >>> tables = {"wte.weight": zeros((11, D)), "wpe.weight": zeros((5, D))}
    >>> final = {"ln_f.weight": zeros(D), "ln_f.bias": zeros(D)}
    >>> blocks = {f"h.0.{name}": value for name, value in block.items()}
    >>> model = causal_lm_from_gpt2({**tables, **blocks, **final}, num_heads=2)
    >>> model.vocabulary_size, model.sequence_length, len(model.blocks)
    (11, 5, 1)

    Reference: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019.
    """
    with opened(state_dict) as (names, read):
        return _model(_Tensors(names, read), num_heads, dropout, activation, **kwargs)


def _model(tensors, num_heads, dropout, activation, **kwargs):
    tensors.require(["wte.weight", "wpe.weight"])
    vocabulary_size, hidden_dim = tensors.shape("wte.weight", 2)
    sequence_length = tensors.shape("wpe.weight", 2)[0]
    num_layers = max(1, len({match[0] for match in map(_BLOCK_NAME.match, tensors.left) if match}))
    layers = ["ln_f", *_block_layers(num_layers)]
    biases = [f"{layer}.bias" for layer in layers]
    has_biases = any(name in tensors.left for name in biases)
    tensors.require([*(f"{layer}.weight" for layer in layers), *(biases if has_biases else ())])
    linear = tensors.shape("h.0.attn.c_attn.weight", 2) == (3 * hidden_dim, hidden_dim)
    intermediate_dim = tensors.shape("h.0.mlp.c_fc.weight", 2)[0 if linear else 1]

    def kernel(name, input_dim, output_dim):
        if linear:
            return tensors.take(name, (output_dim, input_dim)).T
        return tensors.take(name, (input_dim, output_dim))

    table_shape, has_head = (vocabulary_size, hidden_dim), "lm_head.weight" in tensors.left
    # Both are read again when their turn comes: kept until then, they would add to the peak of memory.
    tied = not has_head or np.array_equal(
        tensors.read("lm_head.weight", table_shape), tensors.read("wte.weight", table_shape)
    )
    model = gpt(
        *(vocabulary_size, sequence_length, hidden_dim, num_heads, num_layers),
        intermediate_dim=intermediate_dim,
        dropout=dropout,
        activation=activation,
        tie_embeddings=tied,
        **kwargs,
    )
    _build_with_zeros(model)

    model.embedding.token_embeddings.assign(tensors.take("wte.weight", table_shape))
    model.embedding.position_embeddings.assign(
        tensors.take("wpe.weight", (sequence_length, hidden_dim))
    )
    for index, block in enumerate(model.blocks):
        _assign_norm(block.attention_norm, tensors, f"h.{index}.ln_1")
        _assign_norm(block.mlp_norm, tensors, f"h.{index}.ln_2")
        attention, name = block.attention, f"h.{index}.attn"
        parts = ("query", "key", "value")
        kernels = np.split(kernel(f"{name}.c_attn.weight", hidden_dim, 3 * hidden_dim), 3, axis=1)
        biases = np.split(tensors.take(f"{name}.c_attn.bias", (3 * hidden_dim,)), 3)
        for part, part_kernel, part_bias in zip(parts, kernels, biases, strict=True):
            getattr(attention, f"{part}_kernel").assign(part_kernel)
            getattr(attention, f"{part}_bias").assign(part_bias)
        attention.output_kernel.assign(kernel(f"{name}.c_proj.weight", hidden_dim, hidden_dim))
        attention.output_bias.assign(tensors.take(f"{name}.c_proj.bias", (hidden_dim,)))
        for layer, name, sizes in (
            (block.mlp_expand, f"h.{index}.mlp.c_fc", (hidden_dim, intermediate_dim)),
            (block.mlp_contract, f"h.{index}.mlp.c_proj", (intermediate_dim, hidden_dim)),
        ):
            layer.kernel.assign(kernel(f"{name}.weight", *sizes))
            layer.bias.assign(tensors.take(f"{name}.bias", sizes[1:]))
    _assign_norm(model.final_norm, tensors, "ln_f")
    if has_head:
        head = tensors.take("lm_head.weight", table_shape)
        if not tied:
            model.projection.kernel.assign(head.T)
    tensors.refuse_the_rest()
    return model


def _build_with_zeros(model):
    """Build a model whose start is overwritten anyway: drawing it takes memory that is not returned.

    The layers keep their own initializers, with which a clone starts.
    """
    own = [
        (layer, name, getattr(layer, name))
        for layer in model._flatten_layers(include_self=False)
        for name in ("kernel_initializer", "embeddings_initializer")
        if hasattr(layer, name)
    ]
    for layer, name, _ in own:
        setattr(layer, name, keras.initializers.Zeros())
    model.build((None, model.sequence_length))
    for layer, name, initializer in own:
        setattr(layer, name, initializer)


def _block_layers(num_layers):
    layers = ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    return [f"h.{index}.{layer}" for index in range(num_layers) for layer in layers]


def _assign_norm(layer, tensors, name):
    layer.gamma.assign(tensors.take(f"{name}.weight", tuple(layer.gamma.shape)))
    layer.beta.assign(tensors.take(f"{name}.bias", tuple(layer.beta.shape)))


class _Tensors:
    """A state dict of which each tensor is taken once, and in which nothing may be left over."""

    def __init__(self, names, read):
        self._read, self._received, self.left = read, {}, {}
        for name in names:
            if not isinstance(name, str):
                raise TypeError(
                    "The tensors of a state dict have names. Expected strings. "
                    f"Received: {listed([repr(name)])}. Give a GPT-2's names."
                )
            bare = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
            if bare in self._received:
                raise ValueError(
                    "Two tensors have one name in GPT-2. Expected one of each. "
                    f"Received: {listed([self._received[bare], name])}. Leave one of them out."
                )
            self._received[bare] = name
            if not _MASK_NAME.fullmatch(bare):
                self.left[bare] = name

    def require(self, names):
        missing = [name for name in names if name not in self.left]
        if missing:
            # As the names that are there begin.
            prefix = self.left.get("wte.weight", "wte.weight").removesuffix("wte.weight")
            raise ValueError(
                "The state dict is not a whole GPT-2. "
                f"Expected {listed([prefix + name for name in missing])} as well. "
                f"Received: {listed(self._received.values())}. "
                "Give the state dict of the whole model; in nanoGPT's ckpt.pt it is under 'model'."
            )

    def shape(self, name, rank):
        shape = tuple(self._tensor(name).shape)
        if len(shape) != rank or 0 in shape:
            raise ValueError(
                f"{listed([self.left[name]])} is not GPT-2's. Expected {rank} axes, none of size 0. "
                f"Received: shape {shape}. Give the state dict of a GPT-2."
            )
        return shape

    def take(self, name, shape):
        if name.endswith(".bias") and name not in self.left:
            return np.zeros(shape, "float32")
        array = self.read(name, shape)
        del self.left[name]
        return array

    def read(self, name, shape):
        value, received = self._tensor(name), self.left[name]
        if tuple(value.shape) != tuple(shape):
            raise ValueError(
                f"{listed([received])} does not fit the rest of the model. "
                f"Expected shape {tuple(shape)}. Received: shape {tuple(value.shape)}. "
                "The other shapes come from wte.weight, and the order of a kernel's axes from "
                "h.0.attn.c_attn.weight."
            )
        if hasattr(value, "detach"):  # a PyTorch tensor
            value = value.detach().cpu().float().numpy()
        with np.errstate(over="ignore"):
            array = np.asarray(value, dtype="float32")
        if not np.all(np.isfinite(array)):
            raise ValueError(
                f"{listed([received])} is not finite. Expected numbers that float32 can hold. "
                "Received: NaN or infinity. Give weights from before the training diverged."
            )
        return array

    def refuse_the_rest(self):
        if self.left:
            raise ValueError(
                "The state dict holds what a GPT-2 has not, and dropping it would change the model. "
                f"Expected GPT-2's tensors only. Received: {listed(self.left.values())}. "
                "Leave these out if they do not matter."
            )

    def _tensor(self, name):
        value = self._read(self.left[name])
        dtype = getattr(value, "dtype", "float32")
        dtype = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
        if not hasattr(value, "shape") or dtype not in _DTYPES:
            kind = dtype if hasattr(value, "shape") else type(value).__name__
            raise ValueError(
                f"{listed([self.left[name]])} is no float tensor. Expected {', '.join(_DTYPES)}. "
                f"Received: {kind}. Give the weights before quantization, as arrays."
            )
        return value
