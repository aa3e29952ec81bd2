"""QLoRA: adapters over weights of four bits train on packed rows as on one document at a time."""

import pytest
import torch
from helpers.hf_models import tiny_model, transformers

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops, declare

peft = pytest.importorskip("peft")

LENGTHS = [5, 11, 3, 8]


class Linear4bit(torch.nn.Linear):
    """Stands for bitsandbytes' layer: its weight holds two entries a byte, and no gradient."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.scale = linear.weight.detach().abs().max() / 7
        entries = (linear.weight.detach() / self.scale).round().add(8).to(torch.uint8).flatten()
        self.weight = torch.nn.Parameter((entries[::2] << 4 | entries[1::2])[:, None], requires_grad=False)

    def forward(self, x):
        entries = torch.cat([self.weight >> 4, self.weight & 15], 1).float() - 8
        return torch.nn.functional.linear(x, entries.reshape(self.out_features, -1) * self.scale)


def quantized(kind, folder, device):
    """A Llama whose linear layers, but for the head, hold four bits."""
    model = tiny_model("llama")
    if kind == "bitsandbytes":
        pytest.importorskip("bitsandbytes")
        model.save_pretrained(folder)
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, attn_implementation="eager", device_map={"": device}
        )
    declare(Linear4bit, mixes=False)  # bitsandbytes' is known
    for module in [*model.model.modules()]:
        for name, child in module.named_children():
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, Linear4bit(child))
    return model.to(device)


def loss_and_gradients(model, batches):
    total = 0.0
    for batch in batches:
        loss = model(**batch, num_items_in_batch=sum(LENGTHS) - len(LENGTHS)).loss
        loss.backward()
        total += loss.item()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return total, gradients


@pytest.mark.parametrize("fused_loss", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["bitsandbytes", "stand-in"])
def test_adapters_over_four_bits_train_as_document_by_document(kind, checkpointing, fused_loss, tmp_path, device):
    model = quantized(kind, tmp_path, device)
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
    torch.manual_seed(7)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config).train()
    documents = [torch.randint(3, 61, (length,), device=device) for length in LENGTHS]
    wanted = loss_and_gradients(model, [{"input_ids": d[None], "labels": d[None]} for d in documents])
    apply_packing_ops(model, fused_loss=fused_loss)
    metadata = po.PackedMetadata.from_lengths(LENGTHS, device=device)
    ids = torch.cat(documents)
    row = {"input_ids": ids[None], "labels": po.mask_boundary_labels(ids, metadata)[None], **metadata.to_transformers()}
    found = loss_and_gradients(model, [{**row, "position_ids": metadata.position_ids[None]}])
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert {*found[1]} == {*wanted[1]}
    assert len(found[1]) == 2 * 2 * 3
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(
            found[1][name], gradient, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert gradient.any()
    quantized_weights = [p for p in model.parameters() if p.dtype == torch.uint8]
    assert len(quantized_weights) == 2 * 7
