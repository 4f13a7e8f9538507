"""GPT-2 weights: a model that others trained, stage by stage, and state dicts that do not fit."""

import io
import json
import math
import os
import pathlib
import struct
import subprocess
import sys
import zipfile

import keras
import ml_dtypes
import numpy as np
import pytest

from keras_tinyattn import causal_lm_from_gpt2

T, D, H, L, V, I = 5, 6, 3, 2, 11, 7  # noqa: E741

# A pass in NumPy agrees with the recorded activations, which are of size 10, to 2e-6.
RECORDED = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module")
def sort_model(shared_folder):
    """A trained GPT-2 of three layers by others, and every activation they recorded."""
    folder = shared_folder("models/gpt_nano_sort")
    with np.load(folder / "golden.npz") as golden:
        return causal_lm_from_gpt2(folder / "weights.npz", num_heads=3), dict(golden)


def test_every_stage_of_a_trained_model_is_what_others_recorded(sort_model):
    model, golden = sort_model
    embedding = model.embedding
    x = embedding(golden["idx"])
    np.testing.assert_allclose(x, golden["x"], **RECORDED)
    np.testing.assert_allclose(embedding.position_embeddings, golden["pos_emb"][0], **RECORDED)

    block = model.blocks[0]
    normed = block.attention_norm(x)
    np.testing.assert_allclose(normed, golden["ln1"], **RECORDED)
    trace = block.attention.trace(normed)
    np.testing.assert_allclose(trace.queries, golden["q"], **RECORDED)
    np.testing.assert_allclose(trace.keys, golden["k"], **RECORDED)
    np.testing.assert_allclose(trace.values, golden["v"], **RECORDED)
    lower = np.tril(np.ones(trace.weights.shape[-2:], bool))
    np.testing.assert_allclose(
        trace.scaled_scores.numpy()[..., lower], golden["att"][..., lower], **RECORDED
    )
    np.testing.assert_allclose(trace.weights, golden["attSm"], **RECORDED)
    np.testing.assert_allclose(trace.output, golden["yProj"], **RECORDED)
    residual = x + trace.output
    np.testing.assert_allclose(residual, golden["attnResid"], **RECORDED)
    normed = block.mlp_norm(residual)
    np.testing.assert_allclose(normed, golden["ln2"], **RECORDED)
    expanded = block.mlp_expand(normed)
    np.testing.assert_allclose(expanded, golden["gelu"], **RECORDED)
    np.testing.assert_allclose(block.mlp_contract(expanded), golden["mlp"], **RECORDED)

    for index, block in enumerate(model.blocks):
        x = block(x)
        np.testing.assert_allclose(x, golden[f"block{index}"], **RECORDED)
    np.testing.assert_allclose(model.final_norm(x), golden["ln_f"], **RECORDED)


def test_logits_of_a_trained_model_are_right_on_every_path_and_by_cached_steps(
    sort_model, on_every_path
):
    model, golden = sort_model
    ids = keras.ops.convert_to_tensor(golden["idx"])
    for path, logits in on_every_path(model, ids):
        np.testing.assert_allclose(logits, golden["lm_head"], err_msg=path, **RECORDED)
    cache = model.make_cache(len(ids))
    for t in range(ids.shape[1]):
        logits, cache = model(ids[:, t : t + 1], cache=cache, positions=keras.ops.array([t]))
        np.testing.assert_allclose(logits[:, 0], golden["lm_head"][:, t], **RECORDED)


def test_the_trained_model_sorts(sort_model):
    model, _ = sort_model
    ids = np.random.default_rng(0).integers(0, 3, (64, 6))
    answer = ids
    for _ in range(6):
        newest = np.argmax(model(answer)[:, -1], axis=-1)
        answer = np.concatenate([answer, newest[:, None]], axis=1)
    right = np.all(answer[:, 6:] == np.sort(ids, axis=1), axis=1)
    assert np.mean(right) > 0.95


def test_a_trained_model_survives_saving(sort_model, tmp_path):
    model, golden = sort_model
    model.save(tmp_path / "sort.keras")
    loaded = keras.saving.load_model(tmp_path / "sort.keras")
    np.testing.assert_array_equal(loaded(golden["idx"]), model(golden["idx"]))


