/* A sandbox's first moments: does the steps of a plan, in order, and ends as its agent.
 *
 * The forge (Python) decides every step, see steps.py; a fork of it, and its interpreter, cost more than all the steps
 * together. This is PID 1 of the sandbox's namespace from its first instruction. Everything in a plan comes from the
 * forge, nothing from a sandbox; what an image's files do to a path is what the steps "in the root" guard against.
 *
 * maker PLAN REPORT: descriptors. A step that fails is told on REPORT: u32 its number, u32 errno, what was done to
 * what. REPORT is closed, without a word, by the agent's start.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/loop.h>
#include <linux/openat2.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <unistd.h>

enum { MAY_BE_MISSING = 1, MAY_BE_NO_FOLDER = 2, MAY_FAIL = 4, MAX_STRINGS = 8 };
enum { OPEN_TREE = 428, MOVE_MOUNT = 429, CLOSE_RANGE = 436, OPENAT2 = 437, MOUNT_SETATTR = 442 };
enum { LISTENER = 3, AGENT = 4, BACKLOG = 16, LAST_CAPABILITY = 40 };
/* The order is that of steps.py. */
enum op {
    MAKE_FOLDER = 1, WRITE_FILE, LINK, CHANGE, FOLDER_IN_ROOT, WRITE_IN_ROOT, MOUNT, CLONE_TREE, UNSHARE, SETNS,
    LISTEN, HOSTNAME, LOOPBACK, GO_TO, CHANGE_ROOT, LIMIT, BECOME, KEYRING, CAPABILITIES, FILTER, DESCRIPTORS, START,
    WAIT, MERGE, DISK,
};
static const uint64_t none = ~(uint64_t)0;

struct attr {
    uint64_t set, clear, propagation, userns;
};
struct step {
    unsigned op, lenient, count;
    uint64_t a, b, c;
    char *s[MAX_STRINGS];
    size_t n[MAX_STRINGS];
};
static int report = -1, listener = -1;

static int own(const char *path, uint64_t owner)
{
    return owner == none ? 0 : lchown(path, (uid_t)owner, (gid_t)owner);
}

static int make_folder(const struct step *s)
{
    return mkdir(s->s[0], (mode_t)s->a) < 0 ? -1 : own(s->s[0], s->b);
}

static int fill(int fd, const char *data, size_t n)
{
    while (n) {
        ssize_t wrote = write(fd, data, n);
        if (wrote < 0)
            return -1;
        data += wrote;
        n -= (size_t)wrote;
    }
    return 0;
}

static int write_file(const struct step *s)
{
    int fd = open(s->s[0], O_WRONLY | O_CLOEXEC | (int)s->a, (mode_t)s->b);
    if (fd < 0)
        return -1;
    int result = fill(fd, s->s[1], s->n[1]), error = errno;
    close(fd);
    errno = error;
    return result;
}

