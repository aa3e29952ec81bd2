"""register and revert_registration next to another library that wraps the same functions of transformers."""

import functools

import pytest
import torch

transformers = pytest.importorskip("transformers")

from helpers.hf_models import tiny_model  # noqa: E402

from packing_ops.integrations.transformers import call, masks, register, revert_registration, versions  # noqa: E402

OWNERS = (transformers.masking_utils, "_preprocess_mask_arguments"), (transformers.PreTrainedModel, "__call__")
LENGTHS = [7, 1, 12, 4]


def wrapped(function):
    @functools.wraps(function)
    def theirs(*args, **kwargs):
        return function(*args, **kwargs)

    return theirs


@pytest.fixture
def above_theirs_above_ours(monkeypatch):
    """Registered, wrapped by another library, unregistered and registered again; and what is reported."""
    names, told = list(call.NAMES), []
    for tell in ("warn_once", "log_once"):
        monkeypatch.setattr(versions, tell, torch.compiler.assume_constant_result(lambda why: told.append(why)))
    for name in names:
        revert_registration(name)
    register()
    with monkeypatch.context() as patched:
        for owner, attribute in OWNERS:
            ours = getattr(owner, attribute)
            patched.setattr(owner, attribute, wrapped(ours))
        over = [getattr(owner, attribute) for owner, attribute in OWNERS]
        revert_registration()
        assert [getattr(owner, attribute) for owner, attribute in OWNERS] == over
        register()
        yield told
        revert_registration()
        assert [getattr(owner, attribute) for owner, attribute in OWNERS] == over
    for name in names:
        register(name)
    assert not names or masks.PATCH.is_applied


@pytest.mark.parametrize(
    ("family", "compiled", "told_by"),
    [("gemma2", False, "position_ids"), ("gemma2", False, "attention_mask"), ("llama", True, "attention_mask")],
)
def test_registered_again_over_the_wrappers_of_others(
    family, told_by, compiled, device, fresh_compile, above_theirs_above_ours
):
    documents = [torch.randint(3, 61, (length,), device=device) for length in LENGTHS]
    positions = torch.cat([torch.arange(length, device=device) for length in LENGTHS])[None]
    numbers = torch.cat([torch.full_like(document, i) for i, document in enumerate(documents, 1)])[None]
    model = tiny_model(family, attn_implementation="packing_ops", device=device)
    expected = torch.cat([model(document[None]).logits[0] for document in documents])
    called = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    given = {told_by: numbers} if told_by == "attention_mask" else {}
    logits = called(torch.cat(documents)[None], position_ids=positions, **given).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert above_theirs_above_ours == []
