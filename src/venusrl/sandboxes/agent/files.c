/* Files, in a forked child with the asking user's ids: what the kernel lets that user do, and nothing else.
 *
 * Descriptor 0 is what the host sends (a file's content), descriptor 1 takes records for it.
 */
#include "agent.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

enum { FLUSH = 8192, PIECE = PAYLOAD - 64, ATTRIBUTES = 8192, DEEP = 200, LIST_LIMIT = 200000 };
static const char prefix[] = "user.e2b.";
static struct buf pending;

/* -- records to the host */

static void write_all(int fd, const unsigned char *p, size_t n)
{
    while (n) {
        ssize_t done = write(fd, p, n);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            _exit(1); /* nobody listens */
        p += done;
        n -= (size_t)done;
    }
}

static void flush(void)
{
    if (pending.len)
        write_all(1, buf_data(&pending), pending.len);
    buf_free(&pending);
}

void emit(enum record type, const void *data, size_t n)
{
    put_u8(&pending, type);
    put_bytes(&pending, data, n);
    if (pending.len >= FLUSH || type == R_CHANGE || type == R_STARTED)
        flush();
}

void emit_refuse(enum code code, const char *message)
{
    struct buf b = {0};
    put_u8(&b, code);
    buf_add(&b, message, strnlen(message, 500));
    emit(R_ERROR, b.p, b.len);
    flush();
    _exit(0);
}

static enum code code_of(int error)
{
    switch (error) {
    case ENOENT: return C_NOT_FOUND;
    case EACCES:
    case EPERM:
    case EROFS: return C_PERMISSION;
    case EEXIST:
    case ENOTEMPTY: return C_EXISTS;
    case ENOSPC:
    case EDQUOT:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
    case EFBIG: return C_EXHAUSTED;
    case ENOTDIR:
    case EISDIR:
    case ENAMETOOLONG:
    case ELOOP:
    case EINVAL:
    case ENXIO: return C_INVALID;
    case EXDEV:
    case ETXTBSY:
    case EBUSY: return C_PRECONDITION;
    case ENOTSUP:
    case ENOSYS: return C_UNIMPLEMENTED;
    default: return C_INTERNAL;
    }
}

void emit_error(int error, const char *what)
{
    char message[500];
    snprintf(message, sizeof message, "%.300s: %s", what, strerror(error));
    emit_refuse(code_of(error), message);
}

/* -- entries */

static void put_target(struct buf *b, const char *path)
{
    char target[PATH_MAX + 1];
    if (!realpath(path, target)) { /* it leads nowhere: what it says, then */
        ssize_t n = readlink(path, target, PATH_MAX);
        target[n > 0 ? n : 0] = 0;
    }
    put_str(b, target);
}

static void put_attributes(struct buf *b, const char *path)
{
    char names[ATTRIBUTES], value[ATTRIBUTES];
    struct buf list = {0};
    uint32_t count = 0;
    ssize_t n = listxattr(path, names, sizeof names);
    for (ssize_t at = 0; at < n; at += (ssize_t)strlen(names + at) + 1) {
        if (strncmp(names + at, prefix, sizeof prefix - 1) != 0)
            continue;
        ssize_t size = getxattr(path, names + at, value, sizeof value);
        if (size < 0 || list.len + (size_t)size + strlen(names + at) > ATTRIBUTES)
            continue;
        put_str(&list, names + at + sizeof prefix - 1);
        put_bytes(&list, value, (size_t)size);
        count++;
    }
    put_u32(b, count);
    buf_add(b, list.p, list.len);
    buf_free(&list);
}

static bool emit_entry(const char *path)
{
    struct stat st;
    char name[128];
    if (lstat(path, &st) < 0)
        return false;
    bool file = S_ISREG(st.st_mode), directory = S_ISDIR(st.st_mode), link = S_ISLNK(st.st_mode);
    struct buf b = {0};
    put_str(&b, path);
    put_u8(&b, file ? 1 : directory ? 2 : link ? 3 : 4);
    put_u64(&b, (uint64_t)st.st_size);
    put_u32(&b, st.st_mode & 07777);
    user_name(st.st_uid, name, sizeof name);
    put_str(&b, name);
    group_name(st.st_gid, name, sizeof name);
    put_str(&b, name);
    put_u64(&b, (uint64_t)st.st_mtim.tv_sec * 1000000000u + (uint64_t)st.st_mtim.tv_nsec);
    put_u8(&b, link);
    if (link)
        put_target(&b, path);
    if (file || directory)
        put_attributes(&b, path);
    else
        put_u32(&b, 0);
    emit(R_ENTRY, b.p, b.len);
    buf_free(&b);
    return true;
}

