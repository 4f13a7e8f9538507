"""Weights of others: files that are odd, damaged or hostile, and the memory that reading takes."""

import io
import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from keras_tinyattn import causal_lm_from_gpt2

T, D, H, V, I = 5, 6, 3, 11, 24  # noqa: E741
IDS = np.array([[3, 1, 4, 1, 5], [2, 7, 10, 8, 0]])


def _state_dict(width=D, layers=1, words=V):
    """A GPT-2 without biases, with a head of its own."""
    random = np.random.default_rng(0)
    sizes = {
        **{"wte.weight": (words, width), "wpe.weight": (T, width), "lm_head.weight": (words, width)},
        "ln_f.weight": (width,),
    }
    for name in [f"h.{index}" for index in range(layers)]:
        sizes |= {f"{name}.ln_1.weight": (width,), f"{name}.ln_2.weight": (width,)}
        sizes |= {f"{name}.attn.c_attn.weight": (width, 3 * width)}
        sizes |= {f"{name}.attn.c_proj.weight": (width, width)}
        sizes |= {f"{name}.mlp.c_fc.weight": (width, 4 * width)}
        sizes |= {f"{name}.mlp.c_proj.weight": (4 * width, width)}
    return {name: random.standard_normal(size, "float32") for name, size in sizes.items()}


@pytest.mark.parametrize(
    "prefix", ["transformer.", "_orig_mod.", "module.", "model.", "module._orig_mod.transformer."]
)
def test_names_may_come_with_the_prefixes_of_wrappers(prefix):
    state = {prefix + name: value for name, value in _state_dict().items()}
    expected = causal_lm_from_gpt2(_state_dict(), num_heads=H)(IDS)
    np.testing.assert_array_equal(causal_lm_from_gpt2(state, num_heads=H)(IDS), expected)
    del state[f"{prefix}h.0.ln_1.weight"]
    with pytest.raises(ValueError, match=rf"Expected {prefix}h\.0\.ln_1\.weight as well\. Received: "):
        causal_lm_from_gpt2(state, num_heads=H)


@pytest.mark.parametrize("name", ["wte.weight", "h.0.attn.bias", "h.0.ln_1.weight"])
def test_two_names_that_differ_in_a_prefix_are_refused(name):
    state = {**_state_dict(), name: np.zeros(D), f"module.{name}": np.zeros(D)}
    with pytest.raises(ValueError, match=rf"one name .*Received: {name}, module\.{name}\. "):
        causal_lm_from_gpt2(state, num_heads=H)


def test_absent_biases_are_zeros_and_a_few_absent_ones_an_error():
    state = _state_dict()
    layers = [name.removesuffix(".weight") for name in state if "ln_" in name or ".c_" in name]
    sizes = {"attn.c_attn": 3 * D, "mlp.c_fc": 4 * D}
    zeros = {f"{layer}.bias": np.zeros(sizes.get(layer[4:], D)) for layer in layers}
    model = causal_lm_from_gpt2(state, num_heads=H)
    np.testing.assert_array_equal(model(IDS), causal_lm_from_gpt2({**state, **zeros}, num_heads=H)(IDS))
    for missing in zeros:
        rest = {name: value for name, value in zeros.items() if name != missing}
        with pytest.raises(ValueError, match=f"Expected {missing} as well"):
            causal_lm_from_gpt2({**state, **rest}, num_heads=H)


def test_a_block_may_be_wrapped_by_itself():
    state = {name.replace("h.0.", "h.0._orig_mod."): value for name, value in _state_dict().items()}
    expected = causal_lm_from_gpt2(_state_dict(), num_heads=H)(IDS)
    np.testing.assert_array_equal(causal_lm_from_gpt2(state, num_heads=H)(IDS), expected)


