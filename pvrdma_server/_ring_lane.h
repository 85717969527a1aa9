/* A lane: RDMA WRITEs of one queue pair, both ways, with their ACKs and completions, in one call that also waits.

   Contract: `_ring_build` puts this behind what it uses, and `backend_soft/lane` calls it. What it reads is hostile, as
   there. Whatever is not the usual case is left where it is, for the caller. */

enum { LANE_RECORDS = 512, LANE_BATCH = 256, LANE_LANDINGS = 4, PSN_HALF = 0x800000, ENTRY_FREED = 1 };

static void ring_bell(struct ring_lane *l)
{
    l->rung++;
    send(l->bell_fd, "\1", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* After a store to `head`: the consumer, if it sleeps, is woken once. */
static void wake_consumer(struct ring_lane *l)
{
    uint64_t *asleep = &l->out.to.words[ASLEEP];
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(asleep, __ATOMIC_RELAXED)) {
        __atomic_store_n(asleep, 0, __ATOMIC_RELAXED);
        ring_bell(l);
    }
}

static void tell(struct ring_lane *l)
{
    struct ring_landing *t = &l->in;
    if (t->tail == t->told)
        return;
    __atomic_store_n(&t->words[TAIL_WORD], t->tail, __ATOMIC_RELEASE);
    t->told = t->tail;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&t->words[WANTS], __ATOMIC_RELAXED)
        && __atomic_load_n(&t->words[HEAD], __ATOMIC_RELAXED) - t->tail <= t->capacity / 4 * 3) {
        __atomic_store_n(&t->words[WANTS], 0, __ATOMIC_RELAXED);
        ring_bell(l);
    }
}

/* The row in which a queue goes on, or NULL. */
static const struct ring_row *next_row(struct ring_rows *rows)
{
    return rows->next < rows->count ? &rows->rows[rows->next++] : NULL;
}

/* Publishes the completions of what was acknowledged; false: the queue cannot take them here. */
static bool complete(struct ring_lane *l)
{
    uint32_t before = l->cq_tail;
    bool ok = true;
    for (; l->done < l->count; l->done++) {
        const struct ring_sent *r = &l->records[l->done];
        uint32_t last = (l->first + r->messages - 1) & PSN_MASK;
        if (((l->acked - last) & PSN_MASK) >= PSN_HALF)
            break;
        if (r->flags & SIGNALED || l->signal_all) {
            const struct ring_row *row;
            if (!l->cq_slots && (row = next_row(&l->cq_rows)))
                l->cq_entries = row->at, l->cq_slots = row->slots;
            uint32_t head = __atomic_load_n(&l->cq_words[1], __ATOMIC_ACQUIRE);
            if (!l->cq_slots || head & ~l->cq_mask || ((l->cq_tail - head) & l->cq_mask) >= l->cq_capacity) {
                ok = false;
                break;
            }
            memcpy(l->cq_entries, l->cqe, sizeof l->cqe);
            memcpy(l->cq_entries, &r->wr_id, sizeof r->wr_id);
            memcpy(l->cq_entries + 24, &r->length, sizeof r->length); /* byte_len; see vmw_pvrdma_abi.py */
            l->cq_entries += sizeof l->cqe;
            l->cq_tail = (l->cq_tail + 1) & l->cq_mask;
            l->cq_slots--;
            l->completions++;
        }
        l->first = (last + 1) & PSN_MASK;
        l->flying -= r->length;
    }
    if (l->cq_tail != before)
        __atomic_store_n(&l->cq_words[0], l->cq_tail, __ATOMIC_RELEASE);
    return ok;
}

/* An acknowledgement of something that is under way here. */
static bool take_ack(struct ring_lane *l)
{
    struct ring_landing *t = &l->in;
    struct header h;
    memcpy(&h, t->data + (t->tail & (t->capacity - 1)), sizeof h);
    __asm__ volatile("" ::: "memory");
    if (!l->sends || h.kind != ACK || h.version != VERSION || h.flags != LAST || h.code || h.length
        || h.dst_qpn != t->dst_qpn || h.src_qpn != t->src_qpn || h.psn & ~PSN_MASK
        || ((h.psn - l->acked - 1) & PSN_MASK) >= ((l->out.psn - l->acked - 1) & PSN_MASK))
        return false;
    l->acked = h.psn;
    l->acks++;
    t->tail += sizeof h;
    return true;
}

