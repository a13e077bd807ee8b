/* Processes: how they begin, what they say, how they end, and who is remembered. See agent.h. */
#include "agent.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ALIVE_LIMIT = 1024, REMEMBERED = 256, REMEMBERED_MS = 600000, QUIET_MS = 100, LINGER_MS = 1000 };
enum { STDIN_PIPE = 1, PTY = 2 };

struct process {
    struct process *next;
    pid_t pid;
    struct stream *stream; /* NULL once nobody can ask for its output any more */
    struct watch trouble;  /* what a child that cannot become the program says */
    struct buf shown;      /* its specification, as the host told it */
    bool started, failed, exited, finished;
    int status;
    int64_t exited_at, read_at;
    size_t remaining[2]; /* of each source, when it ended */
    uint64_t said;       /* finished: all of its output, as streams count it */
};
static struct process *processes;

/* -- beginning */

static void on_trouble(struct watch *w, uint32_t events)
{
    struct process *p = w->owner;
    char message[400];
    (void)events;
    ssize_t n = read(w->fd, message, sizeof message - 1);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    watch_close(w);
    struct stream *s = p->stream;
    if (n > 1) {
        message[n] = 0;
        p->failed = true;
        p->stream = NULL;
        if (s) {
            s->process = NULL;
            for (int i = 0; i < 2; i++)
                watch_close(&s->source[i]);
            stream_error(s, (enum code)(unsigned char)message[0], "%s", message + 1);
            if (!s->id)
                stream_close(s);
        }
        return;
    }
    p->started = true;
    if (!s)
        return;
    s->hold = false;
    struct buf b = {0};
    put_u32(&b, (uint32_t)p->pid);
    buf_add(&b, buf_data(&p->shown), p->shown.len);
    stream_record(s, R_STARTED, b.p, b.len);
    buf_free(&b);
    s->head = s->out.len;
    stream_flow(s);
    stream_feed(s);
}

static int open_terminal(struct plan *plan, unsigned cols, unsigned rows)
{
    int unlock = 0, master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (master < 0)
        master = open("/dev/pts/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    struct winsize size = {.ws_col = (unsigned short)cols, .ws_row = (unsigned short)rows};
    if (master < 0 || ioctl(master, TIOCSPTLCK, &unlock) < 0 || ioctl(master, TIOCSWINSZ, &size) < 0 ||
        (plan->in = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC)) < 0) {
        if (master >= 0)
            close(master);
        return -1;
    }
    if (fchown(plan->in, plan->user.uid, (gid_t)-1) == 0 && fchmod(plan->in, 0620) == 0) {}
    plan->out = fcntl(plan->in, F_DUPFD_CLOEXEC, 3);
    plan->err = fcntl(plan->in, F_DUPFD_CLOEXEC, 3);
    return master;
}

static int pipe_from(int *child_end)
{
    int p[2];
    if (pipe2(p, O_CLOEXEC) < 0)
        return -1;
    fcntl(p[0], F_SETFL, O_NONBLOCK);
    *child_end = p[1];
    return p[0];
}

static int pipe_to(int *child_end)
{
    int p[2];
    if (pipe2(p, O_CLOEXEC) < 0)
        return -1;
    fcntl(p[1], F_SETFL, O_NONBLOCK);
    *child_end = p[0];
    return p[1];
}