def test_the_activation_is_gpt2s_unless_another_is_given():
    usual = causal_lm_from_gpt2(_state_dict(), num_heads=H)
    exact = causal_lm_from_gpt2(_state_dict(), num_heads=H, activation="gelu")
    x = np.linspace(-4, 4, D, dtype="float32")[None]
    # An expansion that passes its inputs on shows the activation alone.
    for model in (usual, exact):
        model.blocks[0].mlp_expand.kernel.assign(np.eye(D, I))
        model.blocks[0].mlp_expand.bias.assign(np.zeros(I))
    by_tanh = [0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) for z in x[0]]
    by_erf = [0.5 * z * (1 + math.erf(z / math.sqrt(2))) for z in x[0]]
    np.testing.assert_allclose(usual.blocks[0].mlp_expand(x)[0, :D], by_tanh, atol=1e-6)
    np.testing.assert_allclose(exact.blocks[0].mlp_expand(x)[0, :D], by_erf, atol=1e-6)
    assert not np.allclose(by_tanh, by_erf, atol=1e-5)
    # Blocks with unlike activations share no graph.
    assert usual.blocks[0].graph_key() != exact.blocks[0].graph_key()


def test_a_clone_starts_with_random_numbers_as_any_model_does():
    model = causal_lm_from_gpt2(_state_dict(), num_heads=H)
    clone = type(model).from_config(model.get_config())
    clone.build((None, T))
    for ours, copied in zip(model.variables, clone.variables, strict=True):
        if ours.name.endswith(("kernel", "embeddings")):
            assert 0.01 < np.std(copied) < 0.03, ours.path


