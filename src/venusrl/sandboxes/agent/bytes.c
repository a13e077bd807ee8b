/* Buffers that give their memory back when empty, and little-endian fields in and out of them. */
#include "agent.h"

#include <sys/mman.h>
#include <unistd.h>

enum { MAPPED = 8192 };

void *must(void *allocated)
{
    static const char message[] = "agent: out of memory\n";
    if (!allocated) {
        if (write(2, message, sizeof message - 1)) {}
        _exit(70);
    }
    return allocated;
}

/* Small ones come from the heap; large ones are mapped, so that their pages go back as soon as they are empty. */
static void grow(struct buf *b, size_t cap)
{
    if (cap < MAPPED) {
        b->p = must(realloc(b->p, cap));
    } else if (b->cap >= MAPPED) {
        void *p = mremap(b->p, b->cap, cap, MREMAP_MAYMOVE);
        b->p = must(p == MAP_FAILED ? NULL : p);
    } else {
        void *p = mmap(NULL, cap, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        must(p == MAP_FAILED ? NULL : p);
        if (b->len)
            memcpy(p, b->p, b->len);
        free(b->p);
        b->p = p;
    }
    b->cap = cap;
}

void buf_add(struct buf *b, const void *data, size_t n)
{
    if (n == 0)
        return;
    if (b->start + b->len + n > b->cap) {
        if (b->start) {
            memmove(b->p, b->p + b->start, b->len);
            b->start = 0;
        }
        size_t cap = b->cap ? b->cap : 256;
        while (cap < b->len + n)
            cap *= 2;
        if (cap > b->cap)
            grow(b, cap);
    }
    memcpy(b->p + b->start + b->len, data, n);
    b->len += n;
}

void buf_take(struct buf *b, size_t n)
{
    b->start += n;
    b->len -= n;
    if (b->len == 0)
        buf_free(b);
}

void buf_free(struct buf *b)
{
    if (b->cap >= MAPPED)
        munmap(b->p, b->cap);
    else
        free(b->p);
    *b = (struct buf){0};
}

uint32_t get32(const unsigned char *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

uint64_t get64(const unsigned char *p) { return (uint64_t)get32(p) | (uint64_t)get32(p + 4) << 32; }

void set32(unsigned char *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (unsigned char)(v >> (8 * i));
}

void set64(unsigned char *p, uint64_t v)
{
    set32(p, (uint32_t)v);
    set32(p + 4, (uint32_t)(v >> 32));
}

void put_u8(struct buf *b, unsigned v)
{
    unsigned char c = (unsigned char)v;
    buf_add(b, &c, 1);
}

void put_u32(struct buf *b, uint32_t v)
{
    unsigned char c[4];
    set32(c, v);
    buf_add(b, c, 4);
}

void put_u64(struct buf *b, uint64_t v)
{
    unsigned char c[8];
    set64(c, v);
    buf_add(b, c, 8);
}

void put_bytes(struct buf *b, const void *s, size_t n)
{
    put_u32(b, (uint32_t)n);
    buf_add(b, s, n);
}

void put_str(struct buf *b, const char *s) { put_bytes(b, s, strlen(s)); }

static const unsigned char *take(struct reader *r, size_t n)
{
    if (r->bad || n > r->n) {
        r->bad = true;
        return NULL;
    }
    const unsigned char *p = r->p;
    r->p += n;
    r->n -= n;
    return p;
}

unsigned take_u8(struct reader *r)
{
    const unsigned char *p = take(r, 1);
    return p ? *p : 0;
}

uint32_t take_u32(struct reader *r)
{
    const unsigned char *p = take(r, 4);
    return p ? get32(p) : 0;
}

uint64_t take_u64(struct reader *r)
{
    const unsigned char *p = take(r, 8);
    return p ? get64(p) : 0;
}

const unsigned char *take_bytes(struct reader *r, size_t *n)
{
    *n = take_u32(r);
    const unsigned char *p = take(r, *n);
    if (!p)
        *n = 0;
    return p ? p : (const unsigned char *)"";
}

char *take_str(struct reader *r)
{
    size_t n;
    const unsigned char *p = take_bytes(r, &n);
    if (n && memchr(p, 0, n)) {
        r->bad = true;
        n = 0;
    }
    char *s = must(malloc(n + 1));
    memcpy(s, p, n);
    s[n] = 0;
    return s;
}