/* A file of the image as the sandbox would find it: links lead nowhere but inside, no device is opened. */
static int write_in_root(const struct step *s)
{
    struct open_how how = {.flags = O_WRONLY | O_CREAT | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, .mode = 0644,
                           .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
    int root = open(s->s[0], O_PATH | O_DIRECTORY | O_CLOEXEC);
    int fd = root < 0 ? -1 : (int)syscall(OPENAT2, root, s->s[1], &how, sizeof how);
    struct stat found;
    if (fd < 0 || fstat(fd, &found) < 0)
        return -1;
    if (!S_ISREG(found.st_mode)) {
        errno = EINVAL;
        return -1;
    }
    if (ftruncate(fd, 0) < 0 || fchown(fd, (uid_t)s->a, (gid_t)s->a) < 0 || fill(fd, s->s[2], s->n[2]) < 0)
        return -1;
    return close(fd) | close(root);
}

/* A real directory, reached by no link: what is in its way is removed. */
static int folder_in_root(const struct step *s)
{
    int at = open(s->s[0], O_PATH | O_DIRECTORY | O_CLOEXEC);
    for (char *name = strtok(s->s[1], "/"); name && at >= 0; name = strtok(NULL, "/")) {
        struct stat found;
        if (fstatat(at, name, &found, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISDIR(found.st_mode) && unlinkat(at, name, 0) < 0)
            return -1;
        if (mkdirat(at, name, 0755) < 0 && errno != EEXIST)
            return -1;
        int next = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        close(at);
        at = next;
    }
    if (at < 0 || (s->a != none && fchmod(at, (mode_t)s->a) < 0))
        return -1;
    if (s->b != none && fchown(at, (uid_t)s->b, (gid_t)s->b) < 0)
        return -1;
    return close(at);
}

static int mount_it(const struct step *s)
{
    return mount(s->s[0], s->s[1], s->n[2] ? s->s[2] : NULL, s->a, s->n[3] ? s->s[3] : NULL);
}

/* Show a tree elsewhere, read-only; with a user namespace its owners are mapped as that one maps them. */
static int clone_tree(const struct step *s)
{
    int tree = (int)syscall(OPEN_TREE, AT_FDCWD, s->s[0], 1 /* OPEN_TREE_CLONE */ | O_CLOEXEC | 0x8000 /* AT_RECURSIVE */);
    struct attr plain = {.set = 0x1 | 0x2 | 0x4 /* RDONLY, NOSUID, NODEV */, .propagation = MS_PRIVATE};
    struct attr mapped = {.set = 0x100000 /* IDMAP */, .userns = s->a};
    unsigned flags = 0x1000 /* AT_EMPTY_PATH */ | 0x8000;
    if (tree < 0 || syscall(MOUNT_SETATTR, tree, "", flags, &plain, sizeof plain) < 0)
        return -1;
    if (s->a != none && syscall(MOUNT_SETATTR, tree, "", flags, &mapped, sizeof mapped) < 0)
        return -1;
    if (syscall(MOVE_MOUNT, tree, "", AT_FDCWD, s->s[1], 4 /* F_EMPTY_PATH */) < 0)
        return -1;
    return close(tree);
}

static int listen_at(const struct step *s)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    if (s->n[0] >= sizeof at.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(at.sun_path, s->s[0], s->n[0]);
    listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    umask(0177);
    int result = listener < 0 ? -1 : bind(listener, (struct sockaddr *)&at, sizeof at);
    umask(0);
    return result < 0 ? -1 : listen(listener, BACKLOG);
}

static int loopback(void)
{
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    int any = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    return any < 0 || ioctl(any, SIOCSIFFLAGS, &request) < 0 ? -1 : close(any);
}

static int change_root(void)
{
    return syscall(SYS_pivot_root, ".", ".") < 0 || umount2(".", MNT_DETACH) < 0 ? -1 : chdir("/");
}

static int become(const struct step *s)
{
    uid_t id = (uid_t)s->a;
    return setgroups(0, NULL) < 0 || setresgid(id, id, id) < 0 ? -1 : setresuid(id, id, id);
}

static int keep_capabilities(uint64_t kept)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {{0}};
    for (int n = 0; n <= LAST_CAPABILITY; n++)
        if (!(kept >> n & 1) && prctl(PR_CAPBSET_DROP, n, 0, 0, 0) < 0)
            return -1;
    for (int n = 0; n < 2; n++)
        data[n].effective = data[n].permitted = (uint32_t)(kept >> 32 * n);
    return prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) < 0 ? -1 : (int)syscall(SYS_capset, &header, data);
}

static int filter(const struct step *s)
{
    struct sock_fprog program = {.len = (unsigned short)(s->n[0] / 8), .filter = (struct sock_filter *)s->s[0]};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        return -1;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}

