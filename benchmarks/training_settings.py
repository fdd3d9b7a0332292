"""Which settings suit a short training run? Trains a drafter for the default target under each and measures it held out.

    python benchmarks/training_settings.py outputs/training_settings

Writes settings.csv (a row a setting, added as it is finished) and provenance.json into the folder. About eight minutes
on an H200. Run again, it goes on where it stopped.
"""
import sys
import time
from pathlib import Path

import pandas as pd

from k2eagle import accept, capture, targets, text, train
from k2eagle.files import write_atomic, write_json
from k2eagle.provenance import provenance

GREEDY = {"temperature": 0.0}
BASE = dict(prompts=320, answer_tokens=96, steps=440, batch_tokens=1024, learning_rate=2e-3, decay=0.8,
            draft_vocab_size=4096)
CHANGES = [  # each row changes one thing; batch size and steps change together, so that all see the same tokens
    {}, {"learning_rate": 1e-3}, {"learning_rate": 4e-3},
    {"steps": 220, "batch_tokens": 2048}, {"steps": 880, "batch_tokens": 512}, {"steps": 1760, "batch_tokens": 256},
    {"draft_vocab_size": 2048}, {"draft_vocab_size": 8192}, {"decay": 0.6}, {"decay": 1.0},
    {"steps": 300}, {"steps": 600}, {"steps": 1200},
    {"prompts": 240, "answer_tokens": 128}, {"prompts": 480, "answer_tokens": 64},
    {"prompts": 640, "answer_tokens": 128}, {"prompts": 640, "answer_tokens": 128, "steps": 3000, "batch_tokens": 2048},
]


def cut(sample: text.Sample, answer_tokens: int) -> text.Sample:
    "The same conversation with a shorter answer."
    end = sample.loss_mask.index(True) + answer_tokens
    return text.Sample(sample.id, sample.tokens[:end], sample.loss_mask[:end], sample.finished)


def states(folder: Path, target: Path, samples: list, answer_tokens: int):
    "A store of these conversations, answers cut to a length."
    name = f"{samples[0].id.split('/')[0]}-{len(samples)}-{answer_tokens}"
    return capture.capture(target, [cut(sample, answer_tokens) for sample in samples], folder / name, answers=GREEDY,
                           batch_tokens=16384)


def measure(folder: Path, target: Path, samples: list, heldout, setting: dict) -> dict:
    "Train under one setting and measure the drafter."
    learned = states(folder / "learned", target, samples[:setting["prompts"]], setting["answer_tokens"])
    names = ("steps", "batch_tokens", "learning_rate", "decay")
    config = train.TrainConfig(**{name: setting[name] for name in names}, eval_every=10**6, save_every=10**6)
    began = time.perf_counter()
    name = "-".join(f"{value:g}" for value in setting.values())
    result = train.train(learned, folder / "runs" / name, target, heldout, config, setting["draft_vocab_size"])
    measured = accept.simulate(result.drafter, heldout, config.ttt_steps)
    return setting | {"heldout_loss": result.history["heldout_loss"].iloc[-1], "accept_len": measured.accept_len,
                      "low": measured.ci[0], "high": measured.ci[1], "drafts": measured.drafts,
                      **{f"kept_{k + 1}": share for k, share in enumerate(measured.per_position)},
                      "wall_s": time.perf_counter() - began}


def main(out: Path):
    "Measure every setting that is not in the table yet."
    target, work = targets.default_target(), out / "work"
    options = dict(max_new_tokens=128, batch_size=256)
    samples = capture.answer(target, text.prompts(640, "train"), work / "answers", **options)
    unseen = capture.answer(target, text.prompts(100, "heldout"), work / "unseen", **options)
    heldout = states(work / "heldout", target, unseen, 96)
    write_json(out / "provenance.json", provenance(seed=0))
    path = out / "settings.csv"
    rows = pd.read_csv(path).to_dict("records") if path.exists() else []
    for change in CHANGES[len(rows):]:
        rows.append(measure(work, target, samples, heldout, BASE | change))
        write_atomic(path, pd.DataFrame(rows).to_csv(index=False))
        print(f"{change or 'base'}: accept length {rows[-1]['accept_len']:.3f} ({rows[-1]['low']:.3f} to {rows[-1]['high']:.3f})")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("outputs/training_settings"))
