"""How often does the diagnosis name the right cause? Makes every fault in captures of four targets, alone and in pairs.

    python benchmarks/diagnosis.py outputs/diagnosis [smollm2 kimi qwen3 gptoss]

The second side of each comparison has the faults; the first is right, but computed in float32 and read in other batches, so
that both differ by noise too. Written: trials.csv (a row a diagnosis), confusion.csv (faults against top findings),
summary.csv (hits and false alarms by target) and provenance.json. About half an hour on one core; run again, it goes on
where it stopped.
"""
import itertools
import sys
import time
from functools import cache, partial
from pathlib import Path

import pandas as pd
import torch

from k2eagle import targets, text
from k2eagle.diagnose import STRUCTURAL, Evidence, diagnose, refer
from k2eagle.faults import FAULTS, Bench, fault, quantise
from k2eagle.files import write_atomic, write_json
from k2eagle.provenance import provenance

ONE_OF_EACH = ("layer-shift +1", "aux slots in another order", "residual without branch", "rank 0 of 4", "final norm missing",
               "final norm applied twice", "scaled by 1.2", "channels permuted", "basis rotated", "stored as fp8", "token shift +1",
               "chunk of zeros", "prefix of another document", "chunk read without what came before", "hidden leading token",
               "rope base / 4", "int4 weights, groups of 32", "coarse branches, 4 bits", "other experts for 3 %")
SAME_PLACE = ({"norm-missing", "norm-doubled"}, {"permuted-basis", "rotated-basis"}, {"residual-missing", "partial-sum"},
              {"context-missing", "context-extended"})  # one of the two would undo or replace the other


def _fill(model, seed: int):
    "Random weights that keep the variance of the stream, norms near one."
    random = torch.Generator().manual_seed(seed)
    inner = -2 if model.config.model_type == "gpt_oss" else -1
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=random)
        if "norm" in name:
            weight.data = 1 + 0.1 * noise
        elif weight.ndim == 1 or "bias" in name:
            weight.data = 0.02 * noise
        else:
            weight.data = noise * (1 if "embed" in name else weight.shape[inner if weight.ndim == 3 else -1] ** -0.5)
    return model.bfloat16()


def _tiny(folder: Path, make) -> Path:
    "A random checkpoint, made once."
    if not (folder / "config.json").exists():
        make().save_pretrained(folder)
    return folder


def _qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM
    return _fill(Qwen3ForCausalLM(Qwen3Config(
        vocab_size=49152, hidden_size=128, intermediate_size=256, num_hidden_layers=14, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, tie_word_embeddings=False)), 3)


def _gpt_oss():
    from transformers import GptOssConfig, GptOssForCausalLM
    return _fill(GptOssForCausalLM(GptOssConfig(
        vocab_size=49152, hidden_size=128, intermediate_size=64, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, num_local_experts=8, num_experts_per_tok=2, sliding_window=64, max_position_embeddings=4096)), 4)


TARGETS = {  # name -> (make in a folder, aux boundaries, has experts)
    "smollm2": (lambda folder: targets.default_target(), (2, 15, 27), False),
    "kimi": (lambda folder: targets.mini_kimi(folder / "kimi", num_layers=12), (2, 6, 9), True),
    "qwen3": (lambda folder: _tiny(folder / "qwen3", _qwen3), (2, 7, 11), False),
    "gptoss": (lambda folder: _tiny(folder / "gptoss", _gpt_oss), (2, 6, 9), True),
}


@cache
def conversations(count: int, length: int, first: int = 0) -> list:
    "Token ids of texts of the default target's tokenizer, cut to one length but for every third."
    tokenizer = text.load_tokenizer(targets.default_target())
    chats = [text.prompt_tokens(tokenizer, prompt.text) for prompt in text.prompts(3 * count + first)][first:]
    return [sum(chats[3 * i:3 * i + 4], [])[:length - (i % 3 == 2) * 16] for i in range(count)]


