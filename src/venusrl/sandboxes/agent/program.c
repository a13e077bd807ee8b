/* What a process is made of, and how a forked child becomes its program. See agent.h. */
#include "agent.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <unistd.h>

static const char default_path[] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

void strings_free(char **s)
{
    for (size_t i = 0; s && s[i]; i++)
        free(s[i]);
    free(s);
}

char **take_strings(struct reader *r)
{
    uint32_t n = take_u32(r);
    if (n > r->n / 4) {
        r->bad = true;
        n = 0;
    }
    char **s = must(calloc(n + 1, sizeof *s));
    for (uint32_t i = 0; i < n; i++)
        s[i] = take_str(r);
    return s;
}

static char *joined(const char *name, const char *value)
{
    char *s = must(malloc(strlen(name) + strlen(value) + 2));
    return strcat(strcat(strcpy(s, name), "="), value);
}

/* Later ones win over earlier ones of the same name. */
char **environment(const struct user *u, char **more)
{
    char *base[] = {joined("PATH", default_path), joined("HOME", u->home), joined("USER", u->name),
                    joined("LOGNAME", u->name), NULL};
    char **layers[] = {base, default_env, more};
    size_t count = 0, n = 0;
    for (int l = 0; l < 3; l++)
        for (size_t i = 0; layers[l] && layers[l][i]; i++)
            count++;
    char **env = must(calloc(count + 1, sizeof *env));
    for (int l = 0; l < 3; l++)
        for (size_t i = 0; layers[l] && layers[l][i]; i++) {
            size_t name = strcspn(layers[l][i], "="), at = 0;
            while (at < n && (strncmp(env[at], layers[l][i], name) != 0 || env[at][name] != '='))
                at++;
            free(env[at]);
            env[at] = must(strdup(layers[l][i]));
            n += at == n;
        }
    for (int i = 0; base[i]; i++)
        free(base[i]);
    return env;
}

/* -- in the child */

static _Noreturn void trouble(int fd, enum code code, const char *what, const char *name, int error)
{
    unsigned char message[400];
    message[0] = (unsigned char)code;
    int n = snprintf((char *)message + 1, sizeof message - 1, "%s %.200s%s%s", what, name, error ? ": " : "",
                     error ? strerror(error) : "");
    if (write(fd, message, (size_t)(n < 398 ? n : 398) + 1)) {}
    _exit(127);
}

static enum code code_of_exec(int error)
{
    switch (error) {
    case ENOENT:
    case ENOTDIR: return C_NOT_FOUND;
    case EACCES:
    case EPERM: return C_PERMISSION;
    case EAGAIN:
    case ENOMEM: return C_EXHAUSTED;
    default: return C_INVALID;
    }
}

static void try_exec(const char *path, char **args, char **env)
{
    execve(path, args, env);
    if (errno != ENOEXEC)
        return;
    size_t n = 0;
    while (args[n])
        n++;
    char **again = must(calloc(n + 2, sizeof *again));
    again[0] = (char *)"/bin/sh";
    again[1] = (char *)path;
    for (size_t i = 1; i < n; i++)
        again[i + 1] = args[i];
    execve("/bin/sh", again, env);
}

static void exec_program(struct plan *plan)
{
    const char *name = plan->args[0], *path = default_path;
    if (strchr(name, '/')) {
        try_exec(name, plan->args, plan->env);
        return;
    }
    for (size_t i = 0; plan->env[i]; i++)
        if (strncmp(plan->env[i], "PATH=", 5) == 0)
            path = plan->env[i] + 5;
    int found = ENOENT;
    while (*name) {
        size_t n = strcspn(path, ":");
        char full[4096];
        if (snprintf(full, sizeof full, "%.*s%s%s", (int)n, path, n ? "/" : "./", name) < (int)sizeof full)
            try_exec(full, plan->args, plan->env);
        if (errno != ENOENT && errno != ENOTDIR)
            found = errno;
        if (!path[n])
            break;
        path += n + 1;
    }
    errno = found;
}

static void go_to(struct plan *plan)
{
    const char *cwd = plan->cwd;
    bool home = chdir(plan->user.home) == 0;
    if (*cwd == 0) {
        if (!home && chdir("/") < 0)
            trouble(plan->trouble, C_INVALID, "cwd", "/", errno);
        return;
    }
    if (cwd[0] == '~' && (cwd[1] == 0 || cwd[1] == '/')) {
        cwd += cwd[1] ? 2 : 1;
        while (*cwd == '/')
            cwd++;
    }
    if ((*cwd != '/' && !home) || (*cwd && chdir(cwd) < 0))
        trouble(plan->trouble, C_INVALID, "cwd", plan->cwd, errno);
}

_Noreturn void become_program(struct plan *plan)
{
    sigset_t none;
    setsid();
    if (plan->pty)
        ioctl(plan->in, TIOCSCTTY, 0);
    dup2(plan->in, 0);
    dup2(plan->out, 1);
    dup2(plan->err, 2);
    for (int n = 1; n < 65; n++)
        signal(n, SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    int score = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC); /* rather a command than its sandbox */
    if (score >= 0) {
        if (write(score, "500", 3)) {}
        close(score);
    }
    int error = user_become(&plan->user);
    if (error)
        trouble(plan->trouble, C_PERMISSION, "user", plan->user.name, error);
    go_to(plan);
    exec_program(plan);
    trouble(plan->trouble, code_of_exec(errno), "program", plan->args[0], errno);
}
