"""The program inside every persistent sandbox: its protocol, its client, its source in C.

Owns: ``agent.h`` and the C files (one static program of about 100 KiB, 200 KiB private when it runs), ``build.py``
(compiles it once), ``wire.py`` (the frames), ``link.py`` (streams over a connection that may break), ``follow.py``
(processes and who follows them), ``client.py`` (``AgentClient``, the host's end).

Must not know: E2B, HTTP, how a sandbox is isolated.

Guarantees: those of ``api.py``. A stream of either side is kept until the other has taken it, so that a connection may
be cut anywhere; a host's service that was started anew gets, with its first ``attach``, what the former one had not
taken of a process's output (kept for a minute, then dropped so that the process goes on); the last 256 exits are
remembered for ten minutes.

How a runtime starts it. The program comes from ``await build.program()`` (a path on the host; bind or copy it in):

* namespace: ``agent --fd N``, as PID 1, N an inherited, bound and listening Unix stream socket
  without close-on-exec. Its path stays outside the sandbox; the host connects with ``AgentClient(client.unix(path))``.
  No environment is needed. It must be root of its user namespace, with CAP_SETUID, CAP_SETGID, CAP_KILL and, so that
  root inside is root, CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID; a new devpts at /dev/pts, /proc, /dev/ptmx.
  CAP_SYS_ADMIN only if ``Settings.hostname`` is to be set from inside.
* gVisor: ``agent --unix PATH``, as PID 1: it makes the socket itself, in a directory of the host's that is mounted in.
* virtual machine: ``agent --port /dev/virtio-ports/NAME``, as root, from init (or as init). It waits for the device.
  On the host QEMU's chardev is a Unix socket (``server=on,wait=off``): ``AgentClient(client.unix(path))`` as well.

Any number of connections may follow each other; a newer one replaces the older. One ``AgentClient`` is one session:
it reconnects by itself and loses nothing. After a snapshot was restored, or elsewhere, make a new one.
"""