class Case:
    "One target, a right side with noise, and everything to make a wrong one."

    def __init__(self, name: str, folder: Path, documents: list):
        make, boundaries, self.experts = TARGETS[name]
        self.name, self.target = name, make(folder)
        self.bench = Bench(self.target, documents, boundaries, together=1)
        self.exact = Bench(self.target, documents, boundaries, "float32", together=len(documents), ranks=())
        self.other = Bench(self.target, documents, boundaries, together=len(documents), ranks=())
        self.right = {slot: states.bfloat16() for slot, states in self.exact.capture().items()}
        self.reference = refer(self.target, self.evidence())

    def evidence(self, *faults, a=None, b=None) -> Evidence:
        "A right side and one with these faults."
        recording = self.exact.recording()
        return Evidence(a or self.right, b or self.bench.capture(*faults), self.bench.rows, self.bench.documents, recording.num_layers,
                        ("right", "engine"), norm=(recording.norm_weight, recording.norm_eps))

    def clean(self) -> dict:  # name -> Evidence
        "Pairs that ought to be called clean."
        captures = {"bfloat16": self.bench.capture(), "float32": self.exact.capture(), "another batch": self.other.capture()}
        pairs = [("bfloat16", "bfloat16"), *itertools.combinations(captures, 2), ("float32", "bfloat16")]
        return {f"{a} against {b}": self.evidence(a=captures[a], b=captures[b]) for a, b in pairs}

    def usable(self, one) -> bool:
        "Can this target have the fault?"
        return self.experts or not one.needs

    def pairs(self) -> list:
        "Pairs of faults that can be had together, one of every code."
        some = [fault(name) for name in ONE_OF_EACH if self.usable(fault(name))]
        return [pair for pair in itertools.combinations(some, 2) if {one.code for one in pair} not in SAME_PLACE]


def trial(case: Case, evidence: Evidence, faults: tuple, kind: str, reference=None) -> dict:
    "Diagnose, and compare with what was made."
    began = time.perf_counter()
    found = diagnose(evidence, reference=reference)
    codes, made = [finding.code for finding in found], [one.code for one in faults]
    wrong = [finding.code for finding in found if finding.severity == "error" and finding.code in STRUCTURAL and finding.code not in made]
    return {"target": case.name, "kind": kind, "reference": reference is not None, "faults": " + ".join(one.name for one in faults) or kind,
            "made": " + ".join(made), "top": codes[0], "found": " ".join(codes), "hit": codes[0] in made if made else not wrong,
            "abstained": codes[0] == "unexplained", "all_found": set(made) <= set(codes), "false_structural": " ".join(wrong), "wall_s": round(time.perf_counter() - began, 2)}


def trials(case: Case, pairs: bool = True):
    "Every clean pair, every fault, every pair of faults, one by one."
    for name, evidence in case.clean().items():
        for reference in (case.reference, None):
            yield name, partial(trial, case, evidence, (), name, reference)
    for one in filter(case.usable, FAULTS):
        for reference in (case.reference, None):
            yield one.name, partial(trial, case, case.evidence(one), (one,), "single", reference)
    for pair in case.pairs() if pairs else ():
        yield " + ".join(one.name for one in pair), lambda pair=pair: trial(case, case.evidence(*pair), pair, "pair", case.reference)


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    "Hits and false alarms by target and kind."
    kind = frame.kind.where(frame.kind.isin(["single", "pair"]), "clean")
    rows = []
    for (target, name, reference), part in frame.groupby(["target", kind, "reference"], sort=False):
        rows.append({"target": target, "kind": name, "reference": reference, "diagnoses": len(part), "right": int(part.hit.sum()),
                     "abstained": int(part.abstained.sum()), "share": part.hit.mean(), "all_found": int(part.all_found.sum()),
                     "false_structural": int((part.false_structural.fillna("") != "").sum()), "median_s": part.wall_s.median()})
    return pd.DataFrame(rows)


def confusion(frame: pd.DataFrame) -> pd.DataFrame:
    "What was made, alone, against the top finding, with a reference."
    single = frame[(frame.kind == "single") & frame.reference]
    return pd.crosstab(single.made, single.top)


def main(out: Path, names: list):
    "Diagnose everything that is not in the table yet."
    path = out / "trials.csv"
    rows = pd.read_csv(path, keep_default_na=False).to_dict("records") if path.exists() else []
    done = {name: sum(row["target"] == name for row in rows) for name in names}
    documents = conversations(12, 128)
    for name in names:
        case = Case(name, out / "work", documents)
        for number, (words, run) in enumerate(trials(case)):
            if number >= done[name]:
                rows.append(run())
                print(f"{name}: {words}: {rows[-1]['found']}" + ("" if rows[-1]["hit"] else "   WRONG"), flush=True)
                if number % 10 == 9:
                    write_atomic(path, pd.DataFrame(rows).to_csv(index=False))
        write_atomic(path, pd.DataFrame(rows).to_csv(index=False))
    frame = pd.read_csv(path, keep_default_na=False)
    write_atomic(out / "summary.csv", summary(frame).round(4).to_csv(index=False))
    write_atomic(out / "confusion.csv", confusion(frame).to_csv())
    write_json(out / "provenance.json", provenance(seed=0, documents=len(documents), tokens=sum(map(len, documents))))
    print(summary(frame).to_string(index=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("outputs/diagnosis"), sys.argv[2:] or list(TARGETS))
