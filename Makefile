# k2eagle: every command works in a fresh clone and needs only Python 3.11 or newer (PYTHON=python3.12 names another).
.DEFAULT_GOAL := help
.PHONY: help setup run test lab docs clean
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# beside other work, threads that spin while they wait cost more than they save
export OMP_WAIT_POLICY ?= PASSIVE

help:  ## list the commands
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' Makefile | expand -t 14

setup:  ## make .venv from the pinned lock (again only when the lock or pyproject.toml changed)
	@bash tools/setup.sh

run: setup  ## the whole pipeline on the default target; results in outputs/pipeline/
	python -m k2eagle.runs pipeline

# two files at a time: an engine's test is mostly its start, on one core
test: setup  ## export and clean are no-ops, README in sync, notebook tests, site, package
	python -m pytest -n 2 --dist loadfile

lab: setup  ## JupyterLab on the k2eagle workspace: the index and the run notebooks (ARGS="--no-browser" passes options)
	python tools/lab.py $(ARGS)

docs: setup  ## the site in _docs/, links checked
	python tools/docs.py

clean:  ## remove what the commands above made, except outputs/ and the cache outside the clone
	rm -rf .venv _docs _proc build dist *.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
