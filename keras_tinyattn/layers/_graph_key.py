"""What the graph of a layer depends on: layers alike share one, and no graph is ever stale."""

import keras

# What matters in a call, of the layers of Keras that our blocks are made of.
_ATTRIBUTES = {
    keras.layers.Dense: ("units", "activation", "use_bias", "lora_rank", "lora_alpha"),
    keras.layers.Dropout: ("rate",),
    keras.layers.LayerNormalization: ("axis", "epsilon", "center", "scale"),
    keras.layers.RMSNormalization: ("axis", "epsilon"),
}


def graph_key(layer):
    """A hashable that says what a graph of the layer depends on, apart from its variables.

    Layers with equal keys and variables of equal shapes may share a graph. A layer
    takes part by a method `graph_key`, which says what matters in its call; of a layer without one
    nothing is known, so that its key equals no other layer's, and changes with its configuration.
    """
    if type(layer) in _ATTRIBUTES:
        own = (getattr(layer, name, None) for name in _ATTRIBUTES[type(layer)])
        own = tuple(tuple(value) if isinstance(value, list) else value for value in own)
    elif declares_graph_key(layer):
        own = layer.graph_key()
    else:
        own = (layer, _inherited(layer))
    return (type(layer), own, layer.dtype_policy.name)


def declares_graph_key(layer):
    """Whether the class itself has a `graph_key`: what a subclass does, its base class cannot say."""
    return "graph_key" in vars(type(layer))


def _inherited(layer):
    if hasattr(layer, "graph_key"):
        return layer.graph_key()
    try:
        return repr(layer.get_config())
    except NotImplementedError:
        return None
