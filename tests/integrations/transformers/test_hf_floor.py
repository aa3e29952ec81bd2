"""How attention hangs together: what a query passes, who finds the documents, and what is left on users' tensors."""

import ast
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT

pytest.importorskip("transformers")

from helpers.hf_models import tiny_model

import packing_ops as po
from packing_ops.integrations.transformers import attention, documents, register
from packing_ops.integrations.transformers.call import last_forward
from packing_ops.integrations.transformers.masks import MaskPattern

PACKAGE = ROOT / "packing_ops"
FOLDER = PACKAGE / "integrations" / "transformers"
MODULES = {path.stem: path for path in FOLDER.rglob("*.py") if path.stem != "__init__"}
LENGTHS = [5, 4, 3]


def packed(device="cpu"):
    metadata = po.PackedMetadata.from_lengths(LENGTHS, device=device)
    ids = torch.randint(3, 60, (1, metadata.total), generator=torch.Generator().manual_seed(0)).to(device)
    return metadata, ids


def functions_with(tensor, call):
    """(module, function) of packing_ops that got the tensor as an argument, alone or among others, in order."""
    found = []

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and Path(code.co_filename).is_relative_to(PACKAGE):
            arguments = code.co_argcount + code.co_kwonlyargcount + 2  # *args and **kwargs
            given = [frame.f_locals.get(name) for name in code.co_varnames[:arguments]]
            given += [each for value in given if isinstance(value, (tuple, list)) for each in value]
            if any(each is tensor for each in given):
                found.append((str(Path(code.co_filename).relative_to(PACKAGE).with_suffix("")), code.co_name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("gradient", [False, True])
def test_a_query_passes_few_functions(gradient):
    """On the way to the op; behind it, recording a gradient takes five of autograd.py and of the op's."""
    metadata, _ = packed()
    heads = [torch.randn(1, n, metadata.total, 16, requires_grad=gradient) for n in (4, 2, 2)]
    pattern = MaskPattern(True, (-1, -1), metadata.total, None, metadata.position_ids[None])
    module = SimpleNamespace(is_causal=True)

    def layer():
        attention.packing_ops_attention(module, *heads, pattern, scaling=0.25)

    first, later = functions_with(heads[0], layer), functions_with(heads[0], layer)
    assert later[0] == ("integrations/transformers/attention", "packing_ops_attention")
    for found in (first, later):
        to_the_op = found[: found.index(("_runtime/gate", "varlen_attention")) + 1]
        modules = [name for name, _ in found]
        left = [
            name for place, name in enumerate(modules[1:], 1) if name != modules[place - 1] and name in modules[:place]
        ]
        assert len({*to_the_op}) <= 10, found
        assert len({*found}) <= (15 if gradient else 12), found
        assert len(left) <= 3, found


def imported_here(path):
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    names = [
        alias.name
        for node in nodes
        if (node.module or "").endswith(("integrations.transformers", "transformers.states"))
        for alias in node.names
    ]
    names += [node.module.rpartition(".")[2] for node in nodes if "integrations.transformers." in (node.module or "")]
    return {name for name in names if name in MODULES}


def test_attention_reaches_few_modules():
    reached, left = set(), ["attention"]
    while left:
        new = imported_here(MODULES[left.pop()]) - reached
        reached |= new
        left += new
    # Five of them are of only a call's beginning: positions, layers with a state by rows and in a cache,
    # linear_attention, other_attention. One is of backward.
    assert len(reached - {"attention"}) <= 15, reached
    assert reached.isdisjoint({"apply", "rms_norm", "rope", "summary", "vision"})  # which put something into a model


# What compares a slot with the one before it, or cu_seqlens with slots.
NEIGHBOURS = re.compile(
    r"(?<!shape)\[([^\[\]]*, )?1:\]|\.diff\(|\bcumm(ax|in)\(|\broll\(|\bunique_consecutive\(|\bsearchsorted\(|cu_seqlens_from_position_ids"
)
# Those that compare and find no documents: images in a mask, lengths of pages, names of arguments, segments of a prefix
# tree, and rows of documents that were found.
OTHERS = {
    "masks.ends_of_blocks",
    "continuous_batching.pages_of_requests",
    "linear_attention._agrees",
    "linear_attention._levels",
    "positions._axes_one_by_one",
    "positions.with_axes_of_images",
    "stateful_rows.__init__",
    "stateful_rows._paths_to_leaves",
    "stateful_rows._split",  # slots of a batch that repeat
}


def comparing():
    """module.function of the integration, where neighbours of a tensor are compared."""
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                inside = [each for each in ast.walk(node) if isinstance(each, (ast.Compare, ast.Call))]
                code = [ast.unparse(each) for each in inside if not isinstance(each, ast.Call)]
                code += [ast.unparse(each.func) + "(" for each in inside if isinstance(each, ast.Call)]
                if any(map(NEIGHBOURS.search, code)):
                    yield f"{path.stem}.{node.name}"


def test_one_function_finds_where_documents_start():
    """By positions and numbers only first_tokens, or the op for positions without padding; others take what these
    found.
    """
    found = {*comparing()} - OTHERS
    assert found == {
        "documents.first_tokens",
        "documents._from_values",  # by that or the op: the rows and lengths of what starts
        "documents._agrees_with_cu_seqlens",  # by that: cu_seqlens as numbers
        "documents.each_document_alone",  # by that: the starts before a slot
        "documents.positions_from_axes",  # positions of several axes as those of one
        "positions._start_of",  # by that: the start before a slot
        "positions._lengths_of",  # by that: the end behind a slot
    }
    users = {path.name for path in MODULES.values() if "find_documents(" in path.read_text()}
    assert users == {"documents.py", "call.py", "layer_documents.py"}


@pytest.mark.parametrize("kind", ["position_ids", "cu_seq_lens", "numbers"])
def test_nothing_is_left_on_tensors(kind, device):
    register()
    metadata, ids = packed(device)
    numbers = torch.repeat_interleave(torch.arange(1, 4, device=device), torch.tensor(LENGTHS, device=device))[None]
    given = {"input_ids": ids, "labels": ids, "position_ids": metadata.position_ids[None]}
    given |= {"attention_mask": numbers} if kind == "numbers" else {}
    given |= metadata.to_transformers() if kind == "cu_seq_lens" else {}
    seen = []
    model = tiny_model("gemma2", attn_implementation="packing_ops", device=device)
    for module in model.modules():
        module.register_forward_pre_hook(lambda _, args, named: seen.extend([*args, *named.values()]), with_kwargs=True)
    model(**given).loss.backward()
    tensors = [each for each in (*given.values(), *seen) if isinstance(each, torch.Tensor)]
    assert len(tensors) > 10
    assert [name for each in tensors for name in vars(each) if name.startswith("_packing_ops")] == []


# --- labels, and what the last forward saw ---


def told(kind, metadata, device):
    positions = {"position_ids": metadata.position_ids[None]}
    if kind == "cu_seq_lens_q":
        return {**positions, **metadata.to_transformers()}
    if kind == "attention_mask":
        numbers = torch.arange(1, 4, device=device)
        return {"attention_mask": torch.repeat_interleave(numbers, torch.tensor(LENGTHS, device=device))[None]}
    return positions


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("kind", ["position_ids", "cu_seq_lens_q", "attention_mask"])
def test_first_tokens_are_no_targets(kind, family, device):
    register()
    metadata, ids = packed(device)
    masked = po.mask_boundary_labels(ids[0], metadata.cu_seqlens)[None]
    model, given = tiny_model(family, attn_implementation="packing_ops", device=device), told(kind, metadata, device)
    before = ids.clone()
    found = model(ids, labels=ids, **given)
    wanted = model(ids, labels=masked, **given)
    logits = wanted.logits[0, :-1].float()
    expected = torch.nn.functional.cross_entropy(logits, masked[0, 1:], ignore_index=-100)
    torch.testing.assert_close(found.loss, expected)
    assert torch.equal(found.loss, wanted.loss)
    assert torch.equal(ids, before)
    assert last_forward(model) == (1, 3, kind)
    assert last_forward(model.model) == (1, 3, kind)


def test_labels_that_are_left_alone(device):
    register()
    metadata, ids = packed(device)
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    given = {"input_ids": ids, "position_ids": metadata.position_ids[None]}
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    logits = model(**given).logits[0].float()
    every_target = torch.nn.functional.cross_entropy(logits, shifted[0], ignore_index=-100)
    torch.testing.assert_close(model(**given, labels=ids, shift_labels=shifted).loss, every_target)
    stock = tiny_model("llama", device=device)
    assert last_forward(stock) is None
    rows = {"input_ids": ids.expand(2, -1), "labels": ids.expand(2, -1)}  # each row is a document
    torch.testing.assert_close(model(**rows).loss, stock(**rows).loss)
    assert last_forward(model) == (2, 2, "rows")


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_have_the_loss_of_the_stock_model(side, device):
    """Without the label of the first token behind padding on the left, which the stock loss counts: nothing is before
    it.
    """
    register()
    _, ids = packed(device)
    ids = ids.view(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    mask = mask if side == "left" else mask.flip(1)
    given = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    found = tiny_model("llama", attn_implementation="packing_ops", device=device)(**given).loss
    given["labels"][:, 1:].masked_fill_(mask[:, :-1] == 0, -100)
    torch.testing.assert_close(found, tiny_model("llama", device=device)(**given).loss)


def test_num_items_in_batch_divides_what_is_left(device):
    """It is not changed: who counts targets before the model, as trainers do, counts masked labels."""
    register()
    metadata, ids = packed(device)
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    given = {"input_ids": ids, "position_ids": metadata.position_ids[None], "labels": ids}
    targets = metadata.total - len(LENGTHS)
    torch.testing.assert_close(model(**given, num_items_in_batch=targets).loss, model(**given).loss)


@pytest.mark.parametrize("kind", ["position_ids", "attention_mask", "padding"])
def test_labels_wait_for_no_number_of_documents(kind, device, monkeypatch):
    """The host waits where documents are found by values: as often with labels as without."""
    register()
    metadata, ids = packed(device)
    model, found = tiny_model("llama", attn_implementation="packing_ops", device=device), []
    values = documents._from_values
    monkeypatch.setattr(documents, "_from_values", lambda *given: found.append(given) or values(*given))
    counts = []
    for labels in ({}, {"labels": ids}):
        given = {"attention_mask": torch.ones_like(ids)} if kind == "padding" else told(kind, metadata, device)
        found.clear()
        model(ids, **labels, **{name: tensor.clone() for name, tensor in given.items()})
        counts.append(len(found))
    assert counts[0] == counts[1] == 1


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_without_padding_start_documents_as_those_with_a_mask_of_ones(rows, device):
    positions = torch.tensor([[3, 4, 4, 5, 0, 1], [0, 1, 2, 3, 4, 5]], device=device)[:rows]
    starts = [[False, False, True, False, True, False], [False] * 6]
    for padding in (None, torch.ones(2, 6, dtype=torch.bool, device=device)):
        found = documents.first_tokens(padding, positions, 2, 6, device)
        assert found.tolist() == (starts if rows == 2 else [starts[0]] * 2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
def test_rows_without_slots_have_no_documents(dtype, device):
    query, padding = torch.zeros(2, 1, 0, 8, device=device), torch.ones(2, 0, dtype=dtype, device=device)
    for position_ids in (None, torch.zeros(2, 0, dtype=torch.long, device=device)):
        found = documents.find_documents(query, padding=padding, position_ids=position_ids)
        assert found.cu_seqlens[-1] == 0
        assert not found.several
