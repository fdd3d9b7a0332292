"""What does a verify step cost at each batch size and K, and does the model of `k2eagle.stepcost` say so?

    python benchmarks/stepcost.py outputs/stepcost
    python benchmarks/stepcost.py outputs/stepcost_kimi --only moe --hidden 7168 --experts 384 --active 8 --width 2048 --layers 1

Real forward passes of B requests by K + 1 tokens on a filled KV cache, of two targets: SmolLM2-135M, which is dense, and a
mixture of experts with invented weights, whose sizes are options (the second line has the layer sizes of Kimi-K2, and needs
34 GB for each layer). There is no drafter: the target's side of a step is what is measured. On a GPU by the clock;
on a CPU in processor seconds of one thread, which other programs disturb less. The cells are run in rounds, each in an order
of its own, and the middle of a cell's rounds is taken: which experts a step reads differs from round to round, and the fastest
would be the one that read the fewest. Then batch sizes and K are left out and predicted from the rest.
"""
import argparse
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from k2eagle import plots, stepcost, targets
from k2eagle.files import write_atomic, write_json
from k2eagle.provenance import provenance


def mixture(options) -> DeepseekV3ForCausalLM:
    "A target with experts and invented weights; every layer has experts, and the vocabulary is small."
    config = DeepseekV3Config(
        hidden_size=options.hidden, num_hidden_layers=options.layers, n_routed_experts=options.experts, num_experts_per_tok=options.active,
        moe_intermediate_size=options.width, intermediate_size=2 * options.width, first_k_dense_replace=0, n_group=1, topk_group=1, n_shared_experts=1,
        num_attention_heads=8, num_key_value_heads=8, q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, vocab_size=2048)
    with torch.device(options.device):
        torch.set_default_dtype(options.dtype)
        model = DeepseekV3ForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    return model.eval()


def now(device: str) -> float:
    "Seconds on the clock that suits the device."
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


@torch.inference_mode()
def rounds(model, options) -> pd.DataFrame:
    "Seconds of every cell in every round."
    random, rows, caches, drafts = np.random.default_rng(0), [], {}, max(options.drafts)
    ids = lambda *shape: torch.from_numpy(random.integers(0, model.config.vocab_size, shape)).to(options.device)
    for batch in options.batches:
        caches[batch] = DynamicCache(config=model.config)
        model(ids(batch, options.context), past_key_values=caches[batch], logits_to_keep=1)
        model(ids(batch, drafts + 1), past_key_values=caches[batch])  # warm
        caches[batch].crop(-1 - drafts)
    for number in range(options.rounds):
        for batch, num_draft in random.permutation([(batch, num_draft) for batch in options.batches for num_draft in options.drafts]).tolist():
            tokens, start = ids(batch, num_draft + 1), now(options.device)
            model(tokens, past_key_values=caches[batch])
            rows.append((batch, num_draft, number, now(options.device) - start))
            caches[batch].crop(-1 - num_draft)
    return pd.DataFrame(rows, columns=["batch", "num_draft", "round", "step_s"])


def held_out(name: str, points: pd.DataFrame, experts: tuple) -> pd.DataFrame:
    "Errors of what was left out, within the measured range and beyond it."
    rows = []
    for by in ("point", "batch", "num_draft"):
        table = stepcost.leave_out(points, by, *experts)
        for where, own in (("within", table[~table.beyond]), ("beyond", table[table.beyond])):
            if len(own):
                cost = own[own.num_draft > 0].cost_error.abs()
                rows.append((name, by, where, len(own), own.error.abs().mean(), own.error.abs().max(), cost.mean(), cost.max()))
    return pd.DataFrame(rows, columns=["target", "left_out", "range", "points", "mean_error", "largest_error", "mean_cost_error", "largest_cost_error"])


def report(name: str, points: pd.DataFrame, experts: tuple, options) -> pd.DataFrame:
    "Fit, draw and print one target; its held-out errors."
    model = stepcost.fit(points, *experts)
    text = f"{name}, {options.device}, context {options.context}, middle of {options.rounds} rounds, n = {len(points)} points. Lines: fit, bands: 95 % interval"
    plots.save(plots.caption(stepcost.plot_fit(model), text, width=90), options.out / f"fit_{name}", table=model.points)
    held = held_out(name, points, experts)
    print(model.frame.to_string(), *model.findings, held.round(3).to_string(), sep="\n")
    return held


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=["dense", "moe"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 3, 5, 7])
    parser.add_argument("--context", type=int, default=128, help="tokens in the KV cache of each request")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    for name, size in (("hidden", 512), ("experts", 64), ("active", 4), ("width", 512), ("layers", 3)):
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.dtype = getattr(torch, options.dtype)
    makers = {"dense": lambda: AutoModelForCausalLM.from_pretrained(targets.default_target(), dtype=options.dtype).to(options.device).eval(), "moe": lambda: mixture(options)}
    options.out.mkdir(parents=True, exist_ok=True)
    names, held = [options.only] if options.only else ["dense", "moe"], []
    steps = pd.concat([rounds(makers[name](), options).assign(target=name) for name in names])
    write_atomic(options.out / "steps.csv", steps.to_csv(index=False))
    write_json(options.out / "provenance.json", provenance(seed=0, options={name: str(value) for name, value in vars(options).items() if name != "out"}))
    for name in names:
        points = steps[steps.target == name].groupby(["batch", "num_draft"], as_index=False).step_s.median()
        held.append(report(name, points, (options.experts, options.active) if name == "moe" else (None, None), options))
    write_atomic(options.out / "held_out.csv", pd.concat(held).to_csv(index=False))


if __name__ == "__main__":
    main()