static void close_all(const int *fds, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

static void launch(struct stream *s, struct plan *plan, unsigned flags, unsigned cols, unsigned rows,
                   const unsigned char *shown, size_t shown_len)
{
    int out = -1, err = -1, in = -1, bad;
    bool ok;
    plan->in = plan->out = plan->err = plan->trouble = -1;
    plan->pty = flags & PTY;
    if (plan->pty) {
        out = open_terminal(plan, cols, rows);
        in = out < 0 ? -1 : fcntl(out, F_DUPFD_CLOEXEC, 3);
        ok = in >= 0 && plan->err >= 0;
    } else {
        out = pipe_from(&plan->out);
        err = pipe_from(&plan->err);
        if (flags & STDIN_PIPE)
            in = pipe_to(&plan->in);
        else
            plan->in = open("/dev/null", O_RDONLY | O_CLOEXEC);
        ok = out >= 0 && err >= 0 && plan->in >= 0;
    }
    bad = ok ? pipe_from(&plan->trouble) : -1;
    pid_t pid = bad < 0 ? -1 : fork();
    int error = errno;
    if (pid == 0)
        become_program(plan);
    close_all((int[]){plan->in, plan->out, plan->err, plan->trouble}, 4);
    if (pid < 0) {
        close_all((int[]){in, out, err, bad}, 4);
        stream_error(s, plan->pty && !ok ? C_UNAVAILABLE : C_EXHAUSTED, "no %s for another process: %s",
                     plan->pty && !ok ? "terminal" : "room", strerror(error));
        return;
    }
    struct process *p = must(calloc(1, sizeof *p));
    p->pid = pid;
    p->stream = s;
    p->next = processes;
    processes = p;
    buf_add(&p->shown, shown, shown_len);
    s->process = p;
    s->starter = true;
    s->record[0] = plan->pty ? R_PTY : R_STDOUT;
    s->hold = true;
    stream_source(s, 0, out, plan->pty ? R_PTY : R_STDOUT);
    if (err >= 0)
        stream_source(s, 1, err, R_STDERR);
    if (in >= 0)
        stream_sink(s, in);
    else
        stream_stop_input(s);
    watch_init(&p->trouble, bad, on_trouble, p);
    watch_set(&p->trouble, EPOLLIN);
}

void process_start(struct stream *s, struct reader *r)
{
    static struct plan plan;
    size_t shown_len, alive = 0;
    const unsigned char *shown = take_bytes(r, &shown_len);
    plan.args = take_strings(r);
    char **more = take_strings(r), *user = take_str(r);
    plan.cwd = take_str(r);
    unsigned flags = take_u8(r), cols = take_u32(r), rows = take_u32(r);
    for (struct process *p = processes; p; p = p->next)
        alive += !p->finished;
    plan.env = NULL;
    if (r->bad || !plan.args[0] || !*plan.args[0]) {
        stream_error(s, C_INVALID, "arguments or environment are empty or hold a zero byte");
    } else if (alive >= ALIVE_LIMIT) {
        stream_error(s, C_EXHAUSTED, "%d processes run already", ALIVE_LIMIT);
    } else if (!user_find(user, &plan.user)) {
        stream_error(s, C_UNAUTHENTICATED, "%s", no_user(user));
    } else {
        plan.env = environment(&plan.user, more);
        launch(s, &plan, flags, cols, rows, shown, shown_len);
    }
    strings_free(plan.args);
    strings_free(plan.env);
    strings_free(more);
    free(user);
    free(plan.cwd);
}

/* -- ending */

/* Bytes of `out` that are not the process's own words; how many of those its hosts have taken, and how many there are. */
static size_t preface(const struct stream *s)
{
    uint64_t n = s->head > s->out_base ? s->head - s->out_base : 0;
    return n < s->out.len ? (size_t)n : s->out.len;
}

static uint64_t taken(const struct stream *s)
{
    return s->first + (s->out_base > s->head ? s->out_base - s->head : 0);
}

static uint64_t said(const struct stream *s) { return taken(s) + s->out.len - preface(s); }

static void put_exit(struct stream *s, const struct process *p)
{
    unsigned char e[8];
    set32(e, (uint32_t)(WIFEXITED(p->status) ? WEXITSTATUS(p->status) : -1));
    set32(e + 4, WIFSIGNALED(p->status) ? (uint32_t)WTERMSIG(p->status) : 0);
    stream_record(s, R_EXIT, e, sizeof e);
    stream_fin(s);
    stream_stop_input(s);
}

static bool sources_open(const struct stream *s) { return s && (s->source[0].fd >= 0 || s->source[1].fd >= 0); }

static void finish(struct process *p)
{
    p->finished = true;
    if (p->stream) {
        p->said = said(p->stream);
        put_exit(p->stream, p);
    }
}

void process_source_closed(struct process *p)
{
    if (p->exited && p->started && !p->finished && !sources_open(p->stream))
        finish(p);
}

void process_source_read(struct process *p, int i, size_t n)
{
    p->read_at = now_ms();
    p->remaining[i] -= n < p->remaining[i] ? n : p->remaining[i];
}

void processes_reap(void)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG | __WALL)) > 0) {
        for (struct stream *s = streams; s; s = s->next)
            if (s->child == pid)
                s->child = 0;
        for (struct process *p = processes; p; p = p->next) {
            if (p->pid != pid || p->exited)
                continue;
            p->exited = true;
            p->status = status;
            p->exited_at = p->read_at = now_ms();
            for (int i = 0; i < 2 && p->stream; i++) {
                int n = 0;
                if (p->stream->source[i].fd >= 0 && ioctl(p->stream->source[i].fd, FIONREAD, &n) == 0 && n > 0)
                    p->remaining[i] = (size_t)n;
            }
            process_source_closed(p);
        }
    }
}

/* Its own output was read; others it left behind may hold the pipes for ever, and nobody waits for those. */
static int64_t settle_exit(struct process *p, int64_t now)
{
    struct stream *s = p->stream;
    if (!s || !sources_open(s)) {
        finish(p);
        return -1;
    }
    if ((s->source[0].events | s->source[1].events) == 0 || p->remaining[0] || p->remaining[1])
        return -1; /* the follower is slow, or there is more to read: either wakes us */
    int64_t quiet = p->read_at + QUIET_MS, last = p->exited_at + LINGER_MS;
    int64_t due = quiet < last ? quiet : last;
    if (due > now)
        return due;
    finish(p);
    return -1;
}

static void forget(struct process *p)
{
    struct process **at = &processes;
    while (*at != p)
        at = &(*at)->next;
    *at = p->next;
    watch_close(&p->trouble);
    buf_free(&p->shown);
    free(p);
}

