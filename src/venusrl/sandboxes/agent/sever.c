/* Connections of a network that is no more: the machine goes on elsewhere, and what it had open leads nowhere. See agent.h.
 *
 * Whoever only waits for what comes would wait for ever; so the kernel is told to end them (ECONNABORTED for their
 * programs). Connections within the sandbox stay.
 */
#include "agent.h"

#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

struct request {
    struct nlmsghdr head;
    struct inet_diag_req_v2 body;
};

static bool within(unsigned family, const struct inet_diag_sockid *id)
{
    const unsigned char *a = (const unsigned char *)id->idiag_src;
    static const unsigned char mapped[12] = {[10] = 0xff, [11] = 0xff};
    if (family == AF_INET)
        return a[0] == 127;
    return IN6_IS_ADDR_LOOPBACK((const struct in6_addr *)a) || (memcmp(a, mapped, sizeof mapped) == 0 && a[12] == 127);
}

static int ask(int fd, int type, int flags, unsigned family, const struct inet_diag_sockid *id)
{
    struct request r = {0};
    r.head = (struct nlmsghdr){sizeof r, (unsigned short)type, (unsigned short)(NLM_F_REQUEST | flags), 0, 0};
    r.body.sdiag_family = (unsigned char)family;
    r.body.sdiag_protocol = IPPROTO_TCP;
    r.body.idiag_states = ~(1u << TCP_LISTEN | 1u << TCP_TIME_WAIT | 1u << TCP_CLOSE);
    if (id)
        r.body.id = *id;
    return send(fd, &r, sizeof r, 0) == sizeof r ? 0 : errno;
}

/* Adds the open connections of one family to `found`. */
static int list(int fd, unsigned family, struct buf *found)
{
    static _Alignas(struct nlmsghdr) unsigned char data[32768];
    int error = ask(fd, SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, family, NULL);
    while (!error) {
        ssize_t n = recv(fd, data, sizeof data, 0);
        if (n < 0)
            return errno;
        unsigned left = (unsigned)n;
        for (struct nlmsghdr *m = (struct nlmsghdr *)data; NLMSG_OK(m, left); m = NLMSG_NEXT(m, left)) {
            if (m->nlmsg_type == NLMSG_DONE)
                return 0;
            if (m->nlmsg_type == NLMSG_ERROR)
                return -((struct nlmsgerr *)NLMSG_DATA(m))->error;
            const struct inet_diag_msg *one = NLMSG_DATA(m);
            if (!within(family, &one->id))
                buf_add(found, &one->id, sizeof one->id);
        }
    }
    return error;
}

static int destroy(int fd, unsigned family, const struct inet_diag_sockid *id)
{
    struct {
        struct nlmsghdr head;
        struct nlmsgerr error;
        unsigned char rest[512];
    } answer;
    int error = ask(fd, SOCK_DESTROY, NLM_F_ACK, family, id);
    if (!error && recv(fd, &answer, sizeof answer, 0) < (ssize_t)(sizeof answer.head + sizeof answer.error.error))
        error = EPROTO;
    if (!error && answer.head.nlmsg_type == NLMSG_ERROR)
        error = -answer.error.error;
    return error == ENOENT ? 0 : error; /* it ended meanwhile */
}

void system_sever(struct stream *s)
{
    static const unsigned families[] = {AF_INET, AF_INET6};
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG), error = fd < 0 ? errno : 0;
    for (size_t i = 0; i < 2 && !error; i++) {
        struct buf found = {0};
        error = list(fd, families[i], &found);
        if (error == ENOENT && families[i] == AF_INET6)
            error = 0; /* a kernel without it */
        for (; found.len && !error; buf_take(&found, sizeof(struct inet_diag_sockid))) {
            struct inet_diag_sockid id;
            memcpy(&id, buf_data(&found), sizeof id);
            error = destroy(fd, families[i], &id);
        }
        buf_free(&found);
    }
    if (fd >= 0)
        close(fd);
    if (error)
        stream_error(s, C_UNAVAILABLE, "open connections could not be ended: %s", strerror(error));
    else
        stream_end(s);
}
