/* The first program in a virtual machine: from the kernel's hands to the agent's.
 *
 * Owns: loading the few modules, mounting the root disk and what a Linux program expects, the network's addresses, and
 * becoming the agent (PID 1). Must not know: templates, the agent's protocol.
 *
 * Guarantees: it ends in the agent, or the machine ends with a line on the console that says which step failed.
 * With "venus.probe" on the kernel's command line it only says that the machine boots, and ends it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <arpa/inet.h>
#include <net/if.h>
#include <net/route.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>
#include <dirent.h>

#define PORT_NAME "venus.agent"

static void say(const char *format, ...) {
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    int console = open("/dev/console", O_WRONLY | O_NOCTTY);
    if (console < 0) return;
    if (length > (int)sizeof line - 1) length = sizeof line - 1;
    if (write(console, line, length) < 0) { /* nobody left to tell */ }
    close(console);
}

static void end(void) {
    sync();
    reboot(RB_AUTOBOOT); /* QEMU runs with -no-reboot: it exits */
    for (;;) pause();
}

static void fail(const char *what) {
    say("venus-init: %s: %s\n", what, strerror(errno));
    end();
}

static void need_mount(const char *source, const char *target, const char *kind, unsigned long flags, const char *data) {
    mkdir(target, 0755);
    if (mount(source, target, kind, flags, data) < 0) fail(target);
}

static int read_text(const char *path, char *buffer, size_t size) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    ssize_t length = read(file, buffer, size - 1);
    close(file);
    if (length < 0) return -1;
    buffer[length] = 0;
    return (int)length;
}

/* /modules/order lists the modules' files, each after those it needs. */
static void load_modules(void) {
    static char order[8192];
    if (read_text("/modules/order", order, sizeof order) < 0) fail("/modules/order");
    for (char *name = strtok(order, "\n"); name; name = strtok(NULL, "\n")) {
        char path[256];
        snprintf(path, sizeof path, "/modules/%s", name);
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0) fail(path);
        if (syscall(SYS_finit_module, file, "", 0) < 0 && errno != EEXIST) fail(path);
        close(file);
    }
}

static void wait_for(const char *path) {
    for (int tries = 0; access(path, F_OK) < 0; tries++) {
        if (tries == 3000) fail(path);
        usleep(10000);
    }
}

static void raise_loopback(void) {
    int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    if (sock < 0 || ioctl(sock, SIOCSIFFLAGS, &request) < 0) fail("loopback");
    close(sock);
}

static struct sockaddr_in address(const char *text) {
    struct sockaddr_in made = {.sin_family = AF_INET};
    inet_pton(AF_INET, text, &made.sin_addr);
    return made;
}

/* As machine.py's network card has it. */
static void raise_network(void) {
    struct ifreq request = {.ifr_name = "eth0"};
    struct sockaddr_in own = address("10.0.2.15"), mask = address("255.255.255.0"), gateway = address("10.0.2.2");
    int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (sock < 0) fail("network");
    if (ioctl(sock, SIOCGIFFLAGS, &request) == 0) { /* else there is no card */
        memcpy(&request.ifr_addr, &own, sizeof own);
        if (ioctl(sock, SIOCSIFADDR, &request) < 0) fail("the network's address");
        memcpy(&request.ifr_netmask, &mask, sizeof mask);
        if (ioctl(sock, SIOCSIFNETMASK, &request) < 0) fail("the network's mask");
        request.ifr_flags = IFF_UP | IFF_RUNNING;
        if (ioctl(sock, SIOCSIFFLAGS, &request) < 0) fail("the network card");
        struct rtentry route = {.rt_flags = RTF_UP | RTF_GATEWAY};
        memcpy(&route.rt_gateway, &gateway, sizeof gateway);
        route.rt_dst.sa_family = route.rt_genmask.sa_family = AF_INET;
        if (ioctl(sock, SIOCADDRT, &route) < 0) fail("the network's route");
    }
    close(sock);
}