/* Takes what has come, some of it if it does not end; false: there is something for the caller. */
static bool receive(struct ring_lane *l)
{
    struct ring_landing *t = &l->in;
    int landings = 0;
    for (int turns = 0; turns < LANE_BATCH && arrived(t, sizeof(struct header), false); turns++) {
        if (t->tail - t->told >= TELL)
            tell(l);
        if (l->lands) {
            ring_land_writes(t);
            if (t->messages) {
                l->landed += t->messages;
                l->landed_bytes += t->bytes;
                if (t->unanswered < t->messages) {
                    l->answer = 1;
                    l->ack_psn = (t->psn - 1 - t->unanswered) & PSN_MASK;
                }
                if (++landings == LANE_LANDINGS)
                    break;
                continue;
            }
        }
        if (!take_ack(l))
            return false;
    }
    uint64_t head = __atomic_load_n(&t->words[HEAD], __ATOMIC_ACQUIRE);
    return head >= t->head && head - t->tail <= t->capacity && !(head & ALIGN);
}

/* Acknowledges what landed, if there is room. */
static void answer(struct ring_lane *l)
{
    struct ring_room *to = &l->out.to;
    struct header h = {
        .kind = ACK, .flags = LAST, .version = VERSION, .dst_qpn = l->in.src_qpn, .src_qpn = l->in.dst_qpn,
        .psn = l->ack_psn,
    };
    uint64_t reserve = to->reserve;
    to->reserve = 0;
    if (l->answer && has_room(to, sizeof h)) {
        put(to, &h, NULL);
        publish(to);
        l->answer = 0;
        l->answered++;
        wake_consumer(l);
    }
    to->reserve = reserve;
}

/* Sends what was posted; false: there is something for the caller. */
static bool post(struct ring_lane *l)
{
    struct ring_posting *p = &l->out;
    const struct ring_row *row;
    if (!l->sends || __atomic_load_n(p->prod_tail, __ATOMIC_ACQUIRE) == p->cons_head)
        return true;
    if (!p->slots) {
        if (!(row = next_row(&l->sq_rows)))
            return false;
        p->entries = row->at, p->slots = row->slots;
    }
    if (l->done) {
        l->count -= l->done;
        memmove(l->records, l->records + l->done, l->count * sizeof l->records[0]);
        l->done = 0;
    }
    uint32_t room = l->room < LANE_RECORDS ? l->room : LANE_RECORDS;
    if (l->count >= room || l->flying >= l->window)
        return true;
    p->limit = room - l->count < LANE_BATCH ? room - l->count : LANE_BATCH;
    p->limit_bytes = l->window - l->flying;
    ring_post_requests(p);
    if (!p->entries_taken)
        return !p->unusual;
    memcpy(l->records + l->count, p->sent, p->entries_taken * sizeof p->sent[0]);
    l->count += p->entries_taken;
    l->flying += p->bytes;
    l->taken += p->entries_taken;
    l->posted += p->messages;
    l->posted_bytes += p->bytes;
    p->entries += (uint64_t)p->entries_taken * p->entry_size;
    p->slots -= p->entries_taken;
    p->cons_head = (p->cons_head + p->entries_taken) & p->index_mask;
    __atomic_store_n((uint32_t *)p->prod_tail + ENTRY_FREED, p->cons_head, __ATOMIC_RELEASE);
    wake_consumer(l);
    return true;
}

static uint64_t moved(const struct ring_lane *l)
{
    return (uint64_t)l->landed + l->acks + l->answered + l->taken + l->completions;
}

/* Goes on as long as something comes within `idle_ns` (0), until there is something for the caller (1) or for somebody
   else (2), or `all_ns` is over (1). */
int ring_drive(struct ring_lane *l)
{
    int64_t started_ns = now_ns(), seen_ns = started_ns, at_ns = started_ns;
    int why = 1;
    l->landed = l->answer = l->answered = l->acks = l->taken = l->posted = l->completions = l->rung = 0;
    l->landed_bytes = l->posted_bytes = 0, l->looked_ns = 0;
    l->out.unusual = 0;
    for (;;) {
        uint64_t before = moved(l);
        bool go_on = receive(l);
        go_on = complete(l) && go_on;
        answer(l);
        go_on = go_on && post(l);
        if (!go_on || (l->report && l->completions))
            break;
        int64_t now = now_ns();
        if (moved(l) != before) {
            seen_ns = now;
        } else {
            tell(l);
            l->looked_ns += now - at_ns;
            if (now - seen_ns >= l->idle_ns) {
                why = 0;
                break;
            }
            if (l->look && l->look(l->watch, l->token)) {
                why = 2;
                break;
            }
            now = give_way(now);
        }
        if (__atomic_load_n(l->stop, __ATOMIC_RELAXED)) {
            why = 2;
            break;
        }
        if (now - started_ns >= l->all_ns)
            break;
        at_ns = now;
    }
    tell(l);
    return why;
}
