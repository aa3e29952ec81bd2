"""packing_ops.load_balancing_loss against Megatron-core's, of scores and a routing_map."""

import importlib.util
import types

import pytest
import torch

pytest.importorskip("megatron.core")

from helpers import assert_same
from helpers.megatron_case import (
    RECOMPUTED,
    SHAPE,
    VOCABULARY,
    causal_mask,
    config_of,
    one_process,  # noqa: F401
    parallel,
    spawn,
    thd_params,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss, switch_load_balancing_loss_func
from megatron.core.transformer.moe.router import TopKRouter

import packing_ops as po
from packing_ops.integrations.megatron import (
    packed_seq_params,
    patch_router,
    preprocess_packed_seqs,
    revert_router,
    use_packing_ops,
)
from packing_ops.integrations.megatron import router as router_module

TOP_K, EXPERTS = 2, 6


def of_one_sequence(logits):
    """Megatron's loss of one sequence: its sequence-wise loss with a batch of one."""
    routing_map, scores = compute_routing_scores_for_aux_loss(logits, TOP_K, "softmax")
    return switch_load_balancing_loss_func(scores, routing_map.sum(0), len(logits), TOP_K, EXPERTS, 1.0)


def test_sequence_wise_loss_of_a_packed_row(device):
    """The packed row is one sequence to Megatron; by document the loss is the mean over them."""
    lengths, tail = [5, 1, 11], 3
    logits = torch.randn(sum(lengths) + tail, EXPERTS, device=device, requires_grad=True)
    metadata = po.PackedMetadata.from_lengths(lengths, total=len(logits), device=device)
    documents = logits[: sum(lengths)].split(lengths)
    expected = torch.stack([of_one_sequence(document) for document in documents])
    (wanted,) = torch.autograd.grad(expected.mean(), logits, retain_graph=True)

    routing_map, scores = compute_routing_scores_for_aux_loss(logits, TOP_K, "softmax")
    losses = po.load_balancing_loss(scores, metadata, routed=routing_map, by_document=True) / TOP_K
    torch.testing.assert_close(losses, expected)
    (found,) = torch.autograd.grad(losses.mean(), logits)
    torch.testing.assert_close(found, wanted)
    assert not torch.isclose(of_one_sequence(logits), expected.mean())


def test_loss_of_all_tokens_without_the_padding(device):
    lengths, tail = [5, 1, 11], 3
    logits = torch.randn(sum(lengths) + tail, EXPERTS, device=device)
    routing_map, scores = compute_routing_scores_for_aux_loss(logits, TOP_K, "softmax")
    metadata = po.PackedMetadata.from_lengths(lengths, total=len(logits), device=device)
    loss = po.load_balancing_loss(scores, metadata, routed=routing_map) / TOP_K
    torch.testing.assert_close(loss, of_one_sequence(logits[: sum(lengths)]))


# --- patch_router: the losses inside of a model ---

ROUTED = {
    "num_moe_experts": EXPERTS,
    "moe_router_topk": TOP_K,
    "moe_aux_loss_coeff": 0.3,
    "add_bias_linear": False,
}


@pytest.fixture
def patched(monkeypatch):
    if importlib.util.find_spec("transformer_engine") is None:  # megatron-core 0.16 takes it to be there
        monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    # Of earlier models, on the device of the first one
    monkeypatch.setattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER", {})
    patch_router()
    yield
    revert_router()


def model_of(device, **more):
    config = config_of(**{**ROUTED, **more})
    spec = use_packing_ops(get_gpt_decoder_block_spec(config, use_transformer_engine=False))
    torch.manual_seed(0)
    model = GPTModel(
        config, spec, VOCABULARY, 256, position_embedding_type="rope", share_embeddings_and_output_weights=False
    )
    return model.to(device)


def aux_gradients(model, ids, params, **more):
    """What only the balance losses give each parameter: the loss of the tokens has no part in it."""
    model.zero_grad()
    causal = None if params is not None else causal_mask(ids.shape[1], ids.device)
    out = model(ids, None, causal, packed_seq_params=params, **more)
    (0 * out.sum()).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def mean_of(gradients):
    names = gradients[0].keys()
    return {name: torch.stack([each[name] for each in gradients]).mean(0) for name in names}


def assert_gradients(actual, expected):
    assert actual.keys() == expected.keys()
    assert all(wanted.any() for name, wanted in expected.items() if "router" in name)
    for name, wanted in expected.items():
        torch.testing.assert_close(actual[name], wanted, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


DOCUMENTS = [5, 1, 11]


def documents_and_row(device):
    """Separate documents, and the row of them with padding at its end."""
    documents = [torch.randint(1, VOCABULARY, (1, length), device=device) for length in DOCUMENTS]
    metadata = po.PackedMetadata.from_lengths(DOCUMENTS, total=sum(DOCUMENTS) + 3, device=device)
    row = torch.nn.functional.pad(torch.cat(documents, 1), (0, 3), value=7)
    return documents, row, metadata


@pytest.mark.parametrize("recompute", ["", "full, uniform"])
def test_sequence_loss_of_a_model(megatron, device, patched, recompute):
    """A row's loss is the mean of its documents'; the padding is not one of them."""
    documents, row, metadata = documents_and_row(device)
    more = RECOMPUTED[recompute] if recompute else {}
    model = model_of(device, moe_router_load_balancing_type="seq_aux_loss", **more)
    expected = mean_of([aux_gradients(model, document, None) for document in documents])
    found = aux_gradients(model, row, packed_seq_params(metadata))
    assert_gradients(found, expected)
    revert_router()
    stock = aux_gradients(model, row, packed_seq_params(metadata))
    name = next(name for name in expected if "router" in name)
    assert not torch.allclose(stock[name], expected[name], rtol=1e-2)


def test_loss_of_all_tokens_of_a_model(megatron, device, patched):
    """aux_loss and the z-loss: padding inside documents and at the end of the row counts no token."""
    documents, row, metadata = documents_and_row(device)
    model = model_of(device, moe_router_load_balancing_type="aux_loss", moe_z_loss_coeff=0.1)
    whole = po.PackedMetadata.from_lengths(DOCUMENTS, device=device)
    expected = aux_gradients(model, torch.cat(documents, 1), packed_seq_params(whole))
    assert_gradients(aux_gradients(model, row, packed_seq_params(metadata)), expected)
    apart = torch.cat([torch.nn.functional.pad(each, (0, 2), value=9) for each in documents], 1)
    params = thd_params(DOCUMENTS, device, slots=[length + 2 for length in DOCUMENTS])
    assert_gradients(aux_gradients(model, apart, params), expected)


def test_sequence_loss_with_padding_inside_documents(megatron, device, patched):
    documents, _, _ = documents_and_row(device)
    model = model_of(device, moe_router_load_balancing_type="seq_aux_loss")
    expected = mean_of([aux_gradients(model, document, None) for document in documents])
    apart = torch.cat([torch.nn.functional.pad(each, (0, 2), value=9) for each in documents], 1)
    params = thd_params(DOCUMENTS, device, slots=[length + 2 for length in DOCUMENTS])
    assert_gradients(aux_gradients(model, apart, params), expected)
    rows = torch.nn.utils.rnn.pad_sequence([each[0] for each in documents], batch_first=True)
    aligned, params = preprocess_packed_seqs(rows, rows != 0, tp_size=4)
    assert aligned.shape[1] > sum(DOCUMENTS)
    assert_gradients(aux_gradients(model, aligned, params), expected)


def test_rows_that_are_not_packed_are_as_before(megatron, device, patched):
    model = model_of(device, moe_router_load_balancing_type="seq_aux_loss")
    ids = torch.randint(1, VOCABULARY, (2, 9), device=device)
    found = aux_gradients(model, ids, None)
    revert_router()
    for name, wanted in aux_gradients(model, ids, None).items():
        assert_same(found[name], wanted)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, "recompute_modules: expected no 'moe'"),
    ],
)
def test_what_is_not_served_is_named(megatron, device, patched, more, message):
    _, row, metadata = documents_and_row(device)
    model = model_of(device, moe_router_load_balancing_type="seq_aux_loss", **more)
    with pytest.raises(NotImplementedError, match=f"^{message}"):
        model(row, None, None, packed_seq_params=packed_seq_params(metadata))