static void emit_entry_or_error(const char *path)
{
    if (!emit_entry(path))
        emit_error(errno, path);
}

static char *joined(const char *directory, const char *name)
{
    size_t n = strlen(directory) + strlen(name) + 2;
    char *path = must(malloc(n));
    bool slash = *directory && directory[strlen(directory) - 1] == '/';
    snprintf(path, n, "%s%s%s", directory, slash ? "" : "/", name);
    return path;
}

static void list(const char *path, unsigned depth, bool root)
{
    static unsigned count;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK | (root ? 0 : O_NOFOLLOW));
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (!d && root)
        emit_error(errno, path);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        if (++count > LIST_LIMIT)
            emit_refuse(C_EXHAUSTED, "too many files to list: ask for less depth");
        char *inner = joined(path, e->d_name);
        struct stat st;
        if (emit_entry(inner) && depth > 1 && lstat(inner, &st) == 0 && S_ISDIR(st.st_mode))
            list(inner, depth - 1, false);
        free(inner);
    }
    if (d)
        closedir(d);
}

/* -- making, moving */

/* All of path's directories, itself too if whole. 0 or errno; EEXIST only if the last was there. */
static int make_directories(char *path, bool whole)
{
    int error = 0;
    for (char *at = path + 1;; at++) {
        if (*at && *at != '/')
            continue;
        bool last = !*at;
        if (last && !whole)
            return 0;
        char kept = *at;
        *at = 0;
        error = mkdir(path, 0755) == 0 ? 0 : errno;
        struct stat st;
        bool there = error && stat(path, &st) == 0;
        if (there)
            error = S_ISDIR(st.st_mode) ? EEXIST : ENOTDIR;
        *at = kept;
        if (last || (error && error != EEXIST))
            return error;
    }
}

static void make_parents(char *path)
{
    int error = make_directories(path, false);
    if (error)
        emit_error(error, path);
}

