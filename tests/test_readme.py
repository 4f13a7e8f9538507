"""What the README says is there is there, and its Python runs."""

import pathlib
import re

import tensorflow as tf

import keras_tinyattn
from keras_tinyattn.sampling import SETTINGS

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def test_the_python_of_the_readme_runs_and_its_comments_are_true(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layers, export = _blocks("python")
    names = {}
    exec(layers, names)
    assert "# (2, 5, 8), (2, 2, 5, 5)" in layers
    assert (names["output"].shape, names["weights"].shape) == ((2, 5, 8), (2, 2, 5, 5))
    exec(export, names)
    assert "# exports/1, the next time exports/2" in export
    assert names["version"] == pathlib.Path("exports/1")
    assert (tmp_path / "exports" / "1" / "saved_model.pb").is_file()


def test_every_file_that_the_readme_names_is_there():
    commands = "\n".join(_blocks("sh")) + TEXT
    named = set(re.findall(r"\b(?:scripts|tests|keras_tinyattn|saved_models)/[\w./]*\w", commands))
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_mutation_of_the_readme_changes_a_line():
    ((old, new, file),) = re.findall(r"sed -i 's/(.*)/(.*)/' (\S+)", TEXT)
    assert old != new
    assert (ROOT / file).read_text(encoding="utf-8").count(old) == 1


def test_the_tree_has_every_module_in_the_order_of_the_package():
    tree = TEXT.partition("```\nkeras_tinyattn/\n")[2]
    package = tree.partition("scripts/")[0].splitlines()
    listed = [line.split()[0].removesuffix("/").removesuffix(".py") for line in package]
    assert listed == list(keras_tinyattn._MODULES)


def test_every_lesson_is_in_the_table():
    listed = re.findall(r"python scripts/(lesson_\w+\.py)", TEXT)
    assert listed == sorted(path.name for path in (ROOT / "scripts").glob("lesson_*.py"))


def test_the_table_of_signatures_is_that_of_the_committed_export():
    rows = dict(re.findall(r"^\| (`[a-z_`, ]+) \| (.*)$", TEXT, re.MULTILINE))
    named = {name: row for names, row in rows.items() for name in re.findall(r"`(\w+)`", names)}
    signatures = tf.saved_model.load(str(ROOT / "saved_models" / "lesson_15" / "1")).signatures
    assert set(named) == set(signatures)
    assert {setting.name for setting in SETTINGS} <= set(re.findall(r"`(\w+)`", named["generate"]))
    for name in ("serving_default", "generate", "score", "attention", "tokenize", "detokenize"):
        inputs, outputs = (re.findall(r"`(\w+)`", part) for part in named[name].split("|")[:2])
        given = signatures[name].structured_input_signature[1]
        made = signatures[name].structured_outputs
        assert set(inputs) == set(given), name
        assert set(outputs) <= set(made), name
