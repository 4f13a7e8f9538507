"""Write an export as the next version of a folder, and load one."""

import contextlib
import os
import pathlib
import shutil
import tempfile

import numpy as np
import tensorflow as tf

from keras_tinyattn._boundary import check_names, os_errors, per_row, plain, shown, value_errors
from keras_tinyattn._paths import damaged, local_path, no_export, version_folder, versions_of
from keras_tinyattn.export import card
from keras_tinyattn.export.signatures import Signatures
from keras_tinyattn.generation.request import ROW_SETTINGS, require_stops
from keras_tinyattn.sampling import SETTINGS
from keras_tinyattn.tokenizer.base import as_texts

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["LoadedModel", "export_saved_model", "load_saved_model"]


def export_saved_model(model, tokenizer, path, about=None):
    """Write `path/VERSION/`, where VERSION is the next free integer.

    The export is written under another name and then renamed: a server that watches `path` sees a
    whole version or none, and a version that exists is never touched.

    Args:
        model: a built `CausalLM`.
        tokenizer: the tokenizer of its ids, with the same vocabulary size.
        path: the base folder, on this machine; made unless it exists. An export is renamed when it is
            finished, which object stores cannot do: copy `path/VERSION` there.
        about: what else the model card should say, a dictionary for JSON: the data that the model was
            trained on, its loss, a licence.

    Returns:
        The folder of the version, a `pathlib.Path`. `generate` and `generate_xla` give the same text in
        float32 and float64. In bfloat16 and float16 they round at different places, and a text may go
        another way where two tokens are about equally likely; the card says which holds.

    Raises:
        ValueError: if model and tokenizer disagree about the size of the vocabulary, a variable is not
            finite, `about` is not JSON, or the path is not local.
        OSError: if the folder cannot be written, or the disk is full.
    """
    if tokenizer.vocabulary_size != model.vocabulary_size:
        raise ValueError(
            "The tokenizer writes ids that the model reads. Expected one vocabulary size. Received: "
            f"{tokenizer.vocabulary_size} in the tokenizer, {model.vocabulary_size} in the model. "
            "Export the model with the tokenizer that it was trained with."
        )
    about = {} if about is None else about
    card.check(model, about)
    base = local_path(path)
    base.mkdir(parents=True, exist_ok=True)
    with _unfinished_folder(base) as unfinished:
        module = Signatures(model, tokenizer)
        signatures = module.trace()
        with os_errors():
            tf.saved_model.save(module, str(unfinished), signatures=signatures)
            card.write(unfinished, model, tokenizer, signatures, about)
        unfinished.chmod(0o755)
        return _rename_to_next_version(unfinished, base)


def load_saved_model(path):
    """Load an export: the base folder (its newest version) or the folder of a version.

    Returns:
        A `LoadedModel`.

    Raises:
        ValueError: if the folder holds no export of this package, or a damaged one.
    """
    return LoadedModel(path)