def _state_dict(linear=False, prefix="transformer.", head=None, intermediate_dim=I):
    """A small GPT-2 of random numbers, the same numbers however they are laid out."""
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(size=shape).astype("float32")  # noqa: E731
    kernel = lambda *shape: draw(*shape).T if linear else draw(*shape)  # noqa: E731
    state = {"wte.weight": draw(V, D), "wpe.weight": draw(T, D)}
    for name in [f"h.{index}" for index in range(L)]:
        for norm in ("ln_1", "ln_2"):
            state |= {f"{name}.{norm}.weight": draw(D), f"{name}.{norm}.bias": draw(D)}
        for layer, sizes in {
            "attn.c_attn": (D, 3 * D),
            "attn.c_proj": (D, D),
            "mlp.c_fc": (D, intermediate_dim),
            "mlp.c_proj": (intermediate_dim, D),
        }.items():
            state |= {f"{name}.{layer}.weight": kernel(*sizes), f"{name}.{layer}.bias": draw(sizes[1])}
        state |= {f"{name}.attn.bias": np.tril(np.ones((1, 1, T, T)))}
        state |= {f"{name}.attn.masked_bias": np.array(-1e4)}
    state |= {"ln_f.weight": draw(D), "ln_f.bias": draw(D)}
    state = {prefix + name: value for name, value in state.items()}
    if head is not None:
        state["lm_head.weight"] = state[f"{prefix}wte.weight"] if head == "tied" else draw(V, D)
    return state


IDS = np.array([[3, 1, 4, 1, 5], [2, 7, 10, 8, 0]])


def test_sizes_follow_from_the_shapes():
    model = causal_lm_from_gpt2(_state_dict(), num_heads=H, dropout=0.1, name="small")
    assert (model.vocabulary_size, model.sequence_length, len(model.blocks)) == (V, T, L)
    block = model.blocks[1]
    assert (block.hidden_dim, block.num_heads, block.intermediate_dim, block.dropout) == (D, H, I, 0.1)
    assert model.name == "small"


@pytest.mark.parametrize("intermediate_dim", [I, D])
def test_conv1d_and_linear_kernels_give_the_same_model(intermediate_dim):
    expected = causal_lm_from_gpt2(_state_dict(intermediate_dim=intermediate_dim), num_heads=H)(IDS)
    linear = _state_dict(linear=True, intermediate_dim=intermediate_dim)
    np.testing.assert_array_equal(causal_lm_from_gpt2(linear, num_heads=H)(IDS), expected)


def test_names_may_come_without_the_prefix():
    expected = causal_lm_from_gpt2(_state_dict(), num_heads=H)(IDS)
    np.testing.assert_array_equal(
        causal_lm_from_gpt2(_state_dict(prefix=""), num_heads=H)(IDS), expected
    )


def test_the_head_is_tied_if_it_is_absent_or_equal_to_the_table():
    absent = causal_lm_from_gpt2(_state_dict(), num_heads=H)
    equal = causal_lm_from_gpt2(_state_dict(head="tied"), num_heads=H)
    own = causal_lm_from_gpt2(_state_dict(head="own"), num_heads=H)
    assert [model.projection.tied for model in (absent, equal, own)] == [True, True, False]
    np.testing.assert_array_equal(absent(IDS), equal(IDS))
    np.testing.assert_array_equal(own.projection.kernel, _state_dict(head="own")["lm_head.weight"].T)


def test_tensors_with_detach_are_taken_as_pytorch_tensors():
    class Tensor:
        def __init__(self, array):
            self.array, self.shape = array, array.shape

        def detach(self):
            return self

        cpu = float = detach

        def numpy(self):
            return self.array

    state = {name: Tensor(value) for name, value in _state_dict(head="own").items()}
    expected = causal_lm_from_gpt2(_state_dict(head="own"), num_heads=H)(IDS)
    np.testing.assert_array_equal(causal_lm_from_gpt2(state, num_heads=H)(IDS), expected)


# Names and biases as wrappers and nanoGPT leave them.


@pytest.mark.parametrize(
    "prefix",
    ["_orig_mod.", "module.", "model.transformer.", "module._orig_mod.transformer.", "model.model."],
)
def test_names_may_come_with_the_prefixes_of_wrappers(prefix):
    state = _state_dict(prefix=prefix, head="own")
    state["_orig_mod.module.lm_head.weight"] = state.pop("lm_head.weight")
    expected = causal_lm_from_gpt2(_state_dict(head="own"), num_heads=H)(IDS)
    np.testing.assert_array_equal(causal_lm_from_gpt2(state, num_heads=H)(IDS), expected)