/* What udev would do: /dev/virtio-ports/NAME for the agent's port. */
static void name_port(void) {
    for (int tries = 0; tries < 3000; tries++) {
        DIR *ports = opendir("/sys/class/virtio-ports");
        struct dirent *entry;
        while (ports && (entry = readdir(ports))) {
            char path[300], name[64];
            snprintf(path, sizeof path, "/sys/class/virtio-ports/%s/name", entry->d_name);
            if (entry->d_name[0] == '.' || read_text(path, name, sizeof name) < 0) continue;
            name[strcspn(name, "\n")] = 0;
            if (strcmp(name, PORT_NAME)) continue;
            char target[300];
            snprintf(target, sizeof target, "../%s", entry->d_name);
            mkdir("/dev/virtio-ports", 0755);
            if (symlink(target, "/dev/virtio-ports/" PORT_NAME) < 0) fail("virtio-ports");
            closedir(ports);
            return;
        }
        if (ports) closedir(ports);
        usleep(10000);
    }
    errno = ENODEV;
    fail("the agent's port");
}

static void remove_tree(const char *path) {
    DIR *directory = opendir(path);
    struct dirent *entry;
    while (directory && (entry = readdir(directory))) {
        if (entry->d_name[0] == '.') continue;
        char below[512];
        snprintf(below, sizeof below, "%s/%s", path, entry->d_name);
        unlink(below);
    }
    if (directory) closedir(directory);
    rmdir(path);
}

static void enter_root(void) {
    const char *moved[] = {"/dev", "/proc", "/sys"};
    need_mount("/dev/vda", "/newroot", "ext4", MS_NOATIME, "nobarrier");
    for (size_t i = 0; i < sizeof moved / sizeof *moved; i++) {
        char target[64];
        snprintf(target, sizeof target, "/newroot%s", moved[i]);
        mkdir(target, 0755);
        if (mount(moved[i], target, NULL, MS_MOVE, NULL) < 0) fail(target);
    }
    remove_tree("/modules");
    unlink("/init");
    unlink("/agent"); /* its open descriptor keeps it */
    if (chdir("/newroot") < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 || chdir("/") < 0)
        fail("root");
}

static void furnish(void) {
    need_mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "gid=5,mode=620,ptmxmode=666");
    need_mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777");
    need_mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755");
    mkdir("/sys/fs/cgroup", 0755);
    mount("cgroup2", "/sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL); /* a convenience */
    mkdir("/tmp", 01777);
    chmod("/tmp", 01777);
    if (symlink("/proc/self/fd", "/dev/fd") < 0 && errno != EEXIST) fail("/dev/fd");
    if (symlink("/proc/self/fd/0", "/dev/stdin") < 0 && errno != EEXIST) fail("/dev/stdin");
    if (symlink("/proc/self/fd/1", "/dev/stdout") < 0 && errno != EEXIST) fail("/dev/stdout");
    if (symlink("/proc/self/fd/2", "/dev/stderr") < 0 && errno != EEXIST) fail("/dev/stderr");
    raise_loopback();
    raise_network();
}

int main(void) {
    static char line[4096];
    umask(0);
    need_mount("devtmpfs", "/dev", "devtmpfs", MS_NOSUID, "mode=755");
    need_mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    need_mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    if (read_text("/proc/cmdline", line, sizeof line) < 0) fail("/proc/cmdline");
    if (strstr(line, "venus.probe")) {
        say("venus-init: boots\n");
        end();
    }
    load_modules();
    int agent = open("/agent", O_RDONLY); /* not close-on-exec: fexecve of a script would need it, a program does not care */
    if (agent < 0) fail("/agent");
    wait_for("/dev/vda");
    enter_root();
    furnish();
    name_port();
    umask(022);
    int null = open("/dev/null", O_RDWR);
    dup2(null, 0);
    int console = open("/dev/console", O_WRONLY | O_NOCTTY);
    dup2(console < 0 ? null : console, 1);
    dup2(1, 2);
    if (console > 2) close(console);
    if (null > 2) close(null);
    fcntl(agent, F_SETFD, FD_CLOEXEC);
    char *arguments[] = {"agent", "--port", "/dev/virtio-ports/" PORT_NAME, NULL};
    char *environment[] = {"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", NULL};
    syscall(SYS_execveat, agent, "", arguments, environment, AT_EMPTY_PATH);
    fail("the agent");
}
