"""Packs a step into one contiguous run of int32 words, the wire format between scheduler and device.

Owns the layout and a ring of preallocated buffers: one slot per step that may be in flight and one more, so
that a slot is never rewritten before its step was updated. The scheduler decides and calls `pack`; the
runner copies `StepPlan.buffer` to the device, and `kernels/step.py` unpacks it there.

    header  16 words   version, step_id, num_rows, num_tokens, num_samples, off_rows, off_tokens, off_blocks,
                       num_block_updates, total_words, off_copies, num_copies, num_drafts, then zeros
    rows    8 words each   row, query_start, num_new_tokens, num_computed_tokens, flags, sample_index or -1,
                           num_output_tokens with those in flight, num_rejected
    tokens  one word each  the id; -1 = the last token sampled for this row, which only the device knows yet
    blocks  3 words each   group x row_stride + row, logical index in the group's table, block id
    copies  2 words each   source block, target block

Drafts are the last tokens of a row; its flags hold how many (from bit DRAFTS_SHIFT on). It then has a sample more than
drafts, `sample_index` being the first: sample j follows the row's tokens up to its draft j. The scheduler counts
drafts in flight as accepted: `num_computed_tokens` and `num_output_tokens` are as many too large as drafts were
rejected in this persistent row beyond `num_rejected`, the count that it knew of. Only the device knows that in time.

Block tables are append-only: a row sends what is new, a joined row its whole table (INV-38, INV-39). What fell
out of a group's window is not sent: a joined row begins where the window does, and nobody takes back what a row
sent before. So entries before the window may name other requests' blocks, and no kernel reads them.

The device makes all copies of a step, over all layers, before its forward pass, and before them the loads that
the plan lists beside the buffer. No block is both a source and
a target in one step, so their order is free. The device runs steps in order: a source written by a step in
flight is ready by then, and one that is freed afterwards gets other content by a later step only.
"""
import cython
import numpy as np

from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.string cimport memcpy, memset

from aioengine.fastcore.request cimport GroupTable

VERSION = 4
HEADER_WORDS = 16
ROW_WORDS = 8
BLOCK_WORDS = 3
COPY_WORDS = 2
FLAG_SAMPLE = 1
FLAG_PROMPT_LOGITS = 2
FLAG_JOINED = 4
DRAFTS_SHIFT = 8

# Indices of the header's words.
HEADER_VERSION, HEADER_STEP_ID, HEADER_NUM_ROWS, HEADER_NUM_TOKENS, HEADER_NUM_SAMPLES = range(5)
HEADER_OFF_ROWS, HEADER_OFF_TOKENS, HEADER_OFF_BLOCKS = range(5, 8)
HEADER_NUM_BLOCK_UPDATES, HEADER_TOTAL_WORDS, HEADER_OFF_COPIES, HEADER_NUM_COPIES = range(8, 12)
HEADER_NUM_DRAFTS = 12
# Indices of a row's words.
ROW_ROW, ROW_QUERY_START, ROW_NUM_NEW, ROW_NUM_COMPUTED = range(4)
ROW_FLAGS, ROW_SAMPLE_INDEX, ROW_NUM_OUTPUT, ROW_NUM_REJECTED = range(4, 8)

cdef enum:
    C_VERSION = 4
    C_HEADER_WORDS = 16
    C_ROW_WORDS = 8
    C_BLOCK_WORDS = 3
    C_COPY_WORDS = 2
    C_SAMPLE = 1
    C_PROMPT_LOGITS = 2
    C_JOINED = 4
    C_DRAFTS_SHIFT = 8
    # Blocks that the rows joining in one step may send beyond one whole table: bounds the ring when long
    # cached prefixes are shared by many rows, whose tables together are larger than the pool.
    JOIN_BLOCKS = 65536


