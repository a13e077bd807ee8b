/* Changes below a directory, in a forked child with the asking user's ids: a record each, until descriptor 0 ends. */
#include "agent.h"

#include <dirent.h>
#include <poll.h>
#include <stdio.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DIRECTORIES = 8192, SEEN = 1024, MASK = IN_CREATE | IN_MODIFY | IN_ATTRIB | IN_DELETE | IN_MOVE | IN_DELETE_SELF |
                                            IN_MOVE_SELF | IN_ONLYDIR };
enum change { CREATE = 1, WRITE, REMOVE, RENAME, CHMOD };

static int notify = -1;
static struct { /* by watch descriptor */
    int wd;
    char *name; /* relative to the root, "" for itself */
} *watched;
static size_t watched_count;
static char *seen[SEEN]; /* found while a new directory was looked through: the kernel tells of them once more */
static size_t seen_count;

static void tell(enum change kind, const char *name)
{
    struct buf b = {0};
    put_u8(&b, kind);
    put_str(&b, name);
    emit(R_CHANGE, b.p, b.len);
    buf_free(&b);
}

static char *below(const char *directory, const char *name)
{
    size_t n = strlen(directory) + strlen(name) + 2;
    char *path = must(malloc(n));
    snprintf(path, n, "%s%s%s", directory, *directory && *name ? "/" : "", name);
    return path;
}

static bool forget_seen(const char *name)
{
    for (size_t i = 0; i < seen_count; i++)
        if (strcmp(seen[i], name) == 0) {
            free(seen[i]);
            seen[i] = seen[--seen_count];
            return true;
        }
    return false;
}

static void add(const char *root, const char *name, bool recursive, bool fresh)
{
    char *path = below(root, name);
    int wd = inotify_add_watch(notify, path, (uint32_t)MASK | (*name ? IN_DONT_FOLLOW : 0));
    if (wd < 0 && (!*name || errno == ENOSPC))
        emit_error(errno == ENOSPC ? EMFILE : errno, path);
    if (wd < 0 || watched_count == DIRECTORIES) { /* gone again, or not ours to see */
        free(path);
        return;
    }
    watched = must(realloc(watched, (watched_count + 1) * sizeof *watched));
    watched[watched_count].wd = wd;
    watched[watched_count++].name = must(strdup(name));
    DIR *d = recursive ? opendir(path) : NULL;
    for (struct dirent *e; d && (e = readdir(d));) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        char *inner = below(name, e->d_name), *full = below(path, e->d_name);
        struct stat st;
        bool directory = e->d_type == DT_DIR ||
                         (e->d_type == DT_UNKNOWN && lstat(full, &st) == 0 && S_ISDIR(st.st_mode));
        if (fresh) {
            tell(CREATE, inner);
            if (seen_count < SEEN)
                seen[seen_count++] = must(strdup(inner));
        }
        if (directory)
            add(root, inner, true, fresh);
        free(full);
        free(inner);
    }
    if (d)
        closedir(d);
    free(path);
}

static void drop(int wd)
{
    for (size_t i = 0; i < watched_count; i++)
        if (watched[i].wd == wd) {
            free(watched[i].name);
            watched[i] = watched[--watched_count];
            return;
        }
}

static void drop_below(const char *name)
{
    size_t n = strlen(name);
    for (size_t i = watched_count; i-- > 0;)
        if (strncmp(watched[i].name, name, n) == 0 && (watched[i].name[n] == '/' || !watched[i].name[n])) {
            inotify_rm_watch(notify, watched[i].wd);
            free(watched[i].name);
            watched[i] = watched[--watched_count];
        }
}

/* False once the root itself is gone. */
static bool handle(const char *root, const struct inotify_event *e, bool recursive)
{
    if (e->mask & IN_Q_OVERFLOW)
        emit_refuse(C_EXHAUSTED, "more changes than could be told: some were lost");
    if (e->mask & IN_IGNORED) {
        drop(e->wd);
        return true;
    }
    const char *directory = NULL;
    for (size_t i = 0; i < watched_count; i++)
        if (watched[i].wd == e->wd)
            directory = watched[i].name;
    if (!directory)
        return true;
    if (e->mask & (IN_DELETE_SELF | IN_MOVE_SELF))
        return *directory != 0;
    if (!e->len)
        return true; /* of a directory itself: its parent tells */
    char *name = below(directory, e->name);
    if (e->mask & (IN_CREATE | IN_MOVED_TO)) {
        bool told = forget_seen(name); /* by a look into a new directory, which watches what it finds, too */
        if (!told)
            tell(CREATE, name);
        if (!told && recursive && (e->mask & IN_ISDIR))
            add(root, name, true, true);
    }
    if (e->mask & IN_MODIFY)
        tell(WRITE, name);
    if (e->mask & IN_ATTRIB)
        tell(CHMOD, name);
    if (e->mask & IN_DELETE)
        tell(REMOVE, name);
    if (e->mask & IN_MOVED_FROM) {
        tell(RENAME, name);
        if (e->mask & IN_ISDIR)
            drop_below(name);
    }
    free(name);
    return true;
}

void watch_run(const char *path, bool recursive)
{
    char events[16384] __attribute__((aligned(__alignof__(struct inotify_event))));
    notify = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (notify < 0)
        emit_error(errno, "inotify");
    add(path, "", recursive, false);
    emit(R_STARTED, "", 0);
    struct pollfd fds[2] = {{.fd = 0, .events = POLLIN}, {.fd = notify, .events = POLLIN}};
    while (poll(fds, 2, -1) > 0 && !fds[0].revents) {
        for (ssize_t n; (n = read(notify, events, sizeof events)) > 0;)
            for (ssize_t at = 0; at < n;) {
                const struct inotify_event *e = (const void *)(events + at);
                if (!handle(path, e, recursive))
                    return;
                at += (ssize_t)(sizeof *e + e->len);
            }
        while (seen_count) /* all that waited was read: nothing seen early is still to come */
            free(seen[--seen_count]);
    }
}
