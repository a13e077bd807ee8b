/* The program inside every persistent sandbox: what its parts know of each other.
 *
 * One process, one thread, one epoll loop. Everything the host asks is a stream: two ordered byte strings with
 * offsets, kept until the other end has taken them, so that a lost connection loses and repeats nothing. The host's
 * first bytes on a stream say what is wanted (an "open": u32 length, u8 operation, fields); what goes back is
 * records (u8 type, u32 length, payload). wire.py describes the same from the host's side.
 *
 * Work on files runs in forked children under the asking user's ids. Frames come from the host and are trusted to be
 * polite, but checked; names, /proc, terminals come from hostile code: every length is bounded.
 */
#ifndef VENUSRL_AGENT_H
#define VENUSRL_AGENT_H

#define _GNU_SOURCE
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

enum { HEADER = 20, TRAILER = 4, RECORD_HEAD = 5, PAYLOAD = 16384, WINDOW = 65536, OPEN_LIMIT = 1 << 20, STREAMS = 1024 };
enum { PREAMBLE = 0xA5, VERSION = 1 };
enum frame { F_HELLO = 1, F_DATA, F_ACK, F_RESET, F_STOP, F_BYE };
enum op {
    OP_SETTLE = 1, OP_START, OP_ATTACH, OP_PROCESSES, OP_SIGNAL, OP_RESIZE, OP_USAGE, OP_CONNECT, OP_SEVER,
    OP_STAT = 16, OP_LIST, OP_MKDIR, OP_MOVE, OP_REMOVE, OP_READ, OP_WRITE, OP_WATCH, OP_QUIESCE,
};
enum record {
    R_STARTED = 1, R_ERROR, R_STDOUT, R_STDERR, R_PTY, R_EXIT, R_ENTRY, R_CHANGE, R_END, R_PROCESS, R_USAGE, R_POSITION,
};
enum code {
    C_INVALID = 1, C_NOT_FOUND, C_EXISTS, C_PERMISSION, C_PRECONDITION, C_EXHAUSTED, C_UNAVAILABLE, C_UNIMPLEMENTED,
    C_INTERNAL, C_UNAUTHENTICATED,
};

/* -- bytes.c: buffers that cost nothing when empty, and fields in and out of them */

struct buf {
    unsigned char *p;
    size_t start, len, cap;
};
void *must(void *allocated); /* ends the program when memory is gone */
void buf_add(struct buf *b, const void *data, size_t n);
void buf_take(struct buf *b, size_t n);
void buf_free(struct buf *b);
static inline unsigned char *buf_data(const struct buf *b) { return b->p + b->start; }
void put_u8(struct buf *b, unsigned v);
void put_u32(struct buf *b, uint32_t v);
void put_u64(struct buf *b, uint64_t v);
void put_str(struct buf *b, const char *s);
void put_bytes(struct buf *b, const void *s, size_t n);
uint32_t get32(const unsigned char *p);
uint64_t get64(const unsigned char *p);
void set32(unsigned char *p, uint32_t v);
void set64(unsigned char *p, uint64_t v);

struct reader {
    const unsigned char *p;
    size_t n;
    bool bad;
};
unsigned take_u8(struct reader *r);
uint32_t take_u32(struct reader *r);
uint64_t take_u64(struct reader *r);
char *take_str(struct reader *r);                              /* to be freed; "" and bad if it has a NUL */
const unsigned char *take_bytes(struct reader *r, size_t *n);  /* points into the reader */

/* -- agent.c: the loop */

struct watch {
    void (*ready)(struct watch *w, uint32_t events);
    void *owner;
    int fd;
    uint32_t events;
};
bool watch_init(struct watch *w, int fd, void (*ready)(struct watch *, uint32_t), void *owner);
void watch_set(struct watch *w, uint32_t events); /* 0 = do not look at it, not even for a hang-up */
void watch_close(struct watch *w);                /* closes the descriptor too */
int64_t now_ms(void);
extern bool in_vm;

/* -- stream.c: streams */

