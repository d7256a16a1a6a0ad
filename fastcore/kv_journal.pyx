"""A journal of the prefix index: which blocks were indexed and forgotten, in order.

Exists only while KV events are on; `kv_manager` and `prefix_map` write, `kv_events` takes the entries after each
step. One Python object per entry is what publishing costs; with events off nobody calls this.
"""
import cython

cdef object STORED = "stored"
cdef object REMOVED = "removed"
cdef object CLEARED = "cleared"


@cython.final
cdef class KVJournal:
    def __cinit__(self):
        self.entries = []

    cdef int stored(self, bytes hash, bytes parent, const int32_t* tokens, int32_t num_tokens, bytes tail) except -1:
        """A block was indexed; `parent` is None for a first block, `tail` what its hash has behind the tokens."""
        cdef int32_t i
        self.entries.append((STORED, hash, parent, [tokens[i] for i in range(num_tokens)], tail))
        return 0

    cdef int removed(self, bytes hash) except -1:
        """A block was forgotten."""
        self.entries.append((REMOVED, hash))
        return 0

    cdef int cleared(self) except -1:
        """Every block was forgotten."""
        self.entries.append((CLEARED,))
        return 0

    def take(self):
        """The entries since the last call, oldest first."""
        entries, self.entries = self.entries, []
        return entries
