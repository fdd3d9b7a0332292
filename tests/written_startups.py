"""Starts of many versions, written from the formats that their source has: each line with the stage the server is in after it.

The formats were read in sglang 0.4.6.post5, 0.4.10.post2, 0.5.5, 0.5.8, 0.5.12, 0.5.14, 0.5.18, 0.5.23 and vllm 0.9.2, 0.11.0, 0.13.0, 0.16.0, 0.18.1, 0.22.1, 0.28.0, 0.32.0.
"""
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from packaging.version import Version

SGLANG = ("0.4.6", "0.4.10", "0.5.5", "0.5.8", "0.5.12", "0.5.14", "0.5.18", "0.5.23")
VLLM = ("0.9.2", "0.11.0", "0.13.0", "0.16.0", "0.18.1", "0.22.1", "0.28.0", "0.32.0")


@dataclass
class Written:
    "A start as it is written, line by line."
    now: datetime = datetime(2026, 11, 28, 23, 58, 50)
    rows: list = field(default_factory=list)  # (stage after it, seconds since the first, text)
    begun: datetime = datetime(2026, 11, 28, 23, 58, 50)

    def add(self, stage: str, text: str, seconds: float = 0.0):
        self.now += timedelta(seconds=seconds)
        self.rows.append((stage, (self.now - self.begun).total_seconds(), text))

    @property
    def text(self) -> str:
        return "\n".join(row[2] for row in self.rows) + "\n"


def bar(name: str, done: int, total: int, seconds: float, shards: bool) -> str:
    "A state of a progress bar."
    percent, left = 100 * done // total, seconds / done * (total - done) if done else 0
    clock = "{:02d}:{:02d}<{}".format(*divmod(int(seconds), 60), "{:02d}:{:02d}".format(*divmod(int(left), 60)) if done else "?")
    middle = f"{percent:3d}% Completed | " if shards else f"{percent:3d}%|{'█' * (percent // 10):10}| "
    return f"{name}: {middle}{done}/{total} [{clock}, {seconds / max(done, 1):5.2f}s/it]"


