#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# system_packages.sh PYTHON: what the build needs of the operating system. Missing packages are installed by apt-get when
# this runs as root on Debian or Ubuntu; otherwise one message names them and nothing is changed.
set -euo pipefail
python="$1"

if ! "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))'; then
  echo "PYTHON=$python must be Python 3.10, 3.11 or 3.12: make PYTHON=/path/to/python3.11 ..." >&2
  exit 1
fi
version="$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')"
headers="$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')"

missing=()
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=("$version-venv")
[[ -f "$headers/Python.h" ]] || missing+=("$version-dev")
command -v g++ >/dev/null || missing+=(g++)
# Paddle's libraries link OpenMP's run time, which a minimal system lacks until g++ or this brings it.
ldconfig -p 2>/dev/null | grep -q libgomp.so.1 || missing+=(libgomp1)
[[ ${#missing[@]} -eq 0 ]] && exit 0

if [[ "$(id -u)" -eq 0 ]] && command -v apt-get >/dev/null; then
  echo "installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
else
  echo "missing from this system: ${missing[*]}; on Debian and Ubuntu: apt-get install ${missing[*]}" >&2
  exit 1
fi
