#!/usr/bin/env bash
# Make .venv ready: the lock's packages and an editable k2eagle. Does nothing when it is already so.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
key=$(cat requirements/dev.txt pyproject.toml | cksum; pwd)  # a moved clone needs a new .venv: its scripts name their place

fail() { echo "setup: $*" >&2; exit 1; }

works() { .venv/bin/python -c '' 2>/dev/null; }

if works && [ "$(cat .venv/ready 2>/dev/null)" = "$key" ]; then exit 0; fi

command -v "$python" >/dev/null ||
  fail "$python not found; k2eagle needs Python 3.11 or newer: install it, or name one, as in PYTHON=python3.12 make setup"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" -V) found; k2eagle needs 3.11 or newer: name one, as in PYTHON=python3.12 make setup"

if ! works || [ -e .venv/unfinished ] || [ "$(tail -n 1 .venv/ready 2>/dev/null)" != "$PWD" ]; then
  echo "setup: making .venv with $("$python" -V)"
  rm -rf .venv
  "$python" -m venv .venv || { rm -rf .venv; fail "the venv module does not work (Debian and Ubuntu: apt install python3-venv)"; }
fi
touch .venv/unfinished  # stays if this is interrupted, and then the next setup starts anew
echo "setup: installing requirements/dev.txt (the first time takes a few minutes)"
.venv/bin/python -m pip install -qq --disable-pip-version-check -r requirements/dev.txt
.venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
rm .venv/unfinished
printf '%s' "$key" > .venv/ready
