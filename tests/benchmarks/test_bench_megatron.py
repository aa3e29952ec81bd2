"""What bench_megatron times next to our module computes the same."""

import pytest
import torch

pytest.importorskip("megatron.core")


@pytest.mark.parametrize("together", [True, False])
def test_padded_rows_give_the_same(together, monkeypatch):
    import bench_megatron as bench
    from helpers.megatron_case import answers_of
    from megatron.core import parallel_state

    lengths, heads = [5, 9, 1], (4, 2, 8)
    if not together:
        monkeypatch.setattr(bench, "SCORE_BYTES", 1)  # a batch for each document
    q, k, v, dout = bench.heads_of(sum(lengths), heads, "cpu", torch.float32)
    call = lambda: bench.core_attention(heads)(q, k, v, None, packed_seq_params=bench.params_of(lengths, "cpu"))  # noqa: E731
    try:
        out, gradients = call(), torch.autograd.grad(call(), (q, k, v), dout)
        with answers_of("cpu"):
            padded = [bench.padded_call(q, k, v, dout, lengths, heads, backward=each)() for each in (False, True)]
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    assert [len(batches) for batches in padded] == 2 * [1 if together else 3]
    rows = lambda parts: torch.cat([part[:n, i] for part, i, n in parts])  # noqa: E731
    places = [(0, i) if together else (i, 0) for i in range(3)]
    for index, wanted in enumerate((out, *gradients)):
        batches = padded[0] if index == 0 else [of_batch[index - 1] for of_batch in padded[1]]
        found = rows([(batches[batch], column, n) for (batch, column), n in zip(places, lengths, strict=True)])
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-5)
