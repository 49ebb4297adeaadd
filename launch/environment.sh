# Sourced, or run (bash launch/environment.sh), from the repository root: makes .venv with the pinned requirements, once
# for each version of them. jax's TPU library is among them; where an NVIDIA GPU is, jax's CUDA plugin is added.
# Python 3.11, 3.12 or 3.13: $PYTHON, or one that is here, or, as on a TPU VM with 3.10 alone, 3.12 that uv brings.
set -euo pipefail
uv=uv==0.13.8
python=
candidates=(.venv/bin/python python3 python3.12 python3.11 python3.13)
[ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
for candidate in "${candidates[@]}"; do
  if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
if [ -n "${PYTHON:-}" ] && [ -z "$python" ]; then
  echo "launch: $PYTHON is $("$PYTHON" -V 2>&1); it must be Python 3.11, 3.12 or 3.13" >&2
  exit 2
fi
stamp=$(cat requirements.txt launch/environment.sh | cksum | cut -d' ' -f1)
if [ "$(cat .venv/.requirements 2>/dev/null)" != "$stamp" ]; then
  echo "launch: installing requirements.txt into .venv" >&2
  # Ubuntu's python3 can make no environment without its package python3-venv, uv can
  if ! [ -x .venv/bin/python ] && ! "${python:-false}" -m venv .venv >/dev/null 2>&1; then
    rm -rf .venv
    if ! python3 -m pip install --quiet --target .venv-uv --upgrade "$uv" ||
      ! PYTHONPATH=.venv-uv python3 -m uv venv --quiet --seed --python "${python:-3.12}" .venv; then
      rm -rf .venv
      echo "launch: no environment could be made (python3 is $(python3 -V 2>&1)): install Python 3.11, 3.12 or 3.13" \
        "with its venv, and name it: PYTHON=/path/to/python3.12 bash $0" >&2
      exit 2
    fi
  fi
  python=.venv/bin/python
  .venv/bin/python -m pip install --quiet --disable-pip-version-check "$uv"
  .venv/bin/uv pip install --quiet --python .venv/bin/python -r requirements.txt
  if nvidia-smi >/dev/null 2>&1; then
    cuda=cuda12
    nvidia-smi | grep -q "CUDA Version: 1[3-9]" && cuda=cuda13
    .venv/bin/uv pip install --quiet --python .venv/bin/python "jax[$cuda]==$(sed -n 's/^jax==//p' requirements.txt)"
  fi
  echo "$stamp" >.venv/.requirements
fi
