/* Frames over a connection that comes and goes: a socket accepted from a listener, or a virtio-serial port.
 *
 * A frame: u32 stream, u8 kind, u8 flags, u16 zero, u32 length, u64 offset, payload, u32 trailer. A host that connects
 * first sends more preamble bytes than a frame can have, then HELLO. On a port, where nobody says that the host has
 * come anew, a frame that was cut then ends in preamble: its trailer is wrong, it is dropped, and we look for the HELLO.
 */
#include "agent.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { FRAME = HEADER + PAYLOAD + TRAILER, RUN = 64, FIN = 1, HELLO_FIXED = 8 + 4 + 1 + 16 + 16 + 4, RETRY_MS = 200 };
static const char magic[8] = {'V', 'e', 'n', 'u', 's', 'R', 'L', '1'};
static const uint32_t seal = 0x56524c00;

static struct watch connection = {.fd = -1}, listener = {.fd = -1};
static const char *port_path;
static int64_t port_retry;
static unsigned char in[2 * FRAME], out[2 * FRAME];
static size_t in_len, out_start, out_len;
static bool lost = true, greeted, has_session, closing;
static size_t run;
static unsigned char session[16];
static uint32_t newest, cursor;
static uint32_t resets[STREAMS];
static size_t reset_count;

static unsigned char *frame_begin(size_t payload)
{
    if (out_start + out_len + HEADER + payload + TRAILER > sizeof out) {
        memmove(out, out + out_start, out_len);
        out_start = 0;
    }
    if (out_len + HEADER + payload + TRAILER > sizeof out)
        return NULL;
    return out + out_start + out_len + HEADER;
}

static void frame_end(uint32_t id, enum frame kind, unsigned flags, uint64_t offset, size_t payload)
{
    unsigned char *h = out + out_start + out_len;
    set32(h, id);
    h[4] = (unsigned char)kind;
    h[5] = (unsigned char)flags;
    h[6] = h[7] = 0;
    set32(h + 8, (uint32_t)payload);
    set64(h + 12, offset);
    set32(h + HEADER + payload, seal ^ (uint32_t)payload);
    out_len += HEADER + payload + TRAILER;
}

static bool frame_empty(uint32_t id, enum frame kind, uint64_t offset)
{
    if (!frame_begin(0))
        return false;
    frame_end(id, kind, 0, offset, 0);
    return true;
}

void link_reset(uint32_t id)
{
    if (id && reset_count < STREAMS)
        resets[reset_count++] = id;
}

static uint64_t in_acked(const struct stream *s)
{
    if (!s->opened)
        return s->in_next; /* an open may be larger than the window */
    return s->in_next - s->in.len + (s->in_fin && (s->in_fin_done || s->in_stopped) ? 1 : 0);
}

/* One frame of this stream; false when there is no room. */
static bool send_data(struct stream *s)
{
    uint64_t unsent = s->out_base + s->out.len - s->out_sent;
    uint64_t window = s->out_base + WINDOW - s->out_sent;
    size_t n = (size_t)(unsent < window ? unsent : window);
    if (n > PAYLOAD)
        n = PAYLOAD;
    bool fin = s->out_fin && n == unsent && !s->out_fin_sent;
    if (n == 0 && !fin)
        return true;
    unsigned char *p = frame_begin(n);
    if (!p)
        return false;
    if (n)
        memcpy(p, buf_data(&s->out) + (s->out_sent - s->out_base), n);
    frame_end(s->id, F_DATA, fin ? FIN : 0, s->out_sent, n);
    s->out_sent += n;
    s->out_fin_sent = s->out_fin_sent || fin;
    return true;
}

static bool send_stream(struct stream *s)
{
    if (!s->id)
        return true;
    if (s->stop_due) {
        if (!frame_empty(s->id, F_STOP, s->stop_at))
            return false;
        s->stop_due = false;
    }
    if (s->ack_due) {
        if (!frame_empty(s->id, F_ACK, in_acked(s)))
            return false;
        s->ack_due = false;
    }
    return send_data(s);
}

/* Round and round, beginning after the stream that was served last, until nothing is left or no room. */
static bool compose(void)
{
    size_t before = out_len;
    while (reset_count) {
        if (!frame_empty(resets[reset_count - 1], F_RESET, 0))
            return true;
        reset_count--;
    }
    struct stream *first = stream_find(cursor);
    first = first && first->next ? first->next : streams;
    struct stream *s = first;
    while (s) {
        if (!send_stream(s))
            return true;
        cursor = s->id;
        s = s->next ? s->next : streams;
        if (s == first)
            break;
    }
    return out_len > before;
}