@cython.final
cdef class StepPlan:
    def num_computed(self, Py_ssize_t index):
        """Context length of a row before this step."""
        return self.record(index).num_computed

    def num_new(self, Py_ssize_t index):
        """Tokens of a row in this step."""
        return self.record(index).num_new

    cdef const RowRecord* record(self, Py_ssize_t index) except NULL:
        if self.records == NULL:
            raise RuntimeError(f"step {self.step_id} has been updated; its buffer may hold another step")
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of a step with {self.num_rows} rows")
        return &self.records[index]

    def __repr__(self):
        return (
            f"<StepPlan {self.step_id}: {self.num_rows} rows, {self.num_tokens} tokens, "
            f"{self.num_samples} samples>"
        )


@cython.final
cdef class StepBuffer:
    def __cinit__(
        self, int32_t num_slots, int32_t max_rows, int32_t max_tokens, int32_t block_size,
        int32_t max_table_blocks, int32_t num_groups=1, int32_t row_stride=0,
    ):
        cdef int64_t all_joined = <int64_t> max_rows * max_table_blocks
        cdef int64_t per_slot
        self.num_slots, self.max_rows, self.max_tokens = num_slots, max_rows, max_tokens
        self.row_stride = row_stride or max_rows
        self.max_join_blocks = <int32_t> min(all_joined, <int64_t> max(max_table_blocks, JOIN_BLOCKS))
        # A row that stays needs at most one block more than its tokens fill, in each group.
        self.max_block_updates = self.max_join_blocks + num_groups * (max_tokens // block_size + max_rows)
        per_slot = (
            C_HEADER_WORDS + <int64_t> C_ROW_WORDS * max_rows + max_tokens
            + <int64_t> C_BLOCK_WORDS * self.max_block_updates + <int64_t> C_COPY_WORDS * max_rows
        )
        self.ring = np.zeros((num_slots, per_slot), dtype=np.int32)
        self.words = self.ring
        self.records = <RowRecord*> PyMem_Calloc(<size_t> num_slots * max_rows, sizeof(RowRecord))
        if self.records == NULL:
            raise MemoryError()

    def __dealloc__(self):
        PyMem_Free(self.records)

    cdef StepPlan pack(self, int64_t step_id, list requests, list left_rows, const int32_t* num_rejected):
        """Writes the step and moves the requests' counters past it.

        Every request has `step_tokens` > 0, its drafts included, and blocks for them. `num_rejected` is by row; NULL if
        nobody ever has drafts. The caller keeps within the limits given at
        creation: rows, tokens, and blocks of joining rows.
        """
        cdef StepPlan plan = StepPlan.__new__(StepPlan)
        cdef Py_ssize_t slot = step_id % self.num_slots
        cdef int32_t num_rows = <int32_t> len(requests)
        cdef int32_t* header = &self.words[slot, 0]
        cdef int32_t* row = header + C_HEADER_WORDS
        cdef int32_t* tokens = row + <Py_ssize_t> C_ROW_WORDS * num_rows
        cdef int32_t* blocks
        cdef int32_t* copies
        cdef RowRecord* record = self.records + slot * self.max_rows
        cdef Request request
        cdef Py_ssize_t i
        cdef int32_t num_drafts
        cdef int32_t num_tokens = 0
        cdef int32_t num_updates = 0

        plan.step_id, plan.requests, plan.left_rows = step_id, requests, left_rows
        plan.sample_requests, plan.joined, plan.dropped_rows, plan.records = [], [], [], record
        plan.loads, plan.loaders = [], []
        for i in range(num_rows):
            request = <Request> requests[i]
            num_drafts = 0 if num_rejected == NULL else request.num_drafts()
            pack_tokens(tokens + num_tokens, request, num_drafts)
            pack_row(row, record, request, plan, num_tokens, num_drafts)
            if num_rejected != NULL:
                row[7] = record.num_rejected = num_rejected[request.row]
                if record.sample_index >= 0 and request.drafts is not None:
                    request.drafts.launch()
            num_tokens += request.step_tokens
            row += C_ROW_WORDS
            record += 1
        blocks = tokens + num_tokens
        for i in range(num_rows):
            request = <Request> requests[i]
            assert num_updates + request.num_blocks - request.num_sent_blocks <= self.max_block_updates
            num_updates += pack_blocks(blocks + <Py_ssize_t> C_BLOCK_WORDS * num_updates, request)
            if request.num_more:
                assert num_updates + num_unsent(request) <= self.max_block_updates
                num_updates += pack_more(
                    blocks + <Py_ssize_t> C_BLOCK_WORDS * num_updates, request, self.row_stride
                )
            request.num_computed_tokens += request.step_tokens
            request.step_tokens = 0
            request.last_step = step_id

        plan.num_rows, plan.num_tokens = num_rows, num_tokens
        plan.num_samples = <int32_t> len(plan.sample_requests)
        copies = blocks + <Py_ssize_t> C_BLOCK_WORDS * num_updates
        plan.num_copies = pack_copies(copies, plan.joined)
        memset(header, 0, C_HEADER_WORDS * sizeof(int32_t))
        header[0], header[1] = C_VERSION, <int32_t> (step_id & 0x7FFFFFFF)
        header[2], header[3], header[4] = num_rows, num_tokens, plan.num_samples
        header[5], header[6] = C_HEADER_WORDS, <int32_t> (tokens - header)
        header[7], header[8] = <int32_t> (blocks - header), num_updates
        header[10], header[11] = <int32_t> (copies - header), plan.num_copies
        header[12] = plan.num_drafts
        header[9] = header[10] + C_COPY_WORDS * plan.num_copies
        plan.buffer = self.ring[slot, :header[9]]
        return plan


cdef inline int pack_row(
    int32_t* row, RowRecord* record, Request request, StepPlan plan, int32_t query_start, int32_t num_drafts
) except -1:
    cdef int32_t known = request.num_tokens + request.num_in_flight
    cdef int32_t reached = request.num_computed_tokens + request.step_tokens - num_drafts
    cdef int32_t flags = num_drafts << C_DRAFTS_SHIFT
    cdef int32_t i
    cdef int32_t sample_index = -1
    row[6] = known - request.num_prompt_tokens
    if request.num_sent_blocks == 0:
        flags |= C_JOINED
        plan.joined.append(request)
    cdef int32_t last_useful = request.num_prompt_tokens - 1  # the last prompt token predicts no other
    if request.wants_prompt_logits and min(reached, last_useful) > request.prompt_logits_until:
        # Once per position: a recomputed chunk asks only if it reaches further than any before it.
        flags |= C_PROMPT_LOGITS
        request.prompt_logits_until = reached
    if reached == known and request.max_tokens > 0:
        flags |= C_SAMPLE
        sample_index = <int32_t> len(plan.sample_requests)
        for i in range(1 + num_drafts):
            plan.sample_requests.append(request)
        request.num_in_flight += 1 + num_drafts
        plan.num_drafts += num_drafts
    row[0], row[1], row[2] = request.row, query_start, request.step_tokens
    row[3], row[4], row[5], row[7] = request.num_computed_tokens, flags, sample_index, 0
    record.num_computed, record.num_new = request.num_computed_tokens, request.step_tokens
    record.sample_index, record.epoch = sample_index, request.num_preemptions
    record.num_drafts, record.row, record.num_rejected = num_drafts, request.row, 0
    return 0


cdef inline void pack_tokens(int32_t* tokens, Request request, int32_t num_drafts) noexcept:
    cdef int32_t num_needed = request.step_tokens - num_drafts
    cdef int32_t on_host = min(num_needed, request.num_tokens - request.num_computed_tokens)
    if num_drafts > 0:
        memcpy(tokens + num_needed, request.drafts.ids, num_drafts * sizeof(int32_t))
    if on_host > 0:
        memcpy(tokens, request.tokens + request.num_computed_tokens, on_host * sizeof(int32_t))
    else:
        # Its sample is in flight. A chunk never mixes both: whatever samples ends at the last token known.
        tokens[0] = -1


cdef inline int32_t pack_blocks(int32_t* blocks, Request request) noexcept:
    cdef int32_t i
    cdef int32_t first = request.num_sent_blocks
    for i in range(first, request.num_blocks):
        blocks[0], blocks[1], blocks[2] = request.row, i, request.blocks[i]
        blocks += C_BLOCK_WORDS
    request.num_sent_blocks = request.num_blocks
    return request.num_blocks - first


cdef int32_t num_unsent(Request request) noexcept:
    """Blocks in view of the groups behind the first one that the device does not know of."""
    cdef int32_t count = 0
    cdef int32_t g
    for g in range(request.num_more):
        count += request.more[g].num_blocks - max(request.more[g].num_sent, request.more[g].num_out)
    return count


cdef int32_t pack_more(int32_t* blocks, Request request, int32_t row_stride) noexcept:
    cdef int32_t count = 0
    cdef int32_t g, i
    cdef GroupTable* table
    for g in range(request.num_more):
        table = &request.more[g]
        for i in range(max(table.num_sent, table.num_out), table.num_blocks):
            blocks[0], blocks[1], blocks[2] = (g + 1) * row_stride + request.row, i, table.blocks[i]
            blocks += C_BLOCK_WORDS
            count += 1
        table.num_sent = table.num_blocks
    return count


cdef inline int32_t pack_copies(int32_t* copies, list joined) except -1:
    """Only a row that joins begins with a copy."""
    cdef Request request
    cdef int32_t count = 0
    for request in joined:
        if request.copy_target != 0:
            copies[0], copies[1] = request.copy_source, request.copy_target
            copies += C_COPY_WORDS
            count += 1
    return count


def read_step(const int32_t[::1] buffer not None, int32_t long_chunk):
    """What the host must know of a packed step, in one pass over its rows.

    Returns max_query_len, query_lens [R], then of each sample [N] its persistent row, its position in the output
    and its plan row, all int32; the (plan row, first token) of rows whose prompt is scored; and the
    (plan row, first token, tokens, context) of rows with `long_chunk` or more new tokens.

    Raises:
        ValueError: the buffer has another layout than this version knows.
    """
    if buffer.shape[0] < C_HEADER_WORDS or buffer[0] != C_VERSION:
        raise ValueError(f"step buffer of version {buffer[0] if buffer.shape[0] else None}, expected {VERSION}")
    cdef int32_t num_rows = buffer[2]
    cdef int32_t num_samples = buffer[4]
    lens, rows = np.empty(num_rows, np.int32), np.empty(num_samples, np.int32)
    outputs, plan_rows = np.empty(num_samples, np.int32), np.empty(num_samples, np.int32)
    cdef int32_t[::1] query_lens = lens
    cdef int32_t[::1] sample_rows = rows
    cdef int32_t[::1] sample_outputs = outputs
    cdef int32_t[::1] sample_plan_rows = plan_rows
    cdef const int32_t* row = &buffer[0] + buffer[5]
    cdef int32_t longest = 0
    cdef list scored = []
    cdef list long_rows = []
    cdef int32_t i, k
    for i in range(num_rows):
        query_lens[i] = row[2]
        longest = max(longest, row[2])
        if row[5] >= 0:
            for k in range((row[4] >> C_DRAFTS_SHIFT) + 1):
                sample_rows[row[5] + k], sample_outputs[row[5] + k] = row[0], row[6] + k
                sample_plan_rows[row[5] + k] = i
        if row[4] & C_PROMPT_LOGITS:
            scored.append((i, row[1]))
        if row[2] >= long_chunk:
            long_rows.append((i, row[1], row[2], row[3]))
        row += C_ROW_WORDS
    return longest, lens, rows, outputs, plan_rows, scored, long_rows
