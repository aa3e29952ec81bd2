"""Checkpoints around the layers of a model, as a training loop that knows nothing of transformers puts them there."""


def layers_of(model):
    return model.backbone.layers if hasattr(model, "backbone") else model.model.layers


def by_hand(layer, checkpoint):
    """As a loop calls a layer; hidden states are its first argument."""
    stock = layer.forward
    layer.forward = lambda hidden, *args, **kwargs: checkpoint(lambda each: stock(each, *args, **kwargs), hidden)
    return layer
