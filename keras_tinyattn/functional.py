"""Attention as pure functions of tensors, without weights.

    attention(Q, K, V) = softmax(Q K^T / sqrt(head_dim)) V

One letter an axis, here and everywhere in the package:

    B  batch                T  query positions     D  hidden_dim
    H  heads                S  key positions       K  head_dim
    V  vocabulary_size

Reference: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.
"""

from keras import backend, ops

__all__ = [
    "attention_scores",
    "attention_weights",
    "blockwise_attention",
    "causal_mask",
    "softmax",
]


def causal_mask(query_positions, key_positions):
    """Allow a query to see keys at its own position and before it, and none after.

    Args:
        query_positions: `(T,)` or `(B, T)` integers, the absolute position of each query.
        key_positions: `(S,)` integers, the absolute position of each key.

    Returns:
        `(T, S)` or `(B, T, S)`, boolean. Rows are queries, columns are keys.

    Example:

    >>> print(ops.cast(causal_mask(ops.arange(3), ops.arange(3)), "int32").numpy())
    [[1 0 0]
     [1 1 0]
     [1 1 1]]
    """
    return ops.greater_equal(query_positions[..., :, None], key_positions[None, :])


def attention_scores(queries, keys):
    """Dot product of every query with every key, `Q K^T`, in at least float32.

    In half precision a score of some hundreds has lost the digits that the softmax needs, and a
    larger one overflows.

    The division by `sqrt(head_dim)` is the caller's: dividing the `T x K` queries costs less
    than dividing the `T x S` scores.

    Args:
        queries: `(..., T, K)`.
        keys: `(..., S, K)`.

    Returns:
        `(..., T, S)`, float32 (float64 for float64 inputs): row i, column j says how well query i
        matches key j.

    Example:

    >>> print(attention_scores(ops.array([[1.0, 2.0]]), ops.array([[3.0, 4.0], [5.0, 6.0]])).numpy())
    [[11. 17.]]
    """
    return ops.matmul(at_least_float32(queries), ops.swapaxes(at_least_float32(keys), -1, -2))


def softmax(scores):
    """Softmax over the last axis that cannot overflow, in at least float32.

    The row maximum is subtracted first: `exp(s - max) / sum(exp(s - max))` equals
    `exp(s) / sum(exp(s))`, and no exponent is above zero.

    Args:
        scores: `(..., S)`, of any float type.

    Returns:
        `(..., S)`, float32 (float64 for float64 scores), each row summing to 1.

    Example:

    >>> print(softmax(ops.array([1000.0, 1000.0])).numpy())
    [0.5 0.5]
    """
    scores = at_least_float32(scores)
    if scores.shape[-1] == 1:
        # `ops.softmax` warns that one entry always gives 1; this keeps NaN and says nothing.
        return ops.exp(scores - scores)
    return ops.softmax(scores)


def attention_weights(scores, mask=None, rows_may_be_empty=True):
    """Softmax of the scores over the keys that the mask allows.

    Args:
        scores: `(..., T, S)`.
        mask: boolean, broadcast to the scores; true where a query may look.
        rows_may_be_empty: false promises that every query may look somewhere, as under a causal
            mask alone, and saves a pass over the weights.

    Returns:
        `(..., T, S)`, at least float32. A masked weight is exactly zero; a row in which every key
        is masked is all zeros, and its gradient is zero.

    Example:

    >>> mask = ops.array([[True, True], [False, False]])
    >>> print(attention_weights(ops.zeros((2, 2)), mask).numpy())
    [[0.5 0.5]
     [0.  0. ]]
    """
    if mask is None:
        return softmax(scores)
    scores = at_least_float32(scores)
    weights = softmax(ops.where(mask, scores, _lowest(scores.dtype)))
    if rows_may_be_empty:
        weights = ops.where(ops.any(mask, axis=-1, keepdims=True), weights, 0.0)
    return weights


