"""What apply_packing_ops says that it did, what it left and why, and what info says that runs."""

import pickle
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

from helpers.hf_patch_case import LENGTHS, module_of, outputs, packed, tiny, tiny_gpt2  # noqa: E402

import packing_ops as po  # noqa: E402
from packing_ops._runtime import arguments as _arguments  # noqa: E402
from packing_ops.integrations.transformers import (  # noqa: E402
    Applied,
    apply_packing_ops,
    info,
    register,
    revert_packing_ops,
)


def tiny_deberta():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.DebertaV2Model(transformers.DebertaV2Config(vocab_size=64, **sizes))


def test_counts():
    model = tiny("qwen3")  # two layers, with norms before attention and mlp, of q and k, and one in the end
    assert apply_packing_ops(model, rms_norm=False) == Applied(attention=2, rope=2)
    assert apply_packing_ops(model) == Applied(attention=2, rope=2, rms_norm=2 * 4 + 1)
    nothing_more = {"rope": False, "attention": False, "rms_norm": False}
    in_effect = Applied(attention=2, rope=2, rms_norm=9, fused_loss=1)
    assert apply_packing_ops(model, fused_loss=True) == in_effect
    assert apply_packing_ops(model) == apply_packing_ops(model, **nothing_more) == in_effect  # of earlier calls
    revert_packing_ops(model)
    assert not apply_packing_ops(model, **nothing_more)
    assert apply_packing_ops(model, rope=False, attention=False, rms_norm=True) == Applied(rms_norm=9)
    revert_packing_ops(model)
    applied = apply_packing_ops(tiny("llama"))
    assert (
        repr(applied)
        == "Applied(attention=2, rope=2, rms_norm=5, fused_loss=0, vision=0, linear_attention=0, skipped={})"
    )
    assert pickle.loads(pickle.dumps(applied)) == applied


def test_attention_alone_where_the_rope_is_not_known(device):
    model, inputs = tiny_gpt2().to(device), packed(device)
    documents = [ids for ids in inputs["input_ids"].split(LENGTHS, 1)]
    alone = torch.cat([outputs(model, {"input_ids": ids, "use_cache": False}) for ids in documents], 1)
    with pytest.warns(
        UserWarning, match=r"rope of GPT2LMHeadModel was not swapped: .*\. Pass rope=False to silence this"
    ) as warned:
        applied = apply_packing_ops(model)
    assert warned[0].filename == __file__  # where the caller is
    assert applied == Applied(attention=3, skipped={"rope": applied.skipped["rope"]})
    assert applied.skipped["rope"] == "no rotary embedding was found in it"
    torch.testing.assert_close(outputs(model, inputs), alone, rtol=1e-5, atol=1e-5)
    revert_packing_ops(model)
    assert model.config._attn_implementation == "sdpa"


def test_what_a_model_does_not_have_is_skipped():
    phi = tiny("phi")
    with pytest.warns(UserWarning, match=r"rms_norm of PhiForCausalLM was not swapped: .* no RMSNorm"):
        applied = apply_packing_ops(phi, rms_norm=True)
    assert applied
    assert list(applied.skipped) == ["rms_norm"]
    revert_packing_ops(phi)
    with pytest.warns(UserWarning, match="attention of Linear was not swapped: there is no transformers model"):
        assert not apply_packing_ops(torch.nn.Linear(1, 1), rope=False)
    deberta = tiny_deberta()
    with pytest.warns(
        UserWarning, match="attention of DebertaV2Model was not swapped: DebertaV2Model has an attention of its"
    ):
        assert not apply_packing_ops(deberta, rope=False)
    assert deberta.config._attn_implementation == "eager"


@pytest.mark.parametrize("function", [apply_packing_ops, revert_packing_ops])
def test_anything_but_a_model_is_an_error(function):
    """A class too: its models would share what one of them undoes."""
    cls = module_of("llama").LlamaForCausalLM
    with pytest.raises(
        TypeError, match=r"model: expected a torch\.nn\.Module, got the class LlamaForCausalLM: pass each"
    ):
        function(cls)
    for other in ("llama", None):
        with pytest.raises(
            TypeError, match=rf"model: expected a torch\.nn\.Module, got {type(other).__name__}: pass the"
        ):
            function(other)
    with pytest.raises(TypeError, match="model"):
        function()


