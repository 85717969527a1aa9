"""cffi API-mode builder of `pvrdma_server._ring`: what rings in shared memory need and Python lacks.

Contract: pure C and libc, no state but of manners (`give_way`). Every function has a twin in Python; who calls them,
and the contract of each, is in `backend_soft/native`, the only importer. cffi lets the GIL go around each call.
"""

import os
import shutil
import tempfile
from pathlib import Path

from cffi import FFI

_LANE = Path(__file__).with_name("_ring_lane.h").read_text()

_STRUCTS = """
typedef int (*ring_look)(void *, int);
struct ring_piece { uint64_t address, length; uint8_t *memory; };
struct ring_patience { int64_t each_ns, all_ns; };
struct ring_sent { uint64_t wr_id, remote_addr, addr; uint32_t length, rkey, flags, messages; };
struct ring_asked { uint64_t address; uint32_t length, psn; };

struct ring_landing {
    uint8_t *data; uint64_t capacity, tail, head, told, *words;
    uint32_t dst_qpn, src_qpn, psn, rkey, max_length, limit;
    uint64_t limit_bytes; struct ring_patience patience;
    struct ring_piece piece;
    uint64_t address, total, done;
    const struct ring_sent *reads; uint32_t count;
    uint32_t messages, unanswered, completed; uint64_t bytes;
    struct ring_asked asked[64];
};

struct ring_room {
    uint8_t *data; uint64_t *words, capacity, head, tail, reserve; struct ring_patience patience;
};

struct ring_posting {
    const uint32_t *prod_tail; uint32_t cons_head, index_mask;
    const uint8_t *entries; uint32_t entry_size, slots, opcode, lkey, max_length, limit;
    uint64_t limit_bytes;
    struct ring_piece piece;
    struct ring_room to;
    uint32_t dst_qpn, src_qpn, psn, chunk;
    uint32_t entries_taken, messages, unusual; uint64_t bytes;
    struct ring_sent sent[256];
};

struct ring_chunks {
    struct ring_piece piece;
    struct ring_room to;
    uint32_t flags, dst_qpn, src_qpn, rkey, chunk, ack_every, limit;
    uint64_t psn, addr, remote_addr, total, offset, limit_bytes;
    uint32_t messages; uint64_t bytes;
};

struct ring_answers {
    struct ring_piece piece;
    struct ring_room to;
    uint32_t dst_qpn, src_qpn, chunk, limit, count;
    uint64_t offset, limit_bytes;
    struct ring_asked asked[64];
    uint32_t completed, messages; uint64_t bytes;
};

struct ring_row { uint8_t *at; uint32_t slots; };
/* Slots of a queue from one on, around its ring; rows before `next` are used. */
struct ring_rows { struct ring_row rows[16]; uint32_t count, next; };

struct ring_lane {
    /* Both rings, with the calls of fast_path. `lands`, `sends`: which of them are wanted. */
    struct ring_landing in;
    struct ring_posting out;
    struct ring_rows sq_rows;
    uint32_t lands, sends;
    /* The completion queue: words, `cq_slots` slots in a row from that of `cq_tail` on, what is always the same. */
    struct ring_rows cq_rows;
    uint32_t *cq_words; uint8_t *cq_entries; uint32_t cq_tail, cq_mask, cq_capacity, cq_slots; uint8_t cqe[64];
    /* Requests sent and not completed, `done` to `count`, from PSN `first` on; the last PSN acknowledged. */
    struct ring_sent records[512]; uint32_t done, count, first, acked, room, signal_all, report;
    uint64_t flying, window;
    /* Whom to wake, when to stop. */
    int bell_fd; const uint8_t *stop; ring_look look; void *watch; int token;
    int64_t idle_ns, all_ns;
    /* What came of it. */
    uint32_t landed, answer, answered, ack_psn, acks, taken, posted, completions, rung;
    uint64_t landed_bytes, posted_bytes; int64_t looked_ns;
};
"""

_CDEF = (
    _STRUCTS
    + """
void ring_fence(void);
int ring_linger(const uint64_t *head, uint64_t head_seen, const uint64_t *room, uint64_t room_seen,
                const uint8_t *stop, ring_look look, void *watch, int64_t limit_ns);
void ring_land_writes(struct ring_landing *);
void ring_land_responses(struct ring_landing *);
void ring_take_reads(struct ring_landing *);
void ring_post_requests(struct ring_posting *);
void ring_post_chunks(struct ring_chunks *);
void ring_post_answers(struct ring_answers *);
int ring_drive(struct ring_lane *);
"""
)