def blockwise_attention(queries, keys, values, key_mask=None, causal=False, block_size=256):
    """`softmax(Q K^T) V` in memory linear in the length: the weights never stand whole.

    Blocks of `block_size` queries meet blocks of keys one pair at a time. The forward pass keeps a
    running maximum and sum for each query (the online softmax), the backward pass recomputes the
    scores of each pair from the saved log-sum-exp instead of keeping them. Under a causal mask the
    pairs above the diagonal are never visited. No weights come out and none are dropped out: the
    dense path is for that.

    Args:
        queries: `(B, H, T, K)`, already divided by `sqrt(head_dim)`.
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
    if key_mask is None:
        key_mask = ops.ones((ops.shape(keys)[0], ops.shape(keys)[2]), dtype="bool")
    # The unit of work is one row of the batch: its blocks fit a processor's cache, whatever B is.
    rows, head_dim = ops.shape(queries)[0], queries.shape[3]
    num_heads = queries.shape[1]
    query_blocks = -(-ops.shape(queries)[2] // block_size)
    key_blocks = -(-ops.shape(keys)[2] // block_size)
    dtype = "float64" if backend.standardize_dtype(values.dtype) == "float64" else "float32"
    statistic_shape = (num_heads, block_size, 1)
    tail = ops.arange(block_size)
    on_diagonal = causal_mask(tail, tail)

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

    mask_blocks = ops.reshape(
        ops.pad(key_mask, ((0, 0), (0, key_blocks * block_size - ops.shape(key_mask)[1]))),
        (rows * key_blocks, block_size),
    )

    def first_key_block(i):
        return i // query_blocks * key_blocks

    def last_key_block(i):
        return i if causal else first_key_block(i) + key_blocks - 1

    def pair_scores(query, key, i, j):
        """(H, block_size, block_size) scores of query block i and key block j, -inf where masked."""
        scores = attention_scores(query, key)
        mask = _block(mask_blocks, j)[None, :]
        if causal:
            mask = mask & (on_diagonal | (i > j))
        return ops.where(mask, scores, float("-inf"))

    @ops.custom_gradient
    def attend(queries, keys, values):
        query_parts, key_parts = split(queries, query_blocks), split(keys, key_blocks)
        value_parts = split(values, key_blocks)

        def attend_one_query_block(i, outputs, logsumexps):
            query = _block(query_parts, i)

            def add_one_key_block(j, output, maximum, total):
                scores = pair_scores(query, _block(key_parts, j), i, j)
                higher = ops.maximum(maximum, ops.max(scores, axis=-1, keepdims=True))
                # A query that has seen no key yet has the maximum -inf; -inf - -inf is not a number.
                finite = ops.where(higher == float("-inf"), 0.0, higher)
                shrink = ops.exp(maximum - finite)
                weights = ops.exp(scores - finite)
                attended = ops.matmul(ops.cast(weights, values.dtype), _block(value_parts, j))
                return (
                    j + 1,
                    output * shrink + ops.cast(attended, dtype),
                    higher,
                    total * shrink + ops.sum(weights, axis=-1, keepdims=True),
                )

            zeros = ops.zeros(statistic_shape, dtype)
            _, output, maximum, total = _while_loop(
                lambda j, *_: j <= last_key_block(i),
                add_one_key_block,
                (
                    first_key_block(i),
                    ops.zeros((num_heads, block_size, head_dim), dtype),
                    zeros - float("inf"),
                    zeros,
                ),
            )
            # Zero for a query with no key to see; its log-sum-exp then meets scores of -inf only.
            empty = total == 0.0
            total = ops.where(empty, 1.0, total)
            logsumexp = ops.where(empty, 0.0, maximum) + ops.log(total)
            return (
                i + 1,
                _put(outputs, i, ops.cast(output / total, values.dtype)),
                _put(logsumexps, i, logsumexp),
            )

        _, outputs, logsumexps = _while_loop(
            lambda i, *_: i < rows * query_blocks,
            attend_one_query_block,
            (
                0,
                ops.zeros_like(query_parts),
                ops.zeros((rows * query_blocks, *statistic_shape), dtype),
            ),
        )

        def gradient(*args, upstream=None):
            upstream = split(args[0] if upstream is None else upstream, query_blocks)
            # Row sums of dP * P, without P.
            inner = ops.sum(
                ops.cast(upstream, dtype) * ops.cast(outputs, dtype), axis=-1, keepdims=True
            )

            def one_pair(i, j, d_queries, d_keys, d_values):
                query, key = _block(query_parts, i), _block(key_parts, j)
                value, d_output = _block(value_parts, j), _block(upstream, i)
                weights = ops.exp(pair_scores(query, key, i, j) - _block(logsumexps, i))
                d_weights = attention_scores(d_output, value)
                d_scores = ops.cast(weights * (d_weights - _block(inner, i)), values.dtype)
                weights = ops.cast(weights, values.dtype)
                d_queries = _add(d_queries, i, ops.matmul(d_scores, key))
                d_keys = _add(d_keys, j, ops.matmul(ops.swapaxes(d_scores, -1, -2), query))
                d_values = _add(d_values, j, ops.matmul(ops.swapaxes(weights, -1, -2), d_output))
                done = ops.equal(j, last_key_block(i))
                i = ops.where(done, i + 1, i)
                return i, ops.where(done, first_key_block(i), j + 1), d_queries, d_keys, d_values

            _, _, d_queries, d_keys, d_values = _while_loop(
                lambda i, *_: i < rows * query_blocks,
                one_pair,
                (
                    0,
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

    return attend(queries, keys, values)


def at_least_float32(x):
    dtype = backend.standardize_dtype(x.dtype)
    return ops.cast(x, "float32") if dtype in ("float16", "bfloat16") else x


def _lowest(dtype):
    """The most negative finite number: after the softmax, exactly zero."""
    return -1.7976931348623157e308 if backend.standardize_dtype(dtype) == "float64" else -3.4028235e38


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