int64_t processes_tick(int64_t now)
{
    int64_t next = -1;
    int remembered = 0;
    for (struct process *p = processes, *after; p; p = after) {
        after = p->next;
        if (p->started && p->exited && !p->finished) {
            int64_t due = settle_exit(p, now);
            if (due >= 0 && (next < 0 || due < next))
                next = due;
        }
        struct stream *s = p->stream;
        if (s && p->finished && !s->id && s->drop && !sources_open(s)) {
            s->process = NULL;
            p->stream = NULL;
            stream_close(s);
        }
        bool over = p->finished && !p->stream && ++remembered;
        if (over)
            buf_free(&p->shown); /* its number and its end are enough */
        if ((over && (remembered > REMEMBERED || p->exited_at + REMEMBERED_MS < now)) || (p->failed && p->exited))
            forget(p);
    }
    return next;
}

static void move_ends(struct stream *from, struct stream *to)
{
    for (int i = 0; i < 2; i++) {
        int fd = from->source[i].fd;
        watch_set(&from->source[i], 0);
        from->source[i].fd = -1;
        to->record[i] = from->record[i];
        if (fd >= 0)
            stream_source(to, i, fd, from->record[i]);
    }
    int fd = from->sink.fd;
    watch_set(&from->sink, 0);
    from->sink.fd = -1;
    to->process = from->process;
    to->process->stream = to;
    from->process = NULL;
    if (fd >= 0)
        stream_sink(to, fd);
}

/* Nobody follows any more: what it says from now on is dropped, so that it goes on. */
void process_let_go(struct stream *s)
{
    struct process *p = s->process;
    if (p->finished && !sources_open(s)) {
        s->process = NULL;
        p->stream = NULL;
        return;
    }
    struct stream *nobody = stream_new(0);
    nobody->drop = nobody->opened = true;
    nobody->in_stopped = s->in_stopped;
    nobody->hold = s->hold;
    nobody->first = said(s);
    move_ends(s, nobody);
}

/* -- what else may be asked of them */

static struct process *find(uint32_t pid, bool alive)
{
    struct process *p = processes; /* the newest of this number comes first */
    while (p && (p->pid != (pid_t)pid || !p->started || (alive && p->exited)))
        p = p->next;
    return p;
}

void process_attach(struct stream *s, struct reader *r)
{
    uint32_t pid = take_u32(r);
    struct process *p = find(pid, false);
    if (!p) {
        stream_error(s, C_NOT_FOUND, "there is no process %u", pid);
        return;
    }
    struct buf b = {0};
    put_u32(&b, (uint32_t)p->pid);
    buf_add(&b, buf_data(&p->shown), p->shown.len);
    stream_record(s, R_STARTED, b.p, b.len);
    buf_free(&b);
    struct stream *before = p->stream;
    unsigned char position[8];
    s->first = before ? taken(before) : p->said;
    if (p->finished && s->first > p->said)
        s->first = p->said; /* its end was taken too */
    set64(position, s->first);
    stream_record(s, R_POSITION, position, sizeof position);
    s->head = s->out.len;
    if (!before || (before->drop && p->finished)) {
        put_exit(s, p);
        return;
    }
    size_t skip = preface(before);
    if (before->out.len > skip)
        buf_add(&s->out, buf_data(&before->out) + skip, before->out.len - skip);
    s->out_fin = before->out_fin;
    if (before->in_stopped || before->sink.fd < 0) /* an earlier host may have closed it */
        stream_stop_input(s);
    link_reset(before->id);
    move_ends(before, s);
    stream_close(before);
    stream_flow(s);
}

void process_list(struct stream *s)
{
    for (struct process *p = processes; p; p = p->next) {
        if (!p->started || p->exited)
            continue;
        struct buf b = {0};
        put_u32(&b, (uint32_t)p->pid);
        buf_add(&b, buf_data(&p->shown), p->shown.len);
        stream_record(s, R_PROCESS, b.p, b.len);
        buf_free(&b);
    }
    stream_end(s);
}

void process_abandon(struct process *p)
{
    if (p->exited)
        return;
    if (p->started)
        kill_tree(p->pid);
    kill(p->pid, SIGKILL);
}

void process_signal(struct stream *s, struct reader *r)
{
    uint32_t pid = take_u32(r), number = take_u32(r);
    struct process *p = find(pid, true);
    if (number < 1 || number > 64) {
        stream_error(s, C_INVALID, "there is no signal %u", number);
    } else if (!p) {
        stream_error(s, C_NOT_FOUND, "process %u does not run", pid);
    } else {
        if (number == SIGKILL)
            kill_tree(p->pid);
        kill(-p->pid, (int)number);
        stream_end(s);
    }
}

void process_resize(struct stream *s, struct reader *r)
{
    uint32_t pid = take_u32(r), cols = take_u32(r), rows = take_u32(r);
    struct process *p = find(pid, true);
    struct winsize size = {.ws_col = (unsigned short)cols, .ws_row = (unsigned short)rows};
    if (!p)
        stream_error(s, C_NOT_FOUND, "process %u does not run", pid);
    else if (!p->stream || p->stream->record[0] != R_PTY || ioctl(p->stream->source[0].fd, TIOCSWINSZ, &size) < 0)
        stream_error(s, C_PRECONDITION, "process %u has no terminal", pid);
    else
        stream_end(s);
}
