"""GPT-2 weights: a model that others trained, stage by stage, and state dicts that do not fit."""

import json
import struct

import keras
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
