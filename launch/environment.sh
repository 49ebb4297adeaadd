# Sourced from the repository root: makes .venv with the pinned requirements, once for each version of them.
# On a machine with an NVIDIA GPU, jax's CUDA plugin of the same version is added.
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
  echo "launch: $python is $("$python" -V 2>&1); Python 3.11, 3.12 or 3.13 is needed: PYTHON=/path/to/python3.12 bash $0" >&2
  exit 2
fi
stamp=$(cat requirements.txt launch/environment.sh | cksum | cut -d' ' -f1)
if [ "$(cat .venv/.requirements 2>/dev/null)" != "$stamp" ]; then
  echo "launch: installing requirements.txt into .venv" >&2
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.8
  .venv/bin/uv pip install --quiet --python .venv/bin/python -r requirements.txt
  if nvidia-smi >/dev/null 2>&1; then
    cuda=cuda12
    nvidia-smi | grep -q "CUDA Version: 1[3-9]" && cuda=cuda13
    .venv/bin/uv pip install --quiet --python .venv/bin/python "jax[$cuda]==$(sed -n 's/^jax==//p' requirements.txt)"
  fi
  echo "$stamp" >.venv/.requirements
fi
