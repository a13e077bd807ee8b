/* Keeps what a template's memory already holds out of a migration stream.
 *
 * filter MEMORY BLOCK < STREAM > STREAM
 *
 * Owns: the RAM part of QEMU's stream, with x-ignore-shared set, without postcopy, multifd, compression or XBZRLE.
 * A page of BLOCK that equals MEMORY is dropped, unless an earlier content of it was passed on. Must not know: why the
 * machine moves. The first line of standard error, at the end, is "PASSED DROPPED" pages.
 *
 * Guarantees: what comes out means, to a machine that maps MEMORY, exactly what went in; a stream that it does not
 * understand ends in exit 65 and a cut stream, never in a wrong one. Pages are read from MEMORY only where it has data:
 * a sparse template does not grow.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE 4096ULL
#define ZERO 0x02
#define SIZE 0x04
#define DATA 0x08
#define EOS 0x10
#define CONTINUE 0x20

static unsigned char in[1 << 20], out[1 << 20];
static size_t in_at, in_end, out_end;
static unsigned char *memory, *sent, *filled;
static uint64_t pages, passed, dropped;

static void fail(const char *what) {
    fprintf(stderr, "filter: %s\n", what);
    exit(65);
}

/* Whether to try once more; a descriptor that does not block is waited for. */
static bool again(int file, short events) {
    struct pollfd one = {.fd = file, .events = events};
    if (errno == EAGAIN) return poll(&one, 1, -1) > 0 || errno == EINTR;
    return errno == EINTR;
}

static void flush(void) {
    for (size_t at = 0; at < out_end;) {
        ssize_t done = write(1, out + at, out_end - at);
        if (done < 0 && again(1, POLLOUT)) continue;
        if (done <= 0) fail("nobody takes the stream");
        at += (size_t)done;
    }
    out_end = 0;
}

static void put(const void *data, size_t size) {
    if (out_end + size > sizeof out) flush();
    memcpy(out + out_end, data, size);
    out_end += size;
}

/* More input; what was put goes on its way first, so that no byte waits for one that may never come. */
static bool more(void) {
    flush();
    if (in_at < in_end) memmove(in, in + in_at, in_end - in_at);
    in_end -= in_at;
    in_at = 0;
    for (;;) {
        ssize_t got = read(0, in + in_end, sizeof in - in_end);
        if (got < 0 && again(0, POLLIN)) continue;
        if (got < 0) fail("the stream cannot be read");
        in_end += (size_t)got;
        return got > 0;
    }
}

static const unsigned char *take(size_t size) {
    while (in_end - in_at < size)
        if (!more()) fail("the stream ends early");
    in_at += size;
    return in + in_at - size;
}

static uint64_t number(const unsigned char *bytes, int size) {
    uint64_t value = 0;
    for (int i = 0; i < size; i++) value = value << 8 | bytes[i];
    return value;
}

static const unsigned char *copy(size_t size) {
    const unsigned char *bytes = take(size);
    put(bytes, size);
    return bytes;
}

static void open_memory(const char *path) {
    struct stat status;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &status) < 0) fail("the template's memory cannot be read");
    pages = (uint64_t)status.st_size / PAGE;
    memory = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, file, 0);
    sent = calloc(pages / 8 + 1, 1);
    filled = calloc(pages / 8 + 1, 1);
    if (memory == MAP_FAILED || !sent || !filled) fail("no memory");
    for (off_t at = 0; (at = lseek(file, at, SEEK_DATA)) >= 0;) {
        off_t end = lseek(file, at, SEEK_HOLE);
        for (uint64_t page = (uint64_t)at / PAGE; page < ((uint64_t)end + PAGE - 1) / PAGE && page < pages; page++)
            filled[page / 8] |= (unsigned char)(1 << page % 8);
        at = end;
    }
}

static bool is_zero(const unsigned char *bytes) {
    return bytes[0] == 0 && memcmp(bytes, bytes + 1, PAGE - 1) == 0;
}

