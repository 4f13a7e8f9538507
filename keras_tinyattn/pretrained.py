"""Weights that others trained, in a `CausalLM`."""

import collections.abc
import re

import numpy as np

from keras_tinyattn._paths import local_path
from keras_tinyattn.model import gpt

__all__ = ["causal_lm_from_gpt2"]

# The causal mask, which PyTorch models keep among their tensors; ours makes it from positions.
_MASK_NAME = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
_BLOCK_NAME = re.compile(r"h\.\d+\.")
# What torch.compile, parallel wrappers, Hugging Face and nanoGPT put in front of a name, in any order.
_PREFIX = re.compile(r"^((_orig_mod|module|model|transformer)\.)+")


def causal_lm_from_gpt2(state_dict, num_heads, activation=None, dropout=0.0, **kwargs):
    """A `CausalLM` with the weights of a GPT-2, as Hugging Face, minGPT and nanoGPT name them.

    Sizes follow from the shapes. Kernels may be stored `(in, out)`, as GPT-2's own `Conv1D` does, or
    `(out, in)`, as PyTorch's `Linear` does: the shape of `attn.c_attn.weight`, `(D, 3 D)` or
    `(3 D, D)`, says which, and holds for the square kernels too, whose shape says nothing.

    Args:
        state_dict: mapping of names such as `transformer.h.0.attn.c_attn.weight`, with any of
            `_orig_mod.`, `module.`, `model.` and `transformer.` in front or none, to arrays or tensors;
            or the path of a `.npz` or `.safetensors` file of them. Without a `lm_head.weight`, or with
            one equal to `wte.weight`, the projection is tied to the token table. Without any bias, as
            nanoGPT's `bias=False` saves, all are zero.
        num_heads: H, which no shape tells: 12 for the smallest GPT-2.
        activation: of the MLPs, which no weight tells either: GPT-2's tanh GELU unless given, Hugging
            Face's "gelu_new". nanoGPT's is the exact one, "gelu".
        dropout: share dropped in further training, in [0, 1).
        **kwargs: passed on to `gpt`, such as `name` or `dtype`.

    Returns:
        A `CausalLM`, built.

    Raises:
        ValueError: if a name is missing or unexpected, a shape does not fit, the heads do not divide
            the width, or the file is of another kind, damaged, or unpacks to more than 100 MB and
            twenty times its size.
        ModuleNotFoundError: if a `.safetensors` file is given and the extra `pretrained` is not
            installed.

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
    tensors = _Tensors(state_dict)
    vocabulary_size, hidden_dim = tensors.shape("wte.weight", 2)
    sequence_length = tensors.shape("wpe.weight", 2)[0]
    num_layers = max(1, len({match[0] for match in map(_BLOCK_NAME.match, tensors.names) if match}))
    names = ["ln_f.weight", "ln_f.bias", *_block_names(num_layers)]
    has_biases = any(name.endswith(".bias") for name in tensors.names)
    tensors.require([name for name in names if has_biases or not name.endswith(".bias")])
    linear = tensors.shape("h.0.attn.c_attn.weight", 2) == (3 * hidden_dim, hidden_dim)
    intermediate_dim = tensors.shape("h.0.mlp.c_fc.weight", 2)[0 if linear else 1]

    def kernel(name, input_dim, output_dim):
        if linear:
            return tensors.take(name, (output_dim, input_dim)).T
        return tensors.take(name, (input_dim, output_dim))

    table = tensors.take("wte.weight", (vocabulary_size, hidden_dim))
    head = tensors.take("lm_head.weight", table.shape) if "lm_head.weight" in tensors.names else None
    tied = head is None or np.array_equal(head, table)
    model = gpt(
        *(vocabulary_size, sequence_length, hidden_dim, num_heads, num_layers),
        intermediate_dim=intermediate_dim,
        activation=activation,
        dropout=dropout,
        tie_embeddings=tied,
        **kwargs,
    )
    model.build((None, sequence_length))

    model.embedding.token_embeddings.assign(table)
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
    if not tied:
        model.projection.kernel.assign(head.T)
    tensors.refuse_the_rest()
    return model


def _block_names(num_layers):
    linears = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    return [
        f"h.{index}.{layer}.{kind}"
        for index in range(num_layers)
        for layer in ("ln_1", "ln_2", *linears)
        for kind in ("weight", "bias")
    ]


def _assign_norm(layer, tensors, name):
    layer.gamma.assign(tensors.take(f"{name}.weight", tuple(layer.gamma.shape)))
    layer.beta.assign(tensors.take(f"{name}.bias", tuple(layer.beta.shape)))


class _Tensors:
    """A state dict of which each tensor is taken once, and in which nothing may be left over."""

    def __init__(self, state_dict):
        if not isinstance(state_dict, collections.abc.Mapping):
            state_dict = _read(local_path(state_dict))
        # The names as they were received, by the names of a bare GPT-2.
        self._received = {}
        for name in state_dict:
            short = _PREFIX.sub("", str(name))
            if short in self._received:
                raise ValueError(
                    "A tensor has one name. Expected names that differ by more than their prefixes. "
                    f"Received: {self._received[short]} and {name}. Leave one out."
                )
            self._received[short] = name
        self._left = {
            short: state_dict[name]
            for short, name in self._received.items()
            if not _MASK_NAME.fullmatch(short)
        }
        self.names = frozenset(self._left)
        # Most have the prefix of the first; a head often has less.
        first = next(iter(self._received), "")
        self._prefix = str(self._received.get(first, "")).removesuffix(first)
        self.require(["wte.weight", "wpe.weight"])

    def require(self, names):
        missing = [name for name in names if name not in self.names]
        if missing:
            received = [*self._received.values()]
            raise ValueError(
                "The state dict is not a whole GPT-2. Expected also "
                f"{_listed([self._prefix + name for name in missing])}. "
                f"Received: {len(received)} names, {_listed(received) or 'none'}. "
                "Give the state dict of the whole model."
            )

    def shape(self, name, rank):
        shape = tuple(self._left[name].shape)
        if len(shape) != rank:
            raise ValueError(
                f"{self._received[name]} is not GPT-2's. Expected {rank} axes. "
                f"Received: shape {shape}. Give the state dict of a GPT-2."
            )
        return shape

    def take(self, name, shape):
        """A tensor as a float32 array; a bias of a model without any is zero."""
        if name.endswith(".bias") and name not in self.names:
            return np.zeros(shape, "float32")
        value = self._left.pop(name)
        if tuple(value.shape) != tuple(shape):
            raise ValueError(
                f"{self._received[name]} does not fit the rest of the model. "
                f"Expected shape {tuple(shape)}. Received: shape {tuple(value.shape)}. "
                "The other shapes come from wte.weight, and the order of a kernel's axes from "
                "h.0.attn.c_attn.weight."
            )
        if hasattr(value, "detach"):  # a PyTorch tensor
            value = value.detach().cpu().float().numpy()
        return np.asarray(value, dtype="float32")

    def refuse_the_rest(self):
        if self._left:
            received = [self._received[name] for name in self._left]
            raise ValueError(
                "The state dict holds what a GPT-2 has not, and dropping it would change the model. "
                f"Expected GPT-2's tensors only. Received: {_listed(received)}. "
                "Leave these out if they do not matter."
            )


def _listed(names):
    return ", ".join(str(name)[:200] for name in names[:8]) + (
        f" and {len(names) - 8} more" if len(names) > 8 else ""
    )


def _read(path):
    """The tensors of a file by name."""
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    if path.suffix not in readers:
        raise ValueError(
            "The weights are of an unknown kind. Expected a mapping, or a path that ends in .npz or "
            f".safetensors. Received: {path}. Save PyTorch weights with safetensors.torch.save_file."
        )
    try:
        return readers[path.suffix](path)
    except (OSError, ModuleNotFoundError):
        raise
    except Exception as error:  # Of any type, since any byte may be wrong.
        raise ValueError(
            f"The weights cannot be read. Expected a {path.suffix} file of float tensors. "
            f"Received: {path}, which is damaged or of another kind ({type(error).__name__}: {error}). "
            "Fetch or save it again."
        ) from error


def _read_npz(path):
    size = path.stat().st_size
    limit = max(100_000_000, 20 * size)
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        unpacked = sum(entry.file_size for entry in arrays.zip.infolist())
        if unpacked > limit:
            raise ValueError(f"{size} bytes that unpack to {unpacked}, of at most {limit} allowed")
        return dict(arrays)


def _read_safetensors(path):
    """Tensors that are read when they are taken, so that a file is never in memory as a whole."""
    try:
        import safetensors
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Reading a .safetensors file needs the package safetensors. "
            'Install it: pip install "keras-tinyattn[pretrained]".'
        ) from error
    with path.open("rb"):  # Errors of the file system as Python has them.
        pass
    # NumPy knows no bfloat16, TensorFlow does.
    file = safetensors.safe_open(path, framework="tf")
    tensors = {name: _Stored(file, name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in tensors.items():
        if tensor.dtype not in ("F64", "F32", "F16", "BF16", "U8", "BOOL", "I64"):
            raise ValueError(f"{name} has the type {tensor.dtype}")
    return tensors


class _Stored:
    """A tensor in a .safetensors file."""

    def __init__(self, file, name):
        self._file, self._name = file, name
        stored = file.get_slice(name)
        self.shape, self.dtype = tuple(stored.get_shape()), stored.get_dtype()

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self._file.get_tensor(self._name)).astype(dtype or "float32")