class LoadedModel:
    """An export, loaded: one method per signature, with Python values in and NumPy arrays out.

    Attributes:
        path: the folder of the version.
        signatures: the signatures themselves, by name.
    """

    def __init__(self, path):
        self.path = version_folder(path)
        # Held for life: the signatures alone would not keep the variables.
        try:
            self._loaded = tf.saved_model.load(str(self.path))
        except (MemoryError, tf.errors.ResourceExhaustedError):
            raise
        except Exception as error:  # Of any type, since any byte may be wrong.
            raise ValueError(_what_is_damaged(self.path, error)) from error
        self.signatures = dict(self._loaded.signatures)
        if "generate" not in self.signatures:
            reason = "a SavedModel without the signature generate of an export"
            raise ValueError(no_export(self.path, f"which is {reason}"))

    def generate(self, prompts, max_new_tokens, *, stop=None, jit_compile=False, **settings):
        """Continue texts, with each setting for all of them or one per text.

        Args:
            prompts: a text or a list of texts: strings, or bytes of UTF-8.
            max_new_tokens: how many tokens to add at most.
            stop: the text to stop at; None or "" is the tokenizer's own end.
            jit_compile: whether to call `generate_xla` instead, which is slower at the first call and
                faster after. Off unless asked for, since a server without XLA has `generate` alone;
                `keras_tinyattn.generate` compiles unless asked not to.
            **settings: how tokens are sampled, by the names of `sampling.SETTINGS`: `temperature`,
                `top_k`, `top_p`, `min_p`, `seed`.

        Returns:
            A dictionary of the outputs of the signature: NumPy arrays whose first axis is the batch, of
            size 1 for a single text.

        Raises:
            TypeError: if there is no setting of a name.
            ValueError: if a text or a setting is refused.
        """
        texts = _batch("prompts", prompts)
        rows = len(texts)
        # An export takes the settings that it was made with.
        inputs = self.signatures["generate"].structured_input_signature[1]
        check_names(settings, [setting for setting in SETTINGS if setting.name in inputs])
        settings["max_new_tokens"] = max_new_tokens
        values = {
            setting.name: per_row(setting, settings.get(setting.name, setting.default), rows)
            for setting in ROW_SETTINGS
            if setting.name in inputs
        }
        return self._call(
            "generate_xla" if jit_compile else "generate",
            prompt=texts,
            stop=_stop_texts(stop, rows),
            **{name: np.broadcast_to(value, (rows,)) for name, value in values.items()},
        )

    def score(self, texts):
        """Log-probabilities and loss of a text or a list of texts: the signature `score`."""
        return self._call("score", text=_batch("texts", texts))

    def attention(self, texts):
        """The weights of each layer and head for one or more texts: the signature `attention`."""
        return self._call("attention", text=_batch("texts", texts))

    def _call(self, signature, **inputs):
        with value_errors():
            outputs = self.signatures[signature](
                **{name: tf.constant(value) for name, value in inputs.items()}
            )
        return {name: value.numpy() for name, value in outputs.items()}


def _batch(name, texts):
    """One or more texts as `(B,)` strings."""
    given = as_texts(name, texts)
    if given.shape.rank > 1 or given.shape == (0,):
        raise ValueError(
            f"{name} must be one text, or a list of at least one. Expected a string or a list of them. "
            f"Received: {shown(texts)}."
        )
    return tf.reshape(given, (-1,))


def _stop_texts(stop, rows):
    """The stop of each row as bytes, from one for all or a list with one per row."""
    stop = plain(stop)
    stops = list(stop) if isinstance(stop, list) or np.ndim(stop) else [stop] * rows
    require_stops(stops, rows)
    return _batch("stop", [b"" if part is None else part for part in stops])


def _what_is_damaged(folder, error):
    """The sentence about an export that TensorFlow does not load."""
    if not (folder / card.CARD).exists() and not (folder / "variables").exists():
        return no_export(folder, "whose saved_model.pb is not that of an export")
    prefix = folder / "variables" / "variables"
    if not prefix.with_suffix(".index").is_file() or not list(folder.glob("variables/*.data-*")):
        return damaged(folder, "in which variables are missing")
    what = "variables"
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
        what = "saved_model.pb"
    except Exception as found:
        error = found
    reason = str(error).strip().partition("\n")[0]
    return damaged(folder, f"whose {what} cannot be read ({type(error).__name__}: {reason})")


@contextlib.contextmanager
def _unfinished_folder(base):
    """A folder in `base` to write to, removed in the end unless it was renamed.

    The process holds a lock on the folder, which the system frees when it dies: so those of processes
    that were killed are told from those of living ones, and removed. Where there are no such locks
    (Windows, some network file systems), they stay.
    """
    with contextlib.ExitStack() as locks:
        for leftover in base.glob(".unfinished-*"):
            with contextlib.ExitStack() as lock:
                if _lock_folder(leftover, lock, wait=False):
                    shutil.rmtree(leftover, ignore_errors=True)
        unfinished = None
        while unfinished is None or not unfinished.is_dir():  # Removed before it was locked.
            unfinished = pathlib.Path(tempfile.mkdtemp(prefix=".unfinished-", dir=base))
            _lock_folder(unfinished, locks, wait=True)
        try:
            yield unfinished
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _lock_folder(folder, lock, wait):
    """Whether the folder could be locked, until the stack `lock` ends."""
    if fcntl is None:
        return False
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        lock.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # Held by a living process, removed meanwhile, or not possible there.
        return False
    return True


def _rename_to_next_version(unfinished, base):
    while True:
        version = base / str(max((int(entry.name) for entry in versions_of(base)), default=0) + 1)
        try:
            # Fails if another export took the number meanwhile, since that folder is not empty.
            os.rename(unfinished, version)
        except FileExistsError:
            continue
        except OSError:
            if version.exists():
                continue
            raise
        return version