static int copy_file(const char *from, const char *to, const struct stat *st)
{
    unsigned char data[PAYLOAD];
    char temporary[PATH_MAX];
    if (!S_ISREG(st->st_mode) || snprintf(temporary, sizeof temporary, "%s.moving", to) >= (int)sizeof temporary)
        return EXDEV;
    int in = open(from, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    int out = in < 0 ? -1 : open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    int error = out < 0 ? errno : 0;
    for (ssize_t n = 1; !error && n > 0;) {
        n = read(in, data, sizeof data);
        if (n < 0 || (n > 0 && write(out, data, (size_t)n) != n))
            error = errno ? errno : ENOSPC;
    }
    if (!error && (fchmod(out, st->st_mode & 07777) < 0 || rename(temporary, to) < 0 || unlink(from) < 0))
        error = errno;
    if (error && out >= 0)
        unlink(temporary);
    return error;
}

static void move(const char *from, char *to)
{
    struct stat st;
    if (lstat(from, &st) < 0)
        emit_error(errno, from);
    make_parents(to);
    int error = rename(from, to) == 0 ? 0 : errno;
    if (error == EXDEV)
        error = copy_file(from, to, &st);
    if (error)
        emit_error(error, from);
    emit_entry_or_error(to);
}

/* -- removing: a tree of any depth with a bounded number of descriptors */

static int empty(int top, int directory, int depth);

static int remove_one(int top, int parent, const char *name, int depth)
{
    static unsigned long flattened;
    if (unlinkat(parent, name, 0) == 0 || errno == ENOENT)
        return 0;
    if (errno != EISDIR && errno != EPERM && errno != EACCES)
        return errno;
    int error = errno;
    if (unlinkat(parent, name, AT_REMOVEDIR) == 0)
        return 0;
    if (errno == ENOTDIR)
        return error;
    if (errno != ENOTEMPTY && errno != EEXIST)
        return errno;
    if (depth >= DEEP) { /* hung up at the top, where it is found again */
        char flat[48];
        snprintf(flat, sizeof flat, ".removing-%ld-%lu", (long)getpid(), flattened++);
        return renameat(parent, name, top, flat) == 0 ? 0 : errno;
    }
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return errno;
    error = empty(top < 0 ? fd : top, fd, depth + 1);
    close(fd);
    if (error)
        return error;
    return unlinkat(parent, name, AT_REMOVEDIR) == 0 || errno == ENOENT ? 0 : errno;
}

static int empty(int top, int directory, int depth)
{
    for (bool more = true; more;) { /* what was hung up here, or appeared meanwhile */
        int fd = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        DIR *d = fd < 0 ? NULL : fdopendir(fd);
        if (!d)
            return errno;
        int error = 0;
        more = false;
        for (struct dirent *e; !error && (e = readdir(d));) {
            if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
                continue;
            more = true;
            error = remove_one(top, directory, e->d_name, depth);
        }
        closedir(d);
        if (error)
            return error;
    }
    return 0;
}

static void remove_tree(const char *path)
{
    struct stat st;
    if (strcmp(path, "/") == 0)
        emit_refuse(C_INVALID, "the root directory cannot be removed");
    if (lstat(path, &st) < 0)
        emit_error(errno, path);
    int error = remove_one(-1, AT_FDCWD, path, 0);
    if (error)
        emit_error(error, path);
}

/* -- content */

static void read_file(const char *path)
{
    struct stat st;
    unsigned char data[PIECE];
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    if (fd < 0)
        emit_error(errno, path);
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
        emit_refuse(C_INVALID, S_ISDIR(st.st_mode) ? "it is a directory" : "it is not a regular file");
    emit(R_STARTED, "", 0);
    for (ssize_t n; (n = read(fd, data, sizeof data)) != 0;) {
        if (n < 0)
            emit_error(errno, path);
        emit(R_STDOUT, data, (size_t)n);
    }
}

static int open_to_write(const char *path, bool *fresh)
{
    struct stat st;
    enum { FLAGS = O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY };
    int fd = open(path, FLAGS | O_CREAT | O_EXCL, 0644);
    *fresh = fd >= 0;
    if (fd < 0 && errno == EEXIST)
        fd = open(path, FLAGS);
    if (fd < 0 && errno == ENOENT) /* a link to a file that is not there yet */
        fd = open(path, FLAGS | O_CREAT, 0644);
    if (fd < 0)
        emit_error(errno, path);
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
        emit_refuse(C_INVALID, "it is not a regular file");
    if (st.st_size > 0 && ftruncate(fd, 0) < 0)
        emit_error(errno, path);
    return fd;
}

static void set_attributes(int fd, const char *path, struct reader *r)
{
    char names[ATTRIBUTES];
    ssize_t n = flistxattr(fd, names, sizeof names);
    for (ssize_t at = 0; at < n; at += (ssize_t)strlen(names + at) + 1)
        if (strncmp(names + at, prefix, sizeof prefix - 1) == 0)
            fremovexattr(fd, names + at);
    for (uint32_t left = take_u32(r); left-- && !r->bad;) {
        char *key = take_str(r), name[256];
        size_t size;
        const unsigned char *value = take_bytes(r, &size);
        if (r->bad || snprintf(name, sizeof name, "%s%s", prefix, key) >= (int)sizeof name)
            emit_refuse(C_INVALID, "a name of an attribute is too long or holds a zero byte");
        if (fsetxattr(fd, name, value, size, 0) < 0)
            emit_error(errno, path);
        free(key);
    }
}

static void write_file(char *path, const struct user *u, struct reader *r)
{
    unsigned char data[PAYLOAD];
    bool fresh;
    make_parents(path);
    int fd = open_to_write(path, &fresh);
    /* Whoever watches hears of a new file three times: made, given to its owner, written. */
    if (fresh && fchown(fd, u->uid, u->gid) < 0)
        emit_error(errno, path);
    if (take_u8(r))
        set_attributes(fd, path, r);
    for (ssize_t n; (n = read(0, data, sizeof data)) != 0;) {
        if (n < 0)
            emit_error(errno, path);
        for (ssize_t at = 0; at < n;) {
            ssize_t done = write(fd, data + at, (size_t)(n - at));
            if (done < 0 && errno != EINTR)
                emit_error(errno, path);
            at += done > 0 ? done : 0;
        }
    }
    if (close(fd) < 0)
        emit_error(errno, path);
    emit_entry_or_error(path);
}

static void quiesce(void)
{
    int root = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0 || syncfs(root) < 0)
        emit_error(errno, "/");
    int drop = in_vm ? open("/proc/sys/vm/drop_caches", O_WRONLY | O_CLOEXEC) : -1;
    if (drop >= 0 && write(drop, "3", 1) < 0)
        emit_error(errno, "drop_caches");
}