def test_a_block_may_be_wrapped_by_itself():
    state = {name.replace("h.1.", "h.1._orig_mod."): value for name, value in _state_dict().items()}
    expected = causal_lm_from_gpt2(_state_dict(), num_heads=H)(IDS)
    np.testing.assert_array_equal(causal_lm_from_gpt2(state, num_heads=H)(IDS), expected)


@pytest.mark.parametrize("name", ["wte.weight", "h.0.attn.bias", "h.1.ln_1.weight"])
def test_two_names_that_differ_in_a_prefix_are_refused(name):
    with pytest.raises(ValueError, match=rf"one name .*Received: transformer\.{name}, module\.{name}"):
        causal_lm_from_gpt2({**_state_dict(), f"module.{name}": np.zeros(D)}, num_heads=H)


def test_absent_biases_are_zeros():
    def is_bias(name):
        return name.endswith(".bias") and not name.endswith(".attn.bias")

    state = {name: value for name, value in _state_dict().items() if not is_bias(name)}
    zeros = {
        name: np.zeros_like(value) if is_bias(name) else value for name, value in _state_dict().items()
    }
    model = causal_lm_from_gpt2(state, num_heads=H)
    assert all(np.all(v.numpy() == 0) for v in model.variables if v.name in ("bias", "beta"))
    np.testing.assert_array_equal(model(IDS), causal_lm_from_gpt2(zeros, num_heads=H)(IDS))
    state["transformer.h.1.ln_2.bias"] = np.ones(D)
    with pytest.raises(ValueError, match=r"Expected transformer\.ln_f\.bias, .* as well"):
        causal_lm_from_gpt2(state, num_heads=H)


def test_the_activation_is_gpt2s_unless_another_is_given(tmp_path):
    usual = causal_lm_from_gpt2(_state_dict(), num_heads=H)
    exact = causal_lm_from_gpt2(_state_dict(), num_heads=H, activation="gelu")
    x = np.linspace(-4, 4, D, dtype="float32")[None]
    # An expansion that passes its inputs on shows the activation alone.
    for model in (usual, exact):
        model.blocks[1].mlp_expand.kernel.assign(np.eye(D, I))
        model.blocks[1].mlp_expand.bias.assign(np.zeros(I))
    by_tanh = [0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) for z in x[0]]
    by_erf = [0.5 * z * (1 + math.erf(z / math.sqrt(2))) for z in x[0]]
    np.testing.assert_allclose(usual.blocks[1].mlp_expand(x)[0, :D], by_tanh, atol=1e-6)
    np.testing.assert_allclose(exact.blocks[1].mlp_expand(x)[0, :D], by_erf, atol=1e-6)
    assert not np.allclose(by_tanh, by_erf, atol=1e-5)
    # Blocks with unlike activations share no graph.
    assert usual.blocks[0].graph_key() != exact.blocks[0].graph_key()
    exact.save(tmp_path / "exact.keras")
    loaded = keras.saving.load_model(tmp_path / "exact.keras")
    np.testing.assert_array_equal(loaded(IDS), exact(IDS))


def test_a_clone_starts_with_random_numbers_as_any_model_does():
    model = causal_lm_from_gpt2(_state_dict(head="own"), num_heads=H)
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
        causal_lm_from_gpt2({**_state_dict(), "transformer.wte.weight": value}, num_heads=H)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_a_tensor_that_is_not_finite_is_named(value):
    state = {**_state_dict(), "transformer.h.1.mlp.c_fc.bias": np.full(I, value)}
    with pytest.raises(ValueError, match=r"transformer.h.1.mlp.c_fc.bias is not finite.*Received: NaN"):
        causal_lm_from_gpt2(state, num_heads=H)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", ">f4", "f8"])
def test_floats_of_every_width_are_read(kind):
    dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else np.dtype(kind)
    model = causal_lm_from_gpt2({k: v.astype(dtype) for k, v in _state_dict().items()}, num_heads=H)
    expected = _state_dict()["transformer.wte.weight"].astype(dtype).astype("float32")
    np.testing.assert_array_equal(model.embedding.token_embeddings, expected)


# Files.


