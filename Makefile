# Two commands set everything up by themselves: `make demo` and `make test`. They need Python 3.10+ and make.
PYTHON ?= python3
# What tests train with. Elsewhere than on this project's own machines, `make test TORCH=torch TORCHVISION=torchvision`
# takes whatever pip finds; torchvision goes in without its dependencies so that it cannot pull another torch.
TORCH ?= torch==2.13.0
TORCHVISION ?= torchvision==0.28.0
ARGS ?=
# before an environment is made, as pip would refuse an older Python only after a while
NEWER = @$(PYTHON) -c 'import sys; sys.version_info < (3, 10) and sys.exit("fedquilt needs Python 3.10 or newer, and \
	$(PYTHON) is " + sys.version.split()[0] + ": name another, as in make PYTHON=python3.12")'

.PHONY: demo test check docs tree wheels nightly rehearsal clean

demo: .venv-demo/ready
	.venv-demo/bin/fedquilt demo $(ARGS)

# two workers for each core, as many tests wait for processes; each file's tests in one worker, in the order of
# tests/conftest.py. Bytecode is kept, as hundreds of processes import fedquilt. Files lie in memory where 8 GB are free
# and programs may run from there, as stores wait for the disk at each event. ARGS come last and win: ARGS="-n 0 -x" for
# one process
MEMORY = $(shell grep -s ' /dev/shm ' /proc/mounts | grep -qvw noexec && \
  [ "$$(df --output=avail -k /dev/shm | tail -1)" -gt 8000000 ] && echo /dev/shm)
test: .venv/ready
	TMPDIR=$(MEMORY) PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest -n $$((2 * $$(env -u OMP_NUM_THREADS nproc))) --dist loadfile --no-loadscope-reorder $(ARGS)

check: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/mypy examples/quickstart.py examples/own_method.py
	.venv/bin/lint-imports --no-cache
	.venv/bin/python -m tests.measures

# the pages of docs/ as a site in build/site, with a reference of the Python names
docs: .venv-docs/ready
	.venv-docs/bin/mkdocs build --strict

# the checkout with the links in fedquilt/ made real, for tools that do not follow them
tree:
	rm -rf build/tree && mkdir -p build/tree
	git ls-files -z | grep -zv '^fedquilt/\(coordinator\|edge_agent\|models\|profiles\|tools\)$$' | xargs -0 cp --parents -t build/tree
	cd build/tree && mv coordinator edge_agent models profiles tools fedquilt/

# fedquilt and fedquilt-board in build/wheels
wheels: .venv/ready
	mkdir -p build/wheels
	.venv/bin/python -c 'import pathlib, fedquilt.tools.boards.flash.own_wheels as own; [own.build_own_wheel(pathlib.Path("build/wheels"), name) for name in ("fedquilt", "fedquilt-board")]'

# what takes too long for `make test`: ARGS="--list" says what there is; the board rehearsal wants root
nightly: .venv/ready
	.venv/bin/python -m tests.nightly $(ARGS)

# as root, with debootstrap, systemd-container and mosquitto: a flashed board's first day (docs/boards.md)
rehearsal: .venv/ready
	.venv/bin/python -m tests.rehearsal $(ARGS)

.venv-demo/ready: pyproject.toml
	$(NEWER)
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python -m pip install --quiet --disable-pip-version-check -e '.[demo]'
	touch $@

.venv-docs/ready: pyproject.toml
	$(NEWER)
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

.venv/ready: pyproject.toml
	$(NEWER)
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(TORCHVISION)
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-demo .venv-docs .venv-nightly-* nightly build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
