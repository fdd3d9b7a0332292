"""Serve a target with several drafters, one after the other, in one process of an engine, and write what each accepted.

Run by an engine's interpreter: python serve_drafters.py JOB.json OUT.json
"""
import json
import sys
from pathlib import Path


def with_vllm(job, drafter):
    "Counts and tokens of vLLM."
    from vllm import LLM, SamplingParams
    llm = LLM(model=job["target"], dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8, generation_config="vllm",
              skip_tokenizer_init=True, disable_log_stats=False, enable_prefix_caching=False,
              speculative_config={"method": "eagle3", "model": drafter, "num_speculative_tokens": 3})
    sampling = SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
    outputs = [llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[0] for ids in job["prompts"]]
    counts = {metric.name: metric.value for metric in llm.get_metrics() if "spec_decode" in metric.name and hasattr(metric, "value")}
    found = {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "accepted": counts["vllm:spec_decode_num_accepted_tokens"],
             "drafts": counts["vllm:spec_decode_num_drafts"]}
    llm.llm_engine.engine_core.shutdown()
    return found


def with_sglang(job, drafter):
    "Counts and tokens of SGLang."
    import sglang_worker
    sglang_worker.prepare_cpu(Path(sglang_worker.__file__).parent / "sglang_cpu")
    import sglang
    engine = sglang.Engine(
        model_path=job["target"], device="cpu", dtype="float32", disable_cuda_graph=True, disable_overlap_schedule=True,
        skip_server_warmup=True, skip_tokenizer_init=True, max_total_tokens=4096, mem_fraction_static=0.5, disable_radix_cache=True,
        prefill_attention_backend="intel_amx", decode_attention_backend="intel_amx", chunked_prefill_size=-1, log_level="error",
        speculative_algorithm="EAGLE3", speculative_draft_model_path=drafter, speculative_num_steps=3, speculative_eagle_topk=1,
        speculative_num_draft_tokens=4)
    sampling = {"temperature": 0.0, "max_new_tokens": job["tokens"], "ignore_eos": True}
    replies = [engine.generate(input_ids=[ids], sampling_params=sampling)[0] for ids in job["prompts"]]
    engine.shutdown()
    return {"tokens": [reply["output_ids"] for reply in replies],
            "accepted": sum(reply["meta_info"]["spec_num_correct_drafts"] for reply in replies),
            "drafts": sum(reply["meta_info"]["spec_verify_ct"] for reply in replies)}


def main(job_file, out):
    job = json.loads(Path(job_file).read_text())
    serve = {"vllm": with_vllm, "sglang": with_sglang}[job["engine"]]
    Path(out).write_text(json.dumps({drafter: serve(job, drafter) for drafter in job["drafters"]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
