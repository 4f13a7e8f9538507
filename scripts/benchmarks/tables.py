"""What is measured: the peers, and for each benchmark its columns and its tables."""

from typing import NamedTuple

OURS, AGAINST = "tinyattn", "against"
# A peer's module, and what must be installed for it: a module and its distribution.
PEERS = {
    OURS: ("benchmarks.peer_tinyattn", "keras", "keras"),
    AGAINST: ("benchmarks.peer_tinyattn", "keras", "keras"),
    "Keras": ("benchmarks.peer_keras", "keras", "keras"),
    "KerasHub": ("benchmarks.peer_keras_hub", "keras_hub", "keras-hub"),
    "torch": ("benchmarks.peer_torch", "torch", "torch"),
    "JAX": ("benchmarks.peer_jax", "jax", "jax"),
}


class Benchmark(NamedTuple):
    """One of the command's benchmarks.

    Attributes:
        title: what the page is called.
        columns: maps a column to its peer and to the settings of the peer's function.
        tables: maps the title of a table to the sizes of its problem.
        quick: small tables, to see that everything runs.
        baselines: peers with which all columns are compared, each by its best column.
    """

    title: str
    columns: dict
    tables: dict
    quick: dict
    baselines: tuple = ()


def _graph_and_xla(name, peer, **settings):
    return {
        f"{name} graph": (peer, {"jit_compile": False, **settings}),
        f"{name} XLA": (peer, {"jit_compile": True, **settings}),
    }


def _layers(*shapes, directions=("forward", "forward+backward")):
    return {
        f"B {B}, T {T}, D {D}, H {H}, {direction}": dict(B=B, T=T, D=D, H=H, direction=direction)
        for direction in directions
        for B, T, D, H in shapes
    }


def _requests(models, batch_sizes, prompt_length, new_tokens):
    return {
        f"{name}, batch size {B}, {new_tokens} new tokens": dict(
            model, B=B, prompt_length=prompt_length, new_tokens=new_tokens
        )
        for name, model in models.items()
        for B in batch_sizes
    }


_blockwise = _graph_and_xla(f"{OURS} blockwise", OURS, blockwise=True)
_keras = _graph_and_xla("Keras", "Keras")

BENCHMARKS = {
    "layer": Benchmark(
        "One causal self-attention layer: time",
        columns={
            **_graph_and_xla(f"{OURS} dense", OURS, blockwise=False),
            **_blockwise,
            **_keras,
            **_graph_and_xla("KerasHub", "KerasHub"),
            "torch": ("torch", {}),
            "JAX": ("JAX", {}),
        },
        tables=_layers((32, 64, 128, 4), (8, 256, 384, 6), (4, 1024, 512, 8), (1, 4096, 512, 8)),
        quick=_layers((2, 96, 24, 3)),
        baselines=("Keras", "torch"),
    ),
    "memory": Benchmark(
        "One causal self-attention layer: memory",
        columns={**_blockwise, **_keras, "torch": ("torch", {})},
        # Others than ours are measured at the shorter length only: Keras' layer already takes more than
        # 4 GB there, and four times that at the longer one.
        tables=_layers((1, 8192, 256, 4), (1, 16384, 256, 4)),
        quick=_layers((1, 512, 32, 2), (1, 1024, 32, 2), directions=["forward+backward"]),
    ),
    "generate": Benchmark(
        "Greedy generation by one GPT-2",
        columns={
            f"{OURS} unequal XLA": (OURS, {"jit_compile": True, "unequal": True}),
            **_graph_and_xla(OURS, OURS),
            # Whether the time grows in proportion to the number of new tokens.
            **_graph_and_xla(f"{OURS} 1/4", OURS, share=1 / 4),
            **_graph_and_xla(f"{OURS} 1/2", OURS, share=1 / 2),
            **_graph_and_xla("KerasHub", "KerasHub"),
            "torch KV loop": ("torch", {}),
            "JAX while_loop": ("JAX", {}),
        },
        tables=_requests(
            {
                "small": dict(num_layers=4, H=4, D=128, V=256, T=256),
                "medium": dict(num_layers=6, H=6, D=384, V=5000, T=256),
            },
            batch_sizes=(1, 32),
            prompt_length=16,
            new_tokens=200,
        ),
        quick=_requests({"tiny": dict(num_layers=1, H=2, D=16, V=40, T=32)}, (2,), 6, 8),
        baselines=("KerasHub", "torch"),
    ),
    "train": Benchmark(
        "Training steps of one GPT-2",
        columns={
            f"{OURS} train step": (OURS, {}),
            f"{OURS} fit XLA": (OURS, {"use_fit": True}),
            **_graph_and_xla("Keras fit", "Keras"),
            "torch step, as nanoGPT": ("torch", {}),
        },
        tables={
            "small, 32 x 128 tokens a step": dict(num_layers=4, H=4, D=128, V=65, T=128, B=32, steps=4),
            "medium, 32 x 128 tokens a step": dict(
                num_layers=6, H=6, D=384, V=65, T=128, B=32, steps=1
            ),
        },
        quick={"tiny, 2 x 8 tokens a step": dict(num_layers=1, H=3, D=12, V=11, T=8, B=2, steps=2)},
        baselines=("torch", "Keras"),
    ),
}


def columns_of(name, size, peers):
    """The columns of a table for the peers of a run; with AGAINST, whole problems of ours twice."""
    columns = {
        column: (peer, settings)
        for column, (peer, settings) in BENCHMARKS[name].columns.items()
        if peer in peers
        # One prompt alone is not unequal.
        and not (settings.get("unequal") and size["B"] == 1)
        and not ("share" in settings and AGAINST in peers)
    }
    if AGAINST in peers:
        columns |= {
            column.replace(OURS, AGAINST): (AGAINST, settings)
            for column, (peer, settings) in columns.items()
            if peer == OURS
        }
    return columns


def tokens(size, share=1, **_):
    """How many tokens one call of a column computes."""
    if "new_tokens" in size:
        return size["B"] * int(share * size["new_tokens"])
    return size["B"] * size["T"] * size.get("steps", 1)


def is_part(settings):
    """Whether a column computes something else than the whole problem."""
    return bool(settings.keys() & {"unequal", "share"})
