/* Memory of the imaginary card: addresses, an account of bytes, and the few values that survive.

   1. A card has a range of addresses that nothing may read or write (PROT_NONE), so it needs no memory of the machine.
   2. New memory lies above all memory before it, as the driver's does: of two equal free blocks torch's allocator takes
      the lower one. At the end of the range the search begins again at its start.
   3. A copy to the card keeps its value in a table beside the card, by its address. Kernels write nothing, so a value is
      believed for `BELIEVED` launches only: later a kernel may have written over it. All other reads give zeros.
   4. But a boolean that is read right after a conjunction is true: torch and scripts check values in this way, and a
      check that fails ends the script (`not valid.all()` in torch.distributions, `not isfinite(loss)`). So is one that
      compares a minimum, as torch.normal does (`std.min().ge(0)`). */
#define _GNU_SOURCE
#include "imaginary.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { MOST_CARDS = 16, VALUES = 4096, MOST_VALUE = 1 << 20, BELIEVED = 256 };
typedef struct { char *start; size_t bytes; } Range;
typedef struct { const void *address; size_t bytes; unsigned long launch; void *value; } Value;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *arena;
static size_t arena_bytes = (size_t)1 << 45;
static Range *ranges; /* sorted by address */
static size_t n_ranges, room;
static char *next[MOST_CARDS];
static size_t used[MOST_CARDS];
static Value values[VALUES];
unsigned long n_launches, last_conjunction, last_minimum;

static size_t share(void) { return arena_bytes / MOST_CARDS / GRAIN * GRAIN; }

__attribute__((constructor(102))) static void reserve_addresses(void) {
    while (arena_bytes > (size_t)1 << 36) {
        void *start = mmap(NULL, arena_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (start != MAP_FAILED) {
            arena = (char *)(((uintptr_t)start + GRAIN - 1) / GRAIN * GRAIN);
            arena_bytes -= GRAIN;
            return;
        }
        arena_bytes /= 2; /* a limit on the address space of the process */
    }
}

int device_of(const void *address) {
    const char *at = address;
    return arena && at >= arena && at < arena + MOST_CARDS * share() ? (int)((size_t)(at - arena) / share()) : -1;
}

static size_t first_behind(const void *address) {
    size_t low = 0, high = n_ranges;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].start <= (char *)address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void insert(size_t index, char *start, size_t bytes) {
    if (n_ranges == room) ranges = realloc(ranges, (room = room ? 2 * room : 256) * sizeof *ranges);
    memmove(ranges + index + 1, ranges + index, (n_ranges - index) * sizeof *ranges);
    ranges[index] = (Range){start, bytes};
    n_ranges++;
}

/* The first gap of `bytes` from `start` on, below `end`. */
static char *gap(char *start, char *end, size_t bytes) {
    for (size_t i = first_behind(start); start + bytes <= end; i++) {
        if (i > 0 && ranges[i - 1].start + ranges[i - 1].bytes > start) start = ranges[i - 1].start + ranges[i - 1].bytes;
        char *limit = i < n_ranges && ranges[i].start < end ? ranges[i].start : end;
        if (start + bytes <= limit) return start;
        if (limit == end) return NULL;
        start = limit;
    }
    return NULL;
}

void *reserve(size_t bytes, int device) {
    size_t whole = (bytes + GRAIN - 1) / GRAIN * GRAIN;
    char *first = arena + (size_t)device * share(), *end = first + share();
    if (!arena) return NULL;
    pthread_mutex_lock(&lock);
    char *start = gap(next[device] ? next[device] : first, end, whole);
    if (!start) start = gap(first, end, whole);
    if (start) {
        insert(first_behind(start), start, whole);
        next[device] = start + whole;
    }
    pthread_mutex_unlock(&lock);
    return start;
}

size_t give_back(void *address) {
    pthread_mutex_lock(&lock);
    size_t index = first_behind(address), bytes = 0;
    if (index > 0 && ranges[index - 1].start == address) {
        bytes = ranges[index - 1].bytes;
        memmove(ranges + index - 1, ranges + index, (n_ranges - index) * sizeof *ranges);
        n_ranges--;
    }
    pthread_mutex_unlock(&lock);
    return bytes;
}

Status take(int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    int refused = card.taken + used[device] + bytes > card.bytes;
    if (!refused) used[device] += bytes;
    pthread_mutex_unlock(&lock);
    return refused ? OUT_OF_MEMORY : SUCCESS;
}

void release(int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    used[device] -= bytes;
    pthread_mutex_unlock(&lock);
}

size_t free_bytes(int device) { return card.bytes - card.taken - used[device]; }

static Value *slot(const void *address) { return &values[((uintptr_t)address * 0x9E3779B97F4A7C15u >> 32) % VALUES]; }

static const void *value_at(const void *address, size_t bytes) {
    Value *kept = slot(address);
    int believed = kept->address == address && kept->bytes == bytes && n_launches - kept->launch <= BELIEVED;
    return believed ? kept->value : NULL;
}

static void keep(const void *address, const void *value, size_t bytes) {
    Value *kept = slot(address);
    void *copied = value && bytes <= MOST_VALUE ? malloc(bytes) : NULL;
    if (copied) memcpy(copied, value, bytes); /* before the old value goes: it may be the source */
    free(kept->value);
    *kept = (Value){copied ? address : NULL, bytes, n_launches, copied};
}

static int is_check(void) { return last_conjunction == n_launches || (last_minimum && last_minimum + 1 == n_launches); }

Status copy(void *to, const void *from, size_t bytes) {
    int to_card = device_of(to) >= 0, from_card = device_of(from) >= 0;
    if (!bytes || to == from) return SUCCESS;
    pthread_mutex_lock(&lock);
    const void *value = from_card ? value_at(from, bytes) : from;
    if (to_card) keep(to, value, bytes);
    else if (value) memmove(to, value, bytes);
    else memset(to, bytes == 1 && is_check(), bytes);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