/* -- the child */

static char *resolve(const char *path, const struct user *u)
{
    char *full;
    if (*path == '/')
        full = must(strdup(path));
    else if (path[0] == '~' && (path[1] == 0 || path[1] == '/'))
        full = joined(u->home, path + 1 + strspn(path + 1, "/"));
    else
        full = joined(u->home, path);
    size_t n = strlen(full);
    while (n > 1 && full[n - 1] == '/')
        full[--n] = 0;
    return full;
}

static void work(enum op op, struct reader *r)
{
    struct user user;
    char *name = take_str(r), *asked = take_str(r);
    if (r->bad)
        emit_refuse(C_INVALID, "a name holds a zero byte");
    if (op == OP_QUIESCE) {
        quiesce();
        return;
    }
    if (!user_find(name, &user))
        emit_refuse(C_UNAUTHENTICATED, no_user(name));
    int error = user_become(&user);
    if (error)
        emit_error(error, "the user's ids");
    prctl(PR_SET_DUMPABLE, 0); /* becoming somebody may have undone it */
    char *path = resolve(asked, &user);
    switch (op) {
    case OP_STAT: emit_entry_or_error(path); break;
    case OP_LIST: list(path, take_u32(r), true); break;
    case OP_MKDIR:
        error = make_directories(path, true);
        if (error)
            emit_error(error, path);
        emit_entry_or_error(path);
        break;
    case OP_MOVE: {
        char *target = take_str(r);
        if (r->bad)
            emit_refuse(C_INVALID, "a name holds a zero byte");
        move(path, resolve(target, &user));
        break;
    }
    case OP_REMOVE: remove_tree(path); break;
    case OP_READ: read_file(path); break;
    case OP_WRITE: write_file(path, &user, r); break;
    case OP_WATCH: watch_run(path, take_u8(r)); break;
    default: emit_refuse(C_UNIMPLEMENTED, "no such operation");
    }
}

static _Noreturn void child(enum op op, struct reader *r, int in, int out)
{
    sigset_t none;
    dup2(in, 0);
    dup2(out, 1);
    if (syscall(SYS_close_range, 3u, ~0u, 0u) < 0)
        for (int fd = 3; fd < 1024; fd++)
            close(fd);
    setsid();
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGTERM, SIG_DFL);
    work(op, r);
    emit(R_END, "", 0);
    flush();
    _exit(0);
}

void file_start(struct stream *s, enum op op, const unsigned char *fields, size_t n)
{
    struct reader r = {.p = fields, .n = n};
    int in[2] = {-1, -1}, out[2] = {-1, -1};
    bool fed = op == OP_WRITE || op == OP_WATCH;
    pid_t pid = -1;
    if (fed ? pipe2(in, O_CLOEXEC) == 0 : (in[0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0)
        if (pipe2(out, O_CLOEXEC) == 0)
            pid = fork();
    if (pid == 0)
        child(op, &r, in[0], out[1]);
    int error = errno;
    if (in[0] >= 0)
        close(in[0]);
    if (out[1] >= 0)
        close(out[1]);
    if (pid < 0) {
        if (in[1] >= 0)
            close(in[1]);
        if (out[0] >= 0)
            close(out[0]);
        stream_error(s, C_EXHAUSTED, "no room for another file operation: %s", strerror(error));
        return;
    }
    s->child = pid;
    fcntl(out[0], F_SETFL, O_NONBLOCK);
    stream_source(s, 0, out[0], (enum record)0);
    if (fed) {
        fcntl(in[1], F_SETFL, O_NONBLOCK);
        stream_sink(s, in[1]);
    }
}
