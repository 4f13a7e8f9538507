"""Write an export as the next version of a folder, and load one."""

import contextlib
import os
import pathlib
import shutil
import tempfile

import tensorflow as tf

from keras_tinyattn._boundary import check_names, value_errors
from keras_tinyattn.export import card
from keras_tinyattn.export.signatures import Signatures
from keras_tinyattn.sampling import SETTINGS

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
        path: the base folder; made unless it exists.
        about: what else the model card should say, a dictionary for JSON: the data that the model was
            trained on, its loss, a licence.

    Returns:
        The folder of the version, a `pathlib.Path`. `generate` and `generate_xla` give the same text in
        float32 and float64. In bfloat16 and float16 they round at different places, and a text may go
        another way where two tokens are about equally likely; the card says which holds.

    Raises:
        ValueError: if model and tokenizer disagree about the size of the vocabulary, a variable is not
            finite, or `about` is not JSON.
        OSError: if the folder cannot be written.
    """
    if tokenizer.vocabulary_size != model.vocabulary_size:
        raise ValueError(
            "The tokenizer writes ids that the model reads. Expected one vocabulary size. Received: "
            f"{tokenizer.vocabulary_size} in the tokenizer, {model.vocabulary_size} in the model. "
            "Export the model with the tokenizer that it was trained with."
        )
    about = {} if about is None else about
    card.check(model, about)
    base = pathlib.Path(path)
    base.mkdir(parents=True, exist_ok=True)
    with _unfinished_folder(base) as unfinished:
        module = Signatures(model, tokenizer)
        signatures = module.trace()
        tf.saved_model.save(module, str(unfinished), signatures=signatures)
        card.write(unfinished, model, tokenizer, signatures, about)
        unfinished.chmod(0o755)
        return _rename_to_next_version(unfinished, base)


def load_saved_model(path):
    """Load an export: the base folder (its newest version) or the folder of a version.

    Returns:
        A `LoadedModel`.

    Raises:
        ValueError: if the folder holds no export of this package.
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
        except (OSError, tf.errors.OpError) as error:
            raise ValueError(_NO_EXPORT.format(path=path)) from error
        self.signatures = dict(self._loaded.signatures)
        if "generate" not in self.signatures:
            raise ValueError(_NO_EXPORT.format(path=path))

    def generate(self, prompts, max_new_tokens, *, stop="", jit_compile=False, **settings):
        """Continue texts.

        Args:
            prompts: a string, or a list of strings.
            max_new_tokens: one for all or one per prompt, as the signature `generate` takes it.
            stop: likewise, the text to stop at; "" is the tokenizer's own end.
            jit_compile: whether to call `generate_xla` instead.
            **settings: how tokens are sampled, likewise, by the names of `sampling.SETTINGS`:
                `temperature`, `top_k`, `top_p`, `min_p`, `seed`.

        Returns:
            A dictionary of the outputs of the signature, NumPy arrays of batch size B, 1 for a string.

        Raises:
            TypeError: if there is no setting of a name.
            ValueError: if a prompt or a setting is refused.
        """
        texts = tf.constant([prompts] if isinstance(prompts, str) else list(prompts), tf.string)
        # An export takes the settings that it was made with.
        inputs = self.signatures["generate"].structured_input_signature[1]
        known = [setting for setting in SETTINGS if setting.name in inputs]
        check_names(settings, known)
        values = {setting.name: settings.get(setting.name, setting.default) for setting in known}
        values |= {"max_new_tokens": max_new_tokens, "stop": stop}

        def per_row(value, dtype):
            return tf.broadcast_to(tf.constant(value, dtype), tf.shape(texts))

        return self._call(
            "generate_xla" if jit_compile else "generate",
            prompt=texts,
            **{name: per_row(value, inputs[name].dtype) for name, value in values.items()},
        )

    def score(self, texts):
        """Log-probabilities and loss of texts: the signature `score`."""
        return self._call("score", text=tf.constant([texts] if isinstance(texts, str) else texts))

    def attention(self, texts):
        """The weights of each layer and head for texts: the signature `attention`."""
        return self._call("attention", text=tf.constant([texts] if isinstance(texts, str) else texts))

    def _call(self, signature, **inputs):
        with value_errors():
            outputs = self.signatures[signature](**inputs)
        return {name: value.numpy() for name, value in outputs.items()}


_NO_EXPORT = (
    "There is no export to load. Expected a folder that export_saved_model wrote, or a version in it. "
    "Received: {path}. Export a model first, or name another folder."
)


def version_folder(path):
    """The version folder that a path means: itself, or the newest version in it."""
    path = pathlib.Path(path)
    if (path / "saved_model.pb").is_file():
        return path
    versions = _versions(path)
    if not versions or not (path / str(versions[-1]) / "saved_model.pb").is_file():
        raise ValueError(_NO_EXPORT.format(path=path))
    return path / str(versions[-1])


def _versions(base):
    """The version numbers in a base folder, ascending."""
    if not base.is_dir():
        return []
    return sorted(int(entry.name) for entry in base.iterdir() if entry.name.isdecimal())


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
        version = base / str(max(_versions(base), default=0) + 1)
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
