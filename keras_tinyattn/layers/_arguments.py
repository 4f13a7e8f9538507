"""Checks and conversions of the arguments that several layers share."""

from keras import initializers, ops


def own_draw(initializer, index):
    """The same initializer with another seed.

    A Keras initializer object gives the same numbers each time it is called, so that kernels of one
    shape would start as copies of each other.
    """
    if not isinstance(initializer, initializers.Initializer):
        return initializer
    config = initializer.get_config()
    seed = config.get("seed", "none")
    # Without a seed nothing repeats, and a seed generator advances by itself.
    if not (seed is None or isinstance(seed, int)):
        return initializer
    return type(initializer).from_config({**config, "seed": None if seed is None else seed + index})


def check_size(name, value):
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        raise ValueError(
            f"{name} counts something. Expected an integer of at least 1. "
            f"Received: {name}={value!r}. Give a positive integer."
        )
    return int(value)


def check_rate(dropout):
    if not 0 <= dropout < 1:
        raise ValueError(
            "dropout is the share that is dropped. Expected a number in [0, 1). "
            f"Received: dropout={dropout}. Use 0 for no dropout."
        )
    return float(dropout)


def fits(shape, expected):
    """Whether a shape may be the expected one, where None is a size known only at run time."""
    return len(shape) == len(expected) and all(
        size is None or wanted is None or size == wanted
        for size, wanted in zip(shape, expected, strict=True)
    )


def check_positions(shape, batch_size, length):
    if not (fits(shape, (length,)) or fits(shape, (batch_size, length))):
        raise ValueError(
            "The positions do not fit the inputs. Expected shape (T,) or (B, T), "
            f"here {(length,)} or {(batch_size, length)}. Received: shape {tuple(shape)}. "
            "Give each token its absolute position."
        )


def sizes(x):
    """The sizes of a tensor for a reshape: -1 for the one that is unknown, if there is just one.

    A size that is only known at run time costs a plain graph three operations.
    """
    unknown = [axis for axis, size in enumerate(x.shape) if size is None]
    if len(unknown) == 1 and 0 not in x.shape:
        return tuple(-1 if size is None else size for size in x.shape)
    return ops.shape(x)
