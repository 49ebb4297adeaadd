# Sourced, or run (bash launch/environment.sh), from the repository root: makes .venv with the pinned requirements, once
# for each version of them. jax's TPU library is among them; where an NVIDIA GPU is, jax's CUDA plugin is added.
# Python 3.11, 3.12 or 3.13: $PYTHON, or one that is here, or, as on a TPU VM with 3.10 alone, 3.12 that uv brings.
# On a host of a pod: $MLM_VENV is made.
set -euo pipefail
uv=uv==0.13.8 venv=${MLM_VENV:-.venv} python=
candidates=("$venv/bin/python" python3 python3.12 python3.11 python3.13)
[ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
for candidate in "${candidates[@]}"; do
  version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
  case $version in 3.11 | 3.12 | 3.13) python=$candidate && break ;; esac
  version=3.12
done
if [ -n "${PYTHON:-}" ] && [ -z "$python" ]; then
  echo "launch: $PYTHON is $("$PYTHON" -V 2>&1); it must be Python 3.11, 3.12 or 3.13" >&2
  exit 2
fi
fail() { # what failed, what to do
  local name=", and name it: PYTHON=/path/to/python3.12 bash $0"
  [ "$venv" = .venv ] || name=" on every host, or name one that has the packages: python in pod.toml"
  echo "launch: $1 (python3 is $(python3 -V 2>&1)): $2install Python 3.11, 3.12 or 3.13 with its venv$name" >&2
  rm -rf "$venv"
  exit 2
}
stamp=$(cat requirements.txt launch/environment.sh | cksum | cut -d' ' -f1)
is_made() { [ "$(cat "$venv/.requirements" 2>/dev/null)" = "$stamp" ]; }
if ! is_made && command -v flock >/dev/null; then # of two at once, as when gcloud's ssh starts it again, one waits
  exec 9<requirements.txt
  flock -n 9 || [ $? -ne 1 ] || { echo "launch: waiting for another process that makes $venv" >&2 && flock 9; }
fi
if ! is_made; then
  whole='import pip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'
  if [ -x "$venv/bin/python" ] && ! "$venv/bin/python" -c "$whole" 2>/dev/null; then
    echo "launch: $venv has no pip, or not Python 3.11, 3.12 or 3.13: remove it (rm -rf $venv), and start again" >&2
    exit 2
  fi
  echo "launch: installing requirements.txt into $venv" >&2
  # Ubuntu's python3 can make no environment without its package python3-venv, uv can
  if ! [ -x "$venv/bin/python" ] && ! "${python:-false}" -m venv "$venv" >/dev/null 2>&1; then
    rm -rf "$venv"
    python3 -m pip install --quiet --target "$venv-uv" --upgrade "$uv" ||
      fail "pip can't install $uv, which makes the environment" "sudo apt-get install python3-pip, or "
    PYTHONPATH=$venv-uv python3 -m uv venv --quiet --seed --python "${python:-$version}" "$venv" ||
      fail "uv can't make an environment with Python $version" ""
    rm -rf "$venv-uv"
  fi
  python=$venv/bin/python
  # Compiled once: where bytecode can't be written, each process would compile jax again, for ten seconds.
  { "$python" -m pip install --quiet --disable-pip-version-check "$uv" &&
    "$venv/bin/uv" pip install --quiet --compile-bytecode --python "$python" -r requirements.txt; } || {
    echo "launch: the packages can't be installed, see above: start again where pip reaches a package index" >&2
    exit 2
  }
  if nvidia-smi >/dev/null 2>&1; then
    cuda=cuda12
    nvidia-smi | grep -q "CUDA Version: 1[3-9]" && cuda=cuda13
    "$venv/bin/uv" pip install --quiet --python "$python" "jax[$cuda]==$(sed -n 's/^jax==//p' requirements.txt)"
  fi
  # So that a file of yours, wherever it lies, imports mlm and configs.
  [ "$venv" != .venv ] || echo "$PWD" >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/mlm.pth"
  echo "$stamp" >"$venv/.requirements"
fi
exec 9<&-
