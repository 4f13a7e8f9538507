"""Places on this machine: what a path names, and the version that a folder of exports means.

Python alone is all that this file imports, since scripts run it in a process without the package.
"""

import os
import pathlib
import re
import urllib.parse
import urllib.request


def local_path(path):
    """The `pathlib.Path` that a path of a user names.

    `~` and `~user` are expanded, and a `file:` URL is the path in it. Another scheme is refused: it
    would become a local folder called `gs:`, and an object store cannot rename a finished folder.

    Args:
        path: a string, bytes, an `os.PathLike`, or a `file:` URL.

    Raises:
        TypeError: if it is none of these.
        ValueError: if it cannot name a local file.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise TypeError(
            "A path is text. Expected a string, bytes or an os.PathLike. "
            f"Received: {path!r}. Give the name of a file or folder."
        ) from None
    # A path object has already made one slash of two. One letter is a drive of Windows.
    scheme = re.match(r"([^/\\]{2,}):(?:[/\\]|$)", text)
    problem = None
    if scheme and scheme[1].lower() == "file":
        place = text[len("file:") :]
        host = urllib.parse.urlsplit(text).netloc
        if place.startswith("//"):
            place = place[2 + len(host) :]
        if host.lower() not in ("", "localhost"):
            problem = f"which is on the host {host!r}"
        elif not place:
            problem = "which names no file"
        text = urllib.request.url2pathname(place)
    elif scheme:
        problem = f"which has the scheme {scheme[1]!r}"
    problem = problem or _unusable(text)
    if problem:
        raise ValueError(
            "A path must name a place on this machine. Expected a local path or a file:// URL. "
            f"Received: {os.fsdecode(path)!r}, {problem}. Use a local folder, and copy from or to "
            "other places with their own tools."
        )
    try:
        return pathlib.Path(text) if scheme else pathlib.Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(
            "The home directory in a path is unknown. Expected ~ or ~user of a user of this machine. "
            f"Received: {text!r}. Write the path out, or ./~ for a folder of that name."
        ) from error


def _unusable(text):
    """Why no file can have this name, or None."""
    if not text:
        return "which is empty"
    if "\0" in text:
        return "which holds a null character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "which is not UTF-8, as TensorFlow's file names are"
    return None


def version_folder(path):
    """The version folder that a path means: itself, or the newest version in it.

    Raises:
        ValueError: if there is no SavedModel in it; says which part is missing.
    """
    path = local_path(path)
    versions = [version for version in versions_of(path) if version.is_dir()]
    newest = path if _has_graph(path) or not versions else versions[-1]
    if _has_graph(newest):
        return newest
    # The other files of an export show that there was one.
    if any((newest / name).exists() for name in ("variables", "model_card.json")):
        raise ValueError(damaged(newest, "in which saved_model.pb is missing"))
    whole = [version.name for version in versions if _has_graph(version)]
    if whole:
        raise ValueError(
            "The newest version of the export is not complete. Expected a folder with a "
            f"saved_model.pb. Received: {path}, in which version {newest.name} holds no "
            f"saved_model.pb; {whole[-1]} does. Remove version {newest.name}, or name another one."
        )
    if versions:
        raise ValueError(no_export(path, f"in which version {newest.name} holds no saved_model.pb"))
    kind = "which is empty" if path.is_dir() else "which is a file"
    if path.is_dir() and any(path.iterdir()):
        kind = "which holds neither a saved_model.pb nor a folder with a number as its name"
    raise ValueError(no_export(path, kind if path.exists() else "which does not exist"))


def versions_of(base):
    """What has a number as its name in a base folder, in the order of the numbers."""
    if not base.is_dir():
        return []
    numbered = [entry for entry in base.iterdir() if re.fullmatch(r"[0-9]+", entry.name)]
    return sorted(numbered, key=lambda entry: int(entry.name))


def no_export(path, reason):
    return (
        "There is no export to load. Expected a folder that export_saved_model wrote, or a version in "
        f"it. Received: {path}, {reason}. Export a model first, or name another folder."
    )


def damaged(folder, reason):
    return (
        "The export is damaged. Expected all that export_saved_model wrote. "
        f"Received: {folder}, {reason}. Copy it again, or export the model again."
    )


def _has_graph(folder):
    return (folder / "saved_model.pb").is_file()