static bool known(uint64_t page, const unsigned char *bytes) {
    if (page >= pages) fail("a page beyond the template's memory");
    if (sent[page / 8] & 1 << page % 8) return false;
    bool has = filled[page / 8] & 1 << page % 8;
    const unsigned char *mine = memory + page * PAGE;
    if (bytes ? (has ? memcmp(bytes, mine, PAGE) == 0 : is_zero(bytes)) : (!has || is_zero(mine))) return true;
    sent[page / 8] |= (unsigned char)(1 << page % 8);
    return false;
}

/* Blocks by name: what was last written is what a page without a name continues. */
static char current[256], written[256];

static void page_header(uint64_t address, unsigned flags) {
    bool same = strcmp(current, written) == 0;
    unsigned char bytes[8];
    uint64_t value = address | flags | (same ? CONTINUE : 0);
    for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)(value >> (56 - 8 * i));
    put(bytes, 8);
    if (same) return;
    unsigned char length = (unsigned char)strlen(current);
    put(&length, 1);
    put(current, length);
    strcpy(written, current);
}

static void block_list(uint64_t total) {
    while (total) {
        size_t length = copy(1)[0];
        copy(length);
        uint64_t used = number(copy(8), 8);
        copy(8); /* its address: x-ignore-shared */
        if (used > total) fail("the blocks are longer than their sum");
        total -= used;
    }
}

static void ram(const char *block) {
    written[0] = 0;
    for (;;) {
        const unsigned char *head = take(8);
        uint64_t value = number(head, 8), address = value & ~(PAGE - 1);
        unsigned flags = (unsigned)(value & (PAGE - 1));
        if (flags & SIZE) {
            put(head, 8);
            block_list(address);
            continue;
        }
        if (flags & EOS) {
            put(head, 8);
            return;
        }
        if (flags & ~(unsigned)(ZERO | DATA | CONTINUE) || !(flags & (ZERO | DATA))) fail("a page of an unknown kind");
        if (!(flags & CONTINUE)) {
            size_t length = take(1)[0];
            memcpy(current, take(length), length);
            current[length] = 0;
        }
        bool ours = strcmp(current, block) == 0;
        const unsigned char *bytes = flags & DATA ? take(PAGE) : take(1);
        if (!(flags & DATA) && bytes[0]) fail("a page filled with something");
        if (ours && known(address / PAGE, flags & DATA ? bytes : NULL)) {
            dropped++;
            continue;
        }
        passed++;
        page_header(address, flags & (ZERO | DATA));
        put(bytes, flags & DATA ? PAGE : 1);
    }
}

/* The stream's head ends where the section "ram" begins. */
static uint32_t find_ram(void) {
    static const unsigned char mark[] = {3, 'r', 'a', 'm', 0, 0, 0, 0, 0, 0, 0, 4};
    for (size_t seen = 0; seen < 65536; seen++) {
        while (in_end - in_at < 5 + sizeof mark)
            if (!more()) fail("the stream has no memory in it");
        if (in[in_at] == 1 && memcmp(in + in_at + 5, mark, sizeof mark) == 0) {
            const unsigned char *head = copy(5 + sizeof mark);
            return (uint32_t)number(head + 1, 4);
        }
        copy(1);
    }
    fail("the stream has no memory in it");
    return 0;
}

static void sections(const char *block) {
    uint32_t id = find_ram();
    bool last = false;
    ram(block);
    while (!last) {
        unsigned kind = copy(1)[0];
        if (kind == 0x7e) {
            copy(4);
        } else if (kind == 8) {
            const unsigned char *head = copy(4);
            copy(number(head + 2, 2));
        } else if (kind == 2 || kind == 3) {
            if (number(copy(4), 4) != id) fail("a section of something else than memory");
            ram(block);
            last = kind == 3;
        } else {
            fail("a section of an unknown kind");
        }
    }
    for (;;) {
        put(in + in_at, in_end - in_at);
        in_at = in_end = 0;
        if (!more()) break;
    }
    flush();
}

int main(int argc, char **argv) {
    if (argc != 3) return 64;
    open_memory(argv[1]);
    sections(argv[2]);
    fprintf(stderr, "%llu %llu\n", (unsigned long long)passed, (unsigned long long)dropped);
    return 0;
}
