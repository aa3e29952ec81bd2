"""State of this thread: the model call that runs, and the model whose loss is fused."""

import threading

import torch


class _Now(threading.local):
    def __init__(self):  # not of the class: a graph that looks for them in the object would hold until one is set
        self.call = None
        self.chunked = None
        self.preparing = False  # masks, see mask_preparation
        self.fused = None  # see fused_loss
        self.seq_idx = None  # see stateful_layers


class _Traced:
    """Stands for _now while torch.compile before 2.13 traces.

    Its trace reads the class attributes of a threading.local in place of what the thread has set. This object is one for
    all threads: two of them that call compiled models at the same time may find each other's call.
    """

    call = None
    chunked = None
    preparing = False
    fused = None
    seq_idx = None


_now = _Now()
traced = _now if torch.__version__ >= (2, 13) else _Traced()


def here():
    return traced if torch.compiler.is_compiling() else _now


def fuse(running):
    """Sets the model whose loss is fused in this thread, also for compiled parts that it calls; returns the one before."""
    before, here().fused, traced.fused = here().fused, running, running
    return before
