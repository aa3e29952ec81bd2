"""Steps of megatron-core's schedules, DistributedDataParallel and optimizer over packed batches: as plain
training.
"""

import functools

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from helpers.megatron_case import (
    RECOMPUTED,
    VOCABULARY,
    assert_near,
    config_of,
    parallel,
    spawn,
    tensor_parallel_part,
    tiny_gpt,
)
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from packing_ops.integrations.megatron import next_token_targets, preprocess_packed_seqs, use_packing_ops

WORLD = 2
LR, MOMENTUM = 0.02, 0.9  # an optimizer in which a gradient's scale shows
# Rows of two steps, a micro-batch each; data-parallel ranks share a step's rows.
STEPS = [[[11, 3], [20, 1, 2], [7, 9], [2, 14]], [[5], [4, 4, 4], [13, 1], [6, 17]]]
PIPELINE = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32, "variable_seq_lengths": True}
PIPELINE["moe_token_dispatcher_type"] = "alltoall"  # the default refuses rows of several lengths, experts or none
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CASES = {  # what megatron-core is given
    "data": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "tensor and sequence": SEQUENCE,
    "tensor and sequence, recomputed": {**SEQUENCE, **RECOMPUTED["full, uniform"]},
    "context": {"context_parallel_size": 2},
    "context, attention recomputed": {"context_parallel_size": 2, **RECOMPUTED["core attention"]},
    "pipeline": PIPELINE,
}


class Norm(torch.nn.LayerNorm):
    """As Apex's and TransformerEngine's: under sequence parallelism megatron-core sums its gradients over the ranks."""

    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def documents_of(lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


def plain_training():
    """Stock megatron-core, a document at a time, and torch's optimizer: losses, and parameters before and after."""
    model, losses = tiny_gpt(), []
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    for rows in STEPS:
        loss, targets = 0.0, 0
        for ids in (ids for row in rows for ids in documents_of(row) if len(ids) > 1):
            mask = torch.ones(len(ids) - 1, len(ids) - 1, dtype=torch.bool).triu(1)[None, None]
            loss = loss + model(ids[None, :-1], None, mask, labels=ids[None, 1:]).sum()
            targets += len(ids) - 1
        optimizer.zero_grad()
        (loss / targets).backward()
        optimizer.step()
        losses.append(loss.item() / targets)
    return losses, before, {name: parameter.detach() for name, parameter in model.named_parameters()}


def part_of(parameters, model):
    """This rank's part of a whole model's parameters, by its names."""
    part, first = {}, model.decoder.layers[0].layer_number - 1
    for name, parameter in model.named_parameters():
        words = name.split(".")
        if words[:2] == ["decoder", "layers"]:
            words[2] = str(int(words[2]) + first)
        whole = parameters[".".join(words)]
        if getattr(parameter, "tensor_model_parallel", False):
            dim = parameter.partition_dim
            whole = tensor_parallel_part(whole, dim, parameter.shape[dim])
        part[name] = whole
    return part


def new_model(before, **more):
    config = config_of(**more, calculate_per_token_loss=True)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    spec.layer_norm = Norm
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    model = GPTModel(
        config,
        use_packing_ops(spec),
        vocab_size=VOCABULARY,
        max_sequence_length=256,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    model.load_state_dict(part_of(before, model), strict=False)
    return model


def batch_of(lengths):
    """A row of documents as this rank's part of one packed row, with its targets."""
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(length) for length in lengths], batch_first=True)
    ids = torch.nn.utils.rnn.pad_sequence(documents_of(lengths), batch_first=True)
    cp = parallel_state.get_context_parallel_group()
    part = {"cp_size": cp.size(), "cp_rank": cp.rank()}
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    row, params = preprocess_packed_seqs(ids, mask, tp_size=tp_size, **part)
    return row, params, *next_token_targets(ids, params, mask, **part)


def summed(loss_mask, losses):
    loss = (losses * loss_mask).sum()
    return loss, loss_mask.sum().int(), loss.detach()


def forward_step(batches, model):
    """Every pipeline stage is given the batch: megatron-core sends only the hidden states."""
    row, params, targets, loss_mask = next(batches)
    return model(row, None, None, labels=targets, packed_seq_params=params), functools.partial(summed, loss_mask)


def packed_training(name, before):
    """As plain_training, on this rank; its losses are of its targets."""
    model = new_model(before, **CASES[name])
    model = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    model.config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="sgd", lr=LR, sgd_momentum=MOMENTUM, weight_decay=0.0, clip_grad=0.0),
        [model],
    )
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    losses = []
    for rows in STEPS:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        mine = rows[rank::ranks]
        sums = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=map(batch_of, mine),
            model=[model],
            num_microbatches=len(mine),
            seq_length=1,  # variable_seq_lengths
            micro_batch_size=1,
        )
        assert optimizer.step()[0]
        loss = torch.stack(sums).sum() if sums else torch.zeros(())
        for group in (
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_pipeline_model_parallel_group(),
        ):
            dist.all_reduce(loss, group=group)
        losses.append(loss.item() / sum(length - 1 for row in rows for length in row))
    return losses, model.module


def every_case():
    with parallel():
        expected_losses, before, after = plain_training()
    found = {}
    for name, more in CASES.items():
        with parallel(**{key: size for key, size in more.items() if key.endswith("parallel_size")}):
            losses, model = packed_training(name, before)
            parameters = {key: parameter.detach() for key, parameter in model.named_parameters()}
            found[name] = losses, expected_losses, parameters, part_of(before, model), part_of(after, model)
    return found


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    return spawn(every_case, WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(name, by_rank):
    """Losses of both steps, and every parameter after them."""
    for losses, expected_losses, parameters, before, after in (found[name] for found in by_rank):
        assert losses == pytest.approx(expected_losses, abs=1e-5)
        for key, parameter in parameters.items():
            assert_near(parameter, after[key])
            assert (after[key] - before[key]).abs().max() > 1e-4, key