def test_strict_changes_nothing(monkeypatch):
    gpt2, llama = tiny_gpt2(), tiny("llama")
    before = [dict(vars(module)) for model in (gpt2, llama) for module in model.modules()]
    with pytest.raises(
        ValueError,
        match=r"strict: .* in GPT2LMHeadModel rope: no rotary embedding was found in it .*\(or pass rope=False\)",
    ):
        apply_packing_ops(gpt2, strict=True)
    monkeypatch.setattr(type(llama), "_can_set_attn_implementation", lambda *self: False)
    with pytest.raises(ValueError, match=r"strict: .* LlamaForCausalLM attention: .* cannot change"):
        apply_packing_ops(llama, strict=True)
    assert [dict(vars(module)) for model in (gpt2, llama) for module in model.modules()] == before
    assert gpt2.config._attn_implementation == llama.config._attn_implementation == "sdpa"
    assert apply_packing_ops(gpt2, rope=False, strict=True) == Applied(attention=3)


def test_attention_of_somebody_else_is_not_given_tables():
    class OwnAttention(module_of("llama").LlamaAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = tiny("llama")
    model.model.layers[0].self_attn.__class__ = OwnAttention
    with pytest.warns(UserWarning, match="rope of LlamaForCausalLM was not swapped"):
        assert apply_packing_ops(model, rms_norm=False) == Applied(attention=2, skipped=apply_skipped(model))


def apply_skipped(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return apply_packing_ops(model).skipped


def test_attention_that_cannot_be_set_leaves_the_rest(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", lambda *self: False)
    with pytest.warns(UserWarning, match="attention of LlamaForCausalLM was not swapped: .* cannot change"):
        applied = apply_packing_ops(model)
    assert (applied.attention, applied.rope, list(applied.skipped)) == (0, 2, ["attention"])
    assert model.config._attn_implementation == "sdpa"
    revert_packing_ops(model)


def test_nothing_is_said_of_supported_models():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = tiny("llama")
        apply_packing_ops(model, attention=False)
        revert_packing_ops(model)


# --- info ---

STOCK = "stock in {}; apply_packing_ops(model{}) swaps it"


def test_info_of_a_swapped_model(monkeypatch):
    _arguments.warned.clear()
    model = tiny("qwen3")
    version = transformers.__version__
    swapped = "sdpa in 2 modules; apply_packing_ops(model) swaps it"
    before = [f"Qwen3ForCausalLM, transformers {version}", f"attention: {swapped}"]
    before += ["rope: " + STOCK.format("2 modules", ""), "rms_norm: " + STOCK.format("9 modules", "")]
    before += ["loss: stock; apply_packing_ops(model, fused_loss=True) swaps it"]
    before += ["invariant: off; apply_packing_ops(model, invariant=True) turns it on"]
    before += ["documents: found by transformers, for the attention above"]
    assert info(model).splitlines() == before
    apply_packing_ops(model, rms_norm=False)
    lines = info(model).splitlines()
    assert lines[1:4] == ["attention: packing_ops in 2 modules", "rope: packing_ops in 2 modules", before[3]]
    assert lines[6].startswith("documents: cu_seq_lens_q, else position_ids that restart and a 2-D attention_mask")
    assert len(lines) == 7
    apply_packing_ops(model)
    assert info(torch.nn.Sequential(model)).splitlines()[3] == "rms_norm: packing_ops in 9 modules"
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.train()(**packed("cpu"))
    assert info(model).splitlines()[7:] == [
        "last forward: 1 row, 3 documents, found by position_ids",
        "by SDPA so far: dropout 0.1 in attention",
    ]
    revert_packing_ops(model)
    assert info(model).splitlines()[:7] == before


def last_forward(model, **arguments):
    model(use_cache=False, **arguments)
    (line,) = [line for line in info(model).splitlines() if line.startswith("last forward: ")]
    return line.removeprefix("last forward: ")


def test_info_of_the_last_forward():
    """Packed rows whose documents no argument tells are seen here."""
    model, ids = tiny("qwen3"), torch.ones(1, 16, dtype=torch.long)
    apply_packing_ops(model)
    assert "last forward" not in info(model)
    metadata = po.PackedMetadata.from_lengths(LENGTHS)
    numbers = torch.repeat_interleave(torch.arange(1, 4), torch.tensor(LENGTHS))[None]
    positions = metadata.position_ids[None]
    assert last_forward(model, input_ids=ids, position_ids=positions) == "1 row, 3 documents, found by position_ids"
    assert last_forward(model, input_ids=ids) == "1 row, one document in each, as no argument said otherwise"
    found = last_forward(model, input_ids=ids, **metadata.to_transformers())
    assert found == "1 row, 3 documents, found by cu_seq_lens_q"
    found = last_forward(model, input_ids=ids, attention_mask=numbers)
    assert found == "1 row, 3 documents, found by attention_mask"
    two = {"input_ids": ids.expand(2, -1), "position_ids": positions.expand(2, -1)}
    assert last_forward(model, **two) == "2 rows, 6 documents, found by position_ids"


def test_info_of_others():
    lines = info(tiny_gpt2()).splitlines()
    assert lines[1] == "attention: sdpa in 3 modules; apply_packing_ops(model) swaps it"
    assert lines[2] == "rope: stock, no rotary embedding was found in it"
    assert "attention of its own" in info(tiny_deberta()).splitlines()[1]
    assert "no transformers model" in info(torch.nn.Linear(1, 1)).splitlines()[1]
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    register()
    mixer = transformers.AutoModel.from_config(
        transformers.MobileBertConfig(vocab_size=64, **sizes), attn_implementation="packing_ops"
    )
    assert "documents: one in each row" in info(mixer)
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got str"):
        info("llama")


def test_what_from_pretrained_makes_has_nothing_of_it(tmp_path):
    """As the pages say, and as info shows."""
    model = tiny("qwen3")
    apply_packing_ops(model, rms_norm=True, fused_loss=True)
    applied = info(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert info(loaded) == info(tiny("qwen3"))
    apply_packing_ops(loaded, rms_norm=True, fused_loss=True)
    assert info(loaded) == applied


def test_info_of_norms_whose_class_gets_another_forward(monkeypatch):
    """Modules that are swapped run ours on."""
    model = tiny("llama")
    norm, cls = model.model.norm, type(model.model.norm)
    apply_packing_ops(model)
    x = torch.randn(3, norm.weight.numel())
    wanted = norm(x)
    monkeypatch.setattr(cls, "forward", lambda self, x: 2 * x)
    assert torch.equal(norm(x), wanted)
    assert info(model).splitlines()[3] == "rms_norm: packing_ops in 5 modules"
    assert apply_packing_ops(model).rms_norm == 5
    revert_packing_ops(model)
    assert torch.equal(norm(x), 2 * x)
    assert info(model).splitlines()[3].startswith("rms_norm: stock, it has no RMSNorm that runs the forward of its")


@pytest.mark.parametrize("family", ["Mamba2", "Mamba", "Rwkv"])
def test_info_of_a_model_without_attention(family):
    """Layers of Mamba-2 run ours. Those of others run each document as a row of a batch."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_heads": 4, "head_dim": 8, "n_groups": 1} if family == "Mamba2" else {}
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes))

    def lines():
        return [line for line in info(model).splitlines() if line.startswith(("attention: ", "documents: "))]

    before = ["attention: none: its layers carry a state"]
    before += ["documents: one in each row; apply_packing_ops(model) keeps several apart"]
    assert lines() == before
    if family == "Mamba2":
        apply_packing_ops(model, rope=False, strict=True)
    else:
        why = "its layers carry a state, and keep documents apart. With attention=False they do not"
        with pytest.warns(UserWarning, match=f"no attention that attn_implementation reaches: {why}$"):
            apply_packing_ops(model, rope=False)
    attention, documents = lines()
    assert attention == before[0]
    assert documents.startswith("documents: cu_seq_lens_q, else position_ids")
    ids, positions = torch.arange(3, 9)[None], torch.tensor([[0, 1, 2, 0, 1, 2]])
    found = model.eval()(ids, position_ids=positions, use_cache=False).logits[:, 3:]
    torch.testing.assert_close(found, model(ids[:, 3:], use_cache=False).logits, rtol=1e-4, atol=1e-4)
    revert_packing_ops(model)
    assert lines() == before
