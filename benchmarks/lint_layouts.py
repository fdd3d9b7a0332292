"""What do both engines make of our own drafter, and of the layouts in which others publish theirs?

    python benchmarks/lint_layouts.py outputs/lint [--drafter outputs/pipeline/work/drafter/drafter] [--target default]

The layouts are the small stand-ins of tests/drafter_layouts.py: names, flags, layer ids and rotary parameters of the original,
few and narrow weights. Each is linted for vLLM and for SGLang against the target it belongs to; no engine is started. Written:
layouts.csv (a row a layout and engine: verdict, codes, how many errors and warnings, the worst consequence in words and its
fix) and provenance.json. Some seconds.
"""
import argparse
import sys
import tempfile
from pathlib import Path

import pandas as pd

from k2eagle import targets
from k2eagle.files import write_atomic, write_json
from k2eagle.findings import Findings
from k2eagle.lint import lint, verdict
from k2eagle.provenance import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import drafter_layouts  # noqa: E402

ENGINES = ("vllm==0.32.0", "sglang==0.5.23")


def row(layout: str, target: str, engine: str, found: Findings) -> dict:
    "What one engine makes of one layout."
    package, version = engine.split("==")
    worst = [finding for finding in found if finding.severity != "note"][:1]  # the worst comes first
    return dict(layout=layout, target=target, engine=package, version=version, verdict=verdict(found, (engine,)),
                codes=" ".join(dict.fromkeys(finding.code for finding in found if finding.severity != "note")),
                errors=sum(finding.severity == "error" for finding in found), warnings=sum(finding.severity == "warning" for finding in found),
                consequence=worst[0].message if worst else "", fix=worst[0].fix if worst else "")


def main():
    "Lint, and write the table."
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--drafter", type=Path, default=Path("outputs/pipeline/work/drafter/drafter"))
    parser.add_argument("--target", default="default")
    arguments = parser.parse_args()
    if not (arguments.drafter / "config.json").exists():
        parser.error(f"{arguments.drafter} has no drafter; train one with: python -m k2eagle.runs pipeline")
    target = targets.resolve(arguments.target)
    rows = [row("k2eagle, trained by the pipeline", target.name, engine, lint(arguments.drafter, target, engine)) for engine in ENGINES]
    for name, layout in drafter_layouts.LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            drafter, facts = drafter_layouts.write(name, folder)
            rows += [row(name, layout.target, engine, lint(drafter, facts, engine)) for engine in ENGINES]
    arguments.out.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(rows)
    print(table[["layout", "engine", "errors", "warnings", "codes"]].to_string(index=False))
    write_atomic(arguments.out / "layouts.csv", table.to_csv(index=False))
    write_json(arguments.out / "provenance.json", provenance(engines=ENGINES, layouts=len(drafter_layouts.LAYOUTS) + 1))


if __name__ == "__main__":
    main()
