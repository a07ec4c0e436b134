"""An allocator of pages for a `ptxrt.KVCache`: sequences that grow, fork and end.

python examples/pages.py
"""

import numpy as np

import ptxrt


class Pages:
    """The pages of a cache and the sequences that use them; forked sequences share the pages of their common tokens."""

    def __init__(self, cache):
        self.cache, self.free = cache, list(range(cache.pages))[::-1]
        self.uses, self.pages, self.lengths = [0] * cache.pages, {}, {}

    def take(self):
        page = self.free.pop()
        self.uses[page] = 1
        return page

    def append(self, name, k, v):
        """Append tokens, k [tokens, heads, dim] and v, to a sequence; a last page that is shared is copied first."""
        pages, start, size = self.pages.setdefault(name, []), self.lengths.get(name, 0), self.cache.page_size
        if start % size and self.uses[pages[-1]] > 1:
            self.uses[pages[-1]] -= 1
            pages.append(self.take())
            self.cache.copy_pages([pages[-2]], [pages[-1]], tokens=[start % size])
            del pages[-2]
        while len(pages) * size < start + len(k):
            pages.append(self.take())
        places = np.arange(start, start + len(k), dtype=np.int32)
        self.cache.append(k, v, ptxrt.slots_of(np.int32([pages]), np.zeros_like(places), places, size))
        self.lengths[name] = start + len(k)

    def fork(self, name, new):
        """Start a new sequence with the tokens of another one."""
        self.pages[new], self.lengths[new] = list(self.pages[name]), self.lengths[name]
        for page in self.pages[new]:
            self.uses[page] += 1

    def end(self, name):
        """End a sequence and free the pages that no other sequence uses."""
        del self.lengths[name]
        for page in self.pages.pop(name):
            self.uses[page] -= 1
            if not self.uses[page]:
                self.free.append(page)

    def table(self, names):
        """Return block_table and key_lengths of some sequences."""
        rows = [self.pages[name] for name in names]
        ends = np.cumsum([0, *map(len, rows)])
        return ptxrt.block_table_from_csr(ends, np.concatenate(rows)), np.int32([self.lengths[name] for name in names])


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    tokens = lambda count: [rng.standard_normal((count, 2, 64)).astype(np.float16) for _ in "kv"]
    pages = Pages(ptxrt.KVCache(pages=16, page_size=16, heads=2, dim=64, format="nvfp4"))
    pages.append("prompt", *tokens(40))
    pages.fork("prompt", "answer")
    pages.append("answer", *tokens(1))
    q = rng.standard_normal((2, 8, 1, 64)).astype(np.float16)
    print(ptxrt.attention_paged(q, pages.cache, *pages.table(["prompt", "answer"])).shape, pages.cache)
    pages.end("prompt")
    print(len(pages.free), "pages are free")
