/* Who is who inside: /etc/passwd and /etc/group, read by hand because the sandbox may have written anything there. */
#include "agent.h"

#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILE_LIMIT = 1 << 20 };

char *default_user = "user";
char **default_env;

/* The whole file with a zero at its end, to be freed; NULL when it is not there or not a plain file. */
static char *slurp(const char *path)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    if (fd < 0)
        return NULL;
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size > FILE_LIMIT) {
        close(fd);
        return NULL;
    }
    size_t cap = (size_t)st.st_size + 1, n = 0;
    char *text = must(malloc(cap));
    for (ssize_t got; n < cap - 1 && (got = read(fd, text + n, cap - 1 - n)) > 0;)
        n += (size_t)got;
    close(fd);
    text[n] = 0;
    return text;
}

/* Splits a line at colons into at most `want` fields; the next line, or NULL after the last. */
static char *split(char *line, char **fields, int want, int *count)
{
    char *next = strchr(line, '\n');
    if (next)
        *next++ = 0;
    *count = 0;
    while (line && *count < want) {
        fields[(*count)++] = line;
        line = strchr(line, ':');
        if (line)
            *line++ = 0;
    }
    return next;
}

static bool number(const char *s, unsigned *value)
{
    char *end;
    errno = 0;
    unsigned long v = strtoul(s, &end, 10);
    if (errno || end == s || *end || *s < '0' || *s > '9' || v > 0xfffffffeUL)
        return false;
    *value = (unsigned)v;
    return true;
}

static void copy(char *to, size_t n, const char *from) { snprintf(to, n, "%s", from); }

static void find_groups(struct user *u)
{
    char *text = slurp("/etc/group"), *fields[4];
    int count;
    unsigned gid;
    u->groups[0] = u->gid;
    u->group_count = 1;
    for (char *line = text; line; ) {
        line = split(line, fields, 4, &count);
        if (count < 4 || !number(fields[2], &gid) || gid == u->gid || u->group_count > 64)
            continue;
        for (char *member = strtok(fields[3], ","); member; member = strtok(NULL, ","))
            if (strcmp(member, u->name) == 0) {
                u->groups[u->group_count++] = gid;
                break;
            }
    }
    free(text);
}

bool user_find(const char *name, struct user *u)
{
    char *text = slurp("/etc/passwd"), *fields[7];
    unsigned wanted = 0, uid, gid;
    int count;
    if (!*name)
        name = default_user;
    bool numeric = number(name, &wanted), found = false;
    for (char *line = text; line && !found;) {
        line = split(line, fields, 7, &count);
        if (count < 6 || !number(fields[2], &uid) || !number(fields[3], &gid))
            continue;
        if (strcmp(fields[0], name) != 0 && !(numeric && uid == wanted))
            continue;
        copy(u->name, sizeof u->name, fields[0]);
        copy(u->home, sizeof u->home, *fields[5] == '/' ? fields[5] : "/");
        u->uid = uid;
        u->gid = gid;
        found = true;
    }
    free(text);
    bool root = strcmp(name, "root") == 0;
    if (!found && (root || numeric)) { /* as container engines do without an entry */
        copy(u->name, sizeof u->name, name);
        copy(u->home, sizeof u->home, root ? "/root" : "/");
        u->uid = root ? 0 : wanted;
        u->gid = 0;
        found = true;
    }
    if (found)
        find_groups(u);
    return found;
}

const char *no_user(const char *name)
{
    static char words[160];
    snprintf(words, sizeof words, "invalid username: '%.100s'", *name ? name : default_user);
    return words;
}

int user_become(const struct user *u)
{
    /* In a map of one id there is nobody else to become, and groups cannot be set. */
    bool already = geteuid() == u->uid && getuid() == u->uid;
    if (setgroups((size_t)u->group_count, u->groups) < 0 && !already)
        return errno;
    if (setresgid(u->gid, u->gid, u->gid) < 0 && !already)
        return errno;
    return setresuid(u->uid, u->uid, u->uid) < 0 ? errno : 0;
}

static void name_of(const char *path, unsigned id, char *to, size_t n)
{
    char *text = slurp(path), *fields[3];
    unsigned each;
    int count;
    snprintf(to, n, "%u", id);
    for (char *line = text; line;) {
        line = split(line, fields, 3, &count);
        if (count == 3) { /* the rest of the line, if any, is cut off by split */
            fields[2][strcspn(fields[2], ":")] = 0;
            if (number(fields[2], &each) && each == id) {
                copy(to, n, fields[0]);
                break;
            }
        }
    }
    free(text);
}

/* Listings ask for the same few again and again. */
struct known {
    unsigned id;
    bool set;
    char name[128];
};

static void cached(struct known *cache, const char *path, unsigned id, char *to, size_t n)
{
    struct known *k = &cache[id % 8];
    if (!k->set || k->id != id) {
        name_of(path, id, k->name, sizeof k->name);
        k->id = id;
        k->set = true;
    }
    copy(to, n, k->name);
}

void user_name(uid_t uid, char *to, size_t n)
{
    static struct known cache[8]; /* of a child that does one thing and ends */
    cached(cache, "/etc/passwd", uid, to, n);
}

void group_name(gid_t gid, char *to, size_t n)
{
    static struct known cache[8];
    cached(cache, "/etc/group", gid, to, n);
}