def _write_safetensors(path, state, kind="F32"):
    """The format as its documentation gives it."""
    header, body = {"__metadata__": {"format": "pt"}}, b""
    for name, value in state.items():
        value = np.asarray(value, "<f4")
        if kind == "BF16":
            raw = (value.view("<u4") >> 16).astype("<u2").tobytes()
        else:
            raw = value.astype({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[kind]).tobytes()
        offsets = [len(body), len(body) + len(raw)]
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": offsets}
        body += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


@pytest.mark.parametrize("as_text", [False, True])
def test_an_npz_file_is_read(tmp_path, as_text):
    path = tmp_path / "weights.npz"
    np.savez(path, **_state_dict())
    expected = causal_lm_from_gpt2(_state_dict(), num_heads=H)(IDS)
    model = causal_lm_from_gpt2(str(path) if as_text else path, num_heads=H)
    np.testing.assert_array_equal(model(IDS), expected)


@pytest.mark.parametrize("kind", ["F64", "F32", "F16", "BF16"])
def test_a_safetensors_file_is_read(tmp_path, kind):
    path = tmp_path / "model.safetensors"
    _write_safetensors(path, _state_dict(), kind)
    table = causal_lm_from_gpt2(path, num_heads=H).embedding.token_embeddings
    # Stored with 11 bits (F16), or cut to 8 (BF16).
    tolerance = {"F64": 0, "F32": 0, "F16": 2**-11, "BF16": 2**-7}[kind]
    np.testing.assert_allclose(table, _state_dict()["transformer.wte.weight"], rtol=tolerance)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("damage", ["empty", "cut", "noise"])
def test_a_damaged_file_is_refused_with_its_name(tmp_path, suffix, damage):
    path = tmp_path / f"weights{suffix}"
    np.savez(path, **_state_dict()) if suffix == ".npz" else _write_safetensors(path, _state_dict())
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": whole[:-200], "noise": b"\x93" + whole[:50]}[damage])
    with pytest.raises(ValueError, match=rf"cannot be read.*weights\{suffix}, which is damaged"):
        causal_lm_from_gpt2(path, num_heads=H)


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


def _write_npz(path, state, **raw):
    """An `.npz` file in which some entries are these bytes, whatever they are."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in state.items():
            entry = io.BytesIO()
            np.save(entry, value)
            archive.writestr(f"{name}.npy", raw.get(name.replace(".", "_"), entry.getvalue()))


@pytest.mark.parametrize(
    "shape",
    ["(" * 4000 + ")" * 4000, "(-1,)", "(10**9,)", "(9999999999999999,)", "(11,6)" + " " * 60_000],
    ids=["nested", "negative", "no literal", "vast", "long"],
)
def test_an_npz_entry_with_a_damaged_header_is_refused(tmp_path, shape):
    path = tmp_path / "weights.npz"
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    entry = b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header)) + header + bytes(264)
    _write_npz(path, _state_dict(prefix=""), wte_weight=entry)
    with pytest.raises(
        ValueError, match=r"cannot be read.*Received: .*weights\.npz, which is"
    ) as caught:
        causal_lm_from_gpt2(path, num_heads=H)
    assert len(str(caught.value)) < 600 + len(str(path))


def test_an_npz_entry_that_is_pickled_or_there_twice_is_refused(tmp_path):
    path = tmp_path / "weights.npz"
    np.savez(path, **{**_state_dict(prefix=""), "wte.weight": np.array([None])})
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
    _write_safetensors(path, _state_dict())
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
    for wrong in (None, [1], 3):
        with pytest.raises(TypeError, match=f"Expected a mapping.*Received: {type(wrong).__name__}"):
            causal_lm_from_gpt2(wrong, num_heads=H)


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
    width, layers, words = 512, 12, 30_000
    ones = lambda *shape: np.full(shape, 0.5, "float32")  # noqa: E731
    state = {"wte.weight": ones(words, width), "wpe.weight": ones(64, width)}
    state |= {"lm_head.weight": ones(words, width) / 2, "ln_f.weight": ones(width)}
    for name in [f"h.{index}" for index in range(layers)]:
        state |= {f"{name}.ln_1.weight": ones(width), f"{name}.ln_2.weight": ones(width)}
        state |= {f"{name}.attn.c_attn.weight": ones(width, 3 * width)}
        state |= {f"{name}.attn.c_proj.weight": ones(width, width)}
        state |= {f"{name}.mlp.c_fc.weight": ones(width, 4 * width)}
        state |= {f"{name}.mlp.c_proj.weight": ones(4 * width, width)}
    path = tmp_path / f"weights.{suffix}"
    np.savez(path, **state) if suffix == "npz" else _write_safetensors(path, state)
    root = str(pathlib.Path(__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(result.stdout) < 2.2


def test_a_missing_file_and_an_unknown_kind_are_refused(tmp_path):
    for name in ("weights.npz", "model.safetensors"):
        with pytest.raises(FileNotFoundError, match=name):
            causal_lm_from_gpt2(tmp_path / name, num_heads=H)
    with pytest.raises(
        ValueError, match=r"ends in .npz or .safetensors. Received: .*pytorch_model.bin"
    ):
        causal_lm_from_gpt2(tmp_path / "pytorch_model.bin", num_heads=H)


def test_a_safetensors_file_of_unknown_types_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    _write_safetensors(path, _state_dict())
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F8X"'))
    with pytest.raises(ValueError, match=r"another kind .*F8X"):
        causal_lm_from_gpt2(path, num_heads=H)


# State dicts that do not fit.


@pytest.mark.parametrize(
    "name",
    [
        "wte.weight",
        "wpe.weight",
        "ln_f.bias",
        "h.0.attn.c_attn.weight",
        "h.1.mlp.c_proj.bias",
        "h.1.ln_1.weight",
    ],
)
def test_a_missing_name_is_named(name):
    state = _state_dict()
    del state[f"transformer.{name}"]
    with pytest.raises(ValueError, match=f"not a whole GPT-2. Expected .*{name} as well"):
        causal_lm_from_gpt2(state, num_heads=H)


def test_a_missing_layer_is_named():
    state = {name.replace("h.1.", "h.2."): value for name, value in _state_dict().items()}
    with pytest.raises(ValueError, match=r"Expected transformer.h.1.ln_1.weight.* and 4 more as well"):
        causal_lm_from_gpt2(state, num_heads=H)


def test_names_received_are_shown_and_clipped():
    with pytest.raises(ValueError, match=r"Received: model, iter_num\. .* it is under 'model'"):
        causal_lm_from_gpt2({"model": _state_dict(), "iter_num": 3}, num_heads=H)
    with pytest.raises(ValueError, match=r"Received: no names\."):
        causal_lm_from_gpt2({}, num_heads=H)
    with pytest.raises(ValueError, match=r"Received: a\\nb, x{80}\.\.\.\. "):
        causal_lm_from_gpt2({**_state_dict(), "a\nb": 0, "x" * 10**6: 0}, num_heads=H)
    with pytest.raises(TypeError, match=r"Expected strings\. Received: 5\."):
        causal_lm_from_gpt2({**_state_dict(), 5: 0}, num_heads=H)


@pytest.mark.parametrize("pattern", ["x.{}", "h.{}.x"])
def test_a_hundred_thousand_names_are_judged_in_linear_time(pattern):
    state = {pattern.format(index): 0 for index in range(100_000)}
    with pytest.raises(ValueError, match=r"and \d+ more"):
        causal_lm_from_gpt2({**_state_dict(), **state}, num_heads=H)


@pytest.mark.parametrize("name", ["transformer.h.0.attn.q_norm.weight", "lm_head.bias", "score.weight"])
def test_an_unexpected_name_is_named(name):
    with pytest.raises(ValueError, match=f"what a GPT-2 has not.*Received: .*{name}"):
        causal_lm_from_gpt2({**_state_dict(), name: np.zeros(3)}, num_heads=H)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("transformer.wpe.weight", (T, D + 1)),
        ("transformer.h.0.ln_1.weight", (D + 1,)),
        ("transformer.h.1.attn.c_attn.weight", (3 * D, D)),
        ("transformer.h.0.attn.c_attn.weight", (D, 2 * D)),
        ("transformer.h.0.mlp.c_proj.weight", (D, I)),
        ("transformer.h.1.mlp.c_fc.bias", (I + 1,)),
        ("lm_head.weight", (D, V)),
        ("transformer.wte.weight", (V,)),
    ],
)
def test_a_shape_that_does_not_fit_is_named(name, shape):
    state = {**_state_dict(head="own"), name: np.zeros(shape, "float32")}
    with pytest.raises(ValueError, match=rf"{name} .*Received: shape \({shape[0]},"):
        causal_lm_from_gpt2(state, num_heads=H)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="Received: hidden_dim=6, num_heads=4"):
        causal_lm_from_gpt2(_state_dict(), num_heads=4)


def test_the_dtype_reaches_the_layers():
    model = causal_lm_from_gpt2(_state_dict(), num_heads=H, dtype="bfloat16")
    assert {variable.dtype for variable in model.weights} == {"bfloat16"}
    assert {layer.compute_dtype for layer in model._flatten_layers()} == {"bfloat16"}
