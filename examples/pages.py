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

    def append(self, name, k, v):
        """Append tokens, k [tokens, heads, dim] and v, to a sequence; a last page that is shared is copied first.

        MemoryError, and nothing changes, if too few pages are free.
        """
        pages, start, size = list(self.pages.get(name, [])), self.lengths.get(name, 0), self.cache.page_size
        shared = bool(len(k) and start % size and self.uses[pages[-1]] > 1)
        count = -(-(start + len(k)) // size) - len(pages) + shared
        if count > len(self.free):
            raise MemoryError(f"{name} needs {count} more pages, and {len(self.free)} are free; end a sequence first")
        rest = len(self.free) - count
        taken, old = self.free[rest:][::-1], pages[len(pages) - shared :]
        self.cache.copy_pages(old, taken[:shared], tokens=[start % size] * shared)
        pages = pages[: len(pages) - shared] + taken
        places = np.arange(start, start + len(k), dtype=np.int32)
        self.cache.append(k, v, ptxrt.slots_of(np.int32([pages]), np.zeros_like(places), places, size))
        self.pages[name], self.lengths[name] = pages, start + len(k)
        del self.free[rest:]
        for page in taken:
            self.uses[page] = 1
        for page in old:
            self.uses[page] -= 1

    def fork(self, name, new):
        """Start a new sequence with the tokens of another one; ValueError if there is one of that name."""
        if new in self.pages:
            raise ValueError(f"there is a sequence {new}; end it first, or take another name")
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
        ends, pages = np.cumsum([0, *map(len, rows)]), np.int32([page for row in rows for page in row])
        return ptxrt.block_table_from_csr(ends, pages), np.int32([self.lengths[name] for name in names])


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