@pytest.mark.parametrize(
    ("value", "received"),
    [
        (None, "NoneType"),
        ([[1.0]], "list"),
        (np.zeros((V, D), int), "int64"),
        (np.zeros((V, D), "int8"), "int8"),
        (np.zeros((V, D), bool), "bool"),
        (np.zeros((V, D), complex), "complex128"),
        (np.zeros((V, D), object), "object"),
        (np.zeros((V, D), ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
    ],
)
def test_a_tensor_that_is_not_of_floats_is_named(value, received):
    with pytest.raises(ValueError, match=rf"wte.weight is no float tensor.*Received: {received}\."):
        causal_lm_from_gpt2({**_state_dict(), "wte.weight": value}, num_heads=H)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_a_tensor_that_is_not_finite_is_named(value):
    state = {**_state_dict(), "h.0.ln_1.weight": np.full(D, value)}
    with pytest.raises(ValueError, match=r"h.0.ln_1.weight is not finite.*Received: NaN"):
        causal_lm_from_gpt2(state, num_heads=H)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", ">f4", "f8"])
def test_floats_of_every_width_are_read(kind):
    dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else np.dtype(kind)
    model = causal_lm_from_gpt2({k: v.astype(dtype) for k, v in _state_dict().items()}, num_heads=H)
    expected = _state_dict()["wte.weight"].astype(dtype).astype("float32")
    np.testing.assert_array_equal(model.embedding.token_embeddings, expected)


def test_names_received_are_shown_and_clipped():
    with pytest.raises(ValueError, match=r"Received: model, iter_num\. .* it is under 'model'"):
        causal_lm_from_gpt2({"model": _state_dict(), "iter_num": 3}, num_heads=H)
    with pytest.raises(ValueError, match=r"Received: no names\."):
        causal_lm_from_gpt2({}, num_heads=H)
    with pytest.raises(ValueError, match=r"Received: a\\nb, x{80}\.\.\.\. "):
        causal_lm_from_gpt2({**_state_dict(), "a\nb": 0, "x" * 10**6: 0}, num_heads=H)
    with pytest.raises(TypeError, match=r"Expected strings\. Received: 5\."):
        causal_lm_from_gpt2({**_state_dict(), 5: 0}, num_heads=H)
    with pytest.raises(TypeError, match="A path is text"):
        causal_lm_from_gpt2(None, num_heads=H)
    with pytest.raises(ValueError, match="Expected 2 axes, none of size 0"):
        causal_lm_from_gpt2({**_state_dict(), "wpe.weight": np.zeros((0, D), "f4")}, num_heads=H)


@pytest.mark.parametrize("pattern", ["x.{}", "h.{}.x"])
def test_a_hundred_thousand_names_are_judged_in_linear_time(pattern):
    state = {pattern.format(index): 0 for index in range(100_000)}
    with pytest.raises(ValueError, match=r"and \d+ more"):
        causal_lm_from_gpt2({**_state_dict(), **state}, num_heads=H)


# Files.


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_what_the_safetensors_library_writes_is_read_exactly(tmp_path, dtype):
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    state = {name: value.astype(dtype) for name, value in _state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = causal_lm_from_gpt2(tmp_path / "model.safetensors", num_heads=H)
    expected = state["wte.weight"].astype("float32")
    np.testing.assert_array_equal(model.embedding.token_embeddings, expected)
    np.testing.assert_array_equal(model(IDS), causal_lm_from_gpt2(state, num_heads=H)(IDS))


def _header(**tensors):
    return json.dumps({name: {"dtype": "F32", **entry} for name, entry in tensors.items()}).encode()


GOOD, TWO = {"shape": [2], "data_offsets": [0, 8]}, b"\0" * 8
DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("header", "body"),
    {
        "negative": (_header(a={"shape": [2], "data_offsets": [-8, 0]}), TWO),
        "reversed": (_header(a={"shape": [2], "data_offsets": [8, 0]}), TWO),
        "overlapping": (_header(a=GOOD, b=GOOD), TWO),
        "a gap": (_header(a=GOOD, b={"shape": [1], "data_offsets": [12, 16]}), TWO + TWO),
        "beyond the end": (_header(a=GOOD), TWO[:4]),
        "before the end": (_header(a=GOOD), TWO + b"\0"),
        "vast": (_header(a={"shape": [2**62, 2**62], "data_offsets": [0, 8]}), TWO),
        "twice": (_header(a=GOOD)[:-1] + b", " + _header(a={**GOOD, "shape": [1, 2]})[1:], TWO),
        "nested": (DEEP, b""),
        "nested metadata": (b'{"__metadata__": ' + DEEP + b"}", b""),
        "a list": (b"[]", b""),
        "no JSON": (b"{", b""),
        "a byte order mark": ("\ufeff{}".encode(), b""),
        "not UTF-8": (b'{"\xff": 1}', b""),
    }.values(),
)
def test_a_safetensors_header_that_lies_or_is_no_header_is_refused(tmp_path, header, body):
    path = tmp_path / "lies.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + body)
    with pytest.raises(ValueError, match=r"cannot be read.*Received: .*lies\.safetensors, which is"):
        causal_lm_from_gpt2(path, num_heads=H)


@pytest.mark.parametrize("length", [200, 10**8 + 1, 2**40, 2**63, 2**64 - 1])
def test_a_safetensors_header_beyond_the_file_or_the_limit_is_refused(tmp_path, length):
    path = tmp_path / "long.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}" + b" " * 100)
    with pytest.raises(ValueError, match=r"long\.safetensors, which is damaged .*eader"):
        causal_lm_from_gpt2(path, num_heads=H)


def _write_npz(path, state):
    """An `.npz` file in which bytes stand for an entry as it is."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in state.items():
            entry = io.BytesIO()
            if not isinstance(value, bytes):
                np.save(entry, value)
            archive.writestr(f"{name}.npy", value if isinstance(value, bytes) else entry.getvalue())


@pytest.mark.parametrize(
    "shape",
    ["(" * 4000 + ")" * 4000, "(-1,)", "(10**9,)", "(9999999999999999,)", "(11,6)" + " " * 60_000],
    ids=["nested", "negative", "no literal", "vast", "long"],
)
def test_an_npz_entry_with_a_damaged_header_is_refused(tmp_path, shape):
    path = tmp_path / "weights.npz"
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    entry = b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header)) + header + bytes(264)
    _write_npz(path, {**_state_dict(), "wte.weight": entry})
    with pytest.raises(
        ValueError, match=r"cannot be read.*Received: .*weights\.npz, which is"
    ) as caught:
        causal_lm_from_gpt2(path, num_heads=H)
    assert len(str(caught.value)) < 600 + len(str(path))
    assert "\n" not in str(caught.value)


def test_an_npz_entry_that_is_pickled_or_there_twice_is_refused(tmp_path):
    path = tmp_path / "weights.npz"
    np.savez(path, **{**_state_dict(), "wte.weight": np.array([None])})
    with pytest.raises(ValueError, match=r"weights\.npz, which is .*allow_pickle=False"):
        causal_lm_from_gpt2(path, num_heads=H)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("wte.weight", b"")
        archive.writestr("wte.weight.npy", b"")
    with pytest.raises(ValueError, match=r"weights\.npz, which is .*has the name wte\.weight\)"):
        causal_lm_from_gpt2(path, num_heads=H)


def test_a_small_npz_file_that_unpacks_to_a_large_one_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in _state_dict().items():
            entry = io.BytesIO()
            np.save(entry, value)
            archive.writestr(f"{name}.npy", entry.getvalue())
        with archive.open("bomb.npy", "w") as entry:
            for _ in range(110):
                entry.write(bytes(10**6))
    assert path.stat().st_size < 200_000
    with pytest.raises(ValueError, match=r"bomb\.npz, .* unpacks to 110,.* bytes, and the limit is 10"):
        causal_lm_from_gpt2(path, num_heads=H)


def test_compressed_weights_are_read(tmp_path):
    path = tmp_path / "weights.NPZ"
    with path.open("wb") as file:
        np.savez_compressed(file, **_state_dict())
    expected = causal_lm_from_gpt2(_state_dict(), num_heads=H)(IDS)
    np.testing.assert_array_equal(causal_lm_from_gpt2(path, num_heads=H)(IDS), expected)


def test_without_the_safetensors_library_a_sentence_says_how_to_install_it(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_file(_state_dict(), path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(
        ImportError, match=r'model.safetensors .*pip install "keras-tinyattn\[pretrained\]"'
    ):
        causal_lm_from_gpt2(path, num_heads=H)


def test_a_path_of_weights_is_a_local_one(tmp_path, monkeypatch):
    np.savez(tmp_path / "weights.npz", **_state_dict())
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("~/weights.npz", b"~/weights.npz", (tmp_path / "weights.npz").as_uri()):
        assert causal_lm_from_gpt2(path, num_heads=H).vocabulary_size == V
    with pytest.raises(ValueError, match="has the scheme 'gs'"):
        causal_lm_from_gpt2("gs://bucket/weights.npz", num_heads=H)
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(IsADirectoryError, match=r"folder\.safetensors"):
        causal_lm_from_gpt2(tmp_path / "folder.safetensors", num_heads=H)


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="reads Linux's counters")
@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_reading_takes_less_than_2_2_times_the_memory_of_the_weights(tmp_path, suffix):
    program = """
import pathlib, sys, numpy as np
from keras_tinyattn import causal_lm_from_gpt2, gpt
def status(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
gpt(11, 5, 6, 2, 1).build((None, 5))  # What TensorFlow loads at its first operations is not ours.
before = status("VmRSS")
pathlib.Path("/proc/self/clear_refs").write_text("5")
model = causal_lm_from_gpt2(sys.argv[1], 8)
print((status("VmHWM") - before) / (4 * model.count_params()))
"""
    state = _state_dict(width=512, layers=12, words=30_000)
    path = tmp_path / f"weights.{suffix}"
    np.savez(path, **state) if suffix == "npz" else save_file(state, path)
    root = str(pathlib.Path(__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(result.stdout) < 2.2
