#!/usr/bin/env bash
# The main job on this machine: an environment, then every stage of configs/quickstart.py, from text to a model.
#   bash launch/local.sh                                                # runs/quickstart
#   bash launch/local.sh --config=configs/x.py --config.train.steps=50  # runs/x; every argument of `python -m mlm run`
# Paths are those of the folder that it is started in. Needs Python 3.11, 3.12 or 3.13 with pip and a package index;
# PYTHON=... names another interpreter.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
(cd "$root" && source launch/environment.sh)
# this code, and not a folder mlm/ or configs/ that happens to be there
export PYTHONSAFEPATH=1 PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

config=$root/configs/quickstart.py workdir= before=
for argument in "$@"; do
  case $before in --config | --workdir) argument=$before=$argument ;; esac
  before=$argument
  case $argument in
    --config=*) config=${argument#*=} ;;
    --workdir=*) workdir=${argument#*=} ;;
  esac
done
exec "$root/.venv/bin/python" -m mlm run --config="$config" --workdir="${workdir:-runs/$(basename "$config" .py)}" "$@"
