/* Streams: two byte strings with offsets, between the host and a process, a forked child or a socket inside.
 *
 * What goes to the host is kept until the host has taken it; a full window stops reading at the source, so that a
 * slow reader slows its own source and nobody else. What comes from the host is acknowledged once the sink took it.
 */
#include "agent.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { ORPHAN_MS = 60000 };

struct stream *streams;

struct stream *stream_new(uint32_t id)
{
    struct stream *s = must(calloc(1, sizeof *s));
    s->id = id;
    s->source[0].fd = s->source[1].fd = s->sink.fd = -1;
    s->next = streams;
    streams = s;
    return s;
}

struct stream *stream_find(uint32_t id)
{
    struct stream *s = streams;
    while (s && s->id != id)
        s = s->next;
    return s;
}

void stream_record(struct stream *s, enum record type, const void *data, size_t n)
{
    if (s->drop || s->out_fin)
        return;
    put_u8(&s->out, type);
    put_bytes(&s->out, data, n);
}

void stream_fin(struct stream *s) { s->out_fin = true; }

void stream_end(struct stream *s)
{
    stream_record(s, R_END, "", 0);
    stream_fin(s);
}

void stream_error(struct stream *s, enum code code, const char *format, ...)
{
    unsigned char message[512];
    va_list list;
    message[0] = (unsigned char)code;
    va_start(list, format);
    int n = vsnprintf((char *)message + 1, sizeof message - 1, format, list);
    va_end(list);
    if (n < 0)
        n = 0;
    if (n > (int)sizeof message - 2)
        n = (int)sizeof message - 2;
    stream_record(s, R_ERROR, message, (size_t)n + 1);
    stream_fin(s);
    stream_stop_input(s);
}

void stream_stop_input(struct stream *s)
{
    if (!s->in_stopped) {
        s->in_stopped = s->stop_due = true;
        s->stop_at = s->in_next - s->in.len;
    }
    buf_free(&s->in);
    s->ack_due = true;
    watch_close(&s->sink);
}

static void on_sink(struct watch *w, uint32_t events)
{
    struct stream *s = w->owner;
    (void)events;
    if (s->connecting)
        system_connected(s);
    else
        stream_feed(s);
}

static void on_source(struct watch *w, uint32_t events)
{
    struct stream *s = w->owner;
    (void)events;
    stream_read_source(s, w == &s->source[1]);
    stream_flow(s);
}

void stream_source(struct stream *s, int i, int fd, enum record type)
{
    watch_init(&s->source[i], fd, on_source, s);
    s->record[i] = (unsigned char)type;
    stream_flow(s);
}

void stream_sink(struct stream *s, int fd)
{
    watch_init(&s->sink, fd, on_sink, s);
    stream_feed(s);
}

bool stream_read_source(struct stream *s, int i)
{
    unsigned char data[PAYLOAD];
    struct watch *w = &s->source[i];
    if (w->fd < 0)
        return false;
    ssize_t n = read(w->fd, data, sizeof data);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    if (n <= 0) { /* a terminal says EIO when its last user has gone */
        watch_close(w);
        if (s->process)
            process_source_closed(s->process);
        else
            stream_fin(s);
        return false;
    }
    if (s->drop)
        s->out_base += RECORD_HEAD + (size_t)n; /* as if a host had taken it */
    else if (!s->out_fin) {
        if (s->record[i])
            stream_record(s, s->record[i], data, (size_t)n);
        else
            buf_add(&s->out, data, (size_t)n);
    }
    if (s->process)
        process_source_read(s->process, i, (size_t)n);
    return true;
}

void stream_flow(struct stream *s)
{
    bool room = !s->hold && (s->drop || s->out_fin || s->out.len < WINDOW);
    for (int i = 0; i < 2; i++)
        watch_set(&s->source[i], room ? EPOLLIN : 0);
}

void stream_feed(struct stream *s)
{
    while (s->in.len && s->sink.fd >= 0 && !s->connecting) {
        ssize_t n = write(s->sink.fd, buf_data(&s->in), s->in.len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno != EAGAIN) {
            stream_stop_input(s);
            return;
        }
        if (n < 0)
            break;
        buf_take(&s->in, (size_t)n);
        s->ack_due = true;
    }
    if (s->in_fin && !s->in_fin_done && !s->in.len && s->opened && !s->connecting) {
        s->in_fin_done = s->ack_due = true;
        if (s->tcp)
            shutdown(s->sink.fd, SHUT_WR);
        if (!s->process || s->record[0] != R_PTY)
            watch_close(&s->sink);
    }
    watch_set(&s->sink, s->connecting || s->in.len ? EPOLLOUT : 0);
}

/* Bytes of the host in order; the first of them say what is wanted. */
void stream_input(struct stream *s, const unsigned char *data, size_t n, bool fin)
{
    s->in_next += n;
    if (fin)
        s->in_fin = true;
    if (s->in_stopped) {
        s->ack_due = true;
        return;
    }
    buf_add(&s->in, data, n);
    if (!s->opened) {
        if (s->in.len < 4) {
            s->ack_due = true;
            return;
        }
        size_t length = get32(buf_data(&s->in));
        if (length > OPEN_LIMIT) {
            s->opened = true;
            stream_error(s, C_EXHAUSTED, "more than %d bytes of arguments and environment", OPEN_LIMIT);
            return;
        }
        s->ack_due = true;
        if (s->in.len < 4 + length)
            return;
        unsigned char *open = must(malloc(length + 1));
        memcpy(open, buf_data(&s->in) + 4, length);
        buf_take(&s->in, 4 + length);
        s->opened = true;
        struct reader r = {.p = open, .n = length};
        operation(s, &r);
        free(open);
    }
    stream_feed(s);
}

void stream_close(struct stream *s)
{
    if (s->process)
        process_let_go(s); /* its descriptors and a stream without a host stay with it */
    if (s->child > 0)
        kill(s->child, SIGKILL);
    watch_close(&s->source[0]);
    watch_close(&s->source[1]);
    watch_close(&s->sink);
    struct stream **at = &streams;
    while (*at != s)
        at = &(*at)->next;
    *at = s->next;
    buf_free(&s->in);
    buf_free(&s->out);
    free(s);
}

/* The host that followed this process is gone: keep what it did not take for whoever comes next, for a while. */
void stream_orphan(struct stream *s)
{
    s->id = 0;
    s->orphan_until = now_ms() + ORPHAN_MS;
    s->out_sent = s->out_base;
    buf_free(&s->in);
    s->ack_due = s->stop_due = s->out_fin_sent = false;
}

int64_t streams_tick(int64_t now)
{
    int64_t next = -1;
    for (struct stream *s = streams; s; s = s->next) {
        if (s->id || s->drop || !s->orphan_until)
            continue;
        if (s->orphan_until <= now) {
            s->drop = true;
            s->out_base += s->out.len;
            buf_free(&s->out);
            stream_flow(s);
        } else if (next < 0 || s->orphan_until < next) {
            next = s->orphan_until;
        }
    }
    return next;
}
