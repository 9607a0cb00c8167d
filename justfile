# Every command of this project. `just` itself comes with ./test (.venv/bin/just).

bin := justfile_directory() / ".venv/bin"
compile := bin / "uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header --no-emit-index-url --no-emit-find-links"

# Name the commands.
default:
    @{{ bin }}/just --list --unsorted

# Everything: checks and tests, or pytest with ARGS; --changed: what concerns the changes against main.
test *ARGS:
    ./test {{ ARGS }}

# The checks that need no test run.
lint: types
    {{ bin }}/python tools/twins.py --check
    {{ bin }}/ruff check
    {{ bin }}/ruff format --check
    {{ bin }}/lint-imports

# Repair what can be repaired by machine.
fix:
    {{ bin }}/ruff check --fix
    {{ bin }}/ruff format

# Generate the sync classes from the async ones.
twins:
    {{ bin }}/python tools/twins.py

# Types alone.
types:
    {{ bin }}/mypy

# The public conformance suite alone.
conformance:
    ./test tests/conformance

# The fault tests, with many more kills than ./test has time for, and every soak.
faults $FENCEPOST_FAULT_KILLS="200":
    ./test tests/faults --timeout 3600
    ./test tests -m soak --ignore tests/faults --timeout 3600

# One simulated world of the store, or LIVES power losses of it: SEED [LIVES]; a night: 0 100000.
simulate *ARGS:
    {{ bin }}/python -m tests.simulation.simulation {{ ARGS }}

# Numbers, beside the reference server in the same run.
bench *ARGS:
    {{ bin }}/python -m benchmarks {{ ARGS }}

# The way of one request through the server, call by call: [sqlite|postgres] [append|read].
walk *ARGS:
    {{ bin }}/python -m tools.walk {{ ARGS }}

# Draw which package imports which, as docs/internals/imports.svg.
graph:
    {{ bin }}/python -m tools.graph

# Pairs of files in src that share six or more lines.
repeats *ARGS:
    {{ bin }}/python -m tools.repeats {{ ARGS }}

# The figures of the layout, each beside its aim: modules, single importers, repeats, cycles.
house *ARGS:
    {{ bin }}/python -m tools.house {{ ARGS }}

# Renew the lock files to the newest versions that fit; no line may name a host.
lock:
    {{ compile }} --upgrade pyproject.toml --group dev --output-file requirements-dev.lock
    {{ compile }} pyproject.toml --group build --constraint requirements-dev.lock --output-file requirements.lock
    {{ compile }} pyproject.toml --extra postgres --group build --constraint requirements-dev.lock --output-file requirements-postgres.lock
    {{ compile }} pyproject.toml --extra postgres --extra spark --group build --constraint requirements-dev.lock --output-file requirements-demo.lock
    rm -f tests/package-lock.json
    npm install --prefix tests --package-lock-only --omit-lockfile-registry-resolved --no-audit --no-fund
    {{ bin }}/python .ci/strip_npm_lock.py tests/package-lock.json
    ./test tests/project
