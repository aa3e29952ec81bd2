"""Swapped models that other tests left alive."""

import contextlib
import gc

import torch

from packing_ops.integrations._patching import Patch


@contextlib.contextmanager
def no_model_swapped():
    """Models of other tests, which may live on, do without their patches."""
    torch._dynamo.reset()  # compiled code keeps models alive
    gc.collect()
    users = [(patch, user) for patch in gc.get_objects() if type(patch) is Patch for user in [*patch.users]]
    for patch, user in users:
        patch.revert(user)
    yield
    for patch, user in users:
        patch.apply(user)