/* 0 to 2 are /dev/null, then the listening socket; all else is closed by the agent's start. */
static int descriptors(const struct step *s)
{
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    int high[3] = {fcntl(null, F_DUPFD_CLOEXEC, 64), fcntl(listener, F_DUPFD_CLOEXEC, 64),
                   fcntl((int)s->a, F_DUPFD_CLOEXEC, 64)};
    report = fcntl(report, F_DUPFD_CLOEXEC, 64);
    if (high[0] < 0 || high[1] < 0 || high[2] < 0 || report < 0 || syscall(CLOSE_RANGE, 0, ~0u, 4 /* CLOEXEC */) < 0)
        return -1;
    for (int fd = 0; fd < 3; fd++)
        if (dup2(high[0], fd) < 0)
            return -1;
    return dup2(high[1], LISTENER) < 0 || dup3(high[2], AGENT, O_CLOEXEC) < 0 ? -1 : 0;
}

static int start(const struct step *s)
{
    char *const environment[] = {NULL};
    umask(022);
    return (int)syscall(SYS_execveat, AGENT, "", s->s, environment, 0x1000 /* AT_EMPTY_PATH */);
}

/* What is written of a blank disk, into a file without a name. */
static int copy_of(const char *blank, const char *folder)
{
    int from = open(blank, O_RDONLY | O_CLOEXEC), to = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    struct stat found;
    if (from < 0 || to < 0 || fstat(from, &found) < 0 || ftruncate(to, found.st_size) < 0)
        return -1;
    for (off_t at = 0; (at = lseek(from, at, SEEK_DATA)) >= 0;) {
        off_t end = lseek(from, at, SEEK_HOLE), there = at;
        while (at < end) {
            ssize_t n = copy_file_range(from, &at, to, &there, (size_t)(end - at), 0);
            if (n <= 0)
                return -1;
        }
    }
    return errno != ENXIO || close(from) < 0 ? -1 : to; /* ENXIO: no more data */
}

/* A loop device that goes with its last user. Somebody else may take the free one first. */
static int loop_over(int file, char name[24])
{
    struct loop_config config = {.fd = (uint32_t)file, .block_size = 4096,
                                 .info.lo_flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO};
    int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    for (int tries = 0; control >= 0 && tries < 1000; tries++) {
        int number = ioctl(control, LOOP_CTL_GET_FREE);
        if (number < 0)
            return -1;
        snprintf(name, 24, "/dev/loop%d", number);
        int device = open(name, O_RDWR | O_CLOEXEC);
        if (device < 0 && errno == ENOENT && mknod(name, S_IFBLK | 0600, makedev(7, (unsigned)number)) == 0)
            device = open(name, O_RDWR | O_CLOEXEC);
        if (device >= 0 && ioctl(device, LOOP_CONFIGURE, &config) == 0)
            return close(control) < 0 ? -1 : device;
        if (device < 0 || errno != EBUSY)
            return -1;
        close(device);
    }
    return -1;
}

/* The disk's files go, and with them the space, once nothing is mounted here any more. */
static int mount_disk(const struct step *s)
{
    char name[24];
    int file = copy_of(s->s[0], s->s[1]);
    int device = file < 0 ? -1 : loop_over(file, name);
    if (device < 0 || mount(name, s->s[2], "ext4", s->a, s->s[3]) < 0)
        return -1;
    return close(device) | close(file) | chmod(s->s[2], 0700);
}

/* The disk is there: somebody fills it. */
static int wait_for(const struct step *s)
{
    static const uint32_t waits[2] = {~0u, 0};
    char word;
    if (write(report, waits, sizeof waits) != sizeof waits)
        return -1;
    ssize_t n = read((int)s->a, &word, 1);
    if (n == 0)
        errno = ECANCELED;
    return n == 1 ? close((int)s->a) : -1;
}

static int join_keyring(void)
{
    return syscall(SYS_keyctl, 1 /* JOIN_SESSION_KEYRING */, NULL) < 0 ? -1 : 0;
}

