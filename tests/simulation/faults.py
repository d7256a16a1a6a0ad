"""The faults that `mutations` puts into the code on purpose: each one a change of one place.

Only a description of each; whether the simulation sees it is `mutations`' business.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """In `path`, `right` stands exactly once and becomes `wrong`."""

    what: str
    path: str
    right: str
    wrong: str


FAULTS = (
    Fault(
        "skip the touch of hit blocks",
        "fastcore/kv_manager.pyx",
        "        self.pool.acquire_all(request.blocks, num_hits, not request.prewarms)\n",
        "",
    ),
    Fault("count free hits as free", "fastcore/kv_manager.pyx", "- num_hits + free_hits -", "- num_hits -"),
    Fault(
        "let a hit cover the last token",
        "fastcore/kv_manager.pyx",
        "most = (request.num_tokens - 1) // self.block_size",
        "most = request.num_tokens // self.block_size",
    ),
    Fault(
        "publish a partial block",
        "fastcore/kv_manager.pyx",
        "cdef int32_t full = num_computed // self.block_size",
        "cdef int32_t full = self.blocks_for(num_computed)",
    ),
    Fault(
        "keep the map entry of a block that is taken",
        "fastcore/prefix_map.pyx",
        "                if not blocks[at].flags & HASHED:\n",
        "                if True:\n",
    ),
    Fault(
        "hash without the parent",
        "fastcore/block_hash.pyx",
        "parent = &self.root.word[0] if i == 0 else own - 2",
        "parent = &self.root.word[0]",
    ),
    Fault(
        "release the shallowest block first",
        "fastcore/block_pool.pyx",
        "for i in range(count - 1, -1, -1):",
        "for i in range(count):",
    ),
    Fault(
        "hash without the salt",
        "fastcore/key_tails.pyx",
        "key_tail(extra_keys, cache_salt)",
        'key_tail(extra_keys, b"")',
    ),
    Fault(
        "hash without the media",
        "fastcore/key_tails.pyx",
        "        if self.media is None:\n            return",
        "        if True:\n            return",
    ),
    Fault(
        "hash a picture without its place",
        "fastcore/key_tails.pyx",
        'parts.append((begin - start).to_bytes(4, "little", signed=True))',
        "parts.append(bytes(4))",
    ),
    Fault(
        "copy from a block with another picture",
        "fastcore/kv_manager.pyx",
        "cdef bytes tail = request.tails.at(num_hits, self.block_size)",
        "cdef bytes tail = request.tails.first if num_hits == 0 else request.tails.later",
    ),
    Fault(
        "free a block that has another owner",
        "fastcore/block_pool.pyx",
        "            if block.num_refs == 0:\n                num_returned",
        "            if block.num_refs <= 1:\n                num_returned",
    ),
    Fault(
        "leave a block that is hit in the free list",
        "fastcore/block_pool.pyx",
        "                unlink(blocks, ids[i])\n",
        "",
    ),
    Fault(
        "return cached blocks at the wrong end",
        "fastcore/block_pool.pyx",
        "        if not block.flags & HASHED:\n            link(",
        "        if True:\n            link(",
    ),
    Fault(
        "forget a returned block",
        "fastcore/block_pool.pyx",
        "                    join(blocks, last, sentinel(self))\n                    self.enlist(ids[i])\n"
        "                    last = blocks[sentinel(self)].prev\n",
        "                    num_returned -= 1\n",
    ),
    Fault(
        "admit after a preemption",
        "fastcore/scheduler.pyx",
        "return self.num_victims == 0 and not waits",
        "return not waits",
    ),
    Fault(
        "keep the budget of a victim", "fastcore/scheduler.pyx", "        self.budget.left += victim.step_tokens\n", ""
    ),
    Fault(
        "keep the computed tokens of a victim", "fastcore/scheduler.pyx", "        victim.num_computed_tokens = 0\n", ""
    ),
    Fault("keep the sent table of a victim", "fastcore/scheduler.pyx", "        victim.num_sent_blocks = 0\n", ""),
    Fault(
        "publish what a victim had computed",
        "fastcore/scheduler.pyx",
        "if record.epoch == request.num_preemptions:",
        "if True:",
    ),
    Fault(
        "tell a sample that was dropped",
        "fastcore/scheduler.pyx",
        "if records[i].epoch < request.first_valid_epoch:",
        "if False:",
    ),
    Fault(
        "forget a dropped sample without the row that samples it",
        "fastcore/request.pyx",
        "        self.first_valid_epoch = self.num_preemptions\n",
        "",
    ),
    Fault(
        "offer a prompt before its chunk is computed",
        "fastcore/kv_manager.pyx",
        "cdef int32_t reached = request.num_computed_tokens + request.step_tokens\n",
        "cdef int32_t reached = request.num_tokens\n",
    ),
    Fault(
        "copy from a block before it is written",
        "fastcore/kv_manager.pyx",
        "num_common(at, tokens, most) if self.is_settled(at) else 0",
        "num_common(at, tokens, most)",
    ),
    Fault("keep what a victim was to compute", "fastcore/scheduler.pyx", "        self.kv.take_back(victim)\n", ""),
    Fault(
        "cache what a failed row has computed",
        "aioengine/live.py",
        "            self._take_back(plan.requests[row])\n",
        "            pass\n",
    ),
    Fault(
        "take nothing back but the newest step",
        "fastcore/kv_manager.pyx",
        "request.num_proven = min(request.num_proven, request.num_matched)",
        "request.num_proven = request.num_tokens",
    ),
    Fault(
        "cache what was computed on evicted blocks",
        "fastcore/cache_control.pyx",
        "                self.kv.hold_back(request, name.span_block)\n",
        "                pass\n",
    ),
    Fault(
        "free the blocks of a step in flight",
        "fastcore/steps_in_flight.pyx",
        "if request.num_blocks and self.may_write(request):",
        "if False:",
    ),
    Fault(
        "never free what waited for a step in flight",
        "fastcore/steps_in_flight.pyx",
        "if not self.may_write(request):",
        "if False:",
    ),
    Fault(
        "one token more than asked for",
        "fastcore/step_budget.pxd",
        "known - request.num_prompt_tokens >= request.max_tokens",
        "known - request.num_prompt_tokens > request.max_tokens",
    ),
    Fault(
        "admit a victim whose tokens are in flight",
        "fastcore/scheduler.pyx",
        "if request is None or request.num_in_flight > 0 or request.is_fenced:",
        "if request is None or request.is_fenced:",
    ),
    Fault(
        "let more important requests make way",
        "fastcore/preemption.pyx",
        "if victim.priority > urgent.priority and before(urgent, victim):",
        "if True:",
    ),
    Fault(
        "admit others after making way",
        "fastcore/scheduler.pyx",
        "                    self.give_rest()\n                break\n",
        "                    self.give_rest()\n",
    ),
    Fault("no fence for rows", "fastcore/rows.pyx", "if fence <= last_updated:", "if True:"),
    Fault("lose a row", "fastcore/rows.pyx", "self.num_fenced = kept", "self.num_fenced = 0 * kept"),
    Fault("the last come first", "fastcore/queues.pyx", "a.arrival < b.arrival", "a.arrival > b.arrival"),
    Fault(
        "send a block table with a gap",
        "fastcore/step_buffer.pyx",
        "    request.num_sent_blocks = request.num_blocks\n",
        "    request.num_sent_blocks = request.num_blocks + 1\n",
    ),
    Fault(
        "use a step buffer again too early",
        "fastcore/step_buffer.pyx",
        "cdef Py_ssize_t slot = step_id % self.num_slots",
        "cdef Py_ssize_t slot = 0",
    ),
    Fault(
        "break the links of the prefix map",
        "fastcore/prefix_map.pyx",
        "link[0] = behind[block_id]",
        "link[0] = NULL_BLOCK",
    ),
    Fault(
        "take the block beside a hit for the next hit",
        "fastcore/prefix_map.pyx",
        "hash[0] != 0 and self.has_hash(block_id, hash)",
        "hash[0] != 0",
    ),
    Fault(
        "let a sibling's copy cover the last token",
        "fastcore/kv_manager.pyx",
        "min(request.num_prompt_tokens, request.num_tokens - 1)",
        "request.num_prompt_tokens",
    ),
    Fault(
        "keep the source of a copy for ever",
        "fastcore/kv_manager.pyx",
        "            self.pool.release(request.copy_source)\n            request.copy_source =",
        "            request.copy_source =",
    ),
    Fault(
        "let the source of a copy be a victim",
        "fastcore/kv_manager.pyx",
        "            self.pool.acquire_all(&request.copy_source, 1, not request.prewarms)\n",
        "            self.pool.blocks[request.copy_source].num_refs += 1\n",
    ),
    Fault(
        "share the block that is not full",
        "fastcore/kv_manager.pyx",
        "full = shared // self.block_size",
        "full = self.blocks_for(shared)",
    ),
    Fault(
        "copy from siblings that have not got so far",
        "fastcore/request.pyx",
        "if member.num_computed_tokens >= self.num_prompt_tokens:",
        "if member.num_computed_tokens > 0:",
    ),
    Fault(
        "take a tenant's block for another's",
        "fastcore/kv_manager.pyx",
        "return self.prefix_map.has_hash(block_id, expected.word)",
        "return True",
    ),
    Fault(
        "find one token more than two blocks share",
        "fastcore/kv_manager.pyx",
        "                best = common\n",
        "                best = min(common + 1, most)\n",
    ),
    Fault(
        "send no copies",
        "fastcore/step_buffer.pyx",
        "        if request.copy_target != 0:\n",
        "        if request.copy_target < 0:\n",
    ),
    Fault(
        "load the last block of a prompt too",
        "fastcore/kv_manager.pyx",
        "cdef int32_t end = (request.num_tokens - 1) // self.block_size",
        "cdef int32_t end = request.num_tokens // self.block_size",
    ),
    Fault(
        "copy the tail although its block is loaded",
        "fastcore/kv_manager.pyx",
        "        if request.num_loads:\n            self.forget_tail(request, num_hits)\n",
        "        if request.num_loads:\n            request.num_matched = request.num_remote * self.block_size\n",
    ),
    Fault(
        "load behind a gap",
        "fastcore/kv_manager.pyx",
        "while request.num_remote == known and known < end:",
        "while known < end:",
    ),
    Fault(
        "keep what was lost in the index",
        "fastcore/scheduler.pyx",
        "            self.kv.forget_from(request, first)\n",
        "",
    ),
    Fault(
        "tell what was computed on a lost block",
        "fastcore/scheduler.pyx",
        "            request.drop_samples()\n        return 0\n\n    def take_stores",
        "        return 0\n\n    def take_stores",
    ),
    Fault(
        "look for readers of a lost block among those that run",
        "fastcore/scheduler.pyx",
        "readers_of(lost, [*self.running, *self.in_flight.deferred])",
        "readers_of(lost, self.running)",
    ),
    Fault(
        "look for lost blocks at the loaders only",
        "fastcore/remote_kv.pyx",
        "            if first < end:\n",
        "            if first < end and is_loaded(request, first):\n",
    ),
    Fault(
        "no fence for blocks that a connector's loads may be in",
        "fastcore/scheduler.pyx",
        "        if self.kv.remote is None:\n            self.kv.release(victim)",
        "        if True:\n            self.kv.release(victim)",
    ),
    Fault(
        "store what is not computed yet",
        "fastcore/kv_manager.pyx",
        "            if self.is_settled(block_id):\n                stores",
        "            if True:\n                stores",
    ),
    Fault(
        "store what has left the index",
        "fastcore/kv_manager.pyx",
        "& HASHED or self.prefix_map.bytes_of(block_id) != digest:\n                continue\n",
        "& HASHED:\n                pass\n",
    ),
    Fault(
        "a group's window that is one token short",
        "fastcore/groups.pyx",
        "(num_computed - g.size + 1) // g.block_size if",
        "(num_computed - g.size + 2) // g.block_size if",
    ),
    Fault(
        "a group's chunk that ends one token early",
        "fastcore/groups.pyx",
        "return num_computed // g.size * g.size // g.block_size",
        "return (num_computed + 1) // g.size * g.size // g.block_size",
    ),
    Fault(
        "count no window for a group",
        "fastcore/groups.pyx",
        "        if g.kind == SLIDING:\n",
        "        if False:\n",
    ),
    Fault(
        "leave the twins of other groups in the index",
        "fastcore/prefix_map.pyx",
        "            self.twins.leave_all(block_id)\n",
        "            pass\n",
    ),
    Fault(
        "keep the flag of a group's twin",
        "fastcore/twins.pyx",
        "        self.pool.blocks[block_id].flags = 0\n",
        "",
    ),
    Fault(
        "hit a prefix without the other groups' windows",
        "fastcore/group_tables.pyx",
        "            if at > first:\n",
        "            if False:\n",
    ),
    Fault(
        "hit a group's prefix inside of a coarse block",
        "fastcore/groups.pyx",
        "        self.alignment = scale * block_size\n",
        "        self.alignment = block_size\n",
    ),
    Fault(
        "hang a group's coarse block on its first hash",
        "fastcore/groups.pyx",
        "return (at + 1) * self.groups[group].scale - 1",
        "return at * self.groups[group].scale",
    ),
    Fault(
        "give a group's block out of the window back twice",
        "fastcore/group_tables.pyx",
        "            table.num_out = max(table.num_out, first)\n",
        "",
    ),
    Fault(
        "lose a group's block out of the window",
        "fastcore/group_tables.pyx",
        "                self.pool.release(table.blocks[i])\n                table.blocks[i] = NULL_BLOCK\n",
        "                table.blocks[i] = NULL_BLOCK\n",
    ),
    Fault(
        "skip the touch of other groups' hits",
        "fastcore/group_tables.pyx",
        "                    self.pool.hit(table.blocks[i])\n",
        "                    pass\n",
    ),
    Fault(
        "count other groups' free hits as free",
        "fastcore/group_tables.pyx",
        "                needed += self.pool.blocks[request.more[g - 1].blocks[i]].num_refs == 0\n",
        "                pass\n",
    ),
    Fault(
        "extend without counting other groups",
        "fastcore/kv_manager.pyx",
        "            missing += self.more.num_missing(request, num_tokens)\n",
        "",
    ),
    Fault(
        "send a group's table to the rows of another",
        "fastcore/step_buffer.pyx",
        "(g + 1) * row_stride + request.row",
        "g * row_stride + request.row",
    ),
    Fault(
        "send a group's table once more",
        "fastcore/step_buffer.pyx",
        "        table.num_sent = table.num_blocks\n",
        "",
    ),
    Fault(
        "an abort that frees nothing",
        "aioengine/live.py",
        "                self._scheduler.finish(choice.request, reason)\n                self._end_choice",
        "                self._end_choice",
    ),
    Fault(
        "run on after a stop text",
        "aioengine/live.py",
        '                    self._scheduler.finish(request, "stop")',
        "                    pass",
    ),
    Fault("deliver tokens twice", "aioengine/outputs.py", "= num_delivered + len(new_ids)", "= num_delivered"),
    Fault(
        "a last output that wakes nobody",
        "aioengine/outputs.py",
        "        if not self._is_queued and not stream.is_closed:\n            self._is_queued = True\n"
        "            stream._wake(self)\n",
        "",
    ),
    Fault("do not ring when a step is over", "aioengine/loop.py", "        done.add_done_callback(self._ring)\n", ""),
    Fault(
        "forget that drafts were rejected",
        "fastcore/scheduler.pyx",
        "        self.rows.num_rejected[record.row] += num_rejected\n",
        "",
    ),
    Fault(
        "go on behind rejected drafts",
        "fastcore/scheduler.pyx",
        "            request.num_computed_tokens -= num_rejected\n",
        "            pass\n",
    ),
    Fault(
        "publish what rejected drafts have filled",
        "fastcore/scheduler.pyx",
        "        reached[0] -= num_rejected\n",
        "",
    ),
    Fault(
        "publish as if the drafts before had been accepted",
        "fastcore/scheduler.pyx",
        "        reached[0] -= self.rows.num_rejected[record.row] - record.num_rejected\n",
        "",
    ),
    Fault(
        "count the rejections of living requests alone",
        "fastcore/scheduler.pyx",
        "            if self.drafter is not None:\n                num_rejected =",
        "            if self.drafter is not None and request.state != FINISHED:\n                num_rejected =",
    ),
    Fault(
        "wait for rejected samples for ever",
        "fastcore/scheduler.pyx",
        "        request.num_in_flight -= 1 + record.num_drafts\n",
        "        request.num_in_flight -= 1 + record.num_drafts - num_rejected\n",
    ),
    Fault(
        "append what follows a stop token",
        "fastcore/scheduler.pyx",
        "                has_ended = True\n                break\n",
        "                has_ended = True\n",
    ),
    Fault(
        "draft one token more than may come",
        "fastcore/scheduler.pyx",
        "self.limits.max_total) - known - 1,",
        "self.limits.max_total) - known,",
    ),
    Fault(
        "draft beyond a row's blocks",
        "fastcore/scheduler.pyx",
        "                most = min(most, request.num_blocks * self.kv.block_size - known)\n",
        "                pass\n",
    ),
    Fault(
        "draft beyond the input budget",
        "fastcore/scheduler.pyx",
        "            request.step_tokens += most\n            left -= most\n",
        "            request.step_tokens += most\n",
    ),
    Fault(
        "let a window go as if drafts in flight were accepted",
        "fastcore/request.pyx",
        "self.num_computed_tokens - self.drafts.num_unsure",
        "self.num_computed_tokens",
    ),
    Fault(
        "keep the drafts of dropped steps",
        "fastcore/request.pyx",
        "            self.drafts.forget_flying()\n",
        "            pass\n",
    ),
    Fault(
        "tell the device of no rejection",
        "fastcore/step_buffer.pyx",
        "row[7] = record.num_rejected = num_rejected[request.row]\n",
        "pass\n",
    ),
)
