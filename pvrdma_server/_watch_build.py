"""cffi API-mode builder of `pvrdma_server._watch`: a thread that looks at index words in guest memory.

Contract: pure C and libc. The thread never touches Python, so it runs whatever the GIL does. What it is for, and the
contract of each function, is in `watcher`, the only importer.

How it works. Each entry is in one phase:

    FREE -add-> ARMED -words differ-> FIRED -watch_fired-> DISARMED -rearm-> ARMED;  any -remove-> FREE

`rearm` is the only step taken without the mutex, by compare-and-swap. Guest words are only ever read with the mutex
held, which is why they are not read any more when `watch_remove` returns. The phase shares its word with the slot's
generation, so a token that outlived its entry changes nothing.

No wake-up is lost. Guest against thread: the words are a level, looked at again on every pass while ARMED. `rearm`
against a thread that goes to sleep: one stores `changes` and then reads `asleep`, the other the reverse, all
sequentially consistent, so either the thread makes another pass or `rearm` looks at the words itself. Signal against
`watch_fired`: both sides touch the event with the mutex held.

Memory order: `prod_tail` is read with acquire, so what the guest stored before it is visible to whoever learns of the
firing (through the mutex). The two words are not one snapshot and need not be: the device reads both anew.
"""

import shutil
import tempfile
from pathlib import Path

from cffi import FFI

_CDEF = """
#define WATCH_LIMIT ...
struct watch;
struct watch *watch_open(int64_t spin_ns, int64_t min_sleep_ns, int64_t max_sleep_ns, int64_t quiet_sleep_ns,
                         uint8_t *signalled);
int watch_fd(struct watch *);
int watch_add(struct watch *, const uint32_t *words);
void watch_rearm(struct watch *, int token);
void watch_remove(struct watch *, int token);
int watch_fired(struct watch *, int *tokens, int room);
void watch_set_deadline(struct watch *, int64_t when_ns);
int watch_look(void *, int but);
void watch_attend(struct watch *);
void watch_leave(struct watch *);
void watch_close(struct watch *);
"""