def test_a_megatron_without_these_functions_is_named(monkeypatch):
    monkeypatch.setattr(TopKRouter, "routing", lambda self, logits: None)
    with pytest.raises(
        NotImplementedError, match=r"megatron-core: expected TopKRouter\.routing with padding_mask, got"
    ):
        patch_router()


def sequence_parallel_part():
    """Gradients of the router from its balance losses, of this rank's rows; over the ranks they add up to the whole."""
    if importlib.util.find_spec("transformer_engine") is None:
        moe_utils.te_general_gemm = None
    metadata = po.PackedMetadata.from_lengths([5, 1, 7], total=16)
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    sizes = {"tensor_model_parallel_size": size, "sequence_parallel": size > 1}
    forward = router_module._with_documents(lambda layer, hidden, **_: layer.mlp.router(hidden))
    found = {}
    patch_router()
    with parallel(tensor_model_parallel_size=size):
        for kind in ("aux_loss", "seq_aux_loss"):
            torch.manual_seed(1)
            config = config_of(**ROUTED, moe_router_load_balancing_type=kind, **sizes)
            router = TopKRouter(config, pg_collection=moe_utils.get_default_pg_collection())
            torch.nn.init.normal_(router.weight, std=0.5)
            part = torch.randn(16, 1, SHAPE["hidden_size"]).chunk(size)[rank]
            layer = types.SimpleNamespace(mlp=types.SimpleNamespace(router=router), training=True, config=config)
            probs, _ = forward(layer, part, packed_seq_params=packed_seq_params(metadata))
            (0 * probs.sum()).backward()
            torch.distributed.all_reduce(router.weight.grad)
            found[kind] = router.weight.grad
    revert_router()
    return found


def test_sequence_parallel_ranks_add_up_to_the_whole(tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    (whole,) = spawn(sequence_parallel_part, 1, folders[0])
    for ranks in spawn(sequence_parallel_part, 2, folders[1]):
        for kind, wanted in whole.items():
            assert wanted.any()
            torch.testing.assert_close(ranks[kind], wanted, rtol=1e-4, atol=1e-6)
