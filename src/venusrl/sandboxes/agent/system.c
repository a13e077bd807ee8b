/* The sandbox as a whole: its identity, what it uses, its ports; and which operation is whose. See agent.h. */
#include "agent.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

void operation(struct stream *s, struct reader *r)
{
    unsigned op = take_u8(r);
    switch (op) {
    case OP_SETTLE: system_settle(s, r); break;
    case OP_START: process_start(s, r); break;
    case OP_ATTACH: process_attach(s, r); break;
    case OP_PROCESSES: process_list(s); break;
    case OP_SIGNAL: process_signal(s, r); break;
    case OP_RESIZE: process_resize(s, r); break;
    case OP_USAGE: system_usage(s); break;
    case OP_CONNECT: system_connect(s, r); break;
    case OP_SEVER: system_sever(s); break;
    case OP_STAT: case OP_LIST: case OP_MKDIR: case OP_MOVE: case OP_REMOVE: case OP_READ: case OP_WRITE:
    case OP_WATCH: case OP_QUIESCE: file_start(s, (enum op)op, r->p, r->n); break;
    default: stream_error(s, C_UNIMPLEMENTED, "this agent knows no operation %u", op);
    }
}

/* -- identity */

static void reseed(const unsigned char *entropy, size_t n)
{
    enum { ADD = 0x40085203, RESEED = 0x5207 };
    struct {
        int bits, size;
        unsigned char bytes[512];
    } pool;
    if (!n)
        return;
    if (n > sizeof pool.bytes)
        n = sizeof pool.bytes;
    pool.bits = (int)n * 8;
    pool.size = (int)n;
    memcpy(pool.bytes, entropy, n);
    int fd = open("/dev/urandom", O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return;
    if (ioctl(fd, ADD, &pool) == 0) /* only where the kernel is our own */
        ioctl(fd, RESEED, 0);
    close(fd);
}

/* By way of a new file: what is there may be anything, a pipe that never opens too. */
static bool replace(const char *path, const char *text)
{
    char temporary[64], line[300];
    snprintf(temporary, sizeof temporary, "%s.venusrl", path);
    int n = snprintf(line, sizeof line, "%s\n", text);
    unlink(temporary);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0444);
    if (fd < 0)
        return false;
    bool ok = n < (int)sizeof line && write(fd, line, (size_t)n) == n;
    close(fd);
    if (ok && rename(temporary, path) == 0)
        return true;
    unlink(temporary);
    return false;
}

static bool rename_host(const char *name)
{
    char now[300] = "";
    if (!*name || (gethostname(now, sizeof now - 1) == 0 && strcmp(now, name) == 0))
        return true;
    return sethostname(name, strlen(name)) == 0;
}

void system_settle(struct stream *s, struct reader *r)
{
    static bool own_user;
    size_t entropy_len;
    char *hostname = take_str(r), *machine = take_str(r);
    const unsigned char *entropy = take_bytes(r, &entropy_len);
    uint64_t now_ns = take_u64(r);
    strings_free(default_env);
    default_env = take_strings(r);
    char *user = take_str(r);
    if (r->bad) {
        stream_error(s, C_INVALID, "settings that cannot be read");
    } else {
        reseed(entropy, entropy_len);
        if (in_vm && now_ns) {
            struct timespec t = {.tv_sec = (time_t)(now_ns / 1000000000), .tv_nsec = (long)(now_ns % 1000000000)};
            if (clock_settime(CLOCK_REALTIME, &t) < 0)
                stream_error(s, C_PERMISSION, "the clock cannot be set: %s", strerror(errno));
        }
        if (!rename_host(hostname))
            stream_error(s, C_PERMISSION, "the host name cannot be set: %s", strerror(errno));
        if (*machine && !replace("/etc/machine-id", machine))
            stream_error(s, C_PERMISSION, "/etc/machine-id cannot be written: %s", strerror(errno));
        stream_end(s);
    }
    if (*user && !r->bad) {
        if (own_user)
            free(default_user);
        default_user = user;
        own_user = true;
    } else {
        free(user);
    }
    free(hostname);
    free(machine);
}

/* -- what it uses */

struct use {
    uint64_t busy_ticks, total, used, cache;
};

static size_t read_file(const char *path, char *to, size_t n)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t got = fd < 0 ? -1 : read(fd, to, n - 1);
    if (fd >= 0)
        close(fd);
    to[got > 0 ? got : 0] = 0;
    return got > 0 ? (size_t)got : 0;
}

static uint64_t field(const char *text, const char *name)
{
    const char *at = strstr(text, name);
    return at ? strtoull(at + strlen(name), NULL, 10) * 1024 : 0;
}

