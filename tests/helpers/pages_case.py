"""Keys of documents put into pages: any page of any document anywhere, NaN in every slot that holds no key."""

import itertools

import torch

from helpers.attention_case import Case


class Pages:
    """The keys of a Case in pages, and what a call over them has in place of cu_seqlens_k."""

    def __init__(self, case, page_size=128, *, spare_pages=2, spare_columns=1):
        spans = list(itertools.pairwise(case.cu_seqlens[1].tolist()))
        counts = [-(-(end - start) // page_size) for start, end in spans]
        num_pages = sum(counts) + spare_pages
        ids = iter(torch.randperm(num_pages).tolist())
        table = torch.full((len(spans), max(counts, default=0) + spare_columns), -7, dtype=torch.int32)
        k, v = (torch.full((num_pages, page_size, *t.shape[1:]), torch.nan, dtype=t.dtype) for t in (case.k, case.v))
        for document, (start, end) in enumerate(spans):
            for page in range(counts[document]):
                table[document, page] = at = next(ids)
                rows = slice(start + page * page_size, min(start + (page + 1) * page_size, end))
                for pages, given in ((k, case.k), (v, case.v)):
                    pages[at, : rows.stop - rows.start] = given[rows].cpu()
        device = case.q.device
        self.k, self.v, self.block_table = k.to(device), v.to(device), table.to(device)
        self.seqused_k = case.cu_seqlens[1].diff()

    def keywords(self):
        return {"block_table": self.block_table, "seqused_k": self.seqused_k}


def paged_case(pairs, page_size=128, *, spare_columns=1, spare_pages=2, **options):
    """A Case of (queries, keys) and its keys in pages."""
    case = Case([pair[0] for pair in pairs], [pair[1] for pair in pairs], **options)
    return case, Pages(case, page_size, spare_columns=spare_columns, spare_pages=spare_pages)


def shared_pages(shared, own, *, page_size=128, queries=None, heads=(2, 1), dim=16, dtype=torch.float32, device="cpu"):
    """Documents that start with the same ``shared`` pages and go on with ``own`` keys each; the same keys end to
    end.
    """
    start = shared * page_size
    queries = own if queries is None else queries
    case = Case(queries, [start + keys for keys in own], heads=heads, dim=dim, dtype=dtype, device=device)
    for a in case.cu_seqlens[1].tolist()[1:-1]:
        case.k[a : a + start], case.v[a : a + start] = case.k[:start], case.v[:start]
    pages = Pages(case, page_size)
    pages.block_table[1:, :shared] = pages.block_table[0, :shared]
    return case, pages
