"""What a path names, on every entry the same."""

import os
import pathlib

import pytest

from keras_tinyattn._paths import local_path


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("a/b", "a/b"),
        (b"a/b", "a/b"),
        (pathlib.Path("a/b"), "a/b"),
        ("~", "/home/me"),
        (pathlib.Path("~/a"), "/home/me/a"),
        (b"~/a", "/home/me/a"),
        ("a/~", "a/~"),
        ("file:///a/b", "/a/b"),
        ("file:/a/b", "/a/b"),
        ("FILE://localhost/a%20b%C3%A9", "/a b\u00e9"),
        (pathlib.Path("file:///a/b"), "/a/b"),
        ("file:///~/a", "/~/a"),
        ("a:b", "a:b"),
        ("a/gs:/b", "a/gs:/b"),
        ("./gs:/b", "gs:/b"),
        ("C:/models", "C:/models"),
        ("C:\\models", "C:\\models"),
    ],
)
def test_a_path_names_a_place_on_this_machine(path, place, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert local_path(path) == pathlib.Path(place)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        *((f"{scheme}://bucket/a", f"has the scheme '{scheme}'") for scheme in ("gs", "s3", "hdfs")),
        (pathlib.Path("gs://bucket/a"), "has the scheme 'gs'"),
        (b"gs://bucket", "has the scheme 'gs'"),
        ("gs:", "has the scheme 'gs'"),
        ("memory:/a", "has the scheme 'memory'"),
        ("file://server/a", "is on the host 'server'"),
        ("file://", "names no file"),
        ("file:///a%00b", "holds a null character"),
        ("", "is empty"),
        ("a\0b", "holds a null character"),
        (b"a\xff", "is not UTF-8"),
        ("\ud800", "is not UTF-8"),
    ],
)
def test_a_path_that_names_no_place_here_is_refused(path, problem):
    with pytest.raises(ValueError, match=r"A path must name a place on this machine\.") as raised:
        local_path(path)
    assert problem in str(raised.value)


@pytest.mark.parametrize("path", [None, 3, ["a"], 1.5])
def test_what_is_no_path_is_a_type_error(path):
    with pytest.raises(
        TypeError, match=r"A path is text\. Expected a string, bytes or an os\.PathLike"
    ):
        local_path(path)


def test_an_unknown_user_has_no_home_directory():
    with pytest.raises(ValueError, match="home directory in a path is unknown"):
        local_path("~nobody-of-this-name/a")
    assert not os.path.exists("~nobody-of-this-name")
