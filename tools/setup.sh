#!/usr/bin/env bash
# Makes .venv: torch first (the CPU build unless a GPU is present), then Weft from this tree with its extras.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${WEFT_BASE_PYTHON:-}
if [ -z "$python" ]; then
  for name in python3.11 python3.12 python3; do
    if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'; then
      python=$name
      break
    fi
  done
fi
if [ -z "$python" ]; then
  echo "setup: Weft needs Python 3.11 or 3.12 (on Debian: apt install python3 python3-venv)" >&2
  exit 1
fi
if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
  echo "setup: $python has no venv module (on Debian: apt install python3-venv)" >&2
  exit 1
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  echo "setup: installing torch 2.13.0"
  pip install "torch==2.13.0"
fi
echo "setup: installing Weft and its extras"
pip install -e ".[bench,cuda,dev,fuse,serve]"
command -v g++ >/dev/null || command -v clang++ >/dev/null ||
  echo "setup: no C++ compiler found; Weft will use library kernels only (on Debian: apt install g++)" >&2
# Triton's client wants older packages than Weft has: it has an environment of its own, and its test runs it there
if [ ! -x .venv-client/bin/python ] || ! .venv-client/bin/python -c 'import tritonclient.grpc, tritonclient.http' 2>/dev/null; then
  echo "setup: installing tritonclient for the tests of weft serve"
  "$python" -m venv .venv-client &&
    .venv-client/bin/python -m pip --disable-pip-version-check --quiet install "tritonclient[http,grpc]==2.73.0" ||
    echo "setup: tritonclient could not be installed; its test will be skipped" >&2
fi
# the report's tests click through it in a browser; elsewhere than in CI nothing is installed outside this folder
if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null && ! command -v google-chrome >/dev/null; then
  if [ -n "${CI:-}" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing Chromium for the tests of the report"
    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium; } >/dev/null 2>&1 ||
      echo "setup: Chromium could not be installed; the tests of the report in a browser will be skipped" >&2
  else
    echo "setup: no Chromium found; the tests of the report in a browser will be skipped (on Debian: apt install chromium)" >&2
  fi
fi
touch .venv/ready
