"""A process group whose ranks are threads of one process, so that one GPU is enough, or the CPU.

Their collectives are as late as NCCL's may be. On a GPU each rank has a separate stream and another for collectives,
which waits before it copies; on the CPU the copies are made in wait(). Until then what is received is NaN.
"""

import contextlib
import threading

import torch
import torch.distributed as dist

LATE_CYCLES = 200_000  # 0.1 ms at 2 GHz: more than a launch takes


class _Meeting:
    """What the ranks share."""

    def __init__(self, ranks):
        self.brought = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=120)

    def all_of(self, rank, brought):
        """What each rank has brought."""
        self.brought[rank] = brought
        self.barrier.wait()
        of_ranks = list(self.brought)
        self.barrier.wait()
        return of_ranks


class _Work:
    def __init__(self, wait):
        self._wait = wait

    def wait(self):
        if self._wait is not None:
            self._wait()
        self._wait = None  # and with it what was sent and received


class ThreadRank(dist.ProcessGroup):
    """One rank. It has the collectives that packing_ops.parallel calls, under the names of torch 2.11 and 2.13."""

    def __init__(self, rank, ranks, all_of):
        super().__init__(rank, ranks)
        self._all_of, self._stream = all_of, None

    def alltoall(self, received, sent, options=None):
        return self._exchange("all-to-all", received, sent)

    def all_gather_single(self, gathered, own, options=None):
        return self._exchange("all-gather", list(gathered.chunk(self.size())), [own] * self.size())

    _allgather_base = all_gather_single

    def allgather(self, gathered, own, options=None):
        """Of all_gather_object."""
        return self._exchange("all-gather of a list", gathered[0], own * self.size())

    def allreduce(self, tensors, options=None):
        (tensor,) = tensors
        parts = [torch.empty_like(tensor) for _ in range(self.size())]
        self._exchange("all-reduce", parts, [tensor.clone()] * self.size()).wait()
        tensor.copy_(torch.stack(parts).sum(0))
        return _Work(None)

    def _exchange(self, name, received, sent):
        """received[r] is what rank r sends here."""
        pairs = [(to, index) for index, to in enumerate(received) if to.data_ptr() != sent[index].data_ptr()]
        assert all(tensor.is_contiguous() for tensor in (*received, *sent))  # NCCL takes no others
        for to, _ in pairs:
            to.fill_(torch.nan if to.is_floating_point() else -1)
        if received[0].is_cuda:
            return self._exchange_on_stream(name, pairs, sent)
        of_ranks = self._brought(name, [each.clone() for each in sent])
        return _Work(lambda: _copy(pairs, of_ranks, self.rank()))

    def _exchange_on_stream(self, name, pairs, sent):
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        of_ranks = self._brought(name, sent, torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self._stream):
            for *_, ready in of_ranks:
                ready.wait()
            torch.cuda._sleep(LATE_CYCLES)
            _copy(pairs, of_ranks, self.rank())
            done = self._stream.record_event()
        all_done = self._all_of(self.rank(), done)

        def wait(_kept=(pairs, sent, of_ranks)):
            for each in all_done:
                each.wait()

        return _Work(wait)

    def _brought(self, name, *of_rank):
        of_ranks = self._all_of(self.rank(), (name, *of_rank))
        assert {each[0] for each in of_ranks} == {name}, of_ranks
        return [each[1:] for each in of_ranks]


def _copy(pairs, of_ranks, rank):
    for to, index in pairs:
        (given, *_) = of_ranks[index]
        assert given[rank].shape == to.shape, (given[rank].shape, to.shape)
        to.copy_(given[rank])


def ranks_in_threads(worker, ranks, device="cpu"):
    """What ``worker(group)`` returns on each of that many ranks; what one raises is raised here."""
    meeting, found, errors = _Meeting(ranks), [None] * ranks, []

    def run(rank):
        stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
        try:
            # Else one thread of autograd would run the backwards of all ranks, one after the other.
            with stream, torch.autograd.set_multithreading_enabled(False):
                found[rank] = worker(ThreadRank(rank, ranks, meeting.all_of))
                if device == "cuda":
                    torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    for error in first or errors:
        raise error
    return found


def rank_of_identical_ranks(ranks):
    """Rank 0 of a number of ranks that all send what it sends them, without threads: a CUDA graph is of one thread."""

    def all_of(_, brought):
        if not isinstance(brought, tuple):  # an event
            return [brought]
        name, sent, *ready = brought
        return [(name, [to_rank], *ready) for to_rank in sent]

    return ThreadRank(0, ranks, all_of)
