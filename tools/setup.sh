#!/usr/bin/env bash
# Make .venv ready: the lock's packages and an editable k2eagle. Does nothing when it is already so.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

ready() {  # the stamp names the lock, the project file and the place this venv was finished for
  [ -x .venv/bin/python ] && .venv/bin/python -c '' 2>/dev/null && [ "$(cat .venv/ready 2>/dev/null)" = "$key" ]
}

key=$(cat requirements/dev.txt pyproject.toml tools/setup.sh | cksum; pwd)
ready && exit 0

command -v "$python" >/dev/null ||
  { echo "setup: $python not found; k2eagle needs Python 3.11 or newer: install it, or name one: PYTHON=python3.12 make setup" >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "setup: $("$python" -V) found; k2eagle needs 3.11 or newer: name one, as in PYTHON=python3.12 make setup" >&2; exit 1; }

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then  # absent, half made, or its Python is gone
  echo "setup: making .venv with $("$python" -V)"
  rm -rf .venv
  "$python" -m venv .venv ||
    { rm -rf .venv; echo "setup: could not make .venv; the venv module is missing (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
fi
rm -f .venv/ready
echo "setup: installing requirements/dev.txt (first time: a few minutes)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
printf '%s' "$key" > .venv/ready
