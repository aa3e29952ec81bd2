"""What a compiled graph refuses on a GPU is an assertion there, after which its process cannot use the GPU any more."""

import contextlib
import os
import re
import subprocess
import sys

import pytest
import torch

from helpers import ROOT

_ALONE = "PACKING_OPS_TEST_ALONE"


def asserting(*values):
    """A parameter, or some, with which a test asserts on the GPU."""
    return pytest.param(*values, marks=pytest.mark.asserts_on_gpu)


def runs_alone(item) -> bool:
    """Runs a test marked asserts_on_gpu in a separate process, where it is one of the GPU; whether it did.

    The process may end badly after its test: it has lost the GPU.
    """
    device = getattr(item, "callspec", None) and item.callspec.params.get("device")
    if device != "cuda" or item.get_closest_marker("asserts_on_gpu") is None or _ALONE in os.environ:
        return False
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", item.nodeid]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), _ALONE: "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "1 passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
    return True


@contextlib.contextmanager
def refused(match, capfd):
    """An error with these words; or one of the GPU, which prints them. cuBLAS, which starts after the assertion, has
    an error without the assertion's name.
    """
    with pytest.raises((ValueError, RuntimeError)) as caught:  # noqa: PT012
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    said = str(caught.value)
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
        said += capfd.readouterr().err
    assert re.search(match, said), said


class LostGpu:
    """The first test of this process behind which the GPU does not answer: later ones fail by its name."""

    def __init__(self):
        self.test = None

    def look(self, nodeid) -> None:
        """After a test: an assertion, or an address outside of memory, shows in the first call that waits."""
        if self.test is None and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                self.test = nodeid
                pytest.fail(f"this process lost its GPU in {nodeid}: {str(error).splitlines()[0]}", pytrace=False)

    def refuse_others(self) -> None:
        """Before a test."""
        if self.test is not None:
            pytest.fail(f"this process lost its GPU in an earlier test, {self.test}", pytrace=False)
