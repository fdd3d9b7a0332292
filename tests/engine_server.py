"Real servers of both engines on this machine's CPU, for the time of a block."
import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request

from k2eagle import engines, targets

QUICK = {"OMP_WAIT_POLICY": "PASSIVE", "K2EAGLE_HEADLESS": "1"}
COMMANDS = {"vllm": ["-m", "vllm.entrypoints.openai.api_server", "--model", "{target}", "--enforce-eager", "--max-model-len", "512"],
            "sglang": ["-m", "sglang.launch_server", "--model-path", "{target}", "--device", "cpu", "--disable-cuda-graph",
                       "--disable-overlap-schedule", "--skip-server-warmup", "--max-total-tokens", "4096", "--mem-fraction-static", "0.5"]}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(engine, folder, *arguments):
    "A server of an engine with these arguments, what it prints in server.log; gives its URL."
    port, log = free_port(), folder / "server.log"
    command = [word.format(target=targets.default_target()) for word in COMMANDS[engine]]
    with open(log, "wb") as words:
        process = subprocess.Popen([engines.python(engine), *command, "--host", "127.0.0.1", "--port", str(port), *arguments], stdout=words,
                                   stderr=subprocess.STDOUT, env={**os.environ, **engines.surroundings(engine), **QUICK}, start_new_session=True)
    try:
        until = time.monotonic() + 300
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
