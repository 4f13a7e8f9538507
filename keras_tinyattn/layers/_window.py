"""The forms in which attention over a window is computed, and which of them runs.

dense   one matrix of scores, (B, H, T, T): the only form that has weights to return
strips  the same for one strip of queries after the other, each against the keys up to its end
blocks  `blockwise_attention`, in memory linear in T
"""

from keras import ops

from keras_tinyattn import functional
from keras_tinyattn.blockwise import blockwise_attention
from keras_tinyattn.layers._masks import window_mask

# Tokens from which attention goes by blocks, for their memory. Forward and backward with 8 heads of 64,
# the dense form takes 1, and blocks with XLA / without: 0.68 / 1.04 at T 512, 0.45 / 1.00 at 1,024,
# 0.45 / 0.68 at 2,048. Strips: 0.72 / 0.79, 0.53 / 0.70, 0.60 / 0.60.
BLOCKWISE_FROM = 1024
# The shortest strip, and the most of them. At T 128 two of 64 take 0.92 / 0.97, four of 32 1.00 / 1.07;
# at T 256 four of 64 take 0.79 / 0.91, eight of 32 0.82 / 1.10; at T 1,024 sixteen of 64 0.56 / 0.79.
LEAST_STRIP, MOST_STRIPS = 64, 8


def check_blockwise(blockwise, dropout):
    if blockwise not in (None, True, False):
        raise ValueError(
            "blockwise is a choice. Expected True, False, or None to choose by the length. "
            f"Received: blockwise={blockwise!r}."
        )
    if blockwise and dropout:
        raise ValueError(
            "Blockwise attention never holds the weights, so it cannot drop any out. "
            f"Expected dropout=0.0 with blockwise=True. Received: dropout={dropout}. "
            "Set dropout to 0, or leave blockwise unset."
        )
    return blockwise


def choose_form(length, causal, blockwise, padded, masked, returns_weights, drops):
    """The form of a window; None where its length is not known yet and will tell dense from blocks.

    Args:
        length: T, or None.
        causal: whether a query is kept from the keys after it.
        blockwise: the layer's choice: True, False, or None for by itself.
        padded: whether there is a padding mask.
        masked: whether there is an attention mask.
        returns_weights: whether the weights are wanted.
        drops: whether some weights are dropped out.

    Raises:
        ValueError: if blocks are insisted on where the weights are needed.
    """
    if blockwise and (returns_weights or masked):
        given = "return_attention_scores=True" if returns_weights else "attention_mask"
        raise ValueError(
            "Blockwise attention never holds a (T, S) matrix. "
            f"Expected neither weights nor an attention_mask. Received: {given} with "
            "blockwise=True. Leave it out, or build the layer with blockwise=None."
        )
    if blockwise:
        return "blocks"
    if returns_weights or masked:
        return "dense"
    if blockwise is None and not drops:
        if length is None:
            return None
        if length >= BLOCKWISE_FROM:
            return "blocks"
    by_strips = causal and not padded and length is not None and length >= 2 * LEAST_STRIP
    return "strips" if by_strips else "dense"


def attend_window(form, queries, keys, values, padding, attention_mask, causal, dropout):
    """What each query fetches, `(B, H, T, K)`, and the weights of the dense form or None.

    Args:
        form: what `choose_form` returned.
        queries: `(B, H, T, K)`, as are `keys` and `values`.
        padding: `(B, T)` boolean, true where a position is real, or None.
        attention_mask: boolean, broadcasts to `(B, H, T, T)`, or None.
        causal: whether a query is kept from the keys after it.
        dropout: a function of the weights, or None.
    """

    def dense():
        mask = window_mask(ops.shape(queries)[2], padding, attention_mask, causal)
        may_be_empty = padding is not None or attention_mask is not None
        return functional.attend(queries, keys, values, mask, may_be_empty, dropout=dropout)

    def blocks():
        attended = blockwise_attention(queries, keys, values, padding, causal=causal)
        return attended if padding is None else ops.where(padding[:, None, :, None], attended, 0.0)

    if form == "dense":
        return dense()
    if form == "strips":
        return _attend_by_strips(queries, keys, values, dropout), None
    if form == "blocks":
        return blocks(), None
    is_long = ops.shape(queries)[2] >= BLOCKWISE_FROM
    return ops.cond(is_long, blocks, lambda: dense()[0]), None


def _attend_by_strips(queries, keys, values, dropout):
    """`functional.attend` under a causal mask alone, without most of the scores that it would mask."""
    length = queries.shape[2]
    strip = max(LEAST_STRIP, -(-length // MOST_STRIPS))
    starts = range(0, length, strip)
    # Split and joined, not sliced: the gradient of a slice fills up what it left with zeros.
    parts = [ops.split(x, list(starts[1:]), axis=2) for x in (queries, keys, values)]
    attended = []
    for index, start in enumerate(starts):
        seen = [ops.concatenate(part[: index + 1], axis=2) for part in parts[1:]]
        end = min(start + strip, length)
        mask = functional.causal_mask(ops.arange(start, end), ops.arange(end))
        attended.append(functional.attend(parts[0][index], *seen, mask, False, dropout=dropout)[0])
    return ops.concatenate(attended, axis=2)