static int perform(const struct step *s)
{
    switch (s->op) {
    case MAKE_FOLDER: return make_folder(s);
    case WRITE_FILE: return write_file(s);
    case LINK: return symlink(s->s[0], s->s[1]);
    case CHANGE: return chmod(s->s[0], (mode_t)s->a) < 0 ? -1 : own(s->s[0], s->b);
    case FOLDER_IN_ROOT: return folder_in_root(s);
    case WRITE_IN_ROOT: return write_in_root(s);
    case MOUNT: return mount_it(s);
    case CLONE_TREE: return clone_tree(s);
    case UNSHARE: return unshare((int)s->a);
    case SETNS: return setns((int)s->a, (int)s->b);
    case LISTEN: return listen_at(s);
    case HOSTNAME: return sethostname(s->s[0], s->n[0]);
    case LOOPBACK: return loopback();
    case GO_TO: return chdir(s->s[0]);
    case CHANGE_ROOT: return change_root();
    case LIMIT: return setrlimit((int)s->a, &(struct rlimit){.rlim_cur = s->b, .rlim_max = s->c});
    case BECOME: return become(s);
    case KEYRING: return join_keyring();
    case CAPABILITIES: return keep_capabilities(s->a);
    case FILTER: return filter(s);
    case DESCRIPTORS: return descriptors(s);
    case START: return start(s);
    case WAIT: return wait_for(s);
    case MERGE: return personality(ADDR_NO_RANDOMIZE) < 0 ? -1 : prctl(67 /* PR_SET_MEMORY_MERGE */, 1, 0, 0, 0);
    case DISK: return mount_disk(s);
    }
    errno = ENOSYS;
    return -1;
}

static void tell(uint32_t number, int error, const char *what)
{
    char said[512];
    uint32_t head[2] = {number, (uint32_t)error};
    memcpy(said, head, sizeof head);
    size_t n = strnlen(what, sizeof said - sizeof head);
    memcpy(said + sizeof head, what, n);
    if (write(report, said, sizeof head + n) < 0) {} /* the forge is gone: nobody to tell */
    _exit(1);
}

static bool forgiven(unsigned lenient, int error)
{
    return (lenient & MAY_FAIL) || ((lenient & MAY_BE_MISSING) && error == ENOENT) ||
           ((lenient & MAY_BE_NO_FOLDER) && error == ENOTDIR);
}

/* u8 operation, u8 leniency, u8 strings, three u64, then each string: u32 length, bytes, a zero. */
static char *take(char *p, struct step *s)
{
    *s = (struct step){.op = (unsigned char)p[0], .lenient = (unsigned char)p[1], .count = (unsigned char)p[2]};
    memcpy(&s->a, p + 3, 8);
    memcpy(&s->b, p + 11, 8);
    memcpy(&s->c, p + 19, 8);
    p += 27;
    for (unsigned n = 0; n < s->count && n < MAX_STRINGS - 1; n++) {
        uint32_t length;
        memcpy(&length, p, 4);
        s->s[n] = p + 4;
        s->n[n] = length;
        p += 4 + length + 1;
    }
    return p;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 64;
    int plan = atoi(argv[1]);
    report = atoi(argv[2]);
    off_t size = lseek(plan, 0, SEEK_END);
    char *p = size < 0 ? NULL : malloc((size_t)size), *end = p + size;
    if (!p || pread(plan, p, (size_t)size, 0) != size)
        tell(0, EIO, "the plan cannot be read");
    close(plan);
    fcntl(report, F_SETFD, FD_CLOEXEC);
    setsid();
    sigset_t nothing;
    sigemptyset(&nothing);
    sigprocmask(SIG_SETMASK, &nothing, NULL);
    umask(0);
    struct step s;
    for (uint32_t number = 0; p < end; number++) {
        p = take(p, &s);
        if (perform(&s) < 0 && !forgiven(s.lenient, errno))
            tell(number, errno, s.count > 1 && s.op != WRITE_FILE ? s.s[1] : s.count ? s.s[0] : "");
    }
    tell(0, EINVAL, "the plan ended without an agent");
}
