#!/usr/bin/env bash
# Ray brings fifty packages that nothing but one test needs: an environment of its own, on top of .venv. Without it, as
# where it cannot be installed, the test is skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
if [ ! -x .venv-ray/bin/python ] || ! .venv-ray/bin/python -c 'import ray.serve, weft, torch' 2>/dev/null; then
  echo "setup: installing ray for the test of weft.serve.ray_serve"
  "$python" -m venv .venv-ray &&
    .venv/bin/python -c 'import sysconfig as s; print("import site; site.addsitedir(" + repr(s.get_path("purelib")) + ")")' \
      >"$(.venv-ray/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')/weft-ray.pth" &&
    .venv-ray/bin/python -m pip --disable-pip-version-check --quiet install "ray[serve]==2.60.0" ||
    echo "setup: ray could not be installed; its test will be skipped" >&2
fi
mkdir -p .venv-ray
touch .venv-ray/ready
