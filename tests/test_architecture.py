"""The house: one direction of imports, what importing brings in, and a place for each thing."""

import ast
import graphlib
import importlib
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_tinyattn

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "keras_tinyattn"
FILES = sorted(PACKAGE.rglob("*.py"))
LESSONS = sorted((ROOT / "scripts").glob("lesson_*.py"))

# From the first module that a prompt meets to the last.
ORDER = [
    *("functional", "blockwise", "layers", "model", "pretrained", "tokenizer", "training", "sampling"),
    *("generation", "export", "plotting"),
]
# The package itself, its commands, and three helpers that import nothing of ours.
BESIDE = {"", "__main__", "_boundary", "_paths", "version"}
# A method that generates belongs to the model, and its loop below it.
UPWARD = {("model", "CausalLM.generate", "generation")}
NEEDS_TENSORFLOW = {"_boundary", "tokenizer", "training", "sampling", "generation", "export"}
# A loop that keeps one iteration in memory, and a write in place: Keras has neither.
BORROWS_TENSORFLOW = {
    ("blockwise", "_while_loop"),
    ("layers.cache", "InPlaceCache._scatter"),
}


def _name(path):
    """`layers.cache` for keras_tinyattn/layers/cache.py, and `layers` for its `__init__.py`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path):
    """Pairs: a module that the file imports, and the function that does, `""` at module level."""

    def visit(node, scope, within):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from visit(child, [*scope, child.name], ".".join([*scope, child.name]))
            elif isinstance(child, ast.ClassDef):
                yield from visit(child, [*scope, child.name], within)
            elif isinstance(child, ast.Import):
                yield from ((alias.name, within) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"a relative import in {path}"
                # `from package import module` imports the module.
                yield from ((f"{child.module}.{alias.name}", within) for alias in child.names)
            else:
                yield from visit(child, scope, within)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), [], "")


def _ours(imported):
    """The module of this package that an import names, or None."""
    if not imported.startswith("keras_tinyattn."):
        return None
    name = imported.removeprefix("keras_tinyattn.")
    while name not in MODULES:
        name = name.rpartition(".")[0]
    assert name, f"{imported} is in no module: import it from the one that defines it"
    return name


MODULES = {_name(path): path for path in FILES}
IMPORTS = {name: list(_imports(path)) for name, path in MODULES.items()}


def test_a_module_imports_only_from_the_modules_above_it():
    upward = set()
    for name, imports in IMPORTS.items():
        module = name.split(".")[0]
        for imported, function in imports:
            other = (_ours(imported) or "").split(".")[0]
            if other == "_boundary":
                assert module in NEEDS_TENSORFLOW, name
            elif module in ORDER and other in ORDER and ORDER.index(other) > ORDER.index(module):
                upward.add((name, function, other))
    assert upward == UPWARD
    assert list(keras_tinyattn._MODULES) == ORDER
    assert {name.split(".")[0] for name in MODULES} == {*ORDER, *BESIDE}
    for name in ("_boundary", "_paths", "version"):
        assert not any(_ours(imported) for imported, _ in IMPORTS[name]), name


def test_no_two_files_import_each_other():
    graph = {
        name: {_ours(imported) for imported, function in imports if not function} - {None, ""}
        for name, imports in IMPORTS.items()
    }
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(FILES)


def test_tensorflow_is_imported_where_it_is_needed_and_nowhere_else():
    places = {
        (name, function)
        for name, imports in IMPORTS.items()
        for imported, function in imports
        if imported.split(".")[0] == "tensorflow"
    }
    assert {name.split(".")[0] for name, function in places if not function} == NEEDS_TENSORFLOW
    assert {place for place in places if place[1]} == BORROWS_TENSORFLOW


def test_what_only_pictures_files_and_commands_need_is_imported_when_they_run():
    libraries = {"matplotlib": "plotting", "rich": "__main__", "safetensors": "pretrained"}
    for library, module in libraries.items():
        places = [
            (name, function)
            for name, imports in IMPORTS.items()
            for imported, function in imports
            if imported.split(".")[0] == library
        ]
        assert places, library
        assert all(name.split(".")[0] == module and function for name, function in places), places


def test_nothing_in_the_package_is_ambient():
    for name, path in MODULES.items():
        imported = {imported.split(".")[0] for imported, _ in IMPORTS[name]}
        assert not imported & {"contextvars", "threading"}, name
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        assert not any(isinstance(node, ast.Global) for node in nodes), name


def _length(path):
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_file_of_the_package_is_longer_than_300_lines():
    assert not [path for path in FILES if _length(path) > 300]


def test_each_module_and_each_lesson_has_its_tests():
    tests = {path.stem for path in (ROOT / "tests").glob("test_*.py")}
    layers = [name.replace(".", "_") for name, _ in _public_layers()]
    for module in [*ORDER, *layers]:
        assert f"test_{module}" in tests, module
    for path in LESSONS:
        assert f"test_{path.stem[: len('lesson_00')]}" in tests, path


def _public_layers():
    for name in keras_tinyattn.layers.__all__:
        found = getattr(keras_tinyattn, name)
        yield found.__module__.removeprefix("keras_tinyattn."), found


# Lessons.


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_is_short_defines_no_class_and_uses_public_names_only(path):
    assert _length(path) <= 300
    for imported, _ in _imports(path):
        module, _, name = imported.rpartition(".")
        if module.split(".")[0] == "keras_tinyattn":
            assert name in importlib.import_module(module).__all__, imported
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.ClassDef), node.name
        if isinstance(node, ast.Attribute) and node.attr not in ("_make", "_replace", "_asdict"):
            assert not node.attr.startswith("_"), ast.unparse(node)


# What an import brings in.


def test_every_name_is_there_and_listed():
    for name in keras_tinyattn.__all__:
        assert getattr(keras_tinyattn, name) is not None, name
    assert set(keras_tinyattn.__all__) <= set(dir(keras_tinyattn))
    assert len(keras_tinyattn.__all__) == len(set(keras_tinyattn.__all__))


def test_each_name_is_that_of_its_module():
    for module, names in keras_tinyattn._MODULES.items():
        found = importlib.import_module(f"keras_tinyattn.{module}")
        assert set(names) <= set(found.__all__), module
        assert getattr(keras_tinyattn, module) is found
        for name in names:
            assert getattr(keras_tinyattn, name) is getattr(found, name)


def test_an_unknown_name_is_an_attribute_error_and_an_import_error():
    with pytest.raises(AttributeError, match="has no attribute 'CasualLM'"):
        keras_tinyattn.CasualLM  # noqa: B018
    with pytest.raises(ImportError, match="CasualLM"):
        exec("from keras_tinyattn import CasualLM")


def _python(*arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_package_alone_loads_every_layer_from_a_file_and_brings_in_nothing_foreign(tmp_path):
    inputs = keras.Input((5,), dtype="int32")
    x = keras_tinyattn.TokenAndPositionEmbedding(11, sequence_length=5, hidden_dim=6)(inputs)
    for layer in (
        keras_tinyattn.ScaledSelfAttention(2, num_heads=3),
        keras_tinyattn.CausalSelfAttention(2, num_heads=3),
        keras_tinyattn.DecoderBlock(6, num_heads=3),
        keras_tinyattn.VocabProjection(11),
    ):
        x = layer(x)
    model = keras.Model(inputs, x)
    model.save(tmp_path / "model.keras")
    # What Keras and TensorFlow bring in themselves is theirs.
    program = (
        "import sys, numpy, keras, tensorflow; before = set(sys.modules)\n"
        "import keras_tinyattn; loaded = set(sys.modules) - before\n"
        "sys.modules['matplotlib'] = None; import keras_tinyattn.plotting\n"
        "model = keras.saving.load_model(sys.argv[1])\n"
        "numpy.save(sys.argv[2], model(numpy.array([[1, 2, 3, 4, 5]]))); print(*loaded)"
    )
    result = _python("-c", program, tmp_path / "model.keras", tmp_path / "logits.npy")
    assert result.returncode == 0, result.stderr
    logits = model(np.array([[1, 2, 3, 4, 5]]))
    assert np.std(logits) > 0
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), logits, rtol=1e-6)
    loaded = set(result.stdout.split())
    assert "keras_tinyattn.layers" in loaded
    assert "keras_tinyattn.tokenizer" not in loaded
    # Nothing from outside but what Python itself has, and of that no server.
    foreign = {name.split(".")[0] for name in loaded} - {"keras_tinyattn"}
    assert foreign <= set(sys.stdlib_module_names) - {"http", "socketserver", "wsgiref", "xmlrpc"}


@pytest.mark.parametrize("command", [(), ("verify",)])
def test_help_is_silent_and_imports_neither_keras_nor_tensorflow(command):
    result = _python("-X", "importtime", "-m", "keras_tinyattn", *command, "--help")
    assert result.returncode == 0
    assert "verify" in result.stdout
    imported = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
    assert {"argparse", "keras_tinyattn"} <= imported
    assert not imported & {"keras", "numpy", "rich", "tensorflow"}


def test_a_command_writes_nothing_to_standard_error_but_its_own_sentence(tmp_path):
    result = _python("-m", "keras_tinyattn", "verify", tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("keras_tinyattn verify: error: There is no export to load.")
    assert result.stderr.count("\n") == 1