def sglang(version: str, drafter: bool = False, ranks: int = 1, graphs: bool = True, shards: int = 6, per_shard_s: float = 3.0) -> Written:
    "A start of SGLang."
    at, made = Version(version), Written()
    names = [f" TP{rank}" for rank in range(ranks)] if ranks > 1 else [""]
    late = at >= Version("0.5.14")

    def say(stage, text, seconds=0.0, rank="", level=""):
        made.now += timedelta(seconds=seconds)
        made.add(stage, f"[{made.now:%Y-%m-%d %H:%M:%S}{rank}] {level}{text}")

    def all_say(before, after, text, seconds=0.0):
        for place, rank in enumerate(names):
            say(after if place >= 0 else before, text, seconds / len(names), rank)

    arguments = f"model_path='/models/k2', speculative_algorithm={'EAGLE3' if drafter else None!r}, disable_cuda_graph={not graphs}"
    if at >= Version("0.5.23"):
        arguments = "{" + f"'model_path': '/models/k2'{', ' + repr('speculative_algorithm') + ': ' + repr('EAGLE3') if drafter else ''}"\
            f"{'' if graphs else ', ' + repr('disable_cuda_graph') + ': True'}" + "}"
    elif late:
        arguments = f"ServerArgs({arguments}, cuda_graph_config=None)"
    else:
        arguments = f"ServerArgs({arguments})"
    made.add("start", "/usr/lib/python3/site-packages/sglang/srt/layers/quantization/awq.py:53: UserWarning: Only CUDA, HIP and XPU support AWQ currently.", 4)
    made.add("start", "  warnings.warn(f\"Only CUDA, HIP and XPU support AWQ currently.\")")
    say("processes", "Fail to set RLIMIT_NOFILE: current limit exceeds maximum limit", 3)
    say("processes", f"server_args={arguments}")
    say("processes", "Using default HuggingFace chat template with detected content format: string", 2)
    word = "parallel" if at >= Version("0.5.23") else "torch distributed"
    all_say("processes", "distributed", f"Init {word} begin.", 20)
    all_say("distributed", "weights", f"Init {word} ends.{' elapsed=1.20 s,' if at >= Version('0.5.12') else ''} mem usage=0.40 GB", 2)
    loading = "Multi-thread loading shards" if late else "Loading safetensors checkpoint shards"

    def load(stage, after, kind, count):
        all_say(stage, stage, "Load weight begin. avail mem=138.50 GB")
        for done in range(count + 1):
            made.now += timedelta(seconds=per_shard_s)
            made.add(stage, bar(loading, done, count, done * per_shard_s, True))
        elapsed = " elapsed=18.10 s," if at >= Version("0.5.12") else ""
        all_say(stage, after, f"Load weight end.{elapsed} type={kind}, dtype=torch.bfloat16, avail mem=50.10 GB, mem usage=88.40 GB.", 1)

    def pool(stage):
        kind = " dtype: torch.bfloat16," if late else ""
        all_say("kv cache", "kv cache", f"KV Cache is allocated.{kind} #tokens: 150000, KV size: 30.10 GB", 1)
        all_say("kv cache", stage, "Memory pool end. avail mem=18.20 GB")

    def capture(stage, name, count):
        upper = "CUDA graph" if late else "cuda graph"
        tail = "backend=full, num_tokens_per_req=4, avail mem=17.90 GB" if late else "This can take up to several minutes. avail mem=17.90 GB"
        all_say(stage, stage, f"Capture {name}{upper} begin. {tail}", 1)
        if stage == "graphs" and not late:
            say(stage, f"Capture cuda graph bs {list(range(1, count + 1))}", 0, names[0])
        for done in range(count + 1):
            made.now += timedelta(seconds=1.5)
            made.add(stage, bar(f"Capturing batches (bs={count - done + 1} avail_mem=17.20 GB)", done, count, done * 1.5, False))
        took = "elapsed=9.10 s, mem usage" if late else "Time elapsed: 9.10 s. mem usage"
        all_say(stage, stage, f"Capture {name}{upper} end. {took}=0.80 GB. avail mem=17.10 GB.", 1)

    def draft_capture():
        for name in (("draft decode ", "draft extend ") if late else ("draft ", "draft extend ") if at >= Version("0.4.10") else ("draft ",)):
            capture("draft graphs", name, 3)

    after_pool = "graphs" if graphs else "kv cache"
    load("weights", "draft weights" if drafter and late else "kv cache", "KimiK25ForConditionalGeneration", shards)
    if drafter and late:
        load("draft weights", "kv cache", "LlamaForCausalLMEagle3", 1)
    pool(after_pool)
    if drafter and late:
        pool(after_pool)
    if graphs:
        capture("graphs", "target verify " if late and drafter else "target decode " if late else "", 6)
    if drafter and not late:
        load("draft weights", "kv cache", "LlamaForCausalLMEagle3", 1)
        pool("draft graphs" if graphs else "kv cache")
    if drafter and graphs:
        draft_capture()
    say("server", "max_total_num_tokens=150000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=48, context_len=131072, "
        "available_gpu_mem=16.90 GB", 1, names[0])
    say("server", "Started server process [4711]", 1, level="INFO:     ")
    say("server", "Waiting for application startup.", level="INFO:     ")
    say("server", "Application startup complete.", level="INFO:     ")
    say("warm-up", "Uvicorn running on http://0.0.0.0:30000 (Press CTRL+C to quit)", level="INFO:     ")
    say("warm-up", '127.0.0.1:51000 - "GET /get_model_info HTTP/1.1" 200 OK', 1, level="INFO:     ")
    say("warm-up", "Prefill batch. #new-seq: 1, #new-token: 7, #cached-token: 0, token usage: 0.00", 1, names[0])
    say("ready", "The server is fired up and ready to roll!", 4)
    say("ready", "Prefill batch. #new-seq: 1, #new-token: 70, #cached-token: 0, token usage: 0.00", 40, names[0])
    say("ready", "Decode batch. #running-req: 1, #token: 110, token usage: 0.00, accept len: 2.85, gen throughput (token/s): 81.12, #queue-req: 0", 1, names[0])
    return made