static void of_machine(struct use *u)
{
    char text[4096];
    unsigned long long t[8] = {0};
    if (read_file("/proc/meminfo", text, sizeof text)) {
        u->total = field(text, "MemTotal:");
        u->cache = field(text, "\nCached:") + field(text, "\nBuffers:");
        uint64_t available = field(text, "MemAvailable:");
        u->used = u->total > available ? u->total - available : 0;
    }
    read_file("/proc/stat", text, sizeof text);
    sscanf(text, "cpu %llu %llu %llu %llu %llu %llu %llu %llu", &t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6], &t[7]);
    u->busy_ticks = t[0] + t[1] + t[2] + t[5] + t[6] + t[7];
}

/* In a namespace /proc tells of the machine: add up our own processes instead. */
static void of_processes(struct use *u)
{
    char path[300], text[1024];
    DIR *proc = opendir("/proc");
    u->busy_ticks = u->used = u->cache = 0;
    for (struct dirent *d; proc && (d = readdir(proc));) {
        int pid = atoi(d->d_name);
        unsigned long long user, system, dead_user = 0, dead_system = 0;
        long long resident;
        if (pid <= 0)
            continue;
        snprintf(path, sizeof path, "/proc/%d/stat", pid);
        read_file(path, text, sizeof text);
        char *end = strrchr(text, ')');
        if (!end || sscanf(end + 1,
                           " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu %llu %llu %*d %*d %*d %*d %*u %*u %lld",
                           &user, &system, &dead_user, &dead_system, &resident) != 5)
            continue;
        u->busy_ticks += user + system + dead_user + dead_system;
        if (resident > 0)
            u->used += (uint64_t)resident * (uint64_t)sysconf(_SC_PAGESIZE);
    }
    if (proc)
        closedir(proc);
}

void system_usage(struct stream *s)
{
    static uint64_t last_ticks;
    static int64_t last_ms;
    struct use u = {0};
    struct statvfs disk = {0};
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    int count = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
    of_machine(&u);
    if (!in_vm)
        of_processes(&u);
    statvfs("/", &disk);
    int64_t now = now_ms();
    int64_t elapsed = last_ms ? now - last_ms : 0;
    uint64_t ticks = u.busy_ticks > last_ticks ? u.busy_ticks - last_ticks : 0;
    uint64_t hundredths = elapsed > 0 ? ticks * 1000 * 10000 / (uint64_t)sysconf(_SC_CLK_TCK) / (uint64_t)elapsed : 0;
    last_ticks = u.busy_ticks;
    last_ms = now;
    struct buf b = {0};
    put_u32(&b, (uint32_t)count);
    put_u32(&b, (uint32_t)(hundredths > 10000000 ? 10000000 : hundredths));
    put_u64(&b, u.total);
    put_u64(&b, u.used);
    put_u64(&b, u.cache);
    put_u64(&b, (uint64_t)disk.f_blocks * disk.f_frsize);
    put_u64(&b, ((uint64_t)disk.f_blocks - disk.f_bfree) * disk.f_frsize);
    stream_record(s, R_USAGE, b.p, b.len);
    buf_free(&b);
    stream_end(s);
}

/* -- ports */

static int begin_connect(int family, unsigned port)
{
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    six.sin6_addr = in6addr_loopback;
    struct sockaddr *address = family == AF_INET ? (struct sockaddr *)&four : (struct sockaddr *)&six;
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    if (connect(fd, address, family == AF_INET ? sizeof four : sizeof six) == 0 || errno == EINPROGRESS)
        return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

void system_connect(struct stream *s, struct reader *r)
{
    unsigned port = take_u32(r);
    if (r->bad || port < 1 || port > 65535) {
        stream_error(s, C_INVALID, "there is no port %u", port);
        return;
    }
    int fd = begin_connect(AF_INET, port);
    s->other_port = fd < 0 ? 0 : port;
    if (fd < 0)
        fd = begin_connect(AF_INET6, port);
    if (fd < 0) {
        stream_error(s, C_UNAVAILABLE, "nothing listens on port %u", port);
        return;
    }
    s->tcp = s->connecting = true;
    stream_sink(s, fd);
}

void system_connected(struct stream *s)
{
    int error = 0;
    socklen_t size = sizeof error;
    s->connecting = false;
    if (getsockopt(s->sink.fd, SOL_SOCKET, SO_ERROR, &error, &size) < 0 || error) {
        int other = s->other_port ? begin_connect(AF_INET6, s->other_port) : -1;
        s->other_port = 0;
        if (other >= 0) {
            watch_close(&s->sink);
            s->connecting = true;
            stream_sink(s, other);
            return;
        }
        stream_error(s, C_UNAVAILABLE, "the port does not answer: %s", strerror(error));
        return;
    }
    int fd = fcntl(s->sink.fd, F_DUPFD_CLOEXEC, 3);
    if (fd < 0) {
        stream_error(s, C_EXHAUSTED, "too many open files");
        return;
    }
    stream_record(s, R_STARTED, "", 0);
    stream_source(s, 0, fd, R_STDOUT);
    stream_feed(s);
}
