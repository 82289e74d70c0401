#!/usr/bin/env bash
# Print the path of uv, which is installed into .venv-tools first where there is none. Fails where it can't be installed.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=$PWD/.venv-tools
if command -v uv; then exit 0; fi
if ! "$tools/bin/uv" --version >/dev/null 2>&1; then
    "$(scripts/find_python.sh default)" -m venv "$tools"
    "$tools/bin/python" -m pip install --quiet --disable-pip-version-check uv
fi
echo "$tools/bin/uv"
