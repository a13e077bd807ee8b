/* The loop: descriptors, timers, children; and what the program is when it is PID 1. See agent.h. */
#include "agent.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

bool in_vm;

static int loop = -1;
static struct {
    struct watch *watch;
    uint32_t generation;
} *table;
static size_t table_size;
static uint32_t generation;

int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

bool watch_init(struct watch *w, int fd, void (*ready)(struct watch *, uint32_t), void *owner)
{
    *w = (struct watch){.ready = ready, .owner = owner, .fd = fd};
    if (fd < 0)
        return false;
    if ((size_t)fd >= table_size) {
        size_t size = table_size ? table_size : 32;
        while (size <= (size_t)fd)
            size *= 2;
        table = must(realloc(table, size * sizeof *table));
        memset(table + table_size, 0, (size - table_size) * sizeof *table);
        table_size = size;
    }
    table[fd].watch = NULL;
    table[fd].generation = ++generation;
    return true;
}

void watch_set(struct watch *w, uint32_t events)
{
    if (w->fd < 0 || events == w->events)
        return;
    struct epoll_event e = {.events = events, .data.u64 = (uint64_t)table[w->fd].generation << 32 | (uint32_t)w->fd};
    int how = !events ? EPOLL_CTL_DEL : w->events ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    if (epoll_ctl(loop, how, w->fd, &e) < 0)
        return;
    w->events = events;
    table[w->fd].watch = w;
}

void watch_close(struct watch *w)
{
    if (w->fd < 0)
        return;
    watch_set(w, 0);
    table[w->fd].watch = NULL;
    table[w->fd].generation = ++generation;
    close(w->fd);
    w->fd = -1;
}

static void on_child(struct watch *w, uint32_t events)
{
    struct signalfd_siginfo info[8];
    (void)events;
    while (read(w->fd, info, sizeof info) > 0) {}
    processes_reap();
}

static void guard(void)
{
    /* Nothing inside may read our memory or send us away; terminals' signals are the sandbox's business. */
    static const int ignored[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGPIPE, SIGTSTP, SIGTTIN, SIGTTOU, SIGUSR1,
                                  SIGUSR2, SIGALRM};
    prctl(PR_SET_DUMPABLE, 0);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++)
        signal(ignored[i], SIG_IGN);
    umask(022);
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0)
            break;
    if (chdir("/") < 0)
        _exit(71);
}

static int64_t sooner(int64_t a, int64_t b) { return a < 0 ? b : b < 0 || a < b ? a : b; }

static void serve(void)
{
    for (;;) {
        link_send();
        int64_t now = now_ms();
        int64_t next = sooner(sooner(streams_tick(now), processes_tick(now)), link_tick(now));
        link_send();
        struct epoll_event events[32];
        int n = epoll_wait(loop, events, 32, next < 0 ? -1 : next <= now ? 0 : (int)(next - now));
        for (int i = 0; i < n; i++) {
            size_t fd = events[i].data.u64 & 0xffffffffu;
            uint32_t gen = (uint32_t)(events[i].data.u64 >> 32);
            struct watch *w = fd < table_size && table[fd].generation == gen ? table[fd].watch : NULL;
            if (w)
                w->ready(w, events[i].events);
        }
    }
}

/* What /proc/1 tells inside: nothing of where we come from, on any runtime. */
static void rename_us(int argc, char **argv)
{
    char *end = argv[argc - 1] + strlen(argv[argc - 1]);
    memset(argv[0], 0, (size_t)(end - argv[0]));
    memcpy(argv[0], "agent", sizeof "agent");
    prctl(PR_SET_NAME, "agent");
}

int main(int argc, char **argv)
{
    bool port = argc == 3 && strcmp(argv[1], "--port") == 0;
    bool bound = argc == 3 && strcmp(argv[1], "--unix") == 0;
    if (!port && !bound && !(argc == 3 && strcmp(argv[1], "--fd") == 0)) {
        fprintf(stderr, "use: agent --fd N (a listening socket) | --unix PATH (one to make) | --port PATH (a device)\n");
        return 64;
    }
    guard();
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    loop = epoll_create1(EPOLL_CLOEXEC);
    static struct watch children;
    if (loop < 0 || !watch_init(&children, signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK), on_child, NULL)) {
        perror("agent");
        return 71;
    }
    watch_set(&children, EPOLLIN);
    in_vm = port;
    const char *where = must(strdup(argv[2]));
    rename_us(argc, argv);
    if (port)
        link_port(where);
    else if (bound)
        link_bind(where);
    else
        link_listen(atoi(where));
    processes_reap();
    serve();
}