static void disconnect(void)
{
    watch_close(&connection);
    greeted = closing = false;
    lost = true;
    run = in_len = out_len = out_start = 0;
    if (port_path)
        port_retry = now_ms() + RETRY_MS;
}

void link_send(void)
{
    while (connection.fd >= 0) {
        while (greeted && !closing && out_len < FRAME && compose()) {}
        if (!out_len)
            break;
        ssize_t n = write(connection.fd, out + out_start, out_len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return;
        if (n <= 0) {
            if (!port_path)
                disconnect();
            return; /* on a port: the host is away, the next HELLO begins anew */
        }
        out_start += (size_t)n;
        out_len -= (size_t)n;
        if (!out_len)
            out_start = 0;
    }
    if (closing && !port_path)
        disconnect();
}

static void forget_session(void)
{
    for (struct stream *s = streams, *next; s; s = next) {
        next = s->next;
        if (!s->id)
            continue;
        if (s->process)
            stream_orphan(s);
        else
            stream_close(s);
    }
    newest = cursor = 0;
    reset_count = 0;
}

/* The host wants nothing of it any more. */
static void give_up(struct stream *s)
{
    if (s->process && s->starter && s->out_base == 0)
        process_abandon(s->process);
    stream_close(s);
}

/* The host lists what it knows of and how much of each it has; the rest it has given up. */
static void rewind_streams(struct reader *r, uint32_t count)
{
    const unsigned char *list = r->p;
    for (struct stream *s = streams, *next; s; s = next) {
        next = s->next;
        if (!s->id)
            continue;
        uint32_t i = 0;
        while (i < count && get32(list + 12 * i) != s->id)
            i++;
        uint64_t has = i < count ? get64(list + 12 * i + 4) : 0;
        uint64_t end = s->out_base + s->out.len;
        bool fin = s->out_fin && has == end + 1;
        if (i < count && has >= s->out_base && (has <= end || fin)) {
            s->out_sent = fin ? end : has;
            s->out_fin_sent = fin;
            s->ack_due = true;
            s->stop_due = s->in_stopped;
        } else if (i == count) {
            give_up(s);
        } else {
            link_reset(s->id);
            stream_close(s);
        }
    }
}

static void greet(bool resumed, const unsigned char nonce[16])
{
    out_len = out_start = 0;
    unsigned char *p = frame_begin(PAYLOAD), *start = p;
    memcpy(p, magic, 8);
    memcpy(p + 8, nonce, 16);
    set32(p + 24, VERSION);
    p[28] = resumed;
    set32(p + 29, newest);
    unsigned char *count = p + 33;
    uint32_t n = 0;
    p += 37;
    for (struct stream *s = streams; s; s = s->next) {
        if (!s->id || (size_t)(p - start) + 12 > PAYLOAD)
            continue;
        set32(p, s->id);
        set64(p + 4, s->in_next + (s->in_fin ? 1 : 0));
        p += 12;
        n++;
    }
    set32(count, n);
    frame_end(0, F_HELLO, 0, 0, (size_t)(p - start));
    greeted = true;
    closing = false;
}

static void on_hello(struct reader *r)
{
    unsigned char nonce[16];
    if (r->n < HELLO_FIXED || memcmp(r->p, magic, 8) != 0)
        return;
    uint32_t version = get32(r->p + 8);
    bool resume = r->p[12];
    const unsigned char *who = r->p + 13;
    uint32_t count = get32(r->p + 45);
    memcpy(nonce, r->p + 29, 16);
    bool same = has_session && memcmp(session, who, 16) == 0;
    if (version != VERSION || count > STREAMS || (r->n - HELLO_FIXED) / 12 < count || (resume && !same)) {
        out_len = out_start = 0;
        unsigned char *p = frame_begin(24);
        memcpy(p, magic, 8);
        memcpy(p + 8, nonce, 16);
        frame_end(0, F_BYE, 0, VERSION, 24);
        closing = greeted = true;
        return;
    }
    r->p += HELLO_FIXED;
    if (same) {
        rewind_streams(r, count);
    } else {
        forget_session();
        memcpy(session, who, 16);
        has_session = true;
    }
    greet(same, nonce);
}

static void on_data(uint32_t id, unsigned flags, uint64_t offset, const unsigned char *p, size_t n)
{
    struct stream *s = stream_find(id);
    if (!s && id > newest) {
        size_t count = 0;
        for (struct stream *each = streams; each; each = each->next)
            count += each->id != 0;
        newest = id;
        if (count >= STREAMS || offset != 0) {
            link_reset(id);
            return;
        }
        s = stream_new(id);
    }
    /* Beyond the window or out of order is the host's mistake: what cannot be right is not taken. */
    if (!s || offset != s->in_next || s->in_fin || (s->opened && s->in.len + n > WINDOW + PAYLOAD))
        return;
    stream_input(s, p, n, flags & FIN);
}

static void on_ack(struct stream *s, uint64_t offset)
{
    uint64_t end = s->out_base + s->out.len;
    if (offset > s->out_sent + (s->out_fin_sent ? 1 : 0) || offset < s->out_base)
        return;
    bool all = s->out_fin && offset == end + 1;
    size_t n = (size_t)((all ? end : offset) - s->out_base);
    s->out_base += n;
    if (n)
        buf_take(&s->out, n);
    if (all)
        stream_close(s);
    else
        stream_flow(s);
}

static void on_frame(uint32_t id, unsigned kind, unsigned flags, uint64_t offset, const unsigned char *p, size_t n)
{
    struct reader r = {.p = p, .n = n};
    if (kind == F_HELLO) {
        on_hello(&r);
        return;
    }
    if (!greeted || closing || id == 0)
        return;
    struct stream *s = stream_find(id);
    if (kind == F_DATA)
        on_data(id, flags, offset, p, n);
    else if (kind == F_ACK && s)
        on_ack(s, offset);
    else if (kind == F_RESET && s)
        give_up(s);
}

/* How many bytes of in could be used; 0 = more are needed. */
static size_t parse(const unsigned char *p, size_t n)
{
    if (lost) {
        size_t used = 0;
        while (used < n && (p[used] == PREAMBLE || run < RUN)) {
            run = p[used] == PREAMBLE ? run + 1 : 0;
            used++;
        }
        if (n - used >= HEADER) {
            run = 0;
            lost = p[used + 4] != F_HELLO;
            if (lost)
                used++;
        }
        return used;
    }
    if (n < HEADER)
        return 0;
    size_t length = get32(p + 8);
    if (p[4] < F_HELLO || p[4] > F_BYE || p[6] || p[7] || length > PAYLOAD) {
        lost = true;
        run = 0;
        return 0;
    }
    if (n < HEADER + length + TRAILER)
        return 0;
    if (get32(p + HEADER + length) != (seal ^ (uint32_t)length)) {
        lost = true;
        run = 0;
        return HEADER + length + TRAILER;
    }
    on_frame(get32(p), p[4], p[5], get64(p + 12), p + HEADER, length);
    return HEADER + length + TRAILER;
}

static void parse_all(void)
{
    size_t at = 0;
    for (;;) {
        bool was = lost;
        size_t used = parse(in + at, in_len - at);
        at += used;
        if (!used && was == lost)
            break;
    }
    memmove(in, in + at, in_len - at);
    in_len -= at;
}

static void on_connection(struct watch *w, uint32_t events)
{
    (void)events;
    while (w->fd >= 0) {
        ssize_t n = read(w->fd, in + in_len, sizeof in - in_len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            break;
        if (n <= 0) {
            if (!port_path || n < 0)
                disconnect();
            break; /* the port's host is away: the descriptor stays good */
        }
        in_len += (size_t)n;
        parse_all();
        link_send();
    }
}

static void take(int fd)
{
    disconnect();
    watch_init(&connection, fd, on_connection, NULL);
    watch_set(&connection, EPOLLIN | EPOLLOUT | EPOLLET);
    on_connection(&connection, EPOLLIN);
}

static void on_listener(struct watch *w, uint32_t events)
{
    (void)events;
    int fd = accept4(w->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0)
        take(fd);
}

void link_listen(int fd)
{
    if (listen(fd, 16) < 0) /* it listens already; gVisor cannot tell (SO_ACCEPTCONN), so say it again */
        _exit(72);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    watch_init(&listener, fd, on_listener, NULL);
    watch_set(&listener, EPOLLIN);
}

void link_bind(const char *path)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof at.sun_path)
        _exit(64);
    strcpy(at.sun_path, path);
    unlink(path);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof at) < 0)
        _exit(72);
    link_listen(fd);
}

void link_port(const char *path)
{
    port_path = path;
    port_retry = now_ms();
}

int64_t link_tick(int64_t now)
{
    if (!port_path || connection.fd >= 0)
        return -1;
    if (port_retry <= now) {
        int fd = open(port_path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
        port_retry = now + RETRY_MS;
        if (fd >= 0)
            take(fd);
    }
    return connection.fd >= 0 ? -1 : port_retry;
}
