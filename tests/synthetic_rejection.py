"""vLLM's synthetic rejection on a CPU, where vllm 0.32.0 has no kernel for it (utils/cpu_triton_utils.py refuses the mode).

Only the kernel is replaced, by the rule of v1/sample/rejection_sampler.py in torch: a draft is kept where a uniform number is below the
rate of its position. Drafting, counting by request and in total, and the log are vLLM's own.
"""
from vllm.v1.sample import rejection_sampler
from vllm_worker import Worker  # noqa: F401, what vLLM is told to take from here


def keep_at_random(output, ends, drafts, choices, bonus, is_greedy, max_drafts, uniform, rates):
    "Fill `output` [requests, K + 1] with the drafts that are kept and one token more."
    start = 0
    for request, end in enumerate(ends.tolist()):
        kept = 0
        while kept < end - start and drafts[start + kept] >= 0 and uniform[start + kept] < rates[kept]:
            output[request, kept] = drafts[start + kept]
            kept += 1
        output[request, kept] = choices[start + kept] if start + kept < end else bonus[request]
        start = end


keep_at_random.register_warmup = lambda **options: None
rejection_sampler._rejection_greedy_sample = keep_at_random
