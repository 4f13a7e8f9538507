"""Files of tensors that others wrote: whatever is wrong with one is a sentence that names it."""

import collections
import collections.abc
import contextlib
import json
import zipfile

import numpy as np

from keras_tinyattn._paths import local_path

__all__ = ["listed", "opened"]

# Weights hardly compress: what unpacks to more than this, and this many times its own size, holds none.
_UNPACKED_BYTES, _UNPACKED_RATIO = 100_000_000, 20


@contextlib.contextmanager
def opened(state_dict):
    """The names in a mapping or file, and a function that reads the tensor of a name."""
    if isinstance(state_dict, collections.abc.Mapping):
        yield list(state_dict), state_dict.__getitem__
        return
    path = local_path(state_dict)
    opener = {".npz": _open_npz, ".safetensors": _open_safetensors}.get(path.suffix.lower())
    if opener is None:
        raise ValueError(
            "The weights are of an unknown kind. Expected a mapping, or a path that ends in .npz or "
            f".safetensors. Received: {path}. Save PyTorch weights with safetensors.torch.save_file."
        )
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        with _named_errors(path):
            names, read = opener(file, stack)
            twice = [name for name, count in collections.Counter(names).items() if count > 1]
            if twice:
                raise ValueError(f"more than one tensor has the name {listed(twice)}")

        def read_named(name):
            with _named_errors(path):
                return read(name)

        yield names, read_named


@contextlib.contextmanager
def _named_errors(path):
    """What libraries raise for a file, as one sentence that names it."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            "The weights cannot be read. Expected an .npz or .safetensors file of arrays. "
            f"Received: {path}, which is damaged or of another kind ({reason[:200]}). "
            "Fetch or save it again."
        ) from error


def _open_npz(file, stack):
    archive = stack.enter_context(zipfile.ZipFile(file))
    entries = archive.infolist()
    limit = _UNPACKED_BYTES + _UNPACKED_RATIO * file.seek(0, 2)
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > limit:
        raise ValueError(f"it unpacks to {unpacked:,} bytes, and the limit is {limit:,}")
    names = [entry.filename.removesuffix(".npy") for entry in entries]
    by_name = dict(zip(names, entries, strict=True))

    def read(name):
        with archive.open(by_name[name]) as entry:
            return np.lib.format.read_array(entry, allow_pickle=False)

    return names, read


def _open_safetensors(file, stack):
    try:
        import ml_dtypes  # noqa: F401 - gives NumPy the name bfloat16; Keras depends on it.
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            f"{file.name} cannot be read without the safetensors library. Expected it installed. "
            'Received: none. Install it with `pip install "keras-tinyattn[pretrained]"`.'
        ) from error
    # Mapped pages would count as memory of the process, twice the weights in all.
    weights = stack.enter_context(safe_open(file.name, framework="numpy", backend="pread"))
    # The library has checked the header by now; of two tensors with one name it would take the last.
    header = file.read(int.from_bytes(file.read(8), "little"))
    names = json.loads(header, object_pairs_hook=lambda pairs: [name for name, _ in pairs])
    return [name for name in names if name != "__metadata__"], weights.get_tensor


def listed(names):
    """At most eight names, each on one line and at most 80 characters long."""
    names = list(names)
    shown = [repr(name[:80])[1:-1] + ("..." if len(name) > 80 else "") for name in names[:8]]
    return (", ".join(shown) or "no names") + (f" and {len(names) - 8} more" if len(names) > 8 else "")