_SOURCE = r"""
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

/* Stops a guest that creates rings without end from filling our memory and our passes. */
#define WATCH_LIMIT 65536
#define CHUNK 256
/* At most one part in this many of a core goes into passes, however many rings there are. */
#define REST_PER_PASS 8
/* After a long quiet time a sleep may last one part in so many of it. */
#define QUIET_PER_SLEEP 64
#define GENERATIONS 0x7fff
/* Who attends looks at so many rings at once, and at all of them in turn; at more only the thread does, as ever. */
#define LOOKED_AT 64
#define ATTENDED_MOST 4096
/* How long the thread sleeps meanwhile, in case that somebody attends and does not look. */
#define ATTENDED_NS 1000000

enum phase { FREE, ARMED, FIRED, DISARMED };

struct entry {
    const volatile uint32_t *words;
    _Atomic uint32_t state; /* generation << 2 | phase */
    int next_fired;
};

struct watch {
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    pthread_t thread;
    int epoll_fd, event_fd, timer_fd;
    int64_t spin_ns, min_sleep_ns, max_sleep_ns, quiet_sleep_ns;
    /* Without the mutex, sequentially consistent. Chunks stay until the end: rearm may look into them at any time. */
    _Atomic(struct entry *) chunks[WATCH_LIMIT / CHUNK];
    _Atomic uint32_t changes; /* how many times something was armed */
    _Atomic bool asleep;
    _Atomic int waiting; /* callers that want the mutex from a spinning thread */
    /* Under the mutex. */
    int used;       /* all slots from here on are free */
    int first_free; /* all slots below are not */
    int fired;      /* list by next_fired, -1 at its end */
    int next_look;  /* where who attends looks next */
    bool stop, attended;
    uint32_t seen;  /* `changes` as of the thread's last pass */
    uint8_t *signalled; /* our caller's byte; others read it without the mutex */
    int64_t deadline_ns, wake_ns; /* INT64_MAX: never */
};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static struct timespec timespec_of(int64_t ns)
{
    return (struct timespec){ns / 1000000000, ns % 1000000000};
}

static void enter(struct watch *w)
{
    w->waiting++;
    pthread_mutex_lock(&w->mutex);
    w->waiting--;
}
static void leave(struct watch *w) { pthread_mutex_unlock(&w->mutex); }

static bool exists(struct watch *w, int slot) { return w->chunks[slot / CHUNK] != NULL; }
static struct entry *entry_at(struct watch *w, int slot) { return &w->chunks[slot / CHUNK][slot % CHUNK]; }
static enum phase phase_of(struct entry *e) { return e->state & 3; }
static void set_phase(struct entry *e, enum phase phase) { e->state = (e->state & ~3u) | phase; }

/* The state that the token's entry has in `phase`. */
static uint32_t state_of(int token, enum phase phase) { return (uint32_t)token >> 16 << 2 | phase; }
static bool differ(const volatile uint32_t *words)
{
    return __atomic_load_n(&words[0], __ATOMIC_ACQUIRE) != __atomic_load_n(&words[1], __ATOMIC_RELAXED);
}

/* With the mutex held: the entry's words, if armed. True when it fired. */
static bool look(struct watch *w, int slot)
{
    struct entry *e = entry_at(w, slot);
    if (phase_of(e) != ARMED || !differ(e->words))
        return false;
    set_phase(e, FIRED);
    e->next_fired = w->fired;
    w->fired = slot;
    return true;
}

/* With the mutex held. The byte first: who sees the descriptor ready sees it, too. */
static void signal_fd(struct watch *w)
{
    bool before = *w->signalled;
    __atomic_store_n(w->signalled, 1, __ATOMIC_RELEASE);
    if (!before)
        eventfd_write(w->event_fd, 1);
}

/* With the mutex held: something was armed, and the thread must not sleep for longer than that from now on. */
static void hurry(struct watch *w, int64_t within_ns)
{
    if (w->wake_ns - now_ns() > within_ns)
        pthread_cond_signal(&w->cond);
}

/* With the mutex held: somebody looks at the rings without our help. */
static bool attended(struct watch *w) { return w->attended && w->used <= ATTENDED_MOST; }

/* With the mutex held: an entry was armed. Its words may differ already. */
static void armed(struct watch *w, int slot)
{
    if (look(w, slot))
        signal_fd(w);
    else
        hurry(w, attended(w) ? ATTENDED_NS : w->min_sleep_ns);
}

/* Looks at every armed entry. Returns how many stay armed. */
static int pass(struct watch *w, bool *fired)
{
    int left = 0;
    *fired = false;
    for (int slot = 0; slot < w->used; slot++) {
        if (phase_of(entry_at(w, slot)) != ARMED)
            continue;
        if (look(w, slot))
            *fired = true;
        else
            left++;
    }
    return left;
}

/* Between two passes of a spinning thread: whoever waits for the mutex gets it. */
static void let_others(struct watch *w)
{
    leave(w);
    for (int i = 0; i < 16 || (i < 4096 && w->waiting); i++)
        __asm__ volatile("" ::: "memory");
    pthread_mutex_lock(&w->mutex);
}

static void sleep_until(struct watch *w, int64_t when_ns, uint32_t seen)
{
    w->wake_ns = when_ns;
    w->asleep = true;
    if (w->changes == seen) {
        struct timespec when = timespec_of(when_ns); /* INT64_MAX is some centuries off */
        pthread_cond_timedwait(&w->cond, &w->mutex, &when);
    }
    w->asleep = false;
}

static void *run(void *arg)
{
    struct watch *w = arg;
    int64_t sleep_ns = w->min_sleep_ns, active_ns = 0;
    bool fired;
    prctl(PR_SET_NAME, "ring-watcher");
    prctl(PR_SET_TIMERSLACK, 1);
    pthread_mutex_lock(&w->mutex);
    while (!w->stop) {
        int64_t start_ns = now_ns();
        uint32_t changes = w->changes;
        int left = pass(w, &fired);
        int64_t end_ns = now_ns(), rest_ns = REST_PER_PASS * (end_ns - start_ns);
        if (fired)
            signal_fd(w);
        if (fired || changes != w->seen) {
            sleep_ns = w->min_sleep_ns;
            active_ns = end_ns;
        }
        w->seen = changes;
        if (attended(w)) {
            sleep_until(w, end_ns + ATTENDED_NS, w->seen);
        } else if (!left) {
            sleep_until(w, INT64_MAX, w->seen);
        } else if (end_ns - active_ns < w->spin_ns) {
            let_others(w);
        } else {
            int64_t quiet_ns = (end_ns - active_ns) / QUIET_PER_SLEEP;
            quiet_ns = quiet_ns < w->quiet_sleep_ns ? quiet_ns : w->quiet_sleep_ns;
            rest_ns = quiet_ns > rest_ns ? quiet_ns : rest_ns;
            sleep_until(w, end_ns + (sleep_ns > rest_ns ? sleep_ns : rest_ns), w->seen);
            sleep_ns = 2 * sleep_ns < w->max_sleep_ns ? 2 * sleep_ns : w->max_sleep_ns;
        }
    }
    leave(w);
    return NULL;
}

/* Python's signals are not for this thread; faults still reach faulthandler. */
static int start(struct watch *w)
{
    sigset_t mask, old;
    sigfillset(&mask);
    sigdelset(&mask, SIGSEGV), sigdelset(&mask, SIGBUS), sigdelset(&mask, SIGFPE), sigdelset(&mask, SIGILL);
    pthread_sigmask(SIG_SETMASK, &mask, &old);
    int error = pthread_create(&w->thread, NULL, run, w);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return error;
}

static void release(struct watch *w)
{
    close(w->epoll_fd), close(w->event_fd), close(w->timer_fd); /* -1 does no harm */
    for (int i = 0; i < WATCH_LIMIT / CHUNK; i++)
        free(w->chunks[i]);
    pthread_cond_destroy(&w->cond);
    pthread_mutex_destroy(&w->mutex);
    free(w);
}

/* The kernel's timer is the deadline: one wake-up, where the thread would be a second. NULL and errno on failure. */
struct watch *watch_open(int64_t spin_ns, int64_t min_sleep_ns, int64_t max_sleep_ns, int64_t quiet_sleep_ns,
                         uint8_t *signalled)
{
    struct watch *w = calloc(1, sizeof *w);
    struct epoll_event in = {.events = EPOLLIN};
    pthread_condattr_t attr;
    if (!w)
        return NULL;
    w->spin_ns = spin_ns, w->min_sleep_ns = min_sleep_ns, w->max_sleep_ns = max_sleep_ns;
    w->quiet_sleep_ns = quiet_sleep_ns;
    w->signalled = signalled;
    w->fired = -1, w->deadline_ns = w->wake_ns = INT64_MAX;
    pthread_mutex_init(&w->mutex, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&w->cond, &attr);
    pthread_condattr_destroy(&attr);
    w->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    w->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    w->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    int error = 0;
    if (w->epoll_fd < 0 || w->event_fd < 0 || w->timer_fd < 0
        || epoll_ctl(w->epoll_fd, EPOLL_CTL_ADD, w->event_fd, &in)
        || epoll_ctl(w->epoll_fd, EPOLL_CTL_ADD, w->timer_fd, &in))
        error = errno;
    if (!error && !(error = start(w)))
        return w;
    release(w);
    errno = error;
    return NULL;
}

int watch_fd(struct watch *w) { return w->epoll_fd; }

/* A token, or -errno. */
int watch_add(struct watch *w, const uint32_t *words)
{
    if ((uintptr_t)words % sizeof *words)
        return -EINVAL;
    enter(w);
    int slot = w->first_free, token = -ENOSPC;
    while (slot < w->used && phase_of(entry_at(w, slot)) != FREE)
        slot++;
    if (slot < WATCH_LIMIT) {
        if (!exists(w, slot))
            w->chunks[slot / CHUNK] = calloc(CHUNK, sizeof(struct entry));
        token = -ENOMEM;
        if (exists(w, slot)) {
            struct entry *e = entry_at(w, slot);
            uint32_t generation = ((e->state >> 2) + 1) & GENERATIONS;
            token = (int)(generation << 16 | (uint32_t)slot);
            e->words = words;
            w->first_free = slot + 1;
            w->used = slot < w->used ? w->used : slot + 1;
            e->state = state_of(token, ARMED);
            w->changes++;
            armed(w, slot);
        }
    }
    leave(w);
    return token;
}

void watch_rearm(struct watch *w, int token)
{
    int slot = token & 0xffff;
    uint32_t from = state_of(token, DISARMED);
    if (!exists(w, slot)
        || !atomic_compare_exchange_strong(&entry_at(w, slot)->state, &from, state_of(token, ARMED)))
        return;
    w->changes++;
    if (!w->asleep)
        return; /* the thread sees `changes` before it sleeps, and makes another pass */
    enter(w);
    armed(w, slot);
    leave(w);
}

void watch_remove(struct watch *w, int token)
{
    int slot = token & 0xffff, *at = &w->fired;
    enter(w);
    if (exists(w, slot) && entry_at(w, slot)->state >> 2 == (uint32_t)token >> 16) {
        struct entry *e = entry_at(w, slot);
        if (phase_of(e) == FIRED) {
            while (*at != slot)
                at = &entry_at(w, *at)->next_fired;
            *at = e->next_fired;
        }
        e->state = state_of(token, FREE);
        e->words = NULL;
        w->first_free = slot < w->first_free ? slot : w->first_free;
        while (w->used && phase_of(entry_at(w, w->used - 1)) == FREE)
            w->used--;
    }
    leave(w);
}

/* How many tokens were stored; `room` means there may be more. */
int watch_fired(struct watch *w, int *tokens, int room)
{
    int count = 0;
    eventfd_t ignored;
    struct itimerspec off = {0};
    enter(w);
    if (*w->signalled)
        eventfd_read(w->event_fd, &ignored);
    __atomic_store_n(w->signalled, 0, __ATOMIC_RELAXED);
    if (w->deadline_ns <= now_ns()) {
        timerfd_settime(w->timer_fd, TFD_TIMER_ABSTIME, &off, NULL);
        w->deadline_ns = INT64_MAX;
    }
    while (w->fired >= 0 && count < room) {
        struct entry *e = entry_at(w, w->fired);
        tokens[count++] = (int)((e->state >> 2) << 16 | (uint32_t)w->fired);
        w->fired = e->next_fired;
        set_phase(e, DISARMED);
    }
    leave(w);
    return count;
}

/* INT64_MAX cancels. */
void watch_set_deadline(struct watch *w, int64_t when_ns)
{
    struct itimerspec when = {0};
    if (when_ns != INT64_MAX)
        when.it_value = timespec_of(when_ns > 1 ? when_ns : 1); /* zero would cancel */
    enter(w);
    if (when_ns != w->deadline_ns)
        timerfd_settime(w->timer_fd, TFD_TIMER_ABSTIME, &when, NULL);
    w->deadline_ns = when_ns;
    leave(w);
}

/* Whether a ring has fired; for who attends, at any time. Looks at some, in turn, but not at that of token `but`. */
int watch_look(void *watch, int but)
{
    struct watch *w = watch;
    bool fired = false;
    if (__atomic_load_n(w->signalled, __ATOMIC_ACQUIRE))
        return 1;
    if (pthread_mutex_trylock(&w->mutex))
        return 0;
    int left = w->used > ATTENDED_MOST ? 0 : w->used < LOOKED_AT ? w->used : LOOKED_AT;
    for (; left; left--) {
        int slot = w->next_look < w->used ? w->next_look : 0;
        w->next_look = slot + 1;
        if ((but < 0 || slot != (but & 0xffff)) && look(w, slot))
            fired = true;
    }
    if (fired)
        signal_fd(w);
    leave(w);
    return fired;
}

void watch_attend(struct watch *w)
{
    enter(w);
    w->attended = true;
    leave(w);
}

void watch_leave(struct watch *w)
{
    enter(w);
    if (w->attended && w->changes != w->seen)
        hurry(w, w->min_sleep_ns);
    w->attended = false;
    leave(w);
}

void watch_close(struct watch *w)
{
    enter(w);
    w->stop = true;
    pthread_cond_signal(&w->cond);
    leave(w);
    pthread_join(w->thread, NULL);
    release(w);
}
"""

ffibuilder = FFI()
ffibuilder.cdef(_CDEF)
ffibuilder.set_source(
    "pvrdma_server._watch",
    _SOURCE,
    define_macros=[("_GNU_SOURCE", None)],
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-pthread"],
    extra_link_args=["-pthread"],
)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as build:
        built = Path(ffibuilder.compile(tmpdir=build))
        shutil.copy(built, Path(__file__).parent / built.name)