_SOURCE = (
    r"""
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
"""
    + _STRUCTS
    + r"""
void ring_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

/* A yield that takes longer than SHARED_NS was one to somebody; after one longer than LONG_NS there is none for SELDOM
   times as long. `native` has the same numbers. */
enum { SHARED_NS = 2000, LONG_NS = 400000, SELDOM = 50 };

/* Between two looks, at `now`: whoever waits for this CPU goes first, for it may be who has to answer. Who keeps it for
   long does not wait for us, and gets it seldom. When somebody else ran, the time after that, and otherwise `now`. */
static int64_t give_way(int64_t now)
{
    static _Thread_local int64_t again_ns;
    for (int i = 0; i < 8; i++)
        relax();
    if (now < again_ns)
        return now;
    sched_yield();
    int64_t after = now_ns(), took_ns = after - now;
    if (took_ns > LONG_NS)
        again_ns = after + SELDOM * took_ns;
    return took_ns > SHARED_NS ? after : now;
}

/* Looks until a word changes (1), `stop` is set or `look` finds something (2) or the time is over (0). `room`, `stop`
   and `look` may be NULL. */
int ring_linger(const uint64_t *head, uint64_t head_seen, const uint64_t *room, uint64_t room_seen,
                const uint8_t *stop, ring_look look, void *watch, int64_t limit_ns)
{
    int64_t now = now_ns(), end_ns = now + limit_ns;
    do {
        for (int i = 0; i < 32; i++) {
            if (__atomic_load_n(head, __ATOMIC_ACQUIRE) != head_seen)
                return 1;
            if (room && __atomic_load_n(room, __ATOMIC_ACQUIRE) != room_seen)
                return 1;
            if (stop && __atomic_load_n(stop, __ATOMIC_RELAXED))
                return 2;
            relax();
        }
        if (look && look(watch, -1))
            return 2;
        now = now_ns();
        give_way(now);
    } while (now < end_ns);
    return 0;
}

/* --- RDMA WRITEs and the data of READs, many messages in one call ------------------------------------------------ */

/* The messages' header; see wire.py. Both machines of a fabric are this one. */
struct header {
    uint8_t kind, flags, code, version;
    uint32_t dst_qpn, src_qpn, psn, length, rkey;
    uint64_t remote_addr;
    uint32_t total, imm;
    uint64_t operand_a, operand_b, offset;
};
_Static_assert(sizeof(struct header) == 64, "header");

/* A send queue's entry with one element; see vmw_pvrdma_abi.py. */
struct entry {
    uint64_t wr_id;
    uint32_t num_sge, total_len, opcode, send_flags, ex, unused1;
    uint64_t remote_addr;
    uint32_t rkey, unused2[9];
    uint64_t addr;
    uint32_t length, lkey;
};
_Static_assert(sizeof(struct entry) == 96, "entry");

enum { WRITE = 2, READ_REQUEST = 3, READ_RESPONSE = 4, ACK = 7, VERSION = 1 };
enum { FIRST = 1, LAST = 2, SOLICITED = 4, ACK_REQUEST = 32 };
enum { OPCODE_RDMA_READ = 4, SIGNALED = 2 };
enum { TAIL = 8, ALIGN = 63, PSN_MASK = 0xffffff, MAX_MESSAGE = 1 << 30, MAX_ASKED = 64 };

static bool within(const struct ring_piece *p, uint64_t address, uint64_t length)
{
    return address >= p->address && length <= p->length && address - p->address <= p->length - length;
}

/* The control words; see shm_ring.py. */
enum { HEAD = 0, WANTS = 16, TAIL_WORD = 48, ASLEEP = 64 };
/* How much is consumed before the producer is told. */
enum { TELL = 64 << 10 };

/* Looks a little, as part of `*each_ns`; false: that is over, or what a whole call may wait. */
static bool wait_a_little(struct ring_patience *patience, int64_t *each_ns)
{
    if (*each_ns <= 0 || patience->all_ns <= 0)
        return false;
    int64_t started_ns = now_ns();
    give_way(started_ns);
    int64_t took_ns = now_ns() - started_ns + 1;
    *each_ns -= took_ns;
    patience->all_ns -= took_ns;
    return true;
}

static uint64_t record_size(uint64_t length) { return sizeof(struct header) + ((length + ALIGN) & ~(uint64_t)ALIGN); }

/* Out of the ring, whose end may cut it anywhere. The last 8 bytes land after all others. */
static void copy_out(uint8_t *to, const uint8_t *data, uint64_t capacity, uint64_t from, uint64_t length)
{
    uint8_t last[TAIL];
    uint64_t most = length > TAIL ? length - TAIL : 0, left = length - most;
    uint64_t first = from + most <= capacity ? most : from < capacity ? capacity - from : 0;
    memcpy(to, data + from, first);
    memcpy(to + first, data + ((from + first) & (capacity - 1)), most - first);
    for (uint64_t i = 0; i < left; i++)
        last[i] = data[(from + most + i) & (capacity - 1)];
    __atomic_thread_fence(__ATOMIC_RELEASE);
    if (left == TAIL)
        memcpy(to + most, last, TAIL); /* one store */
    else
        memcpy(to + most, last, left);
}

static void copy_in(uint8_t *data, uint64_t capacity, uint64_t to, const uint8_t *from, uint64_t length)
{
    uint64_t first = to + length <= capacity ? length : to < capacity ? capacity - to : 0;
    memcpy(data + to, from, first);
    memcpy(data + ((to + first) & (capacity - 1)), from + first, length - first);
}

/* Whether `size` bytes are there to be consumed. In the middle of a message the producer is waited for, for
   waking up costs more, but not for long: it may wait for us. An index that cannot be is left for the caller. */
static bool arrived(struct ring_landing *t, uint64_t size, bool in_the_middle)
{
    int64_t each_ns = t->patience.each_ns;
    while (t->head - t->tail < size) {
        uint64_t head = __atomic_load_n(&t->words[HEAD], __ATOMIC_ACQUIRE);
        if (head == t->head) {
            if (!in_the_middle || !wait_a_little(&t->patience, &each_ns))
                return false;
        } else if (head < t->head || head - t->tail > t->capacity || head & ALIGN) {
            return false;
        } else {
            t->head = head;
            each_ns = t->patience.each_ns;
        }
    }
    return true;
}

/* Tells the producer of room now and then; false: its bell is to be rung. */
static bool consumed(struct ring_landing *t)
{
    if (t->tail - t->told < TELL)
        return true;
    __atomic_store_n(&t->words[TAIL_WORD], t->tail, __ATOMIC_RELEASE);
    t->told = t->tail;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return !__atomic_load_n(&t->words[WANTS], __ATOMIC_RELAXED)
           || __atomic_load_n(&t->words[HEAD], __ATOMIC_RELAXED) - t->tail > t->capacity / 4 * 3;
}

/* Whether there is room for `size` bytes beside the reserve; waits likewise, unless the consumer sleeps. */
static bool has_room(struct ring_room *r, uint64_t size)
{
    int64_t each_ns = r->patience.each_ns;
    while (r->head + size - r->tail > r->capacity - r->reserve) {
        uint64_t tail = __atomic_load_n(&r->words[TAIL_WORD], __ATOMIC_ACQUIRE);
        if (tail == r->tail) {
            if (__atomic_load_n(&r->words[ASLEEP], __ATOMIC_RELAXED) || !wait_a_little(&r->patience, &each_ns))
                return false;
        } else if (tail < r->tail || tail > r->head || tail & ALIGN) {
            return false;
        } else {
            r->tail = tail;
            each_ns = r->patience.each_ns;
        }
    }
    return true;
}

static void publish(struct ring_room *r) { __atomic_store_n(&r->words[HEAD], r->head, __ATOMIC_RELEASE); }

/* Takes messages as long as each is the part of a WRITE that follows the one before, into this piece of memory. A
   WRITE that is under way has `done` of `total` bytes at `address`; `total` 0: there is none. The header is a snapshot;
   the producer may change anything at any time and spoils its own data only. */
void ring_land_writes(struct ring_landing *t)
{
    t->messages = t->unanswered = 0, t->bytes = 0;
    for (; t->messages < t->limit && t->bytes < t->limit_bytes && consumed(t); t->messages++) {
        struct header h;
        uint64_t at = t->tail & (t->capacity - 1);
        if (!arrived(t, sizeof h, t->total))
            return;
        memcpy(&h, t->data + at, sizeof h);
        __asm__ volatile("" ::: "memory"); /* what is checked is what is used */
        bool first = h.flags & FIRST, last = h.flags & LAST;
        if (h.kind != WRITE || h.version != VERSION || h.flags & ~(FIRST | LAST | SOLICITED | ACK_REQUEST)
            || h.dst_qpn != t->dst_qpn || h.src_qpn != t->src_qpn || h.psn != t->psn || first == (t->total != 0)
            || !h.length || h.length > t->max_length || record_size(h.length) > t->head - t->tail)
            return;
        uint64_t address = first ? h.remote_addr : t->address, total = first ? h.total : t->total;
        uint64_t done = first ? 0 : t->done, end = done + h.length;
        if ((first && (h.rkey != t->rkey || h.total > MAX_MESSAGE)) || end > total || last != (end == total)
            || !within(&t->piece, address, total))
            return;
        copy_out(t->piece.memory + (address + done - t->piece.address), t->data, t->capacity, at + sizeof h, h.length);
        t->address = address, t->total = last ? 0 : total, t->done = last ? 0 : end;
        t->tail += record_size(h.length);
        t->bytes += h.length;
        t->psn = (t->psn + 1) & PSN_MASK;
        t->unanswered = last || h.flags & ACK_REQUEST ? 0 : t->unanswered + 1;
    }
}

/* The same for the data of `count` READs in order: `psn` is the first one's, and `done` bytes of it have come. */
void ring_land_responses(struct ring_landing *t)
{
    t->messages = t->completed = 0, t->bytes = 0;
    for (; t->messages < t->limit && t->bytes < t->limit_bytes && t->completed < t->count; t->messages++) {
        const struct ring_sent *read = &t->reads[t->completed];
        struct header h;
        uint64_t at = t->tail & (t->capacity - 1);
        if (!consumed(t) || !arrived(t, sizeof h, true))
            return;
        memcpy(&h, t->data + at, sizeof h);
        __asm__ volatile("" ::: "memory");
        uint64_t end = t->done + h.length;
        if (h.kind != READ_RESPONSE || h.version != VERSION || h.flags & ~LAST || h.dst_qpn != t->dst_qpn
            || h.src_qpn != t->src_qpn || h.psn != ((t->psn + t->completed) & PSN_MASK) || h.offset != t->done
            || !h.length || h.length > t->max_length || record_size(h.length) > t->head - t->tail || end > read->length
            || (h.flags == LAST) != (end == read->length) || !within(&t->piece, read->addr, read->length))
            return;
        copy_out(t->piece.memory + (read->addr + t->done - t->piece.address), t->data, t->capacity, at + sizeof h,
                 h.length);
        t->done = h.flags == LAST ? 0 : end;
        t->completed += h.flags == LAST;
        t->tail += record_size(h.length);
        t->bytes += h.length;
    }
}

/* Takes requests as long as each is the next READ, from its beginning, of this piece of memory. */
void ring_take_reads(struct ring_landing *t)
{
    t->messages = 0, t->bytes = 0;
    for (; t->messages < t->limit && t->messages < MAX_ASKED; t->messages++) {
        struct header h;
        if (!arrived(t, sizeof h, false))
            return;
        memcpy(&h, t->data + (t->tail & (t->capacity - 1)), sizeof h);
        __asm__ volatile("" ::: "memory");
        if (h.kind != READ_REQUEST || h.version != VERSION || h.flags != (FIRST | LAST) || h.dst_qpn != t->dst_qpn
            || h.src_qpn != t->src_qpn || h.psn != t->psn || h.length || h.offset || h.rkey != t->rkey || !h.total
            || h.total > MAX_MESSAGE || !within(&t->piece, h.remote_addr, h.total))
            return;
        t->asked[t->messages] = (struct ring_asked){h.remote_addr, h.total, h.psn};
        t->tail += sizeof h;
        t->psn = (t->psn + 1) & PSN_MASK;
    }
}

static void put(struct ring_room *r, const struct header *h, const uint8_t *from)
{
    uint64_t at = r->head & (r->capacity - 1);
    copy_in(r->data, r->capacity, at + sizeof *h, from, h->length);
    memcpy(r->data + at, h, sizeof *h);
    r->head += record_size(h->length);
}

static const uint8_t *place(const struct ring_piece *p, uint64_t address) { return p->memory + (address - p->address); }

/* Sends parts of one WRITE out of this piece of memory. */
void ring_post_chunks(struct ring_chunks *p)
{
    p->messages = 0, p->bytes = 0;
    if (!within(&p->piece, p->addr, p->total))
        return;
    for (; p->messages < p->limit && p->bytes < p->limit_bytes && p->offset < p->total; p->messages++) {
        uint64_t left = p->total - p->offset, length = left < p->chunk ? left : p->chunk;
        if (!has_room(&p->to, record_size(length)))
            break;
        bool last = length == left;
        struct header h = {
            .kind = WRITE, .version = VERSION, .dst_qpn = p->dst_qpn, .src_qpn = p->src_qpn, .psn = p->psn & PSN_MASK,
            .flags = p->flags | (p->offset ? 0 : FIRST) | (last ? LAST : p->psn % p->ack_every ? 0 : ACK_REQUEST),
            .length = length, .total = p->total, .rkey = p->rkey, .remote_addr = p->remote_addr,
        };
        put(&p->to, &h, place(&p->piece, p->addr + p->offset));
        p->psn++;
        p->offset += length;
        p->bytes += length;
        publish(&p->to);
    }
}

/* Sends the data that these READs asked for; `offset` bytes of the first one's went before. */
void ring_post_answers(struct ring_answers *p)
{
    p->messages = p->completed = 0, p->bytes = 0;
    for (; p->messages < p->limit && p->bytes < p->limit_bytes && p->completed < p->count; p->messages++) {
        const struct ring_asked *asked = &p->asked[p->completed];
        uint64_t left = asked->length - p->offset, length = left < p->chunk ? left : p->chunk;
        if (!length || !within(&p->piece, asked->address, asked->length) || !has_room(&p->to, record_size(length)))
            return;
        bool last = length == left;
        struct header h = {
            .kind = READ_RESPONSE, .flags = last ? LAST : 0, .version = VERSION, .dst_qpn = p->dst_qpn,
            .src_qpn = p->src_qpn, .psn = asked->psn, .length = length, .total = asked->length, .offset = p->offset,
        };
        put(&p->to, &h, place(&p->piece, asked->address + p->offset));
        p->offset = last ? 0 : p->offset + length;
        p->completed += last;
        p->bytes += length;
        publish(&p->to);
    }
}

/* Takes entries as long as each is a WRITE out of this piece of memory (or a READ into it, as `opcode` says), and sends
   them, each whole. The caller moves cons_head; entries are snapshots. */
void ring_post_requests(struct ring_posting *p)
{
    uint64_t published = p->to.head;
    uint32_t tail = __atomic_load_n(p->prod_tail, __ATOMIC_ACQUIRE), used = (tail - p->cons_head) & p->index_mask;
    uint32_t most = p->limit < p->slots ? p->limit : p->slots;
    bool reads = p->opcode == OPCODE_RDMA_READ;
    p->entries_taken = p->messages = 0, p->bytes = 0;
    p->unusual = tail & ~p->index_mask || used > (p->index_mask >> 1) + 1;
    if (p->unusual)
        return;
    most = most < used ? most : used;
    for (; p->entries_taken < most && p->bytes < p->limit_bytes; p->entries_taken++) {
        struct entry e;
        memcpy(&e, p->entries + (uint64_t)p->entries_taken * p->entry_size, sizeof e);
        __asm__ volatile("" ::: "memory");
        if (e.opcode != p->opcode || e.num_sge != 1 || e.send_flags & ~SIGNALED || e.lkey != p->lkey
            || !e.length || e.length > p->max_length || !within(&p->piece, e.addr, e.length)) {
            p->unusual = 1;
            break;
        }
        uint32_t sends = reads ? 0 : e.length, messages = sends ? (sends - 1) / p->chunk + 1 : 1;
        if (!has_room(&p->to, (messages - 1) * record_size(p->chunk) + record_size(sends - (messages - 1) * p->chunk)))
            break;
        uint32_t done = 0;
        do {
            uint32_t left = sends - done, length = left < p->chunk ? left : p->chunk;
            struct header h = {
                .kind = reads ? READ_REQUEST : WRITE, .flags = (done ? 0 : FIRST) | (length == left ? LAST : 0),
                .version = VERSION, .dst_qpn = p->dst_qpn, .src_qpn = p->src_qpn, .psn = p->psn, .length = length,
                .rkey = e.rkey, .remote_addr = e.remote_addr, .total = e.length,
            };
            put(&p->to, &h, place(&p->piece, e.addr + done));
            p->psn = (p->psn + 1) & PSN_MASK;
            done += length;
            /* The consumer starts meanwhile, but not at every cache line. */
            if (p->to.head - published >= 4096) {
                publish(&p->to);
                published = p->to.head;
            }
        } while (done < sends);
        p->sent[p->entries_taken] = (struct ring_sent){
            e.wr_id, e.remote_addr, e.addr, e.length, e.rkey, e.send_flags, messages,
        };
        p->messages += messages;
        p->bytes += sends;
    }
    publish(&p->to);
}
"""
    + _LANE
)

ffibuilder = FFI()
ffibuilder.cdef(_CDEF)
ffibuilder.set_source(
    "pvrdma_server._ring",
    _SOURCE,
    extra_compile_args=["-std=gnu11", "-O2", "-Wall"],
)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as build:
        built = Path(ffibuilder.compile(tmpdir=build))
        # The name that setuptools gives it; in one step, for a server that starts meanwhile.
        target = Path(__file__).parent / "_ring.abi3.so"
        shutil.copy(built, target.with_suffix(".new"))
        os.replace(target.with_suffix(".new"), target)
