"""Logs of failed starts, written by us: an excerpt a failure, and whole logs in which a cause stands among its consequences.

They lie in fixtures/failures. Logs recorded from the real engines lie in fixtures/startup.
"""
from pathlib import Path

STAMP = "[2026-01-04 01:02:{:02d}{}] ".format
READY = STAMP(20, "") + "The server is fired up and ready to roll!\n"


def read(name):
    "Logs of a file, by name: what stands beside the name, and the log."
    text = (Path(__file__).parent / "fixtures" / "failures" / name).read_bytes().decode()
    parts = (part.partition("\n") for part in text.split("\n=== ")[1:])
    return {key: (second, log + "\n") for head, _, log in parts for key, second in [head.split(" | ")]}


EXCERPTS = read("excerpts.txt")  # code of the failure -> (where its text was read, the excerpt)
MIXTURES = read("whole.txt")     # name -> (code of the cause, the log)


def begun(ranks=8):
    "How SGLang begins to load."
    args = STAMP(0, "") + "server_args=ServerArgs(model_path='/models/t', log_level='error', speculative_algorithm='EAGLE3')\n"
    return args + "".join(f"{STAMP(1, f' TP{rank}')}Load weight begin. avail mem=93.10 GB\n" for rank in range(ranks))


def vllm_begun():
    "How vLLM begins to load."
    return ("(APIServer pid=1) INFO 01-04 01:02:03 [api_utils.py:286] non-default args: {'model': '/models/t'}\n"
            "(EngineCore pid=7) INFO 01-04 01:02:03 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='/models/t'\n")


def raised(error, rank):
    "A scheduler of SGLang's that ends with an exception."
    frame = '  File "/env/sglang/srt/managers/scheduler.py", line 300, in run_scheduler_process\n    scheduler = Scheduler('
    return f"{STAMP(3, rank)}Scheduler hit an exception: Traceback (most recent call last):\n{frame}\n{error}\n\n"


def ended(code=-3):
    "How SGLang's main process ends after a child failed."
    return f"{STAMP(50, '')}Received sigquit from a child process. It usually means the child failed.\n{STAMP(51, '')}Exit code: {code}\n"
