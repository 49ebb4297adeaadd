#!/usr/bin/env bash
# The proofs on real hosts: four of them on this machine, each with an address, a home, processes and an sshd of its own,
# and the quickstart trained over them through launch/tpu.py and by the bare line on each; and that line under the real
# mpirun and srun. gcloud is the real one, and asks tests/launch/tpu_api. Needs it and root, and installs the rest (Debian).
#   bash tests/pod.sh
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || exec sudo --preserve-env=PATH bash "$0" "$@"
if ! [ -x /usr/sbin/sshd ] || ! command -v ip >/dev/null || ! command -v mpirun >/dev/null || ! [ -x /usr/sbin/slurmd ]; then
  echo "tests: installing openssh-server, iproute2, openmpi-bin and slurm-wlm" >&2
  apt-get update -qq >/dev/null
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq openssh-server openssh-client iproute2 \
    openmpi-bin slurm-wlm >/dev/null
fi
exec bash tests/run.sh --hosts "$@"
