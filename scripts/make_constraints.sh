#!/usr/bin/env bash
# Write constraints/py3XX.txt: the newest version of every direct and indirect dependency, for each supported Python.
#
# Resolves with uv, which it installs in an environment of its own if necessary. Needs none of those Pythons.
set -euo pipefail
cd "$(dirname "$0")/.."

pythons=(3.11 3.12 3.13)
tools=.venv-tools

if command -v uv >/dev/null; then
    uv=uv
else
    [ -x "$tools/bin/uv" ] || {
        "$(scripts/find_python.sh default)" -m venv "$tools"
        "$tools/bin/python" -m pip install --quiet --disable-pip-version-check uv
    }
    uv=$tools/bin/uv
fi
for python in "${pythons[@]}"; do
    file=constraints/py${python/./}.txt
    resolved=$(mktemp)
    "$uv" pip compile --quiet --upgrade --all-extras --python-version "$python" --python-platform x86_64-manylinux_2_31 \
        --no-annotate --no-header --no-emit-package stacked-remat --output-file "$resolved" pyproject.toml
    {
        echo "# The exact versions that CI uses on Python $python, for every extra. Made by \`make constraints\`."
        cat "$resolved"
    } >"$file"
    rm -f "$resolved"
    echo "$file: $(grep -c == "$file") packages"
done
