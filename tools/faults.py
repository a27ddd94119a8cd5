"""What `planted_faults` plants: one replacement each, in one file of a room."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """`old` is in `file` of ``src/tokenspeed/<room>`` once."""

    name: str
    file: str
    old: str
    new: str
    room: str = "scheduler"


SCHEDULER = (
    # ---- what a forward may use, and when
    Fault(
        "who has nothing left to plan keeps its place",
        "admission.py",
        "life.count(State.DRAINING) + life.count(State.FINISHING) if life.passing else 0\n",
        "0\n",
    ),
    Fault(
        "who plans its last token in this very forward gives up its place in it",
        "admission.py",
        "        return seated < self.config.request_slots and seated - self.state.leaving < self.config.seats\n",
        "        self.begin_plan()\n"
        "        return seated < self.config.request_slots and seated - self.state.leaving < self.config.seats\n",
    ),
    Fault(
        "a forward's blocks are findable before it has landed",
        "prefill.py",
        "        schedule.scheduled[row] = end\n",
        "        schedule.scheduled[row] = end\n        schedule.landed[row] = end\n",
    ),
    Fault(
        "a write-through does not pin its sources",
        "host/tier.py",
        "        self.pool.share(group, blocks)\n        for block",
        "        for block",
    ),
    Fault(
        "a load does not pin its targets",
        "host/tier.py",
        "        self.pool.share(group, device_blocks)\n",
        "",
    ),
    Fault("a load does not pin its sources", "host/tier.py", "        self.host.pin(group, host_blocks)\n", ""),
    Fault(
        "a block is found in the host tier before its write-back is acknowledged",
        "host/blocks.py",
        "return block if block is not None and lane.written[block] else None",
        "return block",
    ),
    Fault(
        "a restore does not wait for the snapshot",
        "host/snapshots.py",
        "return image.snapped and all(",
        "return all(",
    ),
    Fault(
        "a restore does not wait for the pages' write-backs",
        "host/snapshots.py",
        "            host.all_written(group, imaged.host_blocks) for",
        "            True for",
    ),
    Fault(
        "a restored request goes on before its restore is acknowledged",
        "admission.py",
        "        self.life.move(row, Event.RESTORE)\n",
        "        self.life.move(row, Event.RESTORE)\n        self.life.move(row, Event.RESTORED)\n",
    ),
    Fault(
        "an image reads the state from where this plan moves it to",
        "host/snapshots.py",
        "self.residents.source_of(number, block) for block in blocks",
        "block for block in blocks",
    ),
    Fault(
        "an image does not pin the host blocks it finds",
        "host/snapshots.py",
        "            host.pin(group, imaged.host_blocks[imaged.host_blocks != NOWHERE])\n",
        "            pass\n",
    ),
    Fault(
        "a window gives up a block too early",
        "groups.py",
        "np.maximum(starts - (self.window - 1), 0) // self.block_tokens",
        "np.maximum(starts - (self.window - 1), 0) // self.block_tokens + 1",
    ),
    Fault(
        "the boundary block is not copied",
        "residents.py",
        "        if own != source:  # it may",
        "        if False:  # it may",
    ),
    Fault(
        "the boundary block is shared and written",
        "reach.py",
        "        return common if common >= self.least else 0\n",
        "        return min(common + 1, room) if common >= self.least else 0\n",
    ),
    Fault(
        "a state's new owner gets it as it was",
        "residents.py",
        "if clean and (self.groups[group].zero or self.config.zero_new_blocks):",
        "if clean and self.config.zero_new_blocks:",
    ),
    Fault(
        "a kept state is written over by its owner",
        "kept_states.py",
        "        if position == NO_POSITION:\n            return\n",
        "        return\n",
    ),
    Fault(
        "the move of a state is not copied",
        "residents.py",
        "        self.state.copies.append(BlockCopy(group=group.number, source=old, destination=int(got[0])))\n",
        "",
    ),
    Fault(
        "promises are not kept back",
        "packed.py",
        "            lacking = lane.promised + want[group] - slack\n",
        "            lacking = want[group] - slack\n",
    ),
    Fault(
        "promises are not kept back, one group",
        "pool.py",
        "        need = want[0] + state.promised\n",
        "        need = want[0]\n",
    ),
    Fault(
        "a request that leaves does not give back its promises",
        "residents.py",
        "            self.pool.redeem(number, int(tables.owed[slot]))\n            tables.first",
        "            tables.first",
    ),
    Fault(
        "what one group takes is not kept for another that was said to get it",
        "residents.py",
        "        for group, slots in enumerate(parts):\n            self.pool.promise(group, len(slots))\n"
        "        for group, slots in enumerate(parts):\n            self.pool.redeem(group, len(slots))\n",
        "        for group, slots in enumerate(parts):\n",
    ),
    Fault(
        "the salt is not part of the name",
        "names.py",
        "root_name(salt=self.table.identity.salt[row])",
        'root_name(salt=b"")',
    ),
    Fault("images are not part of the name", "names.py", '        return b"".join(parts)\n', '        return b""\n'),
    Fault(
        "a page with an image in it is found in part by its ids",
        "reach.py",
        "        if entry is None or self.chains.has_media(row, at):\n",
        "        if entry is None:\n",
    ),
    Fault(
        "the chain of an ended request is kept for the next one in its row",
        "exits.py",
        "        self.cache.forget(row)\n",
        "",
    ),
    Fault(
        "a prefix is released before what extends it, so evicted before it",
        "residents.py",
        "            self.pool.release(number, tables.blocks[slot, first:held][::-1].copy())\n",
        "            self.pool.release(number, tables.blocks[slot, first:held].copy())\n",
    ),
    Fault(
        "an evicted block stays findable",
        "prefix_index.py",
        "                name, whole = self._remove(lost.group, block)\n",
        "                name = self.indexes[lost.group].name(block)\n                whole = False\n",
    ),
    Fault(
        "a displaced block is never released",
        "residents.py",
        "        self.state.displaced.append((forward, relink.group, own))\n",
        "",
    ),
    Fault(
        "a displaced block is released at once, under the forward that uses it",
        "residents.py",
        "        while displaced and displaced[0][0] <= landed:\n",
        "        while displaced:\n",
    ),
    Fault(
        "an aborted request's pages return while its forward is in flight",
        "exits.py",
        "            self.life.move(row, Event.END_IN_FLIGHT)\n            return\n",
        "            self.life.move(row, Event.END_IN_FLIGHT)\n"
        "            self.residents.release_pages(int(self.table.schedule.slot[row]))\n            return\n",
    ),
    Fault(
        "an end that is told twice releases twice",
        "exits.py",
        "        if Owned.TRANSFER in owned or state in (State.RESTORING, State.DISCARDING):\n            return\n",
        "        if Owned.TRANSFER in owned:\n            return\n",
    ),
    Fault(
        "an aborted transfer's pages return before it has stopped",
        "exits.py",
        "        if Owned.TRANSFER in owned or state in (State.RESTORING, State.DISCARDING):\n            return\n",
        "        if state in (State.RESTORING, State.DISCARDING):\n            return\n",
    ),
    Fault(
        "an aborted request leaves its image behind",
        "exits.py",
        "        if Owned.IMAGE in owned:\n            self.images.discard(row)\n",
        "",
    ),
    Fault(
        "what was fetched for a request is never let go",
        "admission.py",
        "        self.storage.admitted(row)\n",
        "",
    ),
    Fault(
        "a GET that failed counts as one that filled its block",
        "storage_fetch.py",
        "            if ok:\n                self.shelf.wrote",
        "            if True:\n                self.shelf.wrote",
    ),
    Fault(
        "storage keys do not tell groups apart",
        "storage_reach.py",
        'return self.group.to_bytes(2, "little") + self.name',
        'return (0).to_bytes(2, "little") + self.name',
    ),
    Fault(
        "a PUT's host block may be evicted meanwhile",
        "storage_shelf.py",
        "            self.host.pin(group, int32([block]))\n",
        "            pass\n",
    ),
    Fault(
        "an acknowledgment of another kind is taken",
        "host/operations.py",
        "                if not isinstance(work, kind):\n",
        "                if work is None:\n",
    ),
    Fault(
        "a request that did not fit is not looked at again when a resident has gone",
        "admission.py",
        "        no_more_room = unused <= state.unused and seated >= state.seated\n",
        "        no_more_room = unused <= state.unused\n",
    ),
    Fault(
        "a suspended request alone waits for room that its scattered blocks take",
        "admission.py",
        "        if not fits and not self.residents.seated:\n",
        "        if False:\n",
    ),
    Fault(
        "a removal is not told",
        "prefix_index.py",
        "        if whole:\n            self.logs[group].removed(name)\n",
        "        if whole and group:\n            self.logs[group].removed(name)\n",
    ),
    Fault(
        "an equal block that replaces another is told behind what extends it",
        "kv_log.py",
        "        changes[name] = VOID if name in changes else None\n",
        "        if name in changes:\n            del changes[name]\n        else:\n            changes[name] = None\n",
    ),
    Fault(
        "forwards are planned while they are forbidden",
        "scheduler.py",
        "        if not state.may_forward:\n",
        "        if False:\n",
    ),
    Fault(
        "a prompt position whose log-probability is wanted is skipped",
        "admission.py",
        "            most = min(most, max(first - 1, 0))\n",
        "            pass\n",
    ),
    Fault(
        "rows that fill a block are remembered beyond a change of the batch",
        "prefix_index.py",
        "            state.due.clear()\n",
        "",
    ),
    Fault(
        "rows that fill a block are looked up a turn late",
        "prefix_index.py",
        "        due = known.get(state.turn % size)\n",
        "        due = known.get((state.turn - 1) % size)\n",
    ),
    # ---- order of the queue
    Fault(
        "waiting does not raise a request",
        "waiting.py",
        "            key = self._key(row, waited=round_id - entry.since_round)\n",
        "            key = self._key(row, waited=0)\n",
    ),
    Fault(
        "patience counts for nothing under priority",
        "policy.py",
        "            return (0, 0, order)\n        return (1, priority",
        "            pass\n        return (1, priority",
    ),
    Fault(
        "patience counts for nothing under longest prefix match",
        "policy.py",
        "            return (0, 0, order)\n        return (1, -cached_tokens",
        "            pass\n        return (1, -cached_tokens",
    ),
    Fault(
        "rounds of waiting gain no level",
        "policy.py",
        "        return (1, priority - waited_rounds // self.rounds_per_level, order)\n",
        "        return (1, priority, order)\n",
    ),
    Fault(
        "what a waiting prompt finds is not looked up again",
        "waiting.py",
        "self.cached.cached_tokens(row) if self.policy.wants_cached_tokens else 0",
        "self.cached.cached_tokens(row) if self.policy.wants_cached_tokens and not waited else 0",
    ),
    Fault(
        "a row that is used again inherits a turn",
        "waiting.py",
        "            if entry is None or entry.first != first:\n",
        "            if entry is None:\n",
    ),
    Fault(
        "the latest of the retracted comes back first",
        "waiting.py",
        "        insort(self.state.returned, (round_id, stamp, row))\n",
        "        insort(self.state.returned, (-round_id, -stamp, row))\n",
    ),
    Fault(
        "a retracted request waits behind those that never ran",
        "waiting.py",
        "        if state.returned:\n            return state.returned[0][2]\n",
        "        if state.returned and not state.live:\n            return state.returned[0][2]\n",
    ),
    Fault(
        "an ended request keeps its place in the queue",
        "exits.py",
        "            self.waiting.remove(row)\n",
        "",
    ),
    # ---- admission and retraction
    Fault(
        "spare slots are places in a forward",
        "admission.py",
        "        return seated < self.config.request_slots and seated - self.state.leaving < self.config.seats\n",
        "        return seated < self.config.request_slots\n",
    ),
    Fault(
        "new requests are admitted ahead of a suspended one",
        "admission.py",
        "        if not self.waiting or not self._has_seat() or self.images.waiting() is not None:\n",
        "        if not self.waiting or not self._has_seat():\n",
    ),
    Fault(
        "a newcomer leaves no spare block for those that run",
        "admission.py",
        "            margin = seated + group.blocks_for(room) if group.by_position else 0\n",
        "            margin = 0\n",
    ),
    Fault(
        "a retracted request comes back without headroom",
        "admission.py",
        "            room = min(self.config.resume_headroom_tokens, limit - cover)\n",
        "            room = 0\n",
    ),
    Fault(
        "a head that did not fit is not looked at again when another has computed its pages",
        "admission.py",
        " and not self.cache.grew(row, tokens=state.found):\n",
        ":\n",
    ),
    Fault(
        "more tokens are told as cached than the prompt has",
        "admission.py",
        "        schedule.cached[row] = min(hit.tokens, int(self.table.identity.prompt_len[row]) - 1)\n",
        "        schedule.cached[row] = hit.tokens\n",
    ),
    Fault(
        "a retracted request gets a new date of admission",
        "seniority.py",
        "        if row not in self.state.stamps:\n            self.state.last += 1\n",
        "        if True:\n            self.state.last += 1\n",
    ),
    Fault(
        "a victim is not spared the next time",
        "seniority.py",
        "        return row not in self.state.retracted, self.state.stamps[row]\n",
        "        return True, self.state.stamps[row]\n",
    ),
    Fault(
        "a victim in whose place the newest went yields all the same",
        "pressure.py",
        "            self.life.move(row, Event.STAY)\n",
        "            pass\n",
    ),
    Fault(
        "an acknowledgment that would free blocks is not waited for",
        "pressure.py",
        "                if self.life.count(State.YIELDING) or self.tier.holds_alone():\n",
        "                if self.life.count(State.YIELDING):\n",
    ),
    Fault(
        "no room is reserved for the forward that runs ahead",
        "decoding.py",
        "        ends = walls - self.ahead\n",
        "        ends = walls.copy()\n",
    ),
    Fault(
        "states that requests leave by themselves are not looked at",
        "states.py",
        "        self.state.passing += (old in _AT_REST) - (new in _AT_REST)\n",
        "",
    ),
    # ---- names that come from the index
    Fault(
        "a known page counts as the next one whatever is in it",
        "index.py",
        "            if name is None or entries[name][2] != pages[begin : begin + width]:\n",
        "            if name is None:\n",
    ),
    Fault(
        "a prompt with an image gets the names of text",
        "reach.py",
        "        if self.guide is None or self.chains.table.identity.media[row]:\n",
        "        if self.guide is None:\n",
    ),
    # ---- budget of a forward
    Fault(
        "decodes take nothing of the token budget",
        "prefill.py",
        "        budget = self.config.max_batched_tokens - len(draft.decodes.rows)\n",
        "        budget = self.config.max_batched_tokens\n",
    ),
    Fault(
        "one prompt takes the whole budget",
        "prefill.py",
        "        end = start + min(goal - start, self.config.chunk_tokens, budget)\n",
        "        end = start + min(goal - start, budget)\n",
    ),
    # ---- kept states and what lands
    Fault(
        "a state that its owner left is released before its forward has landed",
        "kept_states.py",
        "            self._release(left)\n        else:\n            self.state.left[slot, position] = left\n",
        "            self._release(left)\n        else:\n            self._release(left)\n",
    ),
    Fault(
        "a state is found that a row left whose logits were no numbers",
        "kept_states.py",
        "            elif marks.get(slot) == end and not ended:\n",
        "            elif marks.get(slot) == end:\n",
    ),
    Fault(
        "a store of a state that is written over stays good",
        "prefix_index.py",
        "            self.tier.forgotten(group, block)\n            self.pool.forget(group, block)\n",
        "            self.pool.forget(group, block)\n",
    ),
    Fault(
        "rows are taken for the same although one of them has ended",
        "prefix_index.py",
        "        steady = landed.rows is state.lanes and not landed.some_ended\n",
        "        steady = landed.rows is state.lanes\n",
    ),
    Fault(
        "what a surplus forward computed is findable",
        "prefix_index.py",
        "        return np.where(cut, np.int32(0), np.minimum(full, known))\n",
        "        return np.where(cut, np.int32(0), full)\n",
    ),
    Fault(
        "what a request that was cut short computed last is findable",
        "prefix_index.py",
        "        return np.where(cut, np.int32(0), np.minimum(full, known))\n",
        "        return np.minimum(full, known)\n",
    ),
    Fault(
        "the device is told of table entries that were given up again",
        "residents.py",
        "            if state.shrunk:\n",
        "            if False:\n",
    ),
    # ---- events
    Fault(
        "a block that was removed and stored again is told",
        "kv_log.py",
        "        if name in changes and changes[name] is None:\n",
        "        if False:\n",
    ),
    Fault(
        "what was to be told is told behind a clearing",
        "kv_log.py",
        "        self.state.changes.clear()\n        self.state.cleared = True\n",
        "        self.state.cleared = True\n",
    ),
    Fault(
        "a clearing is told again with every drain",
        "kv_log.py",
        "        state.changes.clear()\n        state.cleared = False\n",
        "        state.changes.clear()\n",
    ),
    # ---- host tier
    Fault(
        "an image's place is free while its snapshot is under way",
        "host/snapshots.py",
        "        if image.snapped:\n            self._free(place)\n        else:\n            image.row = NO_ROW\n",
        "        self._free(place)\n",
    ),
    Fault(
        "a block that storage may fail to fill counts as a victim's page",
        "host/snapshots.py",
        "                return None  # storage is filling one of them, which may fail\n",
        "                pass\n",
    ),
    # ---- storage and other nodes
    Fault(
        "who waited for another's fetch is forgotten",
        "storage_fetch.py",
        "        self.state.due.extend(self.state.followers.pop(op_id, ()))\n",
        "        self.state.followers.pop(op_id, ())\n",
    ),
    Fault(
        "a preparation that takes too long is not given up",
        "storage_fetch.py",
        "            if first.op_id == NO_OP or now_s - first.since_s < self.wait_s:\n",
        "            if True:\n",
    ),
    Fault(
        "an operation whose request has ended goes on for it",
        "storage_fetch.py",
        "            self.state.open[preparation.op_id] = attrs.evolve(op, row=NO_ROW)\n",
        "",
    ),
    Fault(
        "an operation that is given up is not cancelled",
        "storage_fetch.py",
        "            self.state.cancels.append(preparation.op_id)\n",
        "",
    ),
    Fault(
        "a frozen round plans storage work",
        "storage_fetch.py",
        "        if not allowed:\n            return ops\n",
        "        if False:\n            return ops\n",
    ),
    Fault(
        "storage is written with its queues full",
        "storage_keep.py",
        "        room = min(MAX_IN_OP, int(MAX_OPEN * (1.0 - pressure)) - state.count)\n",
        "        room = min(MAX_IN_OP, MAX_OPEN - state.count)\n",
    ),
    Fault(
        "a block that was put into storage stays pinned",
        "storage_keep.py",
        "        for group, block in blocks:\n            self.shelf.let_go(group, (block,))\n",
        "",
    ),
    Fault(
        "what the other node does not send is named",
        "remote.py",
        "            self.residents.cache.skip(group.number, slot, group.first_seen(prompt))\n",
        "            pass\n",
    ),
    Fault(
        "a hand-off does not wait for the last chunk's result",
        "remote.py",
        "        rows = [row for row in self.life.rows(State.PREFILL_DONE) if not self.life.flying(row)]\n",
        "        rows = list(self.life.rows(State.PREFILL_DONE))\n",
    ),
)

CONTROL = (
    Fault(
        "a batch counts as the same although a row has changed its slot",
        "output.py",
        " and cohort.moves == self.table.moves\n",
        "\n",
        room="control",
    ),
    Fault(
        "a batch counts as the same although a row was ended",
        "output.py",
        "            self.state.cohort = None\n            self.state.prompt_values.pop(row, None)\n",
        "            self.state.prompt_values.pop(row, None)\n",
        room="control",
    ),
    Fault(
        "a batch counts as the same although a row has ended by its token",
        "output.py",
        "        self.state.cohort = None\n        return finish\n",
        "        return finish\n",
        room="control",
    ),
    Fault(
        "a second commit of a round writes over the first one's tokens",
        "output.py",
        "        self.outbox.detach()  # before the cohort's columns change\n",
        "",
        room="control",
    ),
    Fault(
        "a stop ends a request before its least number of tokens",
        "output.py",
        "        stops &= produced >= identity.min_new[rows]\n",
        "",
        room="control",
    ),
    Fault(
        "surplus tokens count as committed ones",
        "output.py",
        "        surplus = 0 if cohort.keep is None else _surplus(batch, cohort.keep)\n",
        "        surplus = 0\n",
        room="control",
    ),
    Fault(
        "an acknowledgment counts as soon as this member has it",
        "cache_ops.py",
        "        agreed = frozenset(mine).intersection(*self.mesh.gather(frozenset(mine)))\n",
        "        agreed = frozenset(mine)\n        self.mesh.gather(agreed)\n",
        room="control",
    ),
    Fault(
        "an acknowledgment that members agreed on is agreed on again",
        "cache_ops.py",
        "        mine.difference_update(agreed)\n",
        "",
        room="control",
    ),
    Fault(
        "snapshots are acknowledged without the other members",
        "cache_ops.py",
        "        mine.difference_update(agreed)\n        return CacheAcks(\n",
        "        mine.difference_update(agreed)\n"
        '        agreed |= {("snapshots", op) for op in acks.snapshots}\n'
        "        return CacheAcks(\n",
        room="control",
    ),
    Fault(
        "a frozen round does not commit what is in flight",
        "event_loop.py",
        "        committed = self._drain_if(self.control_ops.frozen, events)\n",
        "        committed = 0\n",
        room="control",
    ),
    Fault(
        "the head advances behind planning",
        "event_loop.py",
        "        if facts:\n"
        "            # The scheduler learns what completed and what is permitted; the only head advance.\n"
        "            self.scheduler.advance_head(facts)\n",
        "        if facts.tick is not None:\n"
        "            # The scheduler learns what completed and what is permitted; the only head advance.\n"
        "            self.scheduler.advance_head(facts)\n",
        room="control",
    ),
    Fault(
        "ended requests are released before their results are told to the scheduler",
        "event_loop.py",
        "        events.extend(self.pd.poll())\n",
        "        events.extend(self.pd.poll())\n        self._release_ended()\n",
        room="control",
    ),
    Fault(
        "metrics are recorded behind the agreement on an idle forward",
        "event_loop.py",
        "        self._record(plan, now_s)\n        batch = plan.batch\n",
        "        batch = plan.batch\n"
        "        self.dp_step.idle_forward_due(tokens=0)\n"
        "        self._record(plan, now_s)\n",
        room="control",
    ),
    Fault(
        "a member with tokens is not told apart from one without",
        "gate.py",
        "        return tokens == 0 and any(everyone)\n",
        "        return any(everyone)\n",
        room="control",
    ),
    Fault(
        "a request waits in the queue again and again",
        "request_stats.py",
        "        for row in rows[stats.first_scheduled_s[rows] == 0].tolist():\n",
        "        for row in rows.tolist():\n",
        room="control",
    ),
    Fault(
        "several preemptions of one plan count as one",
        "request_stats.py",
        "            self.meter.preempted(len(rows))\n",
        "            self.meter.preempted(1)\n",
        room="control",
    ),
    Fault(
        "the count of active blocks of an idle round is kept",
        "load.py",
        "            state.active_at_s = None\n            return scheduler.active_lcm_blocks()\n",
        "            state.active, state.active_at_s = scheduler.active_lcm_blocks(), now_s\n"
        "            return state.active\n",
        room="control",
    ),
    Fault(
        "storage's pressure is this member's own",
        "l3.py",
        "            pressure=max(report.pressure for report in reports),\n",
        "            pressure=reports[-1].pressure,\n",
        room="control",
    ),
    Fault(
        "a storage operation completes with the first owner's report",
        "l3.py",
        "                if not op.missing:\n                    ended.append(done.op_id)\n",
        "                if len(op.missing) < self.mesh.size:\n                    ended.append(done.op_id)\n",
        room="control",
    ),
    Fault(
        "a key that one owner failed counts as stored",
        "l3.py",
        "[a and b for a, b in zip(",
        "[a or b for a, b in zip(",
        room="control",
    ),
    Fault(
        "the second of an id in a round is admitted where the first was refused",
        "ingress.py",
        "            if again or buffers(request.rid)",
        "            if buffers(request.rid)",
        room="control",
    ),
    Fault(
        "an id that the scheduler still holds is admitted",
        "event_loop.py",
        "            holds=self.scheduler.holds,\n",
        "            holds=lambda _: False,\n",
        room="control",
    ),
)

FAULTS = SCHEDULER + CONTROL
