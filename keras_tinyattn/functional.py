"""Attention as pure functions of tensors, without weights.

    attention(Q, K, V) = softmax(Q K^T / sqrt(head_dim)) V

One letter per axis, here and everywhere in the package:

    B  batch                T  query positions     D  hidden_dim
    H  heads                S  key positions       K  head_dim
    V  vocabulary_size     M  tokens of a stop
    L  prompt and new tokens     N  new tokens

Reference: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.
"""

from keras import backend, ops

__all__ = ["attend", "attention_scores", "attention_weights", "causal_mask", "softmax"]


def attend(queries, keys, values, mask=None, rows_may_be_empty=True, keys_first=False, dropout=None):
    """Scaled dot-product attention: `softmax(Q K^T / sqrt(head_dim)) V`.

    Args:
        queries: `(..., T, K)`.
        keys: `(..., S, K)`.
        values: `(..., S, K)`.
        mask: boolean, broadcast to `(..., T, S)`; true where a query may look.
        rows_may_be_empty: as in `attention_weights`.
        keys_first: as in `attention_scores`.
        dropout: a function applied to the weights before they meet the values; none unless given.

    Returns:
        The weighted values, `(..., T, K)`, and the weights, `(..., T, S)`, in the type of the values.

    Example:

    >>> x = ops.array([[1.0, 0.0], [0.0, 1.0]])
    >>> attended, weights = attend(x, x, x)
    >>> print(weights.numpy().round(2))
    [[0.67 0.33]
     [0.33 0.67]]
    """
    scores = attention_scores(queries * queries.shape[-1] ** -0.5, keys, keys_first)
    weights = ops.cast(attention_weights(scores, mask, rows_may_be_empty), values.dtype)
    kept = weights if dropout is None else dropout(weights)
    return ops.matmul(kept, values), weights


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
    return ops.greater_equal(ops.expand_dims(query_positions, -1), key_positions)


def attention_scores(queries, keys, keys_first=False):
    """Dot product of every query with every key, `Q K^T`, in at least float32.

    In half precision a score of some hundreds has lost the digits that the softmax needs, and a
    larger one overflows.

    `attend` divides the queries by `sqrt(head_dim)`, since they are fewer numbers than the scores.

    Args:
        queries: `(..., T, K)`.
        keys: `(..., S, K)`.
        keys_first: whether to compute `(K Q^T)^T`, the same numbers. For a single query against a cache
            XLA is faster that way, since it would otherwise transpose the whole cache.

    Returns:
        `(..., T, S)`, float32 (float64 for float64 inputs): row i, column j says how well query i
        matches key j.

    Example:

    >>> print(attention_scores(ops.array([[1.0, 2.0]]), ops.array([[3.0, 4.0], [5.0, 6.0]])).numpy())
    [[11. 17.]]
    """
    queries, keys = at_least_float32(queries), at_least_float32(keys)
    if keys_first:
        return ops.swapaxes(ops.matmul(keys, ops.swapaxes(queries, -1, -2)), -1, -2)
    return ops.matmul(queries, ops.swapaxes(keys, -1, -2))


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
    # One pass over the scores where a selection takes two, and no pass in the gradient. Subtracted, not
    # added: TensorFlow may fuse an addition of rank 4 into the product, at sixty times the cost.
    penalty = ops.where(mask, ops.cast(0.0, scores.dtype), huge(scores.dtype))
    weights = softmax(scores - penalty)
    if rows_may_be_empty:
        weights = ops.where(ops.any(mask, axis=-1, keepdims=True), weights, 0.0)
    return weights


def at_least_float32(x):
    dtype = backend.standardize_dtype(x.dtype)
    return ops.cast(x, "float32") if dtype in ("float16", "bfloat16") else x


def huge(dtype):
    """Half the largest number: a score minus this is zero after the softmax, and still finite."""
    return 8.9e307 if backend.standardize_dtype(dtype) == "float64" else 1.7e38
