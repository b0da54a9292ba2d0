/* Counts the bytes in heap blocks, now and at most; preloaded with LD_PRELOAD, on glibc.
 *
 * Bytes are what malloc_usable_size says. Blocks of at least LARGE bytes (tensors and communication buffers, hardly
 * any Python object) are also counted on their own. */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

#define LARGE (64 * 1024)

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void *__libc_valloc(size_t);
extern void *__libc_pvalloc(size_t);
extern void __libc_free(void *);

struct counter {
    _Atomic long live, peak;
};

static struct counter all, large;

static void change(struct counter *counter, long bytes)
{
    long live = atomic_fetch_add(&counter->live, bytes) + bytes;
    long peak = atomic_load(&counter->peak);
    while (live > peak && !atomic_compare_exchange_weak(&counter->peak, &peak, live))
        ;
}

static void count(long bytes, int sign)
{
    change(&all, sign * bytes);
    if (bytes >= LARGE)
        change(&large, sign * bytes);
}

static void *counted(void *block)
{
    if (block)
        count((long)malloc_usable_size(block), 1);
    return block;
}

/* Writes live and peak of all blocks, then live and peak of the large ones. */
void heap_meter_read(long out[4])
{
    out[0] = all.live;
    out[1] = all.peak;
    out[2] = large.live;
    out[3] = large.peak;
}

void heap_meter_reset_peak(void)
{
    all.peak = all.live;
    large.peak = large.live;
}

void *malloc(size_t size)
{
    return counted(__libc_malloc(size));
}

void *calloc(size_t number, size_t size)
{
    return counted(__libc_calloc(number, size));
}

void *memalign(size_t alignment, size_t size)
{
    return counted(__libc_memalign(alignment, size));
}

void *aligned_alloc(size_t alignment, size_t size)
{
    return counted(__libc_memalign(alignment, size));
}

void *valloc(size_t size)
{
    return counted(__libc_valloc(size));
}

void *pvalloc(size_t size)
{
    return counted(__libc_pvalloc(size));
}

int posix_memalign(void **out, size_t alignment, size_t size)
{
    if (alignment % sizeof(void *) || !alignment || alignment & (alignment - 1))
        return EINVAL;
    void *block = __libc_memalign(alignment, size);
    if (!block)
        return ENOMEM;
    *out = counted(block);
    return 0;
}

void *realloc(void *old, size_t size)
{
    long before = old ? (long)malloc_usable_size(old) : 0;
    void *block = __libc_realloc(old, size);
    if (block || (old && !size)) /* a failed realloc leaves the old block as it was */
        count(before, -1);
    return counted(block);
}

void free(void *block)
{
    if (block)
        count((long)malloc_usable_size(block), -1);
    __libc_free(block);
}
