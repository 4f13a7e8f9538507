"""Attention in memory linear in the length: the scores and weights are never whole."""

from keras import backend, ops

from keras_tinyattn.functional import attention_scores, causal_mask, huge

__all__ = ["blockwise_attention"]


def blockwise_attention(queries, keys, values, key_mask=None, causal=False, block_size=256):
    """`softmax(Q K^T / sqrt(head_dim)) V` in memory linear in the length.

    Blocks of `block_size` queries meet blocks of keys one pair at a time. The forward pass keeps a
    running maximum and sum for each query (the online softmax), the backward pass recomputes the
    scores of each pair from the saved log-sum-exp instead of keeping them. Under a causal mask the
    pairs above the diagonal are never visited. There are no weights to return or to drop out:
    `functional.attend` does that.

    Args:
        queries: `(B, H, T, K)`.
        keys: `(B, H, S, K)`.
        values: `(B, H, S, K)`.
        key_mask: `(B, S)` boolean, true where a key may be seen.
        causal: whether a query sees keys up to its own position only; needs `T == S`.
        block_size: how many queries and keys a block holds.

    Returns:
        `(B, H, T, K)`, in the type of the values. A query with no key to see gets zeros.

    Raises:
        ValueError: if `causal` is asked for and the lengths differ.

    Example:

    >>> x = ops.ones((1, 2, 700, 4))
    >>> blockwise_attention(x, x, x, causal=True).shape
    TensorShape([1, 2, 700, 4])

    Reference: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
    "FlashAttention", 2022.
    """
    T, S = queries.shape[2], keys.shape[2]
    if causal and T != S:
        raise ValueError(
            "Causal blockwise attention aligns queries and keys by position. "
            f"Expected as many queries as keys. Received: {T} queries and {S} keys. "
            "Give windows of equal length, or use dense attention."
        )
    # The unit of work is one row of the batch: its blocks fit a processor's cache, whatever B is.
    rows, head_dim = ops.shape(queries)[0], queries.shape[3]
    num_heads = queries.shape[1]
    query_blocks = -(-ops.shape(queries)[2] // block_size)
    key_blocks = -(-ops.shape(keys)[2] // block_size)
    dtype = "float64" if backend.standardize_dtype(values.dtype) == "float64" else "float32"
    lowest = -huge(dtype)
    within = ops.arange(block_size)
    on_diagonal = causal_mask(within, within)

    def split(x, num_blocks):
        """(B, H, T, K) -> (B * blocks, H, block_size, K), the last block filled up with zeros."""
        x = ops.pad(x, ((0, 0), (0, 0), (0, num_blocks * block_size - ops.shape(x)[2]), (0, 0)))
        x = ops.reshape(x, (rows, num_heads, num_blocks, block_size, head_dim))
        x = ops.transpose(x, (0, 2, 1, 3, 4))
        return ops.reshape(x, (rows * num_blocks, num_heads, block_size, head_dim))

    def join(x, num_blocks, length):
        """The inverse of `split`."""
        x = ops.reshape(x, (rows, num_blocks, num_heads, block_size, head_dim))
        x = ops.reshape(
            ops.transpose(x, (0, 2, 1, 3, 4)), (rows, num_heads, num_blocks * block_size, head_dim)
        )
        return x[:, :, :length]

    if key_mask is None and not causal and (S is None or S % block_size):
        # The keys that fill up the last block. Under a causal mask no query looks as far.
        key_mask = ops.ones((rows, ops.shape(keys)[2]), dtype="bool")
    if key_mask is not None:
        mask_blocks = ops.reshape(
            ops.pad(key_mask, ((0, 0), (0, key_blocks * block_size - ops.shape(key_mask)[1]))),
            (rows * key_blocks, 1, block_size),
        )

    def pair_scores(query, key, j, diagonal, keys_in_rows=False):
        """Scores of a query block and key block j, (H, block_size, block_size), -huge where masked."""
        mask = on_diagonal if diagonal else None
        if key_mask is not None:
            keys_seen = _block(mask_blocks, j)
            mask = keys_seen if mask is None else mask & keys_seen
        scores = attention_scores(key, query) if keys_in_rows else attention_scores(query, key)
        if mask is None:
            return scores
        return ops.where(ops.swapaxes(mask, -1, -2) if keys_in_rows else mask, scores, lowest)

    def seen(maximum):
        # Of a query that has seen no key yet; `lowest` less itself would give masked keys weight.
        return maximum if key_mask is None else ops.where(maximum == lowest, 0.0, maximum)

    @ops.custom_gradient
    def attend(queries, keys, values):
        query_parts, key_parts = split(queries, query_blocks), split(keys, key_blocks)
        value_parts = split(values, key_blocks)

        def attend_one_query_block(i, outputs, logsumexps):
            query = _block(query_parts, i)

            def attend_one_key_block(j, scores, maximum):
                weights = ops.exp(scores - seen(maximum))
                attended = ops.matmul(ops.cast(weights, values.dtype), _block(value_parts, j))
                return ops.cast(attended, dtype), ops.sum(weights, axis=-1, keepdims=True)

            def add_one_key_block(j, output, maximum, total):
                scores = pair_scores(query, _block(key_parts, j), j, diagonal=False)
                higher = ops.maximum(maximum, ops.max(scores, axis=-1, keepdims=True))
                shrink = ops.exp(maximum - seen(higher))
                attended, weight = attend_one_key_block(j, scores, higher)
                return j + 1, output * shrink + attended, higher, total * shrink + weight

            # The diagonal comes first and by itself, so that no other pair needs a causal mask.
            row = i // query_blocks * key_blocks
            start = i if causal else row
            scores = pair_scores(query, _block(key_parts, start), start, diagonal=causal)
            maximum = ops.max(scores, axis=-1, keepdims=True)
            output, total = attend_one_key_block(start, scores, maximum)
            begin, end = (row, i) if causal else (row + 1, row + key_blocks)
            _, output, maximum, total = _while_loop(
                lambda j, *_: j < end, add_one_key_block, (begin, output, maximum, total)
            )
            if key_mask is not None:
                # Zeros for a query with no key to see; its log-sum-exp meets scores of `lowest` only.
                total = ops.where(total == 0.0, 1.0, total)
            return (
                i + 1,
                _put(outputs, i, ops.cast(output / total, values.dtype)),
                _put(logsumexps, i, ops.swapaxes(seen(maximum) + ops.log(total), -1, -2)),
            )

        _, outputs, logsumexps = _while_loop(
            lambda i, *_: i < rows * query_blocks,
            attend_one_query_block,
            (
                0,
                ops.zeros_like(query_parts),
                ops.zeros((rows * query_blocks, num_heads, 1, block_size), dtype),
            ),
        )

        def gradient(*args, upstream=None):
            upstream = split(args[0] if upstream is None else upstream, query_blocks)
            # Row sums of dP * P, without P.
            inner = ops.sum(ops.cast(upstream, dtype) * ops.cast(outputs, dtype), axis=-1)
            inner = inner[:, :, None]

            def differentiate_one_key_block(j, d_queries, d_keys, d_values):
                key, value = _block(key_parts, j), _block(value_parts, j)

                def add_one_query_block(i, d_queries, d_key, d_value, diagonal=False):
                    query, d_output = _block(query_parts, i), _block(upstream, i)
                    # Keys in rows: two of the products then read the weights as they lie.
                    scores = pair_scores(query, key, j, diagonal, keys_in_rows=True)
                    weights = ops.exp(scores - _block(logsumexps, i))
                    d_weights = attention_scores(value, d_output)
                    d_scores = ops.cast(weights * (d_weights - _block(inner, i)), values.dtype)
                    weights = ops.cast(weights, values.dtype)
                    return (
                        i + 1,
                        _add(d_queries, i, ops.matmul(ops.swapaxes(d_scores, -1, -2), key)),
                        d_key + ops.cast(ops.matmul(d_scores, query), dtype),
                        d_value + ops.cast(ops.matmul(weights, d_output), dtype),
                    )

                zeros = ops.zeros((num_heads, block_size, head_dim), dtype)
                row = j // key_blocks * query_blocks
                i, sums = row, (d_queries, zeros, zeros)
                if causal:
                    i, *sums = add_one_query_block(j, *sums, diagonal=True)
                _, d_queries, d_key, d_value = _while_loop(
                    lambda i, *_: i < row + query_blocks, add_one_query_block, (i, *sums)
                )
                return j + 1, d_queries, _put(d_keys, j, d_key), _put(d_values, j, d_value)

            _, d_queries, d_keys, d_values = _while_loop(
                lambda j, *_: j < rows * key_blocks,
                differentiate_one_key_block,
                (
                    0,
                    ops.zeros(ops.shape(query_parts), dtype),
                    ops.zeros(ops.shape(key_parts), dtype),
                    ops.zeros(ops.shape(value_parts), dtype),
                ),
            )
            return (
                ops.cast(join(d_queries, query_blocks, ops.shape(queries)[2]), queries.dtype),
                ops.cast(join(d_keys, key_blocks, ops.shape(keys)[2]), keys.dtype),
                ops.cast(join(d_values, key_blocks, ops.shape(values)[2]), values.dtype),
            )

        return join(outputs, query_blocks, ops.shape(queries)[2]), gradient

    return attend(queries * head_dim**-0.5, keys, values)


def _block(x, index):
    return ops.squeeze(ops.slice(x, (index,) + (0,) * (x.ndim - 1), (1,) + x.shape[1:]), 0)


def _put(x, index, block):
    return ops.scatter_update(x, ops.reshape(index, (1, 1)), block[None])


def _add(x, index, block):
    block = ops.cast(block[None], x.dtype)
    return ops.scatter_update(x, ops.reshape(index, (1, 1)), block, reduction="add")


def _while_loop(condition, body, loop_variables):
    """`ops.while_loop` that keeps one iteration in memory.

    TensorFlow keeps ten in flight unless told otherwise, and ten times ten when loops are nested,
    which costs ten times the memory; `ops.while_loop` cannot tell it.
    """
    if backend.backend() != "tensorflow":
        return ops.while_loop(condition, body, loop_variables)
    import tensorflow as tf

    return tf.while_loop(condition, body, loop_variables, parallel_iterations=1)
