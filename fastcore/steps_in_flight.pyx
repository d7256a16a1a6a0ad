"""The steps that were launched and not updated yet, and what must wait for them.

Owns their plans in order, and the fences behind them: a request that is part of a step in flight and leaves keeps its
blocks, and a row that was left stays empty, until that step was updated (INV-36). Without a connector that is for
finished requests only. The scheduler asks.
"""
import cython


@cython.final
cdef class StepsInFlight:
    def __cinit__(self, KVManager kv, RowPool rows):
        self.kv, self.rows = kv, rows
        self.plans, self.deferred = [], []

    def __len__(self):
        return len(self.plans)

    cdef const RowRecord* take_oldest(self, StepPlan plan, const int32_t[::1] token_ids) except NULL:
        """Takes out a step that is over, if it is the oldest one and the samples can be its own."""
        cdef const RowRecord* records = plan.records
        cdef Py_ssize_t i
        if records == NULL or not self.plans or plan is not self.plans[0]:
            raise RuntimeError(f"{plan!r} is not the oldest step in flight")
        if token_ids.shape[0] != plan.num_samples:
            raise ValueError(f"{plan!r} got {token_ids.shape[0]} token ids")
        if plan.num_drafts == 0:
            for i in range(plan.num_samples):
                if token_ids[i] < 0:
                    raise ValueError(f"{plan!r} got the token id {token_ids[i]} for sample {i}")
        else:
            check_samples(plan, token_ids)
        del self.plans[0]
        plan.records = NULL
        self.last_updated = plan.step_id
        return records

    cdef int forget_all(self) except -1:
        """Takes all steps out as if they were updated: the device has stopped."""
        cdef StepPlan plan
        for plan in self.plans:
            plan.records = NULL
        self.plans.clear()
        self.last_updated = self.last_step
        return 0

    cdef bint may_write(self, Request request) noexcept:
        """Whether a step in flight contains the request."""
        return request.last_step > self.last_updated

    cdef int give_back(self, Request request) except -1:
        """Gives the blocks of a request that leaves back, at once or when no step in flight may use them."""
        if request.is_fenced:
            return 0  # preempted before
        if request.num_blocks and self.may_write(request):
            request.is_fenced = True
            self.deferred.append(request)
            return 0
        return self.kv.release(request)

    cdef int leave_row(self, Request request) except -1:
        """Frees the row, or fences it until no step in flight writes a sampled token to it."""
        if request.row < 0:
            return 0
        self.rows.leave(request.row, request.last_step, self.last_updated)
        request.row = -1
        return 0

    cdef int drain(self) except -1:
        """Gives back blocks and rows whose last step was updated."""
        cdef Request request
        self.rows.drain(self.last_updated)
        if self.deferred:
            for request in self.deferred:
                if not self.may_write(request):
                    self.kv.release(request)
                    request.is_fenced = False
            self.deferred = [request for request in self.deferred if is_fenced(request)]
        return 0

    cdef int num_samples_of(self, Request request) except -1:
        """Tokens of a request that are sampled on the device, not known yet and not to be dropped."""
        cdef StepPlan plan
        cdef int count = 0
        cdef Py_ssize_t i
        for plan in self.plans:
            for i in range(plan.num_rows):
                if (
                    plan.requests[i] is request and plan.records[i].sample_index >= 0
                    and plan.records[i].epoch >= request.first_valid_epoch
                ):
                    count += 1 + plan.records[i].num_drafts
        return count


cdef int check_samples(StepPlan plan, const int32_t[::1] token_ids) except -1:
    """Raises ValueError unless each row that samples got a token at least, and nothing behind a rejected draft."""
    cdef Py_ssize_t i, k
    cdef const RowRecord* record
    for i in range(plan.num_rows):
        record = &plan.records[i]
        for k in range(record.sample_index, record.sample_index + record.num_drafts + 1 if record.sample_index >= 0 else 0):
            if token_ids[k] < 0 and (k == record.sample_index or token_ids[k] != -1):
                raise ValueError(f"{plan!r} got the token id {token_ids[k]} for sample {k}")
            if k > record.sample_index and token_ids[k] >= 0 and token_ids[k - 1] < 0:
                raise ValueError(f"{plan!r} got the token id {token_ids[k]} behind a rejected one")
    return 0


cdef inline bint is_fenced(object request) noexcept:
    return (<Request> request).is_fenced
