"""What makes a rollout's log-probabilities and those of TRL's trainers one: the head in the mode, and the engine that
TRL asks vLLM for.
"""

import ast
import inspect
import sys
import types

import pytest
import torch

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
from common.hf_setup import byte_tokenizer  # noqa: E402
from helpers.hf_models import tiny_model  # noqa: E402
from helpers.trl_case import PAIRS, settings  # noqa: E402

import packing_ops as po  # noqa: E402
from packing_ops.integrations import trl as integration  # noqa: E402
from packing_ops.integrations.transformers import apply_packing_ops  # noqa: E402
from packing_ops.integrations.trl import fused_logps  # noqa: E402

utils = pytest.importorskip("trl.trainer.utils")
if not hasattr(utils, "_ChunkedLogProbFunction"):
    pytest.skip("this TRL has no fused LM head", allow_module_level=True)
LENGTHS = (7, 12, 5)


@pytest.fixture(autouse=True)
def head_of_trl():
    """TRL's head, although a trainer of an earlier test may live on in a reference cycle."""
    for patch in fused_logps.patches():
        for trainer in [*patch.users]:
            patch.revert(trainer)


def trainer_of(tmp_path, device):
    rows = datasets.Dataset.from_list([{"prompt": pair["prompt"]} for pair in PAIRS])
    more = {"num_generations": 2, "beta": 0.0, "max_completion_length": 6, "temperature": 0.7}
    model = tiny_model("llama", vocab_size=258, device=device, seed=0)
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [1.0] * len(completions),
        args=settings("GRPOConfig", tmp_path, device, **more),
        train_dataset=rows,
        processing_class=byte_tokenizer(),
    )


def test_grpo_s_log_probs_in_the_mode_are_those_of_token_logps(device, tmp_path):
    trainer = trainer_of(tmp_path, device)
    model, stock = trainer.model.eval(), utils._ChunkedLogProbFunction
    apply_packing_ops(model)
    integration.enable_padding_free(trainer)
    ids = torch.randint(3, 250, (len(LENGTHS), max(LENGTHS)), device=device)
    mask = (torch.arange(max(LENGTHS), device=device) < torch.tensor(LENGTHS, device=device)[:, None]).long()
    with torch.no_grad(), po.invariant():
        found = trainer._get_per_token_logps_and_entropies(model, ids, mask, max(LENGTHS) - 1)[0]
        metadata = po.PackedMetadata.from_attention_mask(mask)
        row = metadata.unpad(ids)
        of_row = {"position_ids": metadata.position_ids[None], **metadata.to_transformers()}
        hidden = model.model(input_ids=row[None], use_cache=False, **of_row).last_hidden_state
        temperature = torch.full([len(row)], trainer.temperature, device=device)
        wanted = metadata.pad(po.token_logps(hidden, model.lm_head.weight, row, metadata, temperature=temperature))
    assert torch.equal(found[mask[:, 1:].bool()], wanted[:, :-1][mask[:, 1:].bool()])
    assert utils._ChunkedLogProbFunction is not stock
    integration.revert_padding_free(trainer)
    assert utils._ChunkedLogProbFunction is stock


def test_the_head_gives_what_trl_s_gives(device, tmp_path):
    """All of its outputs and gradients; and without the mode TRL's bits."""
    trainer = trainer_of(tmp_path, device)
    apply_packing_ops(trainer.model)
    stock = utils._ChunkedLogProbFunction
    integration.enable_padding_free(trainer)
    head = utils._ChunkedLogProbFunction
    hidden, weight, bias = (torch.randn(*s, device=device) for s in ((21, 32), (300, 32), (300,)))
    targets = torch.randint(300, (21,), device=device)

    def run(function):
        given = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
        outputs = function.apply(*given, targets, 0.7, 128, 30.0, 1.5)
        (outputs[0].sum() + outputs[1].square().sum()).backward()
        assert [each.requires_grad for each in outputs] == [True, True, False, False, False]
        return [*outputs, *(each.grad for each in given)]

    plain = run(stock)
    assert all(torch.equal(*each) for each in zip(run(head), plain, strict=True))
    with po.invariant():
        for found, wanted in zip(run(head), plain, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        some = head.apply(hidden, weight, None, targets, 1.0, 128, None, 1.0, ("is_top1",))
        assert [each is None for each in some] == [False, True, True, True, False]
        nothing = head.apply(hidden[:0], weight, None, targets[:0], 1.0, 128, None, 1.0, ())
        assert nothing[0].shape == (0,)
    integration.revert_padding_free(trainer)


@pytest.mark.parametrize("head", ["without outputs", None], ids=str)
def test_another_head_of_an_older_trl_stays(head, monkeypatch):
    """Before TRL 1.15 it is in the trainers' utils and takes fewer arguments; 1.15 without Triton has none."""
    older = types.ModuleType("trl.trainer.utils")
    older._ChunkedLogProbFunction = head
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", older)
    monkeypatch.delitem(sys.modules, "trl.kernels", raising=False)
    assert fused_logps.patches() == ()


def test_trl_leaves_the_engine_s_attention_open():
    """PACKING_OPS_VLLM=1 does the rest: TRL names nothing that the variable sets, and nothing that is refused."""
    generation = pytest.importorskip("trl.generation.vllm_generation")
    tree = ast.parse(inspect.getsource(generation))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (engine,) = (call for call in calls if ast.unparse(call.func) == "LLM")
    given = {keyword.arg: keyword.value for keyword in engine.keywords}
    assert None not in given  # no **
    ours = {"attention_backend", "attention_config", "compilation_config", "enforce_eager"}
    assert not given.keys() & {*ours, "dtype", "block_size", "kv_cache_dtype", "speculative_config", "enable_lora"}
    assert ast.literal_eval(given["logprobs_mode"]) == "processed_logprobs"
    assert any(ast.unparse(call.func).endswith("model_runner.model.load_weights") for call in calls)
    assert any(ast.unparse(call.func) == "self.llm.reset_prefix_cache" for call in calls)
