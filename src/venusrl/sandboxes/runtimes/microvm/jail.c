/* Starts QEMU where it can reach nothing but what it was given.
 *
 * jail UID ROOT N TASKS... M SOURCE TARGET... -- PROGRAM ARGUMENTS...
 *
 * Owns: a session of its own, the control groups TASKS, empty network, IPC and host name namespaces, a mount namespace
 * whose root (built on the empty directory ROOT) holds the machine's programs and libraries read-only, four devices and
 * the M files SOURCE at /TARGET; then an unprivileged UID without a way back. Must not know: virtual machines.
 *
 * Guarantees: PROGRAM runs with all of it or not at all (exit 126, the failed step on stderr). Open descriptors pass.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static void fail(const char *what) {
    fprintf(stderr, "jail: %s: %s\n", what, strerror(errno));
    _exit(126);
}

static void enter_group(const char *tasks) {
    int file = open(tasks, O_WRONLY | O_CLOEXEC);
    if (file < 0 || write(file, "0", 1) != 1) fail(tasks);
    close(file);
}

static void bind(const char *source, const char *target, unsigned long flags) {
    if (mount(source, target, NULL, MS_BIND, NULL) < 0) fail(source);
    if (mount(NULL, target, NULL, MS_BIND | MS_REMOUNT | MS_NOSUID | flags, NULL) < 0) fail(target);
}

static void empty_file(const char *path) {
    int file = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (file < 0) fail(path);
    close(file);
}

/* /usr and what leads there: a directory is bound, a link is made again. */
static void programs(void) {
    const char *names[] = {"usr", "lib", "lib64", "bin"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char source[16], link[256];
        struct stat status;
        snprintf(source, sizeof source, "/%s", names[i]);
        if (lstat(source, &status) < 0) continue;
        ssize_t length = S_ISLNK(status.st_mode) ? readlink(source, link, sizeof link - 1) : 0;
        if (length > 0) {
            link[length] = 0;
            if (symlink(link, names[i]) < 0) fail(names[i]);
        } else {
            if (mkdir(names[i], 0755) < 0) fail(names[i]);
            bind(source, names[i], MS_RDONLY | MS_NODEV);
        }
    }
}

static void devices(void) {
    const char *names[] = {"null", "zero", "urandom", "kvm"};
    if (mkdir("dev", 0755) < 0) fail("dev");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char source[32], target[32];
        snprintf(source, sizeof source, "/dev/%s", names[i]);
        snprintf(target, sizeof target, "dev/%s", names[i]);
        if (access(source, F_OK) < 0) continue;
        empty_file(target);
        bind(source, target, MS_NOEXEC);
    }
}

int main(int argc, char **argv) {
    int at = 1;
    if (argc < 6) return 64;
    uid_t uid = (uid_t)strtoul(argv[at++], NULL, 10);
    const char *root = argv[at++];
    if (uid == 0) return 64;
    setsid();
    for (int groups = atoi(argv[at++]); groups > 0 && at < argc; groups--) enter_group(argv[at++]);
    if (unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS) < 0) fail("unshare");
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) fail("private mounts");
    if (mount("jail", root, "tmpfs", MS_NOSUID, "size=64k,nr_inodes=64,mode=755") < 0) fail(root);
    if (chdir(root) < 0) fail(root);
    programs();
    devices();
    for (int files = atoi(argv[at++]); files > 0 && at + 1 < argc; files--, at += 2) {
        empty_file(argv[at + 1]);
        bind(argv[at], argv[at + 1], MS_NODEV | MS_NOEXEC | (argv[at + 1][0] == 'w' ? 0 : MS_RDONLY));
    }
    if (at >= argc - 1 || strcmp(argv[at++], "--")) return 64;
    if (syscall(SYS_pivot_root, ".", ".") < 0 || umount2(".", MNT_DETACH) < 0 || chdir("/") < 0) fail("root");
    if (mount(NULL, "/", NULL, MS_REMOUNT | MS_RDONLY | MS_NOSUID, NULL) < 0) fail("read-only root");
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    if (setgroups(0, NULL) < 0 || setresgid(uid, uid, uid) < 0 || setresuid(uid, uid, uid) < 0) fail("uid");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0) fail("no new privileges");
    char *environment[] = {"MALLOC_ARENA_MAX=1", "LC_ALL=C", NULL};
    execve(argv[at], argv + at, environment);
    fail(argv[at]);
}