def vllm(version: str, drafter: bool = False, ranks: int = 1, graphs: bool = True, shards: int = 6, per_shard_s: float = 3.0) -> Written:
    "A start of vLLM."
    at, made = Version(version), Written()
    named = at >= Version("0.10")
    main = "(APIServer pid=10) " if named else ""
    core = "(EngineCore pid=20) " if at >= Version("0.28") else "(EngineCore_DP0 pid=20) " if named else ""

    def worker(rank):
        if ranks == 1:
            return "(Worker pid=30) " if at >= Version("0.32") else core
        return f"(Worker_TP{rank} pid={30 + rank}) " if named else f"(VllmWorker rank={rank} pid={30 + rank}) "

    def say(stage, who, where, text, seconds=0.0, level="INFO"):
        made.now += timedelta(seconds=seconds)
        made.add(stage, f"{who}{level} {made.now:%m-%d %H:%M:%S} [{where}] {text}")

    made.add("start", "Triton is installed, but doesn't include CPU backend. Disabling Triton.", 5)
    if at < Version("0.32"):
        say("processes", main, "api_server.py:1395", f"vLLM API server version {version}", 1)
    draft = "{'method': 'eagle3', 'model': '/models/drafter', 'num_speculative_tokens': 3}"
    say("processes", main, "utils.py:253", f"non-default args: {{'model': '/models/k2'{', ' + repr('enforce_eager') + ': True' if not graphs else ''}"
        f"{', ' + repr('speculative_config') + ': ' + draft if drafter else ''}}}", 1)
    say("processes", main, "config.py:1472", "Using max model len 131072", 1)
    say("processes", core, "core.py:133", f"Initializing a V1 LLM engine (v{version}) with config: model='/models/k2', speculative_config="
        f"{'SpeculativeConfig(method=eagle3)' if drafter else None}, enforce_eager={not graphs}", 15)
    for rank in range(ranks):
        say("distributed", worker(rank) if at < Version("0.32") else f"(Worker pid={30 + rank}) ", "parallel_state.py:1200",
            f"world_size={ranks} rank={rank} local_rank={rank} distributed_init_method=tcp://127.0.0.1:50000 backend=nccl", 8 / ranks)
    say("distributed", worker(0), "parallel_state.py:1394", f"rank 0 in world size {ranks} is assigned as DP rank 0, PP rank 0, TP rank 0, EP rank 0", 2)
    for rank in range(ranks):
        say("weights", worker(rank), "gpu_model_runner.py:1770", "Starting to load model /models/k2...", 1)
    for done in range(shards + 1):
        made.now += timedelta(seconds=per_shard_s)
        made.add("weights", (core if named and at < Version("0.28") else "") + bar("Loading safetensors checkpoint shards", done, shards, done * per_shard_s, True))
    say("weights", worker(0), "default_loader.py:273", "Loading weights took 18.10 seconds")
    if drafter:
        if at < Version("0.28"):
            say("draft weights", worker(0), "gpu_model_runner.py:1794", "Loading drafter model...", 1)
        for done in (0, 1):
            made.now += timedelta(seconds=1)
            made.add("draft weights", bar("Loading safetensors checkpoint shards", done, 1, done, True))
        say("draft weights", worker(0), "default_loader.py:273", "Loading weights took 1.00 seconds")
    memory = " memory" if at >= Version("0.13") else ""
    say("kv cache", worker(0), "gpu_model_runner.py:1801", f"Model loading took 88.4000 GiB{memory} and 19.500000 seconds", 1)
    if graphs:
        say("compile", worker(0), "backends.py:508", "Using cache directory: /cache/torch_compile_cache/a/rank_0_0/backbone for vLLM's torch.compile", 4)
        say("compile", worker(0), "backends.py:519", "Dynamo bytecode transform time: 9.10 s", 9)
        shape = "general shape" if at < Version("0.12") else "compile range (1, 8192)"
        say("compile", worker(0), "backends.py:193", f"Compiling a graph for {shape} takes 21.00 s", 21)
        say("kv cache", worker(0), "monitor.py:34", f"torch.compile {'takes' if at < Version('0.18') else 'took'} 30.10 s in total", 1)
    say("kv cache", worker(0), "gpu_worker.py:232", "Available KV cache memory: 31.20 GiB", 3)
    after = "graphs" if graphs else "kv cache"
    if at >= Version("0.28"):
        say(after, core, "kv_cache_utils.py:2327", "GPU KV cache size: 1,234,560 tokens, Maximum concurrency for 131,072 tokens per request: 9.42x")
    else:
        say(after, core, "kv_cache_utils.py:716", "GPU KV cache size: 1,234,560 tokens")
        say(after, core, "kv_cache_utils.py:720", "Maximum concurrency for 131,072 tokens per request: 9.42x")
    if graphs:
        name = "Capturing CUDA graph shapes" if at < Version("0.11") else "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE)"
        for done in range(0, 8):
            made.now += timedelta(seconds=1)
            made.add("graphs", bar(name, done, 7, done, False))
        if drafter and at >= Version("0.28"):
            for done in range(0, 4):
                made.now += timedelta(seconds=1)
                made.add("draft graphs", bar("Capturing prefill CUDA graphs", done, 3, done, False))
        last = "draft graphs" if drafter and at >= Version("0.28") else "graphs"
        say(last, worker(0), "gpu_model_runner.py:2326", "Graph capturing finished in 12 secs, took 0.53 GiB", 1)
    unit = "seconds" if at < Version("0.17") else "s"
    say("server", core, "core.py:172", f"init engine (profile, create kv cache, warmup model) took 47.10 {unit}", 1)
    if at >= Version("0.11"):
        say("server", main, "api_server.py:1099", "Supported tasks: ['generate']", 1)
    say("server", main, "api_server.py:1457", "Starting vLLM server on http://0.0.0.0:8000" if at >= Version("0.32") else
        "Starting vLLM API server 0 on http://0.0.0.0:8000", 1)
    say("server", main, "launcher.py:36", "Route: /v1/completions, Methods: POST")
    made.add("server", (main if at < Version("0.32") else "") + "INFO:     Started server process [10]", 1)
    made.add("server", (main if at < Version("0.32") else "") + "INFO:     Waiting for application startup.")
    made.add("ready", (main if at < Version("0.32") else "") + "INFO:     Application startup complete.")
    made.add("ready", (main if at < Version("0.32") else "") + 'INFO:     127.0.0.1:51000 - "POST /v1/completions HTTP/1.1" 200 OK', 30)
    say("ready", main, "loggers.py:118", "Engine 000: Avg prompt throughput: 3.8 tokens/s, Avg generation throughput: 31.7 tokens/s, Running: 1 reqs", 9)
    return made


def all_starts() -> dict:
    "Name to start: every version, with and without a drafter, on one rank and on four, with and without graphs."
    made = {}
    for engine, versions, write in (("sglang", SGLANG, sglang), ("vllm", VLLM, vllm)):
        for version in versions:
            for drafter in (False, True):
                for ranks in (1, 4):
                    for graphs in (True, False):
                        name = f"{engine}-{version}{'-eagle3' if drafter else ''}{'-tp4' if ranks > 1 else ''}{'' if graphs else '-eager'}"
                        made[name] = write(version, drafter, ranks, graphs)
    return made
