"""`python -m MODULE` without waiting for imports: a process that has imported everything forks for each.

python forks.py SOCKET                       the process that forks
python forks.py SOCKET -m MODULE WORDS...    has the input, the output and the exit code of `python -m MODULE
                                             WORDS...`; killed, it takes the other end with it
"""

import json
import os
import select
import signal
import socket
import sys


def serve(path: str) -> None:
    import temper_lab.cli.compare
    import temper_lab.study.run
    import temper_lab.train.trainer  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                attention_branch(connection)
                os._exit(0)
            connection.close()


def attention_branch(connection: socket.socket) -> None:
    """Runs what was asked for in a process of its own, and reports its end."""
    message, fds, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    words, folder, environment = json.loads(message)
    pid = os.fork()
    if pid == 0:
        connection.close()
        os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        run(words)
    for fd in fds:
        os.close(fd)
    ended = os.pidfd_open(pid)
    while True:
        ready, _, _ = select.select([ended, connection], [], [])
        if ended in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            connection.sendall(json.dumps(code).encode())
            return
        # A number is a signal to pass on; the end of the connection is the end of who asked.
        number = connection.recv(1)
        os.kill(pid, number[0] if number else signal.SIGKILL)
        if not number:
            return


def run(words: list[str]) -> None:
    from runpy import run_module

    code = 1
    try:
        sys.argv = ["python", *words[2:]]
        run_module(words[1], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ask(path: str, words: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        message = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(connection, [message], [0, 1, 2])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, frame: connection.sendall(bytes([received])))
        # Nobody else may hold the input: its end means something.
        os.close(0)
        code = json.loads(connection.recv(100))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(ask(sys.argv[1], sys.argv[2:]) if len(sys.argv) > 2 else serve(sys.argv[1]))
