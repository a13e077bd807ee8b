/* Killing a process with everything that came of it, wherever that went. See agent.h. */
#include "agent.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

struct relation {
    pid_t pid, parent, session;
};

static struct relation *relations(size_t *count)
{
    struct relation *list = NULL;
    size_t n = 0, cap = 0;
    DIR *proc = opendir("/proc");
    for (struct dirent *d; proc && (d = readdir(proc));) {
        char path[300], text[512];
        struct relation one = {.pid = atoi(d->d_name)};
        if (one.pid <= 1)
            continue;
        snprintf(path, sizeof path, "/proc/%d/stat", (int)one.pid);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
        if (fd >= 0)
            close(fd);
        text[got > 0 ? got : 0] = 0;
        char *end = strrchr(text, ')'), state; /* the name before it may hold anything */
        int group;
        if (!end || sscanf(end + 1, " %c %d %d %d", &state, &one.parent, &group, &one.session) != 4 || state == 'Z')
            continue;
        if (n == cap) {
            cap = cap ? 2 * cap : 64;
            list = must(realloc(list, cap * sizeof *list));
        }
        list[n++] = one;
    }
    if (proc)
        closedir(proc);
    *count = n;
    return list;
}

static bool among(const bool *set, size_t top, pid_t pid) { return pid > 0 && (size_t)pid <= top && set[pid]; }

/* Which of them belong to it: its session, its descendants, theirs. */
static void mark_kin(bool *ours, size_t top, const struct relation *list, size_t n)
{
    for (bool more = true; more;) {
        more = false;
        for (size_t i = 0; i < n; i++) {
            bool kin = among(ours, top, list[i].parent) || among(ours, top, list[i].session);
            if (kin && !ours[list[i].pid])
                ours[list[i].pid] = more = true;
        }
    }
}

/* Again until there is nobody new: they may fork while we look. */
void kill_tree(pid_t root)
{
    pid_t *dead = NULL;
    size_t dead_count = 0;
    for (int round = 0; round < 8; round++) {
        size_t n, fresh = 0, top = (size_t)root;
        struct relation *list = relations(&n);
        for (size_t i = 0; i < n; i++)
            top = (size_t)list[i].pid > top ? (size_t)list[i].pid : top;
        bool *ours = must(calloc(top + 1, 1)), *told = must(calloc(top + 1, 1));
        ours[root] = true;
        for (size_t i = 0; i < dead_count; i++)
            if ((size_t)dead[i] <= top)
                told[dead[i]] = true;
        mark_kin(ours, top, list, n);
        dead = must(realloc(dead, (dead_count + n + 1) * sizeof *dead));
        for (size_t i = 0; i < n; i++)
            if (ours[list[i].pid] && !told[list[i].pid] && list[i].pid != getpid()) {
                kill(list[i].pid, SIGKILL);
                dead[dead_count++] = list[i].pid;
                fresh++;
            }
        free(told);
        free(ours);
        free(list);
        if (!fresh)
            break;
    }
    free(dead);
}