struct process;
struct stream {
    struct stream *next;
    uint32_t id; /* 0: no host follows it (any more) */
    bool opened, drop, ack_due, stop_due;
    bool starter; /* its process was started by it: given up before the host knows, nobody knows of the process */
    uint64_t in_next; /* the next byte the host sends has this offset */
    struct buf in;    /* received, not yet taken */
    uint64_t stop_at; /* in_stopped: what came from here on was thrown away */
    bool in_fin, in_stopped, in_fin_done;
    uint64_t out_base, out_sent; /* of out's first byte; of the next to send */
    struct buf out;
    uint64_t head, first; /* of a process: bytes before its output; how much it had said before that */
    bool out_fin, out_fin_sent;
    struct watch source[2], sink;
    unsigned char record[2]; /* what source[i]'s bytes become; 0 = they are records already */
    bool connecting, tcp;
    unsigned other_port; /* still to be tried on ::1 */
    bool hold; /* nothing is read yet: its program has not begun */
    pid_t child; /* of file work: its ids, its failure */
    struct process *process;
    int64_t orphan_until;
};
extern struct stream *streams;
struct stream *stream_new(uint32_t id);
struct stream *stream_find(uint32_t id);
void stream_record(struct stream *s, enum record type, const void *data, size_t n);
void stream_error(struct stream *s, enum code code, const char *format, ...) __attribute__((format(printf, 3, 4)));
void stream_end(struct stream *s); /* R_END, then nothing more */
void stream_fin(struct stream *s);
void stream_input(struct stream *s, const unsigned char *data, size_t n, bool fin);
void stream_flow(struct stream *s); /* look at what there is room for */
void stream_feed(struct stream *s); /* give what came in to the sink */
void stream_stop_input(struct stream *s);
void stream_source(struct stream *s, int i, int fd, enum record type);
void stream_sink(struct stream *s, int fd);
bool stream_read_source(struct stream *s, int i); /* one read; false = nothing there now, or closed */
void stream_close(struct stream *s);              /* and whatever runs for it; a process is only let go */
void stream_orphan(struct stream *s);
int64_t streams_tick(int64_t now); /* the next time of interest, or -1 */

/* -- link.c: frames over the connection */

void link_listen(int fd);
void link_bind(const char *path);
void link_port(const char *path);
void link_send(void);
void link_reset(uint32_t id); /* tell the host that a stream is no more */
int64_t link_tick(int64_t now);
/* -- operations */

void operation(struct stream *s, struct reader *r); /* dispatch on the operation's byte */
void process_start(struct stream *s, struct reader *r);
void process_attach(struct stream *s, struct reader *r);
void process_list(struct stream *s);
void process_signal(struct stream *s, struct reader *r);
void process_resize(struct stream *s, struct reader *r);
void process_let_go(struct stream *s);
void process_abandon(struct process *p); /* given up before anybody heard that it began */
void processes_reap(void);
int64_t processes_tick(int64_t now);
void process_source_closed(struct process *p);
void process_source_read(struct process *p, int i, size_t n);
void process_host_done(struct process *p);
void system_settle(struct stream *s, struct reader *r);
void system_usage(struct stream *s);
void system_connect(struct stream *s, struct reader *r);
void system_connected(struct stream *s);
void system_sever(struct stream *s);
void file_start(struct stream *s, enum op op, const unsigned char *fields, size_t n);
void watch_run(const char *path, bool recursive); /* in a child: changes to descriptor 1 until descriptor 0 ends */

/* -- emit: records from a child to descriptor 1 */
void emit(enum record type, const void *data, size_t n);
void emit_error(int error, const char *what) __attribute__((noreturn));
void emit_refuse(enum code code, const char *message) __attribute__((noreturn));

/* -- users.c */

struct user {
    char name[128], home[1024];
    uid_t uid;
    gid_t gid;
    gid_t groups[65];
    int group_count;
};
bool user_find(const char *name, struct user *u); /* "" = the sandbox's default */
int user_become(const struct user *u);            /* 0 or errno */
const char *no_user(const char *name);            /* what to say, in E2B's words, when there is none of that name */
void user_name(uid_t uid, char *to, size_t n);
void group_name(gid_t gid, char *to, size_t n);
extern char *default_user;
extern char **default_env; /* ends with NULL */

/* -- program.c, tree.c: what processes are made of, and how they go */

struct plan {
    struct user user;
    char *cwd;
    char **args, **env;
    int in, out, err; /* the child's ends */
    bool pty;
    int trouble;
};
char **take_strings(struct reader *r);
void strings_free(char **s);
char **environment(const struct user *u, char **more);
_Noreturn void become_program(struct plan *plan); /* in the child; says what is wrong on plan->trouble */
void kill_tree(pid_t root);

#endif
