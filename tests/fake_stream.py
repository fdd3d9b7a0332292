"""A server that streams tokens at known times, as a process of its own; it can break in several ways.

Run: python tests/fake_stream.py '{"first_ms": 50, "step_ms": 20}' (prints its port)
"""
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

PLAIN = dict(first_ms=50, step_ms=20, step_tokens=1, empty=0, cut_tcp=False, usage="continuous", fail_every=0, cut_every=0, die_after=0, native=False,
             ignore_length=0, slow_every=0, drafts=True)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Fake:
    "Times in `way`, counts in `self`."

    def __init__(self, way: dict):
        self.way, self.asked, self.drafts, self.accepted, self.generated, self.lasted = PLAIN | way, 0, 0, 0, 0, []

    async def answer(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            sizes = [int(line.split(":")[1]) for line in head.lower().split("\r\n") if line.startswith("content-length")]
            body = json.loads(await reader.readexactly(sizes[0]) if sizes and sizes[0] else b"{}")
            path = head.split()[1]
            if path in ("/v1/completions", "/generate"):
                await self.stream(writer, body, path == "/generate")
            else:
                status, text = self.page(path)
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            await writer.drain()
        writer.close()

    def page(self, path: str) -> tuple:
        pages = {"/v1/models": {"data": [{"id": "fake"}]}, "/lasted": self.lasted}
        if self.way["native"]:
            drafting = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3} if self.way["drafts"] else {}
            pages |= {"/get_server_info": {"version": "0.5.23", "model_path": "fake", "max_running_requests": 8, "disable_cuda_graph": True,
                                           "disable_radix_cache": False, **drafting, "internal_states": [{}]}, "/flush_cache": {}}
        else:
            pages |= {"/version": {"version": "0.32.0"}, "/metrics": None}
        if path == "/metrics" and not self.way["native"]:
            kept = {0: self.accepted, 1: 0}
            lines = [f"vllm:generation_tokens_total{{}} {self.generated}", "vllm:num_requests_running{} 0", f"vllm:spec_decode_num_drafts_total{{}} {self.drafts}",
                     f"vllm:spec_decode_num_draft_tokens_total{{}} {2 * self.drafts}", f"vllm:spec_decode_num_accepted_tokens_total{{}} {self.accepted}",
                     *(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{at}"}} {value}' for at, value in kept.items())]
            return 200, "\n".join(lines if self.way["drafts"] else lines[:2]) + "\n"
        return (200, json.dumps(pages[path])) if path in pages else (404, "{}")

    def event(self, native: bool, prompt: int, count: int, text: str, steps: int, last: bool) -> dict:
        if native:
            counts = {"spec_verify_ct": steps, "spec_accept_token_num": count - 1 - steps, "spec_draft_token_num": 3 * steps} if steps and last else {}
            return {"text": text, "meta_info": {"prompt_tokens": prompt, "completion_tokens": count, "finish_reason": {"type": "length"} if last else None, **counts}}
        usage = {"usage": {"prompt_tokens": prompt, "completion_tokens": count}} if self.way["usage"] == "continuous" else {}
        return {"choices": [{"text": text, "finish_reason": "length" if last else None}], **usage}

    async def stream(self, writer, body: dict, native: bool):
        way, self.asked, began = self.way, self.asked + 1, time.perf_counter()
        number, prompt = self.asked, len(body.get("prompt") or body.get("input_ids") or body["text"])
        if way["die_after"] and number > way["die_after"]:
            sys.exit(1)
        if way["fail_every"] and number % way["fail_every"] == 0:
            return writer.write(b"HTTP/1.1 500 X\r\nContent-Length: 17\r\n\r\nno room for that\n")
        writer.write(HEAD)
        wanted = way["ignore_length"] or body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        slow, count, steps = way["slow_every"] and number % way["slow_every"] == 0, 0, 0
        while count < wanted:
            if way["cut_every"] and number % way["cut_every"] == 0 and steps == 2:
                return writer.transport.abort()
            for _ in range(way["empty"]):
                await self.send(writer, self.event(native, prompt, count, "", 0, False))
            at = way["first_ms"] + way["step_ms"] * steps * (4 if slow else 1)
            await asyncio.sleep(began + at / 1e3 - time.perf_counter())
            count = min(wanted, count + (way["step_tokens"] if count else 1))
            await self.send(writer, self.event(native, prompt, count, "word ", steps, count == wanted))
            steps += 1
        self.lasted.append(time.perf_counter() - began)
        self.drafts, self.accepted, self.generated = self.drafts + steps - 1, self.accepted + count - steps, self.generated + count
        if way["usage"] != "none" and not native:
            await self.send(writer, {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": count}})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async def send(self, writer, event: dict):
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        pieces = [data[:7], data[7:]] if self.way["cut_tcp"] else [data]
        for piece in pieces:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            if self.way["cut_tcp"]:
                await asyncio.sleep(0)


@contextlib.contextmanager
def serving(**way):
    "A fake server for the time of a block; gives its URL."
    process = subprocess.Popen([sys.executable, Path(__file__), json.dumps(way)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


async def main(way: dict):
    fake = Fake(way)
    server = await asyncio.start_server(fake.answer, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
